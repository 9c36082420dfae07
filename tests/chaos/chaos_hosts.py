"""Processes of roles that can be spoiled: with a proxy in front, and PSs that write down what they do."""

from __future__ import annotations

from typing import Any


def proxied(host: type, folder: str = "", every: int = 1) -> type:
    """A host with a proxy in front of its role; with a folder, its pushes are written down there.

    The class is local, so that it is pickled whole: only once it is made can its process import what is here.
    """

    class Proxied(host):  # type: ignore[misc,valid-type]
        def serve(self, service: Any, protocol: type, address: str = "") -> str:
            import chaos_disk  # noqa: F401  It registers the disk, to which PSs write as well.
            from chaos_proxy import Proxy
            from chaos_records import Recorded

            recorded = Recorded(service, folder, every, self.rank) if folder else service
            inner = super().serve(recorded, protocol)
            self.proxy = Proxy(inner, address or f"{self.origin}*")
            self.address = self.proxy.address
            return self.address

        def spoil(self, kind: str) -> None:
            self.proxy.spoil(kind)

    return Proxied


def recorded(host: type, folder: str, every: int = 1) -> type:
    """A host of an embedding PS that writes its pushes into a folder. Without a proxy, so that it may have keys."""

    class RecordedHost(host):  # type: ignore[misc,valid-type]
        def serve(self, service: Any, protocol: type, address: str = "") -> str:
            from chaos_records import Recorded

            return str(super().serve(Recorded(service, folder, every, self.rank), protocol, address))

    return RecordedHost
