"""Closes connections that send a message without end.

ZeroMQ collects a message until its last frame has arrived and does not report its parts. The kernel, however, counts
the bytes received over each connection. Messages of a connection arrive one after the other, so all bytes since the
last complete message belong to an unfinished one.
"""

from __future__ import annotations

import socket
import struct

__all__ = ["Intake"]

_RECEIVED = struct.Struct("<128xQ")
"""`tcpi_bytes_received` in Linux's `struct tcp_info`."""

_FRAME_BYTES = 64
"""Upper bound on the bytes that ZeroMQ and CURVE add to a frame."""

_SLACK_BYTES = 1 << 16


class Intake:
    """Tracks the bytes that each connection has sent since its last message. Not thread-safe.

    Args:
        message_bytes: maximum bytes of a message.
        frames: maximum frames of a message.
        unread: maximum number of complete messages that wait in ZeroMQ per connection.
    """

    def __init__(self, message_bytes: int, frames: int, unread: int) -> None:
        self._most = message_bytes + frames * _FRAME_BYTES + _SLACK_BYTES
        self._unread = unread
        self._since: dict[int, int] = {}  # By descriptor: bytes received up to its last message, or before.
        self._delivered: set[int] = set()

    def accepted(self, descriptor: int) -> None:
        """Adds a connection."""
        self._since[descriptor] = 0

    def gone(self, descriptor: int) -> None:
        """Removes a closed connection, whose descriptor may already belong to another file."""
        self._since.pop(descriptor, None)

    def delivered(self, descriptor: int) -> None:
        """Notes that a complete message of a connection has been read."""
        self._delivered.add(descriptor)

    def check(self, *, behind: bool) -> int:
        """Closes connections that have sent too much; returns their number.

        Args:
            behind: whether complete messages may be waiting in ZeroMQ.
        """
        most = self._most * (1 + self._unread * behind)
        closed = 0
        for descriptor, since in self._since.items():
            try:
                # A second descriptor of ZeroMQ's connection, for a moment.
                with socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as found:
                    (received,) = _RECEIVED.unpack(
                        found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size)
                    )
                    if descriptor in self._delivered:
                        self._since[descriptor] = received
                    elif received - since > most:
                        found.shutdown(socket.SHUT_RDWR)
                        closed += 1
            except (OSError, struct.error):  # Closed meanwhile, or not TCP.
                continue
        self._delivered.clear()
        return closed
