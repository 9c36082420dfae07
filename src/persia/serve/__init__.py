"""Serves predictions from a log of changes: `Predictor` reads rows and network, follows the log, and predicts.

docs/guide/serving.md explains it.
"""

from persia.serve.compiled import CompiledNetwork, compile_network
from persia.serve.onnx_export import export_onnx
from persia.serve.options import ServeOptions, ServeState
from persia.serve.predictor import Prediction, Predictor
from persia.serve.retrieval import IndexOptions, ItemIndex, Retrieved
from persia.serve.retrieval_http import retrieval_router
from persia.serve.retriever import Retriever

__all__ = [
    "CompiledNetwork",
    "IndexOptions",
    "ItemIndex",
    "Prediction",
    "Predictor",
    "Retrieved",
    "Retriever",
    "ServeOptions",
    "ServeState",
    "compile_network",
    "export_onnx",
    "retrieval_router",
]
