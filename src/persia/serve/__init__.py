"""Serves predictions from a log of changes: `Predictor` reads rows and network, follows the log, and predicts.

docs/guide/serving.md explains it.
"""

from persia.serve.options import ServeOptions, ServeState
from persia.serve.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor", "ServeOptions", "ServeState"]
