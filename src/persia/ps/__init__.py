"""The embedding parameter server role."""

from persia.ps.held import HoldOptions
from persia.ps.server import EmbeddingServer

__all__ = ["EmbeddingServer", "HoldOptions"]
