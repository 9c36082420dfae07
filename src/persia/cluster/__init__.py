"""Ways to run the roles."""

from persia.cluster.embedded import Embedded

__all__ = ["Embedded"]
