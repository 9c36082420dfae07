"""The embedding parameter server role."""

from persia.ps.options import ServerOptions
from persia.ps.server import EmbeddingServer

__all__ = ["EmbeddingServer", "ServerOptions"]
