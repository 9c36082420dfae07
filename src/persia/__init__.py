"""Train recommenders with unbounded embedding tables in plain PyTorch.

Importing `persia` is cheap: names load what they need when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia import cluster, data, dense, modes, nn, optim
    from persia.batching.batch import Batch
    from persia.batching.id_column import IdColumn
    from persia.data.fit import fit_features
    from persia.errors import PersiaError
    from persia.schema import (
        AdmitAll,
        AdmitMinFrequency,
        AdmitProbability,
        Buckets,
        CodePrefix,
        Days,
        DenseFeature,
        HashTo,
        IdFeature,
        Label,
        Normal,
        Quotient,
        Remainder,
        RsqrtDim,
        Schedule,
        Schema,
        Steps,
        Table,
        TimePart,
        Tokens,
        Uniform,
        Zeros,
        dims_by_frequency,
    )
    from persia.telemetry.tracking import MLflow, Wandb
    from persia.trainer import FitResult, Trainer
    from persia.trainer.callbacks import Callback
    from persia.trainer.options import TrainerOptions

__version__ = "0.2.0"

_HOMES = {
    "persia.batching.batch": ("Batch",),
    "persia.batching.id_column": ("IdColumn",),
    "persia.data.fit": ("fit_features",),
    "persia.errors": ("PersiaError",),
    "persia.trainer.options": ("TrainerOptions",),
    "persia.schema": (
        "AdmitAll",
        "AdmitMinFrequency",
        "AdmitProbability",
        "Buckets",
        "CodePrefix",
        "Days",
        "DenseFeature",
        "HashTo",
        "IdFeature",
        "Label",
        "Normal",
        "Quotient",
        "Remainder",
        "RsqrtDim",
        "Schedule",
        "Schema",
        "Steps",
        "Table",
        "TimePart",
        "Tokens",
        "Uniform",
        "Zeros",
        "dims_by_frequency",
    ),
    "persia.telemetry.tracking": ("MLflow", "Wandb"),
    "persia.trainer": ("FitResult", "Trainer"),
    "persia.trainer.callbacks": ("Callback",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}
_PACKAGES = frozenset(
    {
        "checkpoint",
        "cluster",
        "data",
        "dense",
        "errors",
        "interop",
        "metrics",
        "modes",
        "nn",
        "optim",
        "publish",
        "replay",
        "schema",
        "serve",
        "testing",
    }
)

__all__ = [
    "AdmitAll",
    "AdmitMinFrequency",
    "AdmitProbability",
    "Batch",
    "Buckets",
    "Callback",
    "CodePrefix",
    "Days",
    "DenseFeature",
    "FitResult",
    "HashTo",
    "IdColumn",
    "IdFeature",
    "Label",
    "MLflow",
    "Normal",
    "PersiaError",
    "Quotient",
    "Remainder",
    "RsqrtDim",
    "Schedule",
    "Schema",
    "Steps",
    "Table",
    "TimePart",
    "Tokens",
    "Trainer",
    "TrainerOptions",
    "Uniform",
    "Wandb",
    "Zeros",
    "cluster",
    "data",
    "dense",
    "dims_by_frequency",
    "fit_features",
    "modes",
    "nn",
    "optim",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(_HOME_OF[name]), name)
    if name in _PACKAGES:
        return importlib.import_module(f"persia.{name}")
    raise AttributeError(f"module 'persia' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
