"""A proxy in front of a role, that cuts connections, loses replies and repeats requests.

It understands as much of ZMTP 3 (rfc.zeromq.org/spec/23) as is needed to tell one message from the next.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable

GREETING = 64
MORE, LONG, COMMAND = 1, 2, 4


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
        """`cut`: ends all connections now. `lost_reply`, `duplicate`: befalls the next message of its direction."""
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
            for source, sink, kind, spoiled in (
                (client, server, "duplicate", self._twice),
                (server, client, "lost_reply", self._never),
            ):
                threading.Thread(target=self._pump, args=(source, sink, kind, spoiled), daemon=True).start()

    def _pump(
        self, source: socket.socket, sink: socket.socket, kind: str, spoiled: Callable[[socket.socket, bytes], None]
    ) -> None:
        with contextlib.suppress(OSError, EOFError):
            for _ in range(GREETING):  # At once: each end waits for the beginning of the other's greeting.
                sink.sendall(_exactly(source, 1))
            while True:
                message, is_command = _message(source)
                if not is_command and self._disarm(kind):
                    spoiled(sink, message)
                else:
                    sink.sendall(message)
        for end in (source, sink):
            with self._lock:
                self._open.discard(end)
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _disarm(self, kind: str) -> bool:
        with self._lock:
            if kind not in self._armed:
                return False
            self._armed.remove(kind)
            return True

    def _twice(self, sink: socket.socket, message: bytes) -> None:
        sink.sendall(message + message)

    def _never(self, sink: socket.socket, message: bytes) -> None:
        """A reply is only ever lost together with its connection."""
        raise EOFError

    def _cut(self) -> None:
        with self._lock:
            ends = list(self._open)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


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
