"""Optimizers: declarations for the rows of embedding tables, and APMSqueeze for the network.

The declarations are defined in `persia.schema`, their update rules in the native store and, in a readable form, in
`tests/support/twins/optimizers.py`. APMSqueeze needs torch and is imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from persia.schema import SGD, Adagrad, Adam, EmbeddingOptimizer, Ftrl, RowwiseAdagrad, Schedule

if TYPE_CHECKING:
    from persia.optim.apmsqueeze import APMSqueeze
    from persia.optim.compressors import Compressor, OneBit, StochasticTernary, TopK, Uncompressed
    from persia.optim.options import APMSqueezeOptions

__all__ = [
    "SGD",
    "APMSqueeze",
    "APMSqueezeOptions",
    "Adagrad",
    "Adam",
    "Compressor",
    "EmbeddingOptimizer",
    "Ftrl",
    "OneBit",
    "RowwiseAdagrad",
    "Schedule",
    "StochasticTernary",
    "TopK",
    "Uncompressed",
]

_HOMES = {
    "APMSqueeze": "persia.optim.apmsqueeze",
    "APMSqueezeOptions": "persia.optim.options",
    "Compressor": "persia.optim.compressors",
    "OneBit": "persia.optim.compressors",
    "StochasticTernary": "persia.optim.compressors",
    "TopK": "persia.optim.compressors",
    "Uncompressed": "persia.optim.compressors",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'persia.optim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
