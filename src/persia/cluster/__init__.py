"""Ways to run the roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia.cluster.embedded import Embedded
from persia.cluster.scaler import Scaler
from persia.errors import MissingExtraError

if TYPE_CHECKING:
    from persia.cluster.ray.cluster import Ray
    from persia.cluster.ray.options import RayOptions
    from persia.cluster.ray.placement import Placement

__all__ = ["Embedded", "Placement", "Ray", "RayOptions", "Scaler"]


def __getattr__(name: str) -> Any:
    # Ray takes a second to import, and is an extra.
    if name == "RayOptions":
        from persia.cluster.ray.options import RayOptions

        return RayOptions
    if name == "Placement":
        from persia.cluster.ray.placement import Placement

        return Placement
    if name == "Ray":
        try:
            from persia.cluster.ray.cluster import Ray
        except ModuleNotFoundError as error:
            if error.name != "ray":
                raise
            raise MissingExtraError(
                'persia.cluster.Ray needs Ray: pip install "persia-recsys[ray]", or use persia.cluster.Embedded().',
                extra="ray",
            ) from error
        return Ray
    raise AttributeError(f"module 'persia.cluster' has no attribute {name!r}")
