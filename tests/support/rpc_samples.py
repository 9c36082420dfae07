"""A service with a method for everything that can cross, and what tests of rpc share."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia import rpc
from persia.errors import StoreError

DEADLINE = 20.0


def expire(stub: Any) -> None:
    """Makes the calls in flight late now. A short deadline could pass before the server has them."""
    connection = stub._connection
    with connection._port.lock:
        for call in connection._calls.values():
            call.expires = time.monotonic()


def expire_iterators(server: rpc.Server, seconds: float = 0.02) -> None:
    """Lets iterators expire that are not read for these seconds. From the start, they could before they are read."""
    server._dispatcher.streams._limits = rpc.Limits(stream_seconds=seconds)


class Pair(NamedTuple):
    number: int
    array: NDArray[np.float32] | None = None


class Nested(NamedTuple):
    pairs: dict[str, Pair]
    either: NDArray[np.uint16 | np.uint32]


@dataclass(frozen=True, slots=True)
class Column:
    values: NDArray[np.uint64]
    offsets: NDArray[np.int64] | None = None


class Record(msgspec.Struct, frozen=True, tag_field="kind", tag="record"):
    name: str
    size: float = 0.5


class OddError(StoreError):
    """With a constructor of its own."""

    def __init__(self, number: int) -> None:
        super().__init__(f"odd {number}", number=number)


class Sample(Protocol):
    def anything(self, value: Any) -> Any: ...
    def array(self, array: np.ndarray) -> np.ndarray: ...
    def floats(self, array: NDArray[np.float32]) -> NDArray[np.float32]: ...
    @rpc.inline
    def floats_inline(self, array: NDArray[np.float32]) -> NDArray[np.float32]: ...
    def typed(self, nested: Nested, columns: Mapping[str, Column], records: Sequence[Record]) -> Nested: ...
    def tables(self, gradients: Mapping[str, tuple[NDArray[np.uint64], NDArray[np.float32]]]) -> dict[str, Pair]: ...
    def nothing(self, number: int = 3, *, text: str = "x") -> None: ...
    def defaults(self, number: int, text: str = "x") -> str: ...
    def fail(self, kind: str) -> None: ...
    def wait(self) -> int: ...
    def wait_with(self, array: NDArray[np.float32]) -> int: ...
    @rpc.once
    def wait_once(self) -> int: ...
    def chunks(self, count: int, size: int) -> Iterator[Pair]: ...
    def process(self) -> int: ...


class Service:
    """Implements Sample."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.waiting = 0
        self.ran = 0
        self.made = 0
        self.finished = 0
        self.seen: Any = None
        self.lock = threading.Lock()

    def anything(self, value):
        self.seen = value
        return value

    def array(self, array):
        self.seen = array
        return array

    def floats(self, array):
        return array

    floats_inline = floats

    def typed(self, nested, columns, records):
        self.seen = (nested, columns, records)
        return nested

    def tables(self, gradients):
        return {name: Pair(len(ids), values) for name, (ids, values) in gradients.items()}

    def nothing(self, number=3, *, text="x"):
        self.seen = (number, text)

    def defaults(self, number, text="x"):
        return text * number

    def fail(self, kind):
        if kind == "persia":
            raise StoreError("The store is full; delete rows.", table="item", rows=7, path=OddError)
        if kind == "odd":
            raise OddError(3)
        if kind == "file":
            raise ValueError("cannot read bad\udcff")
        if kind == "exit":
            raise SystemExit(3)
        raise ValueError("not yours")

    def wait(self):
        with self.lock:
            self.waiting += 1
        assert self.gate.wait(DEADLINE)
        with self.lock:
            self.ran += 1
            return self.ran

    def wait_with(self, array):
        return self.wait() + 0 * len(array)

    wait_once = wait

    def chunks(self, count, size):
        try:
            for number in range(count):
                self.made += 1
                yield Pair(number, np.full(size, number, np.float32))
            if count == 3:
                raise StoreError("three is too many", count=3)
        finally:
            self.finished += 1

    def process(self):
        import os

        return os.getpid()
