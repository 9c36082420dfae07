"""Bandwidth without rights: this process's own TCP connections, paced by the kernel.

`SO_MAX_PACING_RATE` needs no privilege. It holds for a connection, not for a host: with two ranks that is the same;
with more, a rank that sends to all at once is faster than on a real link, so only two ranks are compared this way.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["pace", "sent"]

SO_MAX_PACING_RATE = 47
TCP_INFO_BYTES_SENT = 200
"""Offset of `tcpi_bytes_sent` in Linux's `struct tcp_info`, since 4.19."""


def pace(gbit: float | None) -> None:
    """Holds every open TCP connection to this bandwidth; None: as fast as it goes."""
    rate = (1 << 64) - 1 if gbit is None else int(gbit * 1e9 / 8)
    with _connections() as sockets:
        for connection in sockets:
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", rate))


def sent() -> int:
    """Payload bytes sent so far over the TCP connections that are open."""
    with _connections() as sockets:
        infos = [connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256) for connection in sockets]
    return sum(struct.unpack_from("Q", info, TCP_INFO_BYTES_SENT)[0] for info in infos)


@contextmanager
def _connections() -> Iterator[list[socket.socket]]:
    """Duplicates of this process's connected TCP sockets; gloo's are among them."""
    duplicates = []
    for name in os.listdir("/proc/self/fd"):
        try:
            number = int(name)
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(number))
        except OSError:  # closed in the meantime
            continue
        duplicates.append(duplicate)
    try:
        yield [each for each in duplicates if _is_connected_tcp(each)]
    finally:
        for each in duplicates:
            each.close()


def _is_connected_tcp(each: socket.socket) -> bool:
    if each.family not in (socket.AF_INET, socket.AF_INET6) or each.type != socket.SOCK_STREAM:
        return False
    try:
        each.getpeername()
    except OSError:
        return False
    return True
