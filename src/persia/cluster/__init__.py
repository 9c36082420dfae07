"""Ways to run the roles."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from persia.errors import MissingExtraError

if TYPE_CHECKING:
    from persia.cluster.embedded import Embedded
    from persia.cluster.ray.cluster import Ray
    from persia.cluster.ray.options import RayOptions
    from persia.cluster.ray.placement import Placement
    from persia.cluster.scaler import Scaler

__all__ = ["Embedded", "Placement", "Ray", "RayOptions", "Scaler"]


def __getattr__(name: str) -> Any:
    # Each process of a cluster imports this package, and few need any of these. Ray is an extra, too.
    if name == "Embedded":
        from persia.cluster.embedded import Embedded

        return Embedded
    if name == "Scaler":
        from persia.cluster.scaler import Scaler

        return Scaler
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
