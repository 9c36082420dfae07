"""The embedding worker role."""

from persia.worker.buffer import WorkerOptions
from persia.worker.embedding_worker import Worker

__all__ = ["Worker", "WorkerOptions"]
