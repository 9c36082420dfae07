"""Serves predictions from a log of changes: `Predictor` reads rows and network, follows the log, and predicts.

`persia serve` answers over HTTP, and `Client` sends requests to it. docs/guide/serving.md explains both.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from persia.serve.client import Client
    from persia.serve.compiled import CompiledNetwork, compile_network
    from persia.serve.item_index import IndexOptions, ItemIndex, Retrieved
    from persia.serve.onnx_export import export_onnx
    from persia.serve.options import RowServerOptions, ServeOptions, ServeState
    from persia.serve.predictor import Prediction, Predictor
    from persia.serve.retriever import Retriever, RetrieverState
    from persia.serve.row_server import RowServer

__all__ = [
    "Client",
    "CompiledNetwork",
    "IndexOptions",
    "ItemIndex",
    "Prediction",
    "Predictor",
    "Retrieved",
    "Retriever",
    "RetrieverState",
    "RowServer",
    "RowServerOptions",
    "ServeOptions",
    "ServeState",
    "compile_network",
    "export_onnx",
]

_MODULES = {
    "Client": "persia.serve.client",  # Without torch, which clients do not need.
    "CompiledNetwork": "persia.serve.compiled",
    "IndexOptions": "persia.serve.item_index",
    "ItemIndex": "persia.serve.item_index",
    "Prediction": "persia.serve.predictor",
    "Predictor": "persia.serve.predictor",
    "Retrieved": "persia.serve.item_index",
    "Retriever": "persia.serve.retriever",
    "RetrieverState": "persia.serve.retriever",
    "RowServer": "persia.serve.row_server",
    "RowServerOptions": "persia.serve.options",
    "ServeOptions": "persia.serve.options",
    "ServeState": "persia.serve.options",
    "compile_network": "persia.serve.compiled",
    "export_onnx": "persia.serve.onnx_export",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
