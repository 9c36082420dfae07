"""Training: `Trainer`, and the components of its loop."""

from persia.trainer.options import TrainerOptions
from persia.trainer.progress import FitResult
from persia.trainer.trainer import Trainer

__all__ = ["FitResult", "Trainer", "TrainerOptions"]
