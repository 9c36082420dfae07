"""ZeroMQ sockets that many threads share."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from persia.errors import ConfigError
from persia.malloc import keep_memory
from persia.rpc.intake import UNREAD_MESSAGES
from persia.rpc.keys import Keys, Password
from persia.rpc.limits import Limits
from persia.telemetry.logs import get_logger

__all__ = ["Port", "client_port", "server_port"]

_quiet = get_logger("persia.rpc.peers")
_quiet.setLevel(logging.INFO)  # At DEBUG, pyzmq logs passwords.

DOMAIN = "persia"
USER = "persia"
HEARTBEAT_SECONDS = 5
DEAD_SECONDS = 15
HANDSHAKE_SECONDS = 5
RECONNECT_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.5
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

_HANDSHAKE_BYTES = {Keys: 250, Password: 80, type(None): 0}
"""By type of credentials: the bytes that a server sends at most before a peer has authenticated. Greeting and WELCOME
take 234 and 74 bytes; READY follows and takes 43 or more."""

_ZERO_COPY_RECV = 10
"""ZeroMQ's context option of this name, which pyzmq does not define."""


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
