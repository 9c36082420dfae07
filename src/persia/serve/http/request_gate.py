"""ASGI middleware for all requests: checks host and key, and counts."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from persia.serve.http.problems import problem_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from persia.serve.http.keys import ClientKeys
    from persia.serve.http.server_metrics import ServerMetrics

__all__ = ["OPEN", "Gate", "is_local"]

OPEN = frozenset({"/health", "/live"})
"""Paths that need no key. They must not reveal anything confidential without one."""

_HEADERS = [(b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff")]


class Gate:
    """Refuses requests without a key or for another host, and counts all requests.

    Args:
        app: application that answers the accepted requests.
        metrics: counters of requests.
        keys: accepted keys; None if none is needed.
        local: whether to answer only requests whose Host header is this host. This prevents DNS rebinding: another site
            could resolve its name to this address, and use the server from a browser on this host.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics, keys: ClientKeys | None, local: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        self._local = local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request; see ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        status = 500

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), *_HEADERS]}
            await send(message)

        try:
            await (self._refusal(scope) or self._app)(scope, receive, counted)
        finally:
            self._metrics.answered(scope["path"], status, time.perf_counter() - started)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if self._local and not is_local(headers.get(b"host", "")):
            message = "The server answers requests to this host only; use its address, 127.0.0.1 or localhost."
            return problem_response(403, "Refused", message)
        if self._keys is not None:
            scope["persia.key"] = self._keys.accept(headers.get(b"authorization"))
            if not scope["persia.key"] and scope["path"] not in OPEN:
                message = "The key is missing or wrong; send it as Authorization: Bearer KEY."
                return problem_response(401, "Refused", message, headers={"WWW-Authenticate": "Bearer"})
        return None


def is_local(host: str) -> bool:
    """Returns whether a Host header names this host."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return False
    return name in ("localhost", "::1") or (name.startswith("127.") and name.replace(".", "").isdecimal())
