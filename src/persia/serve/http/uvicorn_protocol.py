"""Uvicorn's HTTP protocol with limits on heads, unread answers and idle connections, which it does not have."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MAX_HEAD_BYTES", "limited_protocol"]

MAX_HEAD_BYTES = 1 << 16


def limited_protocol(head_seconds: float, answer_seconds: float, max_connections: int) -> type[HttpToolsProtocol]:
    """Returns a protocol that ends connections whose request's head is late or large, or that do not read answers.

    A new connection above the limit takes the place of the one that has waited longest for its client, so that clients
    which send nothing lock nobody out.

    Args:
        head_seconds: from the connection, or the first byte of a further request, to the end of the head.
        answer_seconds: for which a client may leave more than 64 KiB of answers unread.
        max_connections: open connections of the server.
    """
    waiting: dict[LimitedProtocol, None] = {}
    """Connections that wait for their clients: for a request, the rest of one, or until answers are read."""

    class LimitedProtocol(HttpToolsProtocol):
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _head_began = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._late = self.loop.call_later(head_seconds, self._end)
            if len(self.connections) > max_connections and waiting:
                next(iter(waiting)).give_way()
            self._note()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            self._in_time()
            self._is_read()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_began = False
            super().data_received(data)
            # Before the head that began in these bytes there may have been others, and bodies.
            if self._late is not None and not self._head_began:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._end()

        def on_message_begin(self) -> None:
            self._head_bytes, self._head_began = 0, True
            if self._late is None:
                self._late = self.loop.call_later(head_seconds, self._end)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._in_time()
            super().on_headers_complete()
            self._note()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._note()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._note()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._unread is None:
                self._unread = self.loop.call_later(answer_seconds, self.transport.abort)
            self._note()

        def resume_writing(self) -> None:
            self._is_read()
            super().resume_writing()
            self._note()

        def timeout_keep_alive_handler(self) -> None:
            self._end()

        def give_way(self) -> None:
            """Ends the connection at once, for a new one."""
            waiting.pop(self, None)
            self.transport.abort()

        def _note(self) -> None:
            """Notes whether the connection waits for its client. One that still does keeps its place."""
            cycle = self.cycle
            answering = bool(self.pipeline) or (cycle and not cycle.response_complete and not cycle.more_body)
            if answering and self._unread is None:
                waiting.pop(self, None)
            elif not self.transport.is_closing():
                waiting.setdefault(self)

        def _end(self) -> None:
            """Ends the connection now: what is closed with answers in its buffer waits until they are read."""
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            elif not self.transport.is_closing():
                self.transport.close()

        def _in_time(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

        def _is_read(self) -> None:
            if self._unread is not None:
                self._unread.cancel()
                self._unread = None

    return LimitedProtocol
