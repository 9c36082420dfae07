"""Serves predictions from a log of changes: `Predictor` reads rows and network, follows the log, and predicts.

`persia serve` answers over HTTP, and `Client` asks it. docs/guide/serving.md explains both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.serve.client import Client
    from persia.serve.options import ServeOptions, ServeState
    from persia.serve.predictor import Prediction, Predictor

__all__ = ["Client", "Prediction", "Predictor", "ServeOptions", "ServeState"]

_HOMES = {
    "Client": "persia.serve.client",  # Without torch, which programs that only ask a server do not need.
    "Prediction": "persia.serve.predictor",
    "Predictor": "persia.serve.predictor",
    "ServeOptions": "persia.serve.options",
    "ServeState": "persia.serve.options",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
