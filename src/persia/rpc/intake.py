"""Bounds on the connections of a server, and on the bytes that they send."""

from __future__ import annotations

import contextlib
import math
import struct
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Address, ip_address, ip_network
from socket import AF_INET6, IPPROTO_TCP, SHUT_RDWR, SOCK_STREAM, TCP_INFO, fromfd, socket
from typing import NamedTuple

from persia.rpc.growth import Growth
from persia.rpc.limits import Limits

__all__ = ["UNREAD_MESSAGES", "Intake"]

UNREAD_MESSAGES = 16
"""Number of messages that wait in ZeroMQ per connection; further ones stay with the client of a busy server."""

_COUNTED = struct.Struct("<120xQQ")
"""`tcpi_bytes_acked` and `tcpi_bytes_received` in Linux's `struct tcp_info`."""

_FRAME_BYTES = 64
"""Upper bound on the bytes that ZeroMQ and CURVE add to a frame."""

_LOOK_SECONDS = 0.01
"""Seconds between two checks of all strangers while there are too many. A check takes milliseconds."""

_SLOW_SECONDS = 1.0
"""Seconds after which a handshake gives way to a new one, if there are too many. A handshake takes milliseconds."""

_SLACK_BYTES = 1 << 16
"""Bytes that are always allowed. A handshake takes less than 1,000."""


class Traffic(NamedTuple):
    """Bytes that the kernel has counted on a TCP connection.

    Attributes:
        sent: bytes that the peer has acknowledged.
        received: bytes that the peer has sent.
    """

    sent: int
    received: int


class Intake:
    """Closes connections that take more memory than honest clients need. Not thread-safe.

    ZeroMQ collects a message until its last frame has arrived and does not report its parts. The kernel, however,
    counts the bytes received over each connection. Messages of a connection arrive one after the other, so all bytes
    since the last complete message belong to an unfinished one. The kernel also counts the bytes sent, which show
    whether a handshake has succeeded: until then a server sends at most a fixed number.

    Tiny frames take 32 times their bytes, and nothing counts frames. The growth of this process bounds their memory.

    Args:
        limits: bounds on messages, connections and unread bytes.
        port: port number of the server's address; 0 if it has none. Descriptors of other sockets are left alone: the
            number of a closed connection may belong to another socket before its end is reported.
        handshake_bytes: maximum bytes that the server sends before a peer has authenticated.
        unread: maximum number of complete messages that wait in ZeroMQ per connection.
    """

    def __init__(self, limits: Limits, port: int, handshake_bytes: int, unread: int = UNREAD_MESSAGES) -> None:
        self._limits = limits
        self._port = port
        self._most = limits.message_bytes + (limits.arrays + 1) * _FRAME_BYTES + _SLACK_BYTES
        self._handshake_bytes = handshake_bytes
        self._unread = unread
        self._since: dict[int, int] = {}  # By descriptor: bytes received up to its last message or earlier.
        self._hosts: dict[int, str] = {}  # By descriptor, oldest first: the peer's network address.
        self._strangers: dict[int, float] = {}  # By descriptor, oldest first: start of an unfinished handshake.
        self._delivered: set[int] = set()
        self._growth = Growth(limits.unread_bytes)
        self._looked = -math.inf
        self.closed = 0
        """Number of connections that this object closed."""

    @property
    def strangers(self) -> int:
        """Number of connections that were in their handshake at the last check, or are newer."""
        return len(self._strangers)

    @property
    def watching(self) -> bool:
        """Whether so much was unread at the last check that the next one should be soon."""
        return self._growth.watching

    def accepted(self, descriptor: int) -> None:
        """Adds a connection, and closes one if there are too many.

        Among too many strangers it closes a slow one, or else the newest one of the host with the most. Among too many
        connections it closes the newest one of the host with the most, too. So no host can lock others out.
        """
        now = time.monotonic()
        self._since[descriptor] = 0
        self._hosts[descriptor] = _host(descriptor, self._port)
        self._strangers[descriptor] = now
        if len(self._strangers) > self._limits.strangers and now - self._looked > _LOOK_SECONDS:
            self._looked = now
            for stranger in list(self._strangers):  # Some may have authenticated since the last check.
                self._look(stranger)
        if len(self._strangers) > self._limits.strangers:
            oldest, start = next(iter(self._strangers.items()))
            # Many honest peers that connect at the same time can finish their handshakes; the newest, which are
            # closed, try again.
            self._close(oldest if now - start > _SLOW_SECONDS else self._newest_of_busiest_host(self._strangers))
        if len(self._since) > self._limits.connections:
            self._close(self._newest_of_busiest_host(self._hosts))

    def _newest_of_busiest_host(self, connections: Mapping[int, object]) -> int:
        """Returns the newest connection of the host that has the most of these, which are ordered by age."""
        ((busiest, _),) = Counter(self._hosts[one] for one in connections).most_common(1)
        return next(one for one in reversed(list(connections)) if self._hosts[one] == busiest)

    def end_all(self) -> None:
        """Ends all connections. ZeroMQ alone would keep those of which it holds unread messages."""
        for descriptor in list(self._since):
            self._end(descriptor)
        self._delivered.clear()

    def gone(self, descriptor: int) -> None:
        """Removes a closed connection, whose descriptor may already belong to another file."""
        self._since.pop(descriptor, None)
        self._hosts.pop(descriptor, None)
        self._strangers.pop(descriptor, None)
        self._growth.forget(descriptor)

    def delivered(self, descriptor: int) -> None:
        """Notes that a complete message of a connection has been read."""
        self._delivered.add(descriptor)

    def check_strangers(self) -> None:
        """Closes connections that have sent too much for a handshake. Checks no others."""
        for descriptor in list(self._strangers):
            traffic = self._look(descriptor)
            if descriptor in self._strangers and traffic is not None and traffic.received > _SLACK_BYTES:
                self._close(descriptor)

    def check(self, *, behind: bool) -> None:
        """Closes connections that have sent too much, including strangers.

        Args:
            behind: whether complete messages may be waiting in ZeroMQ.
        """
        self.check_strangers()
        most = self._most * (1 + self._unread * behind)
        unread: dict[int, int] = {}
        for descriptor, since in list(self._since.items()):
            traffic = self._look(descriptor)
            if traffic is None:
                continue
            if descriptor in self._delivered:
                self._since[descriptor] = traffic.received
            elif traffic.received - since > most:
                self._close(descriptor)
            else:
                unread[descriptor] = traffic.received - since
        self._delivered.clear()
        excess = sum(unread.values()) - self._limits.unread_bytes
        closed = self.closed
        for descriptor in sorted(unread, key=lambda one: -unread[one]):
            if excess <= 0:
                break
            self._close(descriptor)
            excess -= unread.pop(descriptor)
        if self.closed > closed:
            self._growth.pause()
        for descriptor in self._growth.check(unread):
            self._close(descriptor)

    def _look(self, descriptor: int) -> Traffic | None:
        """Returns the traffic of a connection, after noting whether it has authenticated; None if it is not TCP."""
        try:
            traffic = _traffic(descriptor, self._port)
        except (OSError, struct.error):  # Closed meanwhile, or not TCP.
            traffic = None
        if traffic is None or traffic.sent > self._handshake_bytes:
            self._strangers.pop(descriptor, None)
        return traffic

    def _close(self, descriptor: int) -> None:
        """Ends a connection that takes too much."""
        self.closed += 1
        self._end(descriptor)

    def _end(self, descriptor: int) -> None:
        """Ends a connection for both sides. ZeroMQ notices, and closes its descriptor."""
        self.gone(descriptor)
        with contextlib.suppress(OSError), _connection(descriptor, self._port) as connection:
            connection.shutdown(SHUT_RDWR)


@contextlib.contextmanager
def _connection(descriptor: int, port: int) -> Iterator[socket]:
    """Opens a temporary second descriptor of one of ZeroMQ's connections.

    Raises:
        OSError: it is closed, or now a socket of another port.
    """
    with fromfd(descriptor, AF_INET6, SOCK_STREAM) as connection:  # Large enough for an address of either family.
        name = connection.getsockname()
        if port and not (isinstance(name, tuple) and name[1] == port):
            raise OSError("another socket")
        yield connection


def _host(descriptor: int, port: int) -> str:
    """Returns the network address of a peer; for IPv6 only the network half, as a host owns all addresses in it."""
    try:
        with _connection(descriptor, port) as connection:
            name = connection.getpeername()
    except OSError:  # Closed meanwhile.
        return ""
    if not isinstance(name, tuple):
        return ""
    address = ip_address(name[0].partition("%")[0])
    if isinstance(address, IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ip_network((int(address) >> 64 << 64, 64)))


def _traffic(descriptor: int, port: int) -> Traffic:
    """Returns the bytes sent and received over one of ZeroMQ's connections.

    Raises:
        OSError: it is closed.
        struct.error: it is not TCP.
    """
    with _connection(descriptor, port) as connection:
        return Traffic(*_COUNTED.unpack(connection.getsockopt(IPPROTO_TCP, TCP_INFO, _COUNTED.size)))
