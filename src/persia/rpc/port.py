"""A ZeroMQ socket that many threads share, and a way to wait for it without holding it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from persia.errors import ConfigError
from persia.rpc.keys import Keys
from persia.rpc.limits import Limits
from persia.rpc.memory import keep_memory

__all__ = ["UNREAD_MESSAGES", "Port", "client_port", "server_port"]

DOMAIN = "persia"
HEARTBEAT_SECONDS = 5
DEAD_SECONDS = 15
HANDSHAKE_SECONDS = 5
RECONNECT_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.5
UNREAD_MESSAGES = 16
"""So many per connection wait in ZeroMQ; the rest stays with the client while a server is busy."""

# Plain numbers: operations on the flags of pyzmq take as long as sending a small frame.
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


class Port:
    """A socket, its monitor, and a wake-up call. Touch `send`, `receive`, `pending`, `events` under `lock` only.

    ZeroMQ sockets may be used by any thread, one at a time. Waiting needs no lock, since it looks at file descriptors
    only. A descriptor announces a change once: a thread that sends may swallow the announcement of a message, so
    whoever sends looks at `pending` afterwards, and receives or wakes a thread that waits.

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
        # Each change is told once, to one of those that wait.
        self._poller = select.epoll()
        for descriptor in (self._wake, self._monitor_fd, self._socket_fd):
            self._poller.register(descriptor, select.EPOLLIN | select.EPOLLET)

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

    def wait(self, seconds: float) -> bool:
        """Blocks until there is news of the socket or the monitor, a wake-up, or time is over.

        Returns:
            Whether to look at the monitor. A message may be there in any case.
        """
        return any(descriptor == self._monitor_fd for descriptor, _ in self._poller.poll(max(0.0, seconds)))

    def wake(self) -> None:
        """Ends a wait of one other thread. Takes no lock; nothing happens once the port is closed."""
        os.eventfd_write(self._wake, 1)

    def __del__(self) -> None:
        # Not in `close`: until then some thread may be about to write to it, and its number would be another file's.
        with contextlib.suppress(AttributeError):
            os.close(self._wake)

    def pending(self) -> bool:
        """Whether a message can be received."""
        return bool(int(self._socket.getsockopt(_EVENTS)) & _POLLIN)

    def send(self, frames: Sequence[bytes], arrays: Sequence[Any]) -> bool:
        """Sends a message without waiting: small frames, then arrays, whose memory is used until they are sent.

        Returns:
            Whether there was room, and the connection lasted to the last frame.

        Raises:
            zmq.ZMQError: the peer is gone (EHOSTUNREACH).
        """
        # Small arrays are copied by ZeroMQ, which is faster. The frames of others are made before anything is sent:
        # what is wrong with the last must not leave half a message in the socket.
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
                # The connection broke in between. ZeroMQ throws away the rest, but must see where the message ends.
                whole = False
        return whole

    def receive(self, most: int) -> list[zmq.Frame] | None:
        """The next message, of which frames beyond `most` + 1 are thrown away; None if there is none."""
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
        """What happened to connections since the last look, and its value: for most the descriptor."""
        while int(self._monitor.getsockopt(_EVENTS)) & _POLLIN:
            message = parse_monitor_message(self._monitor.recv_multipart())
            yield zmq.Event(message["event"]), int(message["value"])

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
    socket.setsockopt(zmq.RCVHWM, UNREAD_MESSAGES)
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
    keep_memory()
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, DEAD_SECONDS * 1000)
