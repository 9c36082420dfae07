"""A ZeroMQ socket that many threads share, and a way to wait for it without holding it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from persia.errors import ConfigError
from persia.rpc.keys import Keys
from persia.rpc.limits import Limits

__all__ = ["Port", "Ready", "client_port", "server_port"]

DOMAIN = "persia"
HEARTBEAT_SECONDS = 5
DEAD_SECONDS = 15
HANDSHAKE_SECONDS = 5
RECONNECT_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.5

EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class Ready(NamedTuple):
    """What a wait found."""

    socket: bool
    monitor: bool


class Port:
    """A socket, its monitor, and a wake-up call. Touch `send`, `receive`, `pending`, `events` under `lock` only.

    ZeroMQ sockets may be used by any thread, one at a time. Waiting needs no lock, since it looks at file descriptors
    only. A descriptor announces a change once: a thread that sends may swallow the announcement of a message, so
    whoever sends looks at `pending` afterwards, and receives or wakes the thread that waits.

    Args:
        context: of the socket alone; closed with it.
        socket: bound or about to be connected.
    """

    def __init__(self, context: zmq.Context[Any], socket: zmq.Socket[bytes]) -> None:
        self.lock = threading.Lock()
        self.address = ""
        self._context = context
        self._socket = socket
        self._monitor = socket.get_monitor_socket(EVENTS)
        # A descriptor announces nothing before the first look.
        self._monitor.getsockopt(zmq.EVENTS)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket_fd = int(socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        self._authenticator: ThreadAuthenticator | None = None
        self.closed = False
        self._all = self._poller(self._wake, self._monitor_fd, self._socket_fd)
        self._quiet = self._poller(self._wake, self._monitor_fd)

    @staticmethod
    def _poller(*descriptors: int) -> Any:
        poller = select.poll()
        for descriptor in descriptors:
            poller.register(descriptor, select.POLLIN)
        return poller

    def bind(self, address: str, keys: Keys | None) -> None:
        """Starts to listen.

        Raises:
            ConfigError: the address is not valid or in use.
        """
        if keys is not None:
            self._authenticator = ThreadAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(DOMAIN, _Only(keys.public))
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"Cannot listen on {address}: {error}; choose another.", address=address) from error
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def connect(self, address: str, keys: Keys | None) -> None:
        """Begins to connect, and reconnects whenever the connection is lost.

        Raises:
            ConfigError: the address is not valid.
        """
        if keys is not None:
            self._socket.curve_serverkey = keys.public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.connect(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"Cannot connect to {address!r}: {error}; use tcp://host:port.") from error
        self.address = address

    def wait(self, seconds: float, *, socket: bool = True) -> Ready:
        """Blocks until the socket (if asked for), the monitor or a wake-up announces something, or time is over."""
        ready = dict((self._all if socket else self._quiet).poll(max(0.0, seconds * 1000 + 0.5)))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):  # Another thread was faster.
                os.eventfd_read(self._wake)
            return Ready(True, True)
        return Ready(self._socket_fd in ready, self._monitor_fd in ready)

    def wake(self) -> None:
        """Ends a wait of another thread."""
        os.eventfd_write(self._wake, 1)

    def pending(self) -> bool:
        """Whether a message can be received."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, frames: Sequence[Any], arrays: Sequence[Any]) -> bool:
        """Sends a message without waiting: small frames, then arrays, whose memory is used until they are sent.

        Returns:
            Whether there was room.

        Raises:
            zmq.ZMQError: the peer is gone (EHOSTUNREACH).
        """
        last = len(frames) + len(arrays) - 1
        try:
            for index, frame in enumerate(frames):
                self._socket.send(frame, zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0))
        except zmq.Again:  # Only ever at the first frame: ZeroMQ takes whole messages.
            return False
        for index, array in enumerate(arrays, len(frames)):
            self._socket.send(array, zmq.NOBLOCK | (zmq.SNDMORE if index < last else 0), copy=False)
        return True

    def receive(self, most: int) -> list[zmq.Frame] | None:
        """The next message, of which frames beyond `most` + 1 are thrown away; None if there is none."""
        socket = self._socket
        try:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        frames = [frame]
        while frame.more:
            frame = socket.recv(zmq.NOBLOCK, copy=False)
            if len(frames) <= most:
                frames.append(frame)
        return frames

    def events(self) -> Iterator[zmq.Event]:
        """What happened to connections since the last look."""
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            yield zmq.Event(parse_monitor_message(self._monitor.recv_multipart())["event"])

    def close(self, linger_seconds: float, *, term: bool = True) -> None:
        """Closes the socket and its context; what is not sent gets so long. Nobody may wait any more."""
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
        os.close(self._wake)


class _Only:
    """Accepts one public key, that of the cluster."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client may connect."""
        del domain
        return key == self._public


def server_port(limits: Limits) -> Port:
    """A ROUTER that tells when a peer is gone or does not read, and that takes no frame beyond the limit."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, limits.message_bytes)
    socket.setsockopt(zmq.SNDHWM, limits.unread_replies)
    # With a domain, ZeroMQ refuses peers of protocol 1 and 2, which know neither CURVE nor heartbeats: any bytes look
    # like a greeting of version 1, and two such peers of one name leave a connection that is never closed.
    socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
    # Few messages per connection wait here: the rest stays with the client while this process is busy.
    socket.setsockopt(zmq.RCVHWM, 16)
    _common(socket)
    return Port(context, socket)


def client_port() -> Port:
    """A DEALER that forgets what it had not sent when its connection breaks: the caller sends it again."""
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_SECONDS * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_SECONDS * 1000))
    _common(socket)
    return Port(context, socket)


def _common(socket: zmq.Socket[bytes]) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, DEAD_SECONDS * 1000)
