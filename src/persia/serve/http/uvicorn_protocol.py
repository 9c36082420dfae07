"""Adds limits on heads, unread answers and idle connections to uvicorn's HTTP protocol."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["MAX_HEAD_BYTES", "limited_protocol"]

MAX_HEAD_BYTES = 1 << 16


def limited_protocol(head_seconds: float, answer_seconds: float, max_connections: int) -> type[HttpToolsProtocol]:
    """Returns a protocol that closes connections whose request's head is late or large, or that do not read answers.

    A new connection above the limit replaces the one that has waited longest for its client, so that clients which send
    nothing cannot block others.

    Args:
        head_seconds: maximum time from the connection, or the first byte of a further request, to the end of the head.
        answer_seconds: maximum time for which a client may leave more than 64 KiB of answers unread.
        max_connections: maximum number of open connections of the server.
    """
    waiting: dict[LimitedProtocol, None] = {}
    """Connections that wait for their clients: for a request, the rest of one, or until answers are read."""

    class LimitedProtocol(HttpToolsProtocol):
        _head_timeout: asyncio.TimerHandle | None = None
        _answer_timeout: asyncio.TimerHandle | None = None
        _head_bytes = 0
        _head_began = False

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._head_timeout = self.loop.call_later(head_seconds, self._end)
            if len(self.connections) > max_connections and waiting:
                next(iter(waiting)).give_way()
            self._update_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            waiting.pop(self, None)
            self._cancel_head_timeout()
            self._cancel_answer_timeout()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._head_began = False
            super().data_received(data)
            # If a head began in these bytes, other heads and bodies may precede it.
            if self._head_timeout is not None and not self._head_began:
                self._head_bytes += len(data)
                if self._head_bytes > MAX_HEAD_BYTES:
                    self._end()

        def on_message_begin(self) -> None:
            self._head_bytes, self._head_began = 0, True
            if self._head_timeout is None:
                self._head_timeout = self.loop.call_later(head_seconds, self._end)
            super().on_message_begin()

        def on_headers_complete(self) -> None:
            self._cancel_head_timeout()
            super().on_headers_complete()
            self._update_waiting()

        def on_message_complete(self) -> None:
            super().on_message_complete()
            self._update_waiting()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._update_waiting()

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._answer_timeout is None:
                self._answer_timeout = self.loop.call_later(answer_seconds, self.transport.abort)
            self._update_waiting()

        def resume_writing(self) -> None:
            self._cancel_answer_timeout()
            super().resume_writing()
            self._update_waiting()

        def timeout_keep_alive_handler(self) -> None:
            self._end()

        def give_way(self) -> None:
            """Closes the connection immediately, for a new one."""
            waiting.pop(self, None)
            self.transport.abort()

        def _update_waiting(self) -> None:
            """Records whether the connection waits for its client; the order is by the start of the wait."""
            cycle = self.cycle
            answering = bool(self.pipeline) or (cycle and not cycle.response_complete and not cycle.more_body)
            if answering and self._answer_timeout is None:
                waiting.pop(self, None)
            elif not self.transport.is_closing():
                waiting.setdefault(self)

        def _end(self) -> None:
            """Closes the connection; aborts it if answers are unread, as closing would wait until they are read."""
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            elif not self.transport.is_closing():
                self.transport.close()

        def _cancel_head_timeout(self) -> None:
            if self._head_timeout is not None:
                self._head_timeout.cancel()
                self._head_timeout = None

        def _cancel_answer_timeout(self) -> None:
            if self._answer_timeout is not None:
                self._answer_timeout.cancel()
                self._answer_timeout = None

    return LimitedProtocol
