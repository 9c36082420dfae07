"""What a peer may ask of this process: every limit of the wire format in one place."""

from __future__ import annotations

from dataclasses import dataclass

from persia.errors import ConfigError

__all__ = ["Limits"]

MIN_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on messages, work and memory. All are positive.

    Attributes:
        message_bytes: most bytes of one message, header and arrays together; also of one frame. Give both sides of a
            connection the same: whoever sends checks its own limit first.
        header_bytes: most bytes of a header (everything but the arrays), at least 4,096.
        arrays: most arrays in one message.
        requests: most requests that a server holds, running or waiting; beyond it stops reading.
        request_bytes: most bytes of those requests, likewise. One message may exceed it.
        threads: most methods that run, or block, at the same time; more requests wait.
        streams: most iterators open at a time.
        stream_seconds: an iterator that nobody asked for an item in this time is closed.
        unread_replies: most replies that wait for one client; the methods of further ones keep their threads.
    """

    message_bytes: int = 1 << 30
    header_bytes: int = 1 << 20
    arrays: int = 4096
    requests: int = 1024
    request_bytes: int = 2 << 30
    threads: int = 256
    streams: int = 64
    stream_seconds: float = 60.0
    unread_replies: int = 64

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"Limits.{name} = {getattr(self, name)!r} must be positive; correct it.", field=name)
        if self.header_bytes < MIN_HEADER_BYTES:
            raise ConfigError(
                f"Limits.header_bytes = {self.header_bytes} leaves no room for an error; allow {MIN_HEADER_BYTES} or "
                "more.",
                field="header_bytes",
            )
        if self.arrays > 65535:
            raise ConfigError(f"Limits.arrays = {self.arrays}: the wire format has at most 65535.", field="arrays")
