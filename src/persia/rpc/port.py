"""ZeroMQ sockets that many threads share."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from persia.errors import ConfigError
from persia.malloc import keep_memory
from persia.rpc.intake import UNREAD_MESSAGES
from persia.rpc.key_file import KeyFile, Keys
from persia.rpc.keys import Password
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
CONNECT_SECONDS = 5.0
"""Seconds without an answer after which a client connects again, and resolves the name again.

TCP alone waits 127 s, and retries only after 1, 3, 7, 15, 31 and 63 s: up to a minute after a partition has ended.
"""
RECONNECT_SECONDS = 0.02
RECONNECT_MAX_SECONDS = 0.5
REDIAL_SECONDS = 0.2
"""Seconds between two changes of a client's key pair, while the server accepts none. A handshake takes milliseconds."""
# Plain numbers, as operations on pyzmq's flags take as long as sending a small frame.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS = int(zmq.EVENTS)
_POLLIN = int(zmq.POLLIN)

EVENTS = (
    zmq.EVENT_LISTENING
    | zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

_HANDSHAKE_BYTES = {KeyFile: 250, Password: 80, type(None): 0}
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
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._authenticator: ThreadAuthenticator | None = None
        self._credentials: KeyFile | Password | None = None
        self._keys: Keys | None = None  # The pair that is in use.
        self._admitted = _Only()
        self._listening = -1
        self._dialled = -math.inf
        self.closed = False
        # Each change is signalled once, to one waiting thread.
        self._poller = select.epoll()
        self._poller.register(self._wake, select.EPOLLIN | select.EPOLLET)
        self._attach(socket)

    def _attach(self, socket: zmq.Socket[bytes]) -> None:
        """Uses a socket, and waits for its events."""
        self._socket = socket
        self._monitor = socket.get_monitor_socket(EVENTS)
        # The descriptor signals nothing before the events are read once.
        self._monitor.getsockopt(zmq.EVENTS)
        self._socket_fd = int(socket.getsockopt(zmq.FD))
        self._monitor_fd = int(self._monitor.getsockopt(zmq.FD))
        for descriptor in (self._monitor_fd, self._socket_fd):
            self._poller.register(descriptor, select.EPOLLIN | select.EPOLLET)

    def bind(self, address: str, credentials: KeyFile | Password | None) -> None:
        """Starts to listen. Admits only peers with the first of the keys or this password; with None, admits anyone.

        Raises:
            ConfigError: the address is invalid or in use.
        """
        self._credentials = credentials
        if credentials is not None:
            self._authenticator = ThreadAuthenticator(self._context, log=_quiet)
            self._authenticator.start()
        if isinstance(credentials, KeyFile) and self._authenticator is not None:
            self._authenticator.configure_curve_callback(DOMAIN, self._admitted)
            self._socket.curve_server = True
            self._listen_with(credentials.pairs[0])
        elif isinstance(credentials, Password) and self._authenticator is not None:
            self._authenticator.configure_plain(DOMAIN, {USER: credentials.text})
            self._socket.plain_server = True
        self._socket.setsockopt(zmq.IPV6, "[" in address)
        try:
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"Cannot listen on {address}: {error}; choose another.", address=address) from error
        self.handshake_bytes = _HANDSHAKE_BYTES[type(credentials)]
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._listening = next(value for event, value in self.events() if event == zmq.EVENT_LISTENING)

    def stale(self) -> bool:
        """Whether the file of keys has another first pair than the one that this port listens with. Takes no lock."""
        if not isinstance(self._credentials, KeyFile):
            return False
        self._credentials.refresh()
        return self._credentials.pairs[0] != self._keys

    def rebind(self) -> str:
        """Listens with the first pair of the file from now on, and ends all connections. Returns the pair's name.

        ZeroMQ takes keys over when it starts to listen. The kernel's socket stays, so no other process can take the
        port, and connections that arrive meanwhile are accepted afterwards.
        """
        assert isinstance(self._credentials, KeyFile)
        listening = os.dup(self._listening)
        keys = self._credentials.pairs[0]
        self._listen_with(keys)
        self._socket.unbind(self.address)
        self._socket.setsockopt(zmq.USE_FD, listening)
        self._socket.bind(self.address)
        self._listening = listening
        return keys.name

    def _listen_with(self, keys: Keys) -> None:
        self._keys = keys
        self._admitted.public = keys.public
        self._socket.curve_publickey, self._socket.curve_secretkey = keys

    def connect(self, address: str, credentials: KeyFile | Password | None) -> None:
        """Starts to connect. ZeroMQ reconnects whenever the connection is lost.

        Raises:
            ConfigError: the address is invalid.
        """
        self.address, self._credentials = address, credentials
        if isinstance(credentials, KeyFile):
            self._keys = credentials.pairs[0]
        self._dial()

    def redial(self, *, stopped: bool) -> bool:
        """Connects with the next key pair of the file, after a handshake has failed.

        The server may not know the first pair yet, or no longer. Call it again if it does nothing: there is only one
        pair, or the last change was just now.

        Args:
            stopped: whether ZeroMQ does not retry by itself with the pair in use: after it was refused by a server
                that has just changed its keys.

        Returns:
            Whether it connects anew.
        """
        now = time.monotonic()
        if not isinstance(self._credentials, KeyFile) or now < self._dialled + REDIAL_SECONDS:
            return False
        self._credentials.refresh()
        pairs = self._credentials.pairs
        following = pairs[(pairs.index(self._keys) + 1) % len(pairs)] if self._keys in pairs else pairs[0]
        if following == self._keys and not stopped:
            return False
        try:
            # A new one, as ZeroMQ may connect with the old keys again after `disconnect`.
            socket = _client_socket(self._context)
        except zmq.ZMQError:  # Too many files are open: the next failed handshake tries again.
            return False
        self._keys, self._dialled = following, now
        for descriptor in (self._monitor_fd, self._socket_fd):
            self._poller.unregister(descriptor)
        self._drop()
        self._attach(socket)
        self._dial()
        return True

    def _dial(self) -> None:
        if self._keys is not None:
            self._socket.curve_serverkey = self._keys.public
            self._socket.curve_publickey, self._socket.curve_secretkey = self._keys
        elif isinstance(self._credentials, Password):
            self._socket.plain_username, self._socket.plain_password = USER.encode(), self._credentials.text.encode()
        self._socket.setsockopt(zmq.IPV6, "[" in self.address)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(f"Cannot connect to {self.address!r}: {error}; use tcp://host:port.") from error

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
        self._drop(linger_seconds)
        if self._authenticator is not None:
            self._authenticator.stop()
        if term:
            self._context.term()

    def _drop(self, linger_seconds: float = 0.0) -> None:
        """Closes the socket and its monitor."""
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_seconds * 1000))


class _Only:
    """Accepts a single public key, the one that the cluster uses now."""

    public = b""

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns whether a client may connect."""
        del domain
        return key == self.public


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
    return Port(context, _client_socket(context))


def _client_socket(context: zmq.Context[Any]) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, int(CONNECT_SECONDS * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL, int(RECONNECT_SECONDS * 1000))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(RECONNECT_MAX_SECONDS * 1000))
    _common(socket)
    return socket


def _common(socket: zmq.Socket[bytes]) -> None:
    keep_memory()
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_SECONDS * 1000)
    socket.setsockopt(zmq.HEARTBEAT_TTL, DEAD_SECONDS * 1000)
