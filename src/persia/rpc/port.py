"""ZeroMQ sockets that many threads share, and bounds on the bytes that they receive."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address, ip_address, ip_network
from socket import AF_INET6, IPPROTO_TCP, SHUT_RDWR, SOCK_STREAM, TCP_INFO, fromfd, socket
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from persia.errors import ConfigError
from persia.malloc import keep_memory
from persia.rpc.growth import Growth
from persia.rpc.keys import Keys, Password
from persia.rpc.limits import Limits
from persia.telemetry.logs import get_logger

__all__ = ["Intake", "Port", "client_port", "server_port"]

_quiet = get_logger("persia.rpc.peers")
_quiet.setLevel(logging.INFO)  # At DEBUG, pyzmq logs passwords.

DOMAIN = "persia"
USER = "persia"
HEARTBEAT_SECONDS = 5
DEAD_SECONDS = 15
HANDSHAKE_SECONDS = 5
RECONNECT_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.5
UNREAD_MESSAGES = 16
"""Number of messages that wait in ZeroMQ per connection; further ones stay with the client of a busy server."""

# Plain numbers, as operations on pyzmq's flags take as long as sending a small frame.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_COUNTED = struct.Struct("<120xQQ")
"""`tcpi_bytes_acked` and `tcpi_bytes_received` in Linux's `struct tcp_info`."""

_HANDSHAKE_BYTES = {Keys: 250, Password: 80, type(None): 0}
"""By type of credentials: the bytes that a server sends at most before a peer has authenticated. Greeting and WELCOME
take 234 and 74 bytes; READY follows and takes 43 or more."""

_FRAME_BYTES = 64
"""Upper bound on the bytes that ZeroMQ and CURVE add to a frame."""

_ZERO_COPY_RECV = 10
"""ZeroMQ's context option of this name, which pyzmq does not define."""

_LOOK_SECONDS = 0.01
"""Seconds between two checks of all strangers while there are too many. A check takes milliseconds."""

_SLOW_SECONDS = 1.0
"""Seconds after which a handshake gives way to a new one, if there are too many. A handshake takes milliseconds."""

_SLACK_BYTES = 1 << 16
"""Bytes that are always allowed. A handshake takes less than 1,000."""


class Port:
    """A socket, its monitor and a wake-up pipe. Call `send`, `receive`, `pending` and `events` under `lock` only.

    Any thread may use a ZeroMQ socket, but only one at a time. Waiting needs no lock, as it only polls file
    descriptors. A descriptor signals a change once, so sending may consume the signal of a received message. After
    sending, a thread must check `pending`, and then receive or wake a waiting thread.

    Args:
        context: context of only this socket; closed with it.
        socket: socket to be bound or connected.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        self.lock = threading.Lock()
        self.address = ""
        self.handshake_bytes = 0
        """Maximum bytes that a server sends before a peer has authenticated."""
        self._context = context
        self._socket = socket
        self._monitor = socket.get_monitor_socket(EVENTS)
        # The descriptor signals nothing before the events are read once.
        self._monitor.getsockopt(zmq.EVENTS)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket_fd = int(socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._authenticator: ThreadAuthenticator | None = None
        self.closed = False
        # Each change is signalled once, to one waiting thread.
        self._poller = select.epoll()
        for descriptor in (self._wake, self._monitor_fd, self._socket_fd):
            self._poller.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def bind(self, address: str, keys: Keys | Password | None) -> None:
        """Starts to listen. Admits only peers with these keys or this password; with None, admits anyone.

        Raises:
            ConfigError: the address is invalid or in use.
        """
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context, log=_quiet)
            self._authenticator.start()
            if isinstance(keys, Keys):
                self._authenticator.configure_curve_callback(DOMAIN, _Only(keys.public))
                self._socket.curve_server = True
                self._socket.curve_publickey, self._socket.curve_secretkey = keys
            else:
                self._authenticator.configure_plain(DOMAIN, {USER: keys.text})
                self._socket.plain_server = True
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"Cannot listen on {address}: {error}; choose another.", address=address) from error
        self.handshake_bytes = _HANDSHAKE_BYTES[type(keys)]
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str, keys: Keys | Password | None) -> None:
        """Starts to connect. ZeroMQ reconnects whenever the connection is lost.

        Raises:
            ConfigError: the address is invalid.
        """
        if isinstance(keys, Keys):
            self._socket.curve_serverkey = keys.public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
        elif keys is not None:
            self._socket.plain_username, self._socket.plain_password = USER.encode(), keys.text.encode()
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"Cannot connect to {address!r}: {error}; use tcp://host:port.") from error
        self.address = address

    def wait(self, seconds: float) -> bool:
        """Blocks until the socket or the monitor has an event, a wake-up arrives, or the time has passed.

        Returns:
            Whether to read the monitor. A message may be pending in any case.
        """
        return any(descriptor == self._monitor_fd for descriptor, _ in self._poller.poll(max(0.0, seconds)))

    def wake(self) -> None:
        """Ends the wait of one other thread. Takes no lock. No-op once the port is closed."""
        os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        # Not in `close`: a thread may be about to write to it, and its number could belong to another file by then.
        try:  # noqa: SIM105  # `contextlib` may be gone.
            os.close(self._wake)
        except AttributeError:  # `__init__` failed, or Python shuts down and `os` is gone.
            pass

    def pending(self) -> bool:
        """Whether a message can be received."""
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def send(self, frames: Sequence[bytes], arrays: Sequence[Any]) -> bool:
        """Sends a message without blocking: small frames, then arrays, whose memory is used until they are sent.

        Returns:
            Whether the send buffer had space and the connection lasted until the last frame.

        Raises:
            zmq.ZMQError: the peer is gone (EHOSTUNREACH).
        """
        # ZeroMQ copies small arrays, which is faster. The frames of large ones are made before anything is sent:
        # an error in the last one must not leave half a message in the socket.
        threshold = self._socket.copy_threshold
        parts: list[Any] = [
            *frames,
            *[a if a.nbytes < threshold else zmq.Frame(a, track=False, copy=False) for a in arrays],
        ]
        last = len(parts) - 1
        whole = True
        for index, part in enumerate(parts):
            try:
                self._socket.send(part, _MORE if index < last else _LAST)
            except zmq.Again:
                if index == 0:
                    return False
                # The connection broke in between. ZeroMQ discards the other frames, but must see the message's end.
                whole = False
        return whole

    def receive(self, most: int) -> list[zmq.Frame] | None:
        """Receives the next message, dropping frames beyond `most` + 1; None if there is none."""
        if not self.pending():  # Cheaper than an exception.
            return None
        socket = self._socket
        frame = socket.recv(_LAST, copy=False)
        frames = [frame]
        while frame.more:
            frame = socket.recv(_LAST, copy=False)
            if len(frames) <= most:
                frames.append(frame)
        return frames

    def events(self) -> Iterator[tuple[zmq.Event, int]]:
        """Yields the connection events since the last call, with their values (mostly descriptors)."""
        while int(self._monitor.getsockopt(_EVENTS)) & _POLLIN:
            message = parse_monitor_message(self._monitor.recv_multipart())
            yield zmq.Event(message["event"]), int(message["value"])

    def close(self, linger_seconds: float, *, term: bool = True) -> None:
        """Closes the socket and its context after at most this time for unsent messages. No thread may be waiting."""
        if self.closed:
            return
        self.closed = True
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_seconds * 1000))
        if self._authenticator is not None:
            self._authenticator.stop()
        if term:
            self._context.term()


class _Only:
    """Accepts a single public key, the key of the cluster."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether a client may connect."""
        del domain
        return key == self._public


def server_port(limits: Limits) -> Port:
    """Makes a ROUTER that reports peers which are gone or do not read, and rejects frames beyond the limit."""
    context: zmq.Context[Any] = zmq.Context()
    # By default a frame of 34 bytes, or of 1 byte with CURVE, keeps the 18 KiB buffer that it was received in. Copies
    # of frames below 8 KiB take no measurable time.
    with contextlib.suppress(zmq.ZMQError):  # Not an option of this libzmq.
        context.set(_ZERO_COPY_RECV, 0)
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
    socket.setsockopt(zmq.SNDHWM, limits.unread_replies)
    # With a domain, ZeroMQ refuses peers of protocol 1 and 2, which have neither CURVE nor heartbeats: any bytes look
    # like a greeting of version 1, and two such peers with the same name leave a connection that is never closed.
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
    socket.setsockopt(zmq.RCVHWM, UNREAD_MESSAGES)
    _common(socket)
    return Port(context, socket)


def client_port() -> Port:
    """Makes a DEALER that drops unsent messages when its connection breaks; the caller sends them again."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_SECONDS * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_SECONDS * 1000))
    _common(socket)
    return Port(context, socket)


def _common(socket: zmq.Socket[bytes]) -> None:
    keep_memory()
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, DEAD_SECONDS * 1000)


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

        Among too many strangers it closes a slow one, or else the new one. Among too many connections it closes the
        newest one of the host with the most, so no host can lock others out.
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
            self._close(oldest if now - start > _SLOW_SECONDS else descriptor)
        if len(self._since) > self._limits.connections:
            ((most, _),) = Counter(self._hosts.values()).most_common(1)
            self._close(next(one for one in reversed(self._hosts) if self._hosts[one] == most))

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
        """Ends a connection for both sides. ZeroMQ notices, and closes its descriptor."""
        self.gone(descriptor)
        self.closed += 1
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
