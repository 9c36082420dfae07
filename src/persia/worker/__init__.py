"""The embedding worker role."""

from persia.worker.embedding_worker import Worker
from persia.worker.options import WorkerOptions

__all__ = ["Worker", "WorkerOptions"]
