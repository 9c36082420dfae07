"""Peers of rpc that are not ours: sockets of ZeroMQ, and plain ones that speak ZMTP themselves."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

from persia.rpc.keys import Password, keys_to_connect
from persia.rpc.port import DOMAIN, USER
from support.rpc_samples import DEADLINE

__all__ = ["connected", "dealer", "let_in", "raw_dealer", "router"]


def password() -> str:
    """Returns what processes of this user have on this host."""
    found = keys_to_connect("tcp://127.0.0.1:1", None)
    assert isinstance(found, Password)
    return found.text


@contextlib.contextmanager
def dealer(address: str) -> Iterator[zmq.Socket[bytes]]:
    """A client of another make, which has the password."""
    context: zmq.Context[Any] = zmq.Context()
    found = context.socket(zmq.DEALER)
    found.plain_username, found.plain_password = USER.encode(), password().encode()
    found.connect(address)
    try:
        yield found
    finally:
        context.destroy(linger=0)


@contextlib.contextmanager
def router() -> Iterator[tuple[zmq.Socket[bytes], str]]:
    """A server of another make and its address; it lets our clients in."""
    context: zmq.Context[Any] = zmq.Context()
    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_plain(DOMAIN, {USER: password()})
    found = context.socket(zmq.ROUTER)
    found.zap_domain, found.plain_server = DOMAIN.encode(), True
    port = found.bind_to_random_port("tcp://127.0.0.1")
    try:
        yield found, f"tcp://127.0.0.1:{port}"
    finally:
        authenticator.stop()
        context.destroy(linger=0)


def connected(address: str) -> socket.socket:
    """Returns a socket that is connected, and has sent nothing."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=DEADLINE)


def exactly(found: socket.socket, count: int) -> bytes:
    """Returns so many bytes, or less if the connection has ended."""
    read = b""
    while len(read) < count and (more := found.recv(count - len(read))):
        read += more
    return read


def command(name: bytes, body: bytes) -> bytes:
    """Returns a short command of ZMTP."""
    return b"\x04" + bytes([1 + len(name) + len(body), len(name)]) + name + body


def let_in(found: socket.socket) -> None:
    """Makes the handshake of a client with the password."""
    found.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN" + bytes(47))
    assert exactly(found, 64)[:1] == b"\xff"
    texts = [bytes([len(text)]) + text for text in (USER.encode(), password().encode())]
    found.sendall(command(b"HELLO", b"".join(texts)))
    assert b"WELCOME" in exactly(found, 10)
    kind = b"\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER" + b"\x08Identity" + bytes(4)
    found.sendall(command(b"INITIATE", kind))
    assert b"READY" in exactly(found, 8)


@contextlib.contextmanager
def raw_dealer(address: str) -> Iterator[socket.socket]:
    """A client whose bytes a test chooses, after the handshake."""
    with connected(address) as found:
        let_in(found)
        yield found
