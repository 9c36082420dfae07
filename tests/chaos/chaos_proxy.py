"""A proxy in front of a role, that cuts connections, loses, repeats and reorders messages, and holds them up.

It understands as much of ZMTP 3 (rfc.zeromq.org/spec/23) as is needed to tell one message from the next, which it can
only without keys: encrypted messages are numbered, and ZeroMQ closes a connection that lacks one or has one twice.

TCP hides lost, late, reordered and repeated packets. What is left of them above it are messages that are held up, as
here by `stall`; connections that end, as by `cut`; and requests that come twice or in another order, since clients
repeat them over a new connection, as by `duplicate` and `reorder`. `support.packet_relay` treats packets themselves.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping

GREETING = 64
STALL_SECONDS = 1.0
HOLD_SECONDS = 1.0
"""How long a message waits for one that may overtake it."""
MORE, LONG, COMMAND = 1, 2, 4

Spoiler = Callable[[socket.socket, socket.socket, bytes], None]
"""Passes on a message, or does not: from, to, message."""


class Proxy:
    """Listens at an address and passes everything on to a role, but for what it is told to spoil.

    Args:
        target: where the role listens, `tcp://host:port`.
        address: where to listen; port 0 or `*` for any.
    """

    def __init__(self, target: str, address: str) -> None:
        self._target = _parts(target)
        self._armed: list[str] = []
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(_parts(address))
        host, port = self._listener.getsockname()[:2]
        self.address = f"tcp://{host}:{port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def spoil(self, kind: str) -> None:
        """`cut` ends all connections now; others, see `REQUESTS` and `REPLIES`, befall the next message."""
        if kind == "cut":
            self._cut()
        else:
            with self._lock:
                self._armed.append(kind)

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            try:
                server = socket.create_connection(self._target)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._open |= {client, server}
            for source, sink, spoilers in ((client, server, REQUESTS), (server, client, REPLIES)):
                threading.Thread(target=self._pump, args=(source, sink, spoilers), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, spoilers: Mapping[str, Spoiler]) -> None:
        with contextlib.suppress(OSError, EOFError):
            for _ in range(GREETING):  # At once: each end waits for the beginning of the other's greeting.
                sink.sendall(_exactly(source, 1))
            while True:
                message, is_command = _message(source)
                kind = None if is_command else self._disarm(spoilers)
                if kind is None:
                    sink.sendall(message)
                else:
                    spoilers[kind](source, sink, message)
        for end in (source, sink):
            with self._lock:
                self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _disarm(self, kinds: Mapping[str, Spoiler]) -> str | None:
        with self._lock:
            for kind in self._armed:
                if kind in kinds:
                    self._armed.remove(kind)
                    return kind
            return None

    def _cut(self) -> None:
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _twice(source: socket.socket, sink: socket.socket, message: bytes) -> None:
    del source
    sink.sendall(message + message)


def _later(source: socket.socket, sink: socket.socket, message: bytes) -> None:
    """After the next message, if one comes soon."""
    overtaking = b""
    if select.select([source], [], [], HOLD_SECONDS)[0]:
        overtaking, _ = _message(source)
    sink.sendall(overtaking + message)


def _stalled(source: socket.socket, sink: socket.socket, message: bytes) -> None:
    del source
    time.sleep(STALL_SECONDS)
    sink.sendall(message)


def _never(source: socket.socket, sink: socket.socket, message: bytes) -> None:
    """A reply is only ever lost together with its connection."""
    raise EOFError


REQUESTS: Mapping[str, Spoiler] = {"duplicate": _twice, "reorder": _later}
REPLIES: Mapping[str, Spoiler] = {"lost_reply": _never, "stall": _stalled}


def _message(source: socket.socket) -> tuple[bytes, bool]:
    """All frames of a message, and whether it is a command of the protocol itself."""
    found = b""
    while True:
        flags = _exactly(source, 1)
        size = _exactly(source, 8 if flags[0] & LONG else 1)
        length = struct.unpack(">Q", size)[0] if flags[0] & LONG else size[0]
        found += flags + size + _exactly(source, length)
        if not flags[0] & MORE:
            return found, bool(flags[0] & COMMAND)


def _exactly(source: socket.socket, count: int) -> bytes:
    pieces = []
    while count:
        piece = source.recv(min(count, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        count -= len(piece)
    return b"".join(pieces)


def _parts(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, 0 if port == "*" else int(port)
