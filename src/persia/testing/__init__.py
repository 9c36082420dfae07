"""Clusters and emulations for tests and experiments; not for production."""

from persia.testing.threads import Threads

__all__ = ["Threads"]
