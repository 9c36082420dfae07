"""What a call costs by its pieces, in microseconds of CPU: repeated, and after megabytes went through the caches.

    python -m benchmarks.profile_rpc

Then the context switches that a call of 4 KiB causes in both processes together, and the switches of libzmq alone.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import zmq

from benchmarks.rpc import Echo, EchoService, over_zmq, sides
from persia.rpc.dispatch import Dispatcher
from persia.rpc.interface import describe
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, body, header_bytes, parse
from persia.rpc.port import Port

REPEATS = 200
CALLS = 500
SWEEP = np.ones(4 << 20, np.float32)
"""More than the caches of a core hold."""


def cost(piece: Callable[[], object], *, cold: bool) -> float:
    """Median microseconds."""
    seconds = []
    for _ in range(REPEATS):
        if cold:
            SWEEP.sum()
        began = time.thread_time()
        piece()
        seconds.append(time.thread_time() - began)
    return 1e6 * statistics.median(seconds)


def pieces() -> dict[str, Callable[[], object]]:
    limits, methods = Limits(), describe(Echo)
    array = np.ones(1 << 10, np.float32)
    method = methods["echo"]
    arguments = body((array,), limits)
    head = header_bytes(Kind.CALL, 5, "echo", 60.0, arguments.payload)
    message = parse([zmq.Frame(head), zmq.Frame(array.tobytes())], limits)
    dispatcher = Dispatcher(EchoService(), methods, limits, lambda _: None)
    context: zmq.Context = zmq.Context()
    sockets = [context.socket(zmq.PAIR) for _ in range(2)]
    sockets[0].bind("inproc://pieces")
    sockets[1].connect("inproc://pieces")
    sender, receiver = Port(context, sockets[0]), Port(context, sockets[1])
    return {
        "client: encode arguments": lambda: body((array,), limits),
        "either: header": lambda: header_bytes(Kind.CALL, 5, "echo", 60.0, arguments.payload),
        "either: send and receive, in one process": lambda: (sender.send((head,), [array]), receiver.receive(8)),
        "either: look whether a message is there": sender.pending,
        "either: decode an array": lambda: method.arguments.decode(message.header.payload, message.frames),
        "server: decode, run, encode": lambda: dispatcher.answer(message, float("inf")),
    }


def switches(process: int) -> int:
    """Of all threads of a process so far."""
    total = 0
    for thread in Path(f"/proc/{process}/task").iterdir():
        lines = (thread / "status").read_text().splitlines()
        total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total


def main() -> None:
    for name, piece in pieces().items():
        print(f"{name:42} {cost(piece, cold=False):6.1f} us, cold {cost(piece, cold=True):6.1f} us")
    with sides() as both:
        (other,) = multiprocessing.active_children()
        array = np.ones(1 << 10, np.float32)
        for name, call in (("ours", lambda: both.stub.echo(array)), ("libzmq", over_zmq(both.dealer, array))):
            call()
            before = sum(map(switches, (os.getpid(), other.pid)))
            for _ in range(CALLS):
                call()
            spent = sum(map(switches, (os.getpid(), other.pid))) - before
            print(f"{name}: {spent / CALLS:.1f} context switches a call")


if __name__ == "__main__":
    main()
