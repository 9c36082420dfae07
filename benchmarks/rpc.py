"""Calls between two processes against bare sockets between the same two.

    python -m benchmarks 'rpc.*' [--preset smoke|laptop|full] [--json FILE]

Both sides are an echo on loopback, one request at a time. The bare socket is TCP with `TCP_NODELAY`: `sendall` of the
array, `recv_into` new memory of the same size, as a reply needs. Beside it stands a bare echo of libzmq, a DEALER here
and a ROUTER in the other process, which sends the array as a single frame: what it costs more than TCP is libzmq's, the
rest is ours.
"""

from __future__ import annotations

import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np
import zmq

from benchmarks import runner
from benchmarks.elsewhere import methods
from persia import rpc
from persia.types import Floats, Ids

ROUNDS = {"smoke": 1, "laptop": 15, "full": 31}
CALLS = {"smoke": 50, "laptop": 500, "full": 2000}
IN_FLIGHT = 16
TABLES = 26
SIZE = struct.Struct("<QQ")
"""Bytes of a message and how many follow."""


class Echo(Protocol):
    def echo(self, array: Floats) -> Floats: ...

    @rpc.inline
    def echo_inline(self, array: Floats) -> Floats: ...

    def gradients(self, gradients: Mapping[str, tuple[Ids, Floats]]) -> int: ...


class EchoService:
    def echo(self, array: Floats) -> Floats:
        return array

    def echo_inline(self, array: Floats) -> Floats:
        return array

    def gradients(self, gradients: Mapping[str, tuple[Ids, Floats]]) -> int:
        return len(gradients)


def serve(pipe: Connection) -> None:
    """The other process: an rpc server, and the bare echoes, until their clients end."""
    context: zmq.Context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    echo = threading.Thread(target=echo_tcp, args=(listener,))
    echo.start()
    with rpc.serve(EchoService(), protocol=Echo) as server:
        pipe.send((server.address, f"tcp://127.0.0.1:{port}", listener.getsockname()))
        while True:
            peer, frame = router.recv_multipart(copy=False)
            if len(frame) == 1:
                break
            router.send_multipart((peer, frame), copy=False)
    context.destroy(linger=0)
    echo.join()
    listener.close()


def echo_tcp(listener: socket.socket) -> None:
    """Sends back whatever comes: a size and a count, then as many messages of this size; and again."""
    peer, _ = listener.accept()
    with peer:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while head := peer.recv(SIZE.size, socket.MSG_WAITALL):
            size, count = SIZE.unpack(head)
            for _ in range(count):
                peer.sendall(received(peer, size))


def received(peer: socket.socket, size: int) -> np.ndarray:
    """The next bytes, in memory of their own."""
    array = np.empty(size, np.uint8)
    rest = memoryview(array)
    while len(rest):
        count = peer.recv_into(rest)
        if not count:
            raise ConnectionError("the other side has closed")
        rest = rest[count:]
    return array


class Sides(NamedTuple):
    stub: Echo
    dealer: zmq.Socket
    tcp: socket.socket


@contextmanager
def sides() -> Iterator[Sides]:
    here, there = methods().Pipe()
    process = methods().Process(target=serve, args=(there,))
    process.start()
    context: zmq.Context = zmq.Context()
    try:
        ours, bare, plain = here.recv()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(bare)
        stub = rpc.connect(ours, Echo, peer="echo")
        with socket.create_connection(plain) as tcp:
            tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            yield Sides(stub, dealer, tcp)
        rpc.close(stub)
        dealer.send(b"x")
        process.join(10)
    finally:
        process.kill()
        context.destroy(linger=0)


def seconds(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """Mean time of a call."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return (time.perf_counter() - start) / calls

    return measure


def over_zmq(dealer: zmq.Socket, array: np.ndarray) -> Callable[[], object]:
    def call() -> object:
        dealer.send(array, copy=False)
        return np.frombuffer(dealer.recv(copy=False), np.float32)

    return call


def over_tcp(tcp: socket.socket, array: np.ndarray, calls: int) -> Callable[[], float]:
    """Mean time of an echo."""

    def call() -> object:
        tcp.sendall(array)
        return received(tcp, array.nbytes).view(np.float32)

    def measure() -> float:
        tcp.sendall(SIZE.pack(array.nbytes, calls))
        return seconds(call, calls)()

    return measure


def compared(sides: Sides, method: str, array: np.ndarray, calls: int, rounds: int) -> list[tuple[float, float, float]]:
    """Seconds of ours, libzmq's and TCP's echo, in alternating order."""
    call = getattr(sides.stub, method)
    ways = [
        seconds(lambda: call(array), calls),
        seconds(over_zmq(sides.dealer, array), calls),
        over_tcp(sides.tcp, array, calls),
    ]
    for way in ways:
        way()
    times_of_ways = []
    for number in range(rounds):
        order = ways if number % 2 else ways[::-1]
        times = {id(way): way() for way in order}
        times_of_ways.append((times[id(ways[0])], times[id(ways[1])], times[id(ways[2])]))
    return times_of_ways


def details(times: list[tuple[float, float, float]]) -> dict[str, Any]:
    ours, theirs, tcp = (float(np.median(column)) for column in zip(*times, strict=True))
    return {
        "of": "a bare TCP socket",
        "ours_s": ours,
        "libzmq_s": theirs,
        "tcp_s": tcp,
        "ours_over_libzmq": float(np.median([a / b for a, b, _ in times])),
        "libzmq_over_tcp": float(np.median([b / c for _, b, c in times])),
    }


def rate(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """Calls per second."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return calls / (time.perf_counter() - start)

    measure()
    return measure


@runner.measures("rpc.echo_1mib")
def echo_1mib(preset: str) -> runner.Measure:
    """Throughput of a 1 MiB array there and back."""
    array = np.ones(1 << 18, np.float32)
    with sides() as both:
        times = compared(both, "echo", array, CALLS[preset], ROUNDS[preset])
    return runner.quantity(
        "rpc.echo_1mib", [tcp / ours for ours, _, tcp in times], "ratio", at_least=0.8, details=details(times)
    )


def roundtrip(preset: str, name: str, method: str) -> runner.Measure:
    array = np.ones(1 << 10, np.float32)
    with sides() as both:
        times = compared(both, method, array, 4 * CALLS[preset], ROUNDS[preset])
    return runner.quantity(name, [ours / tcp for ours, _, tcp in times], "ratio", at_most=3.0, details=details(times))


@runner.measures("rpc.roundtrip_4kib")
def roundtrip_4kib(preset: str) -> runner.Measure:
    """Latency of a 4 KiB array there and back, the method on a thread of the pool."""
    return roundtrip(preset, "rpc.roundtrip_4kib", "echo")


@runner.measures("rpc.roundtrip_4kib_inline")
def roundtrip_4kib_inline(preset: str) -> runner.Measure:
    """The same with a method that is declared inline."""
    return roundtrip(preset, "rpc.roundtrip_4kib_inline", "echo_inline")


@runner.measures("rpc.in_flight")
def in_flight(preset: str) -> runner.Measure:
    """4 KiB echoes per second with 16 calls in flight, from one thread."""
    array = np.ones(1 << 10, np.float32)

    def burst() -> None:
        for future in [rpc.start(stub.echo, array) for _ in range(IN_FLIGHT)]:
            future.result()

    with sides() as (stub, _, _):
        measure = rate(burst, CALLS[preset] // 4)
        return runner.quantity("rpc.in_flight", [IN_FLIGHT * measure() for _ in range(ROUNDS[preset])], "calls/s")


def push() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Gradients of a step: 26 tables, 52 arrays, 1.9 MB."""
    rng = np.random.default_rng(0)
    return {
        f"table_{t}": (rng.integers(0, 1 << 40, 1000).astype(np.uint64), np.ones((1000, 16), np.float32))
        for t in range(TABLES)
    }


@runner.measures("rpc.gradients")
def gradients(preset: str) -> runner.Measure:
    """A push of 26 tables (52 arrays, 1.9 MB): messages per second."""
    message = push()
    with sides() as (stub, _, _):
        measure = rate(lambda: stub.gradients(message), CALLS[preset])
        return runner.quantity("rpc.gradients", [measure() for _ in range(ROUNDS[preset])], "calls/s")


def serve_thrice(pipe: Connection, keys: str) -> None:
    """The other process of `guarded`: open to all, with the password of the user, and with CURVE keys."""
    with (
        rpc.serve(EchoService(), "tcp://0.0.0.0:*", protocol=Echo, insecure=True) as anyone,
        rpc.serve(EchoService(), protocol=Echo) as user,
        rpc.serve(EchoService(), protocol=Echo, keys=keys) as cluster,
    ):
        pipe.send((anyone.address, user.address, cluster.address))
        pipe.recv()


def guarded(preset: str, name: str, way: int) -> runner.Measure:
    """A push of `rpc.gradients` by peers that are let in, against the same to a server that is open to anyone."""
    message, calls = push(), CALLS[preset] // 2
    here, there = methods().Pipe()
    with tempfile.TemporaryDirectory() as folder:
        keys = f"{folder}/keys"
        rpc.make_keys(keys)
        process = methods().Process(target=serve_thrice, args=(there, keys))
        process.start()
        try:
            addresses = here.recv()
            stubs = [rpc.connect(at, Echo, keys=file) for at, file in zip(addresses, (None, None, keys), strict=True)]
            ways = [seconds(lambda stub=stub: stub.gradients(message), calls) for stub in (stubs[0], stubs[way])]
            times = []
            for number in range(ROUNDS[preset] + 1):
                order = (0, 1) if number % 2 else (1, 0)
                both = {which: ways[which]() for which in order}
                times.append((both[1], both[0]))
            for stub in stubs:
                rpc.close(stub)
            here.send(None)
            process.join(10)
        finally:
            process.kill()
    times = times[1:]  # The first one warms up.
    medians = [float(np.median(column)) for column in zip(*times, strict=True)]
    return runner.quantity(
        name, [ours / theirs for ours, theirs in times], "ratio", details={"s": medians[0], "open_s": medians[1]}
    )


@runner.measures("rpc.password")
def password(preset: str) -> runner.Measure:
    """A push with the password of the user, which this host's peers have by default, against an open server."""
    return guarded(preset, "rpc.password", 1)


@runner.measures("rpc.keys")
def keys(preset: str) -> runner.Measure:
    """A push that CURVE encrypts, against an open server."""
    return guarded(preset, "rpc.keys", 2)
