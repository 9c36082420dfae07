"""Passes packets between two network devices, late, out of order and more than once: what a kernel's `netem` does.

    python packet_relay.py DEVICE DEVICE SEED

Each line of the input is a `Treatment` as a JSON list; the answer is an empty line. Ends with its input. Imports
nothing of this project, so that it starts in milliseconds.

Packets are treated below TCP: connections, encryption and addresses stay as they are, and what applications observe is
what a slow network makes of TCP. It hides loss, order and copies, and shows them as stalls (retransmission), as
connections that end, and, once a program has reconnected and repeated its requests, as requests that come twice or in
another order.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import random
import select
import socket
import sys
import time
from typing import NamedTuple

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
ETH_P_ALL = 3
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
FRAME_BYTES = 1 << 17
"""A packet of TCP has up to 64 KiB, as the kernel divides it only where it leaves the machine."""
BUFFER_BYTES = 16 << 20
HELD_BYTES = 64 << 20
"""Bytes of delayed packets beyond which further ones are dropped."""
AT_ONCE = 64
"""Packets read from a device before the other one is looked at."""


class Treatment(NamedTuple):
    """What happens to the packets of both directions.

    Attributes:
        delay: seconds by which each packet is late.
        jitter: maximum of a random delay in addition to it, in seconds. It does not change the order.
        reordered: share of packets that are held back for another `delay` + `jitter`, while later ones pass.
        duplicated: share of packets that arrive twice.
    """

    delay: float = 0.0
    jitter: float = 0.0
    reordered: float = 0.0
    duplicated: float = 0.0


class Relay:
    """The packets between two devices. Not thread-safe.

    Args:
        devices: names of the devices.
        seed: decides which packets are reordered and duplicated, and the jitter.
    """

    def __init__(self, devices: tuple[str, str], seed: int) -> None:
        self.treatment = Treatment()
        self._random = random.Random(seed)
        self._sockets = [_opened(device) for device in devices]
        self._held: list[tuple[float, int, socket.socket, bytes]] = []
        self._held_bytes = 0
        self._latest = [0.0, 0.0]
        """When the last packet of each direction that was not held back is due."""
        self._numbers = itertools.count()

    def run(self) -> None:
        """Relays until the input ends."""
        while True:
            self._deliver()
            wait = max(0.0, self._held[0][0] - time.monotonic()) if self._held else None
            readable, _, _ = select.select([sys.stdin, *self._sockets], [], [], wait)
            if sys.stdin in readable:
                line = sys.stdin.readline()
                if not line:
                    return
                self.treatment = Treatment(*json.loads(line))
                print(flush=True)
            for direction, source in enumerate(self._sockets):
                if source in readable:
                    self._take(direction, source)

    def _take(self, direction: int, source: socket.socket) -> None:
        sink = self._sockets[1 - direction]
        for _ in range(AT_ONCE):
            try:
                frame = source.recv(FRAME_BYTES)
            except OSError:  # There is none, or the device is down.
                return
            self._hold(direction, sink, frame)

    def _hold(self, direction: int, sink: socket.socket, frame: bytes) -> None:
        delay, jitter, reordered, duplicated = self.treatment
        due = time.monotonic() + delay + self._random.random() * jitter
        if self._random.random() < reordered:
            due += delay + jitter
        else:
            due = self._latest[direction] = max(due, self._latest[direction])
        for _ in range(1 + (self._random.random() < duplicated)):
            if self._held_bytes + len(frame) <= HELD_BYTES:
                heapq.heappush(self._held, (due, next(self._numbers), sink, frame))
                self._held_bytes += len(frame)

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            _, _, sink, frame = heapq.heappop(self._held)
            self._held_bytes -= len(frame)
            with contextlib.suppress(OSError):  # The queue of the link is full, or the link is down: a lost packet.
                sink.send(frame)


def _opened(device: str) -> socket.socket:
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # With the kernel's header, which says how a large packet is to be divided and that its checksum is still missing.
    opened.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    opened.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for option in (SO_SNDBUFFORCE, SO_RCVBUFFORCE):
        opened.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
    opened.setblocking(False)
    opened.bind((device, ETH_P_ALL))
    return opened


if __name__ == "__main__":
    Relay((sys.argv[1], sys.argv[2]), int(sys.argv[3])).run()
