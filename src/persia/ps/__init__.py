"""The embedding parameter server role."""

from persia.ps.server import EmbeddingServer, ServerOptions

__all__ = ["EmbeddingServer", "ServerOptions"]
