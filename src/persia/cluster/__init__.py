"""Ways to run the roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia.cluster.embedded import Embedded
from persia.errors import MissingExtraError

if TYPE_CHECKING:
    from persia.cluster.on_ray.cluster import Ray
    from persia.cluster.on_ray.options import RayOptions
    from persia.cluster.threads import Threads

__all__ = ["Embedded", "Ray", "RayOptions", "Threads"]


def __getattr__(name: str) -> Any:
    if name == "Threads":
        from persia.cluster.threads import Threads

        return Threads
    # Ray takes a second to import, and is an extra.
    if name == "RayOptions":
        from persia.cluster.on_ray.options import RayOptions

        return RayOptions
    if name == "Ray":
        try:
            from persia.cluster.on_ray.cluster import Ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise MissingExtraError(
                'persia.cluster.Ray needs Ray: pip install "persia[ray]", or use persia.cluster.Embedded().',
                extra="ray",
            ) from error
        return Ray
    raise AttributeError(f"module 'persia.cluster' has no attribute {name!r}")
