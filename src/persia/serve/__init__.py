"""Serves predictions of a model whose rows follow the log of changes."""

from persia.serve.client import Client

__all__ = ["Client"]
