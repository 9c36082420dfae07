"""Uvicorn's HTTP protocol with limits on the heads of requests, which it does not have of its own."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MAX_HEAD_BYTES", "limited_protocol"]

MAX_HEAD_BYTES = 1 << 16


def limited_protocol(seconds: float) -> type[HttpToolsProtocol]:
    """Returns a protocol that closes connections whose request's head is late or large.

    Args:
        seconds: from the connection, or the first byte of a further request, to the end of the head.
    """

    class LimitedProtocol(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None
        _head_bytes = 0

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._late = self.loop.call_later(seconds, transport.close)

        def connection_lost(self, exc: Exception | None) -> None:
            self._in_time()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._late is not None:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self.transport.close()

        def on_message_begin(self) -> None:
            self._head_bytes = 0
            if self._late is None:
                self._late = self.loop.call_later(seconds, self.transport.close)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_time()
            super().on_headers_complete()

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return LimitedProtocol
