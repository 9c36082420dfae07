"""Limits of the wire format: bounds on the resources that a peer can use."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from persia.errors import ConfigError
from persia.memory import host_memory

__all__ = ["Limits"]

MIN_HEADER_BYTES = 4096


@functools.cache
def _host_bytes() -> int:
    return host_memory().total


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on messages, work and memory. All are positive.

    A running method that `waits` for calls of other clients counts toward `waiting` and `waiting_bytes`, not toward
    `requests`, `request_bytes` and `threads`.

    Attributes:
        message_bytes: maximum bytes of a message (header and arrays), and of a frame. Use the same value on both
            sides of a connection, as senders check their own limit.
        header_bytes: maximum bytes of a header (everything except the arrays), at least 4,096.
        arrays: maximum number of arrays in a message.
        requests: maximum number of running or waiting requests; a server stops reading at this number.
        request_bytes: maximum total bytes of these requests once they are decoded; headers count 128 times. A single
            message may exceed it.
        connections: maximum number of connections; beyond it the server closes the newest one of the host with the
            most.
        strangers: maximum number of connections that have not authenticated yet. Beyond it the server closes one whose
            handshake takes more than a second, or else the newest one of the host with the most.
        unread_bytes: maximum total bytes of messages that have not been read, most of them unfinished, and maximum
            memory that they take in ZeroMQ; beyond it the server closes the connections with the most. The memory of
            tiny frames is up to 32 times their bytes, and is bounded only with glibc 2.33 or newer. A quarter of the
            host's memory by default.
        threads: maximum number of methods that run or block at the same time; further requests wait.
        waiting: maximum number of running methods that wait for calls of other clients; further ones are refused.
        waiting_bytes: maximum total bytes of their requests once they are decoded; headers count 128 times.
        peer_share: largest share of `requests`, `request_bytes`, `waiting` and `waiting_bytes` that one connection may
            hold, at most 1. A client keeps further requests until others are answered; a server refuses those of a
            client with other limits, and calls that wait for other clients. A single message may exceed the bytes.
        streams: maximum number of open iterators.
        stream_seconds: seconds without a request after which an iterator is closed.
        unread_replies: maximum number of replies that wait for one client; methods with further replies block.
    """

    message_bytes: int = 1 << 30
    header_bytes: int = 1 << 20
    arrays: int = 4096
    requests: int = 1024
    request_bytes: int = 2 << 30
    connections: int = 4096
    strangers: int = 1024
    unread_bytes: int = field(default_factory=lambda: _host_bytes() // 4)
    threads: int = 256
    waiting: int = 8192
    waiting_bytes: int = 32 << 30
    peer_share: float = 0.5
    streams: int = 64
    stream_seconds: float = 60.0
    unread_replies: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"Limits.{name} = {getattr(self, name)!r} must be positive; correct it.", field=name)
        if self.peer_share > 1:
            raise ConfigError(
                f"Limits.peer_share = {self.peer_share!r} is more than all; choose at most 1.", field="peer_share"
            )
        if self.header_bytes < MIN_HEADER_BYTES:
            raise ConfigError(
                f"Limits.header_bytes = {self.header_bytes} is too small for an error; allow {MIN_HEADER_BYTES} or "
                "more.",
                field="header_bytes",
            )
        if self.arrays > 65535:
            raise ConfigError(f"Limits.arrays = {self.arrays}: the wire format has at most 65535.", field="arrays")

    def of_peer(self, *, waits: bool) -> tuple[int, int]:
        """Returns the number of requests that a connection may hold, and their bytes once they are decoded.

        Args:
            waits: whether they wait for calls of other clients.
        """
        count, nbytes = (self.waiting, self.waiting_bytes) if waits else (self.requests, self.request_bytes)
        return max(1, int(count * self.peer_share)), int(nbytes * self.peer_share)
