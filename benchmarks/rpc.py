"""Calls between two processes against bare ZeroMQ sockets between the same two.

    python benchmarks/rpc.py [--only NAME] [--preset smoke|laptop|full] [--json FILE]

Both sides are an echo on loopback, one request at a time: a DEALER here, a ROUTER in the other process. The bare
one sends the array as a single frame and copies nothing either.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import harness

from persia import rpc
from persia.types import Floats, Ids

ROUNDS = {"smoke": 5, "laptop": 15, "full": 31}
CALLS = {"smoke": 50, "laptop": 500, "full": 2000}
IN_FLIGHT = 16
TABLES = 26


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
    """The other process: an rpc server, and a bare echo, until a single byte comes."""
    context: zmq.Context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    with rpc.serve(EchoService(), protocol=Echo) as server:
        pipe.send((server.address, f"tcp://127.0.0.1:{port}"))
        while True:
            peer, frame = socket.recv_multipart(copy=False)
            if len(frame) == 1:
                break
            socket.send_multipart((peer, frame), copy=False)
    context.destroy(linger=0)


class Sides(NamedTuple):
    ours: Echo
    theirs: zmq.Socket


@contextmanager
def sides() -> Iterator[Sides]:
    methods = multiprocessing.get_context("spawn")
    here, there = methods.Pipe()
    process = methods.Process(target=serve, args=(there,))
    process.start()
    context: zmq.Context = zmq.Context()
    try:
        ours, theirs = here.recv()
        socket = context.socket(zmq.DEALER)
        socket.connect(theirs)
        stub = rpc.connect(ours, Echo, peer="echo")
        yield Sides(stub, socket)
        rpc.close(stub)
        socket.send(b"x")
        process.join(10)
    finally:
        process.kill()
        context.destroy(linger=0)


def rate(call: Callable[[], object], calls: int) -> Callable[[], float]:
    """Calls per second."""

    def measure() -> float:
        start = time.perf_counter()
        for _ in range(calls):
            call()
        return calls / (time.perf_counter() - start)

    measure()
    return measure


def bare(socket: zmq.Socket, array: np.ndarray) -> Callable[[], object]:
    def call() -> object:
        socket.send(array, copy=False)
        return np.frombuffer(socket.recv(copy=False), np.float32)

    return call


def echo_1mib(preset: str) -> harness.Measure:
    """Throughput of a 1 MiB array there and back."""
    array = np.ones(1 << 18, np.float32)
    with sides() as (stub, socket):
        return harness.ratio(
            "rpc.echo_1mib",
            ours=rate(lambda: stub.echo(array), CALLS[preset]),
            theirs=rate(bare(socket, array), CALLS[preset]),
            rounds=ROUNDS[preset],
            unit="x echoes/s",
            target=0.8,
        )


def roundtrip(preset: str, name: str, method: str, target: float | None) -> harness.Measure:
    array = np.ones(1 << 10, np.float32)
    calls = 4 * CALLS[preset]
    with sides() as (stub, socket):
        call = getattr(stub, method)
        ours, theirs = rate(lambda: call(array), calls), rate(bare(socket, array), calls)
        pairs = []
        for number in range(ROUNDS[preset]):
            if number % 2:
                b, a = 1 / theirs(), 1 / ours()
            else:
                a, b = 1 / ours(), 1 / theirs()
            pairs.append((a, b))
    details = {
        "ours_us": 1e6 * float(np.median([a for a, _ in pairs])),
        "theirs_us": 1e6 * float(np.median([b for _, b in pairs])),
    }
    return harness.quantity(
        name, [a / b for a, b in pairs], "x seconds", target, at_least=False, details=details
    )  # fmt: skip


def roundtrip_4kib(preset: str) -> harness.Measure:
    """Latency of a 4 KiB array there and back, the method on a thread of the pool."""
    return roundtrip(preset, "rpc.roundtrip_4kib", "echo", 3.0)


def roundtrip_4kib_inline(preset: str) -> harness.Measure:
    """The same with a method that is declared inline."""
    return roundtrip(preset, "rpc.roundtrip_4kib_inline", "echo_inline", 3.0)


def in_flight(preset: str) -> harness.Measure:
    """4 KiB echoes per second with 16 calls in flight, from one thread."""
    array = np.ones(1 << 10, np.float32)

    def burst() -> None:
        for future in [rpc.start(stub.echo, array) for _ in range(IN_FLIGHT)]:
            future.result()

    with sides() as (stub, _):
        measure = rate(burst, CALLS[preset] // 4)
        return harness.quantity("rpc.in_flight", [IN_FLIGHT * measure() for _ in range(ROUNDS[preset])], "calls/s")


def gradients(preset: str) -> harness.Measure:
    """A push of 26 tables (52 arrays, 1.9 MB): messages per second."""
    rng = np.random.default_rng(0)
    push = {
        f"table_{t}": (rng.integers(0, 1 << 40, 1000).astype(np.uint64), np.ones((1000, 16), np.float32))
        for t in range(TABLES)
    }
    with sides() as (stub, _):
        measure = rate(lambda: stub.gradients(push), CALLS[preset])
        return harness.quantity("rpc.gradients", [measure() for _ in range(ROUNDS[preset])], "calls/s")


MEASURES = {
    "rpc.echo_1mib": echo_1mib,
    "rpc.roundtrip_4kib": roundtrip_4kib,
    "rpc.roundtrip_4kib_inline": roundtrip_4kib_inline,
    "rpc.in_flight": in_flight,
    "rpc.gradients": gradients,
}

if __name__ == "__main__":
    harness.main(MEASURES)
