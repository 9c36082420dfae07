"""What may go wrong inside a message, a method or a thread, and must not reach anything else."""

import contextlib
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest
import zmq

from persia import rpc
from persia.errors import ConfigError, DeadlineError, PersiaError, RemoteError, StoreError, WireError
from persia.rpc import port
from persia.rpc.failures import failure
from persia.rpc.messages import Kind, body
from persia.rpc.port import client_port
from support.rpc_samples import DEADLINE, Sample, Service, expire_iterators
from support.strangers import raw_dealer
from support.waiting import wait_until

SMALL = rpc.Limits(message_bytes=1 << 20)
SYN_SENT = "02"
"""State of a connection in /proc/net/tcp."""
LARGE = np.zeros(1 << 20, np.float32)


class UnspeakableError(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@dataclass(frozen=True)
class Checked:
    number: int

    def __post_init__(self):
        if self.number < 0:
            raise ConfigError("number is negative; correct it.", field="number")


class Trouble:
    """Everything that a service can do wrong."""

    def __init__(self):
        self.gate = threading.Event()

    def unspeakable(self) -> None:
        raise UnspeakableError

    def verbose(self) -> None:
        raise StoreError("x" * 100_000, **{f"field{i}": "\u20ac" * 16_000 for i in range(100)})

    @rpc.inline
    def inline_fails(self) -> None:
        raise SystemExit

    def checked(self, value: Checked) -> int:
        return value.number

    def grow(self, count: int) -> np.ndarray:
        return np.zeros(count, np.uint8)

    def bad_end(self, kind: str) -> Iterator[int]:
        try:
            yield 1
            yield 2
        finally:
            if kind == "raises":
                raise ValueError("in the end")
            if kind == "exits":
                raise SystemExit
            if kind == "goes on":
                yield 3
            if kind == "blocks":
                assert self.gate.wait(DEADLINE)

    def take(self, array: np.ndarray) -> int:
        return len(array)

    def ping(self) -> int:
        return 1

    def wait(self) -> int:
        assert self.gate.wait(DEADLINE)
        return 2


@pytest.fixture
def trouble():
    found = Trouble()
    yield found
    found.gate.set()


@contextlib.contextmanager
def served(service, limits=None, client_limits=None):
    protocol = type(service)
    with rpc.serve(service, limits=limits) as server:
        stub = rpc.connect(server.address, protocol, peer="trouble 0", timeout=DEADLINE, limits=client_limits or limits)
        try:
            yield server, stub
        finally:
            getattr(service, "gate", threading.Event()).set()
            rpc.close(stub)


# --- messages that are too large ------------------------------------------------------------------------------------


def test_a_too_large_request_fails_immediately_with_its_limit(server):
    stub = rpc.connect(server.address, Sample, timeout=DEADLINE, limits=SMALL)
    began = time.monotonic()
    with pytest.raises(WireError, match=r"Limits.message_bytes allows 1,048,576; send less") as caught:
        stub.floats(LARGE)
    assert caught.value.fields["limit"] == 1 << 20
    with pytest.raises(WireError):
        stub.anything([LARGE[: 1 << 17]] * 3)  # No single one is too large.
    with pytest.raises(WireError):
        rpc.start(stub.floats, LARGE)
    assert time.monotonic() - began < DEADLINE / 2
    assert stub.defaults(2) == "xx"
    counts = rpc.statistics(stub)
    assert (counts["connects"], counts["in_flight"]) == (1, 0)
    rpc.close(stub)


def test_a_reply_that_is_too_large_is_an_error_reply(trouble):
    with served(trouble, SMALL) as (server, stub):
        for _ in range(2):
            with pytest.raises(WireError, match=r"Limits.message_bytes allows 1,048,576"):
                stub.grow(2 << 20)
        assert stub.ping() == 1
        assert rpc.statistics(stub)["connects"] == 1
        assert server.statistics()["errors"] == 2


def test_a_reply_beyond_the_limit_of_the_client_fails_its_call(trouble):
    with served(trouble, client_limits=SMALL) as (_, stub):
        with pytest.raises(WireError, match=r"trouble 0 at .* sent a reply to grow .* same Limits"):
            stub.grow(2 << 20)
        assert stub.ping() == 1


def test_a_request_beyond_the_servers_total_limit_fails_its_call(service):
    with rpc.serve(service, protocol=Sample, limits=SMALL) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        with pytest.raises(WireError, match="same Limits"):
            stub.anything([LARGE[: 1 << 17]] * 3)
        assert stub.defaults(1) == "x"
        rpc.close(stub)


def test_limits_leave_room_for_errors():
    with pytest.raises(ConfigError, match="header_bytes"):
        rpc.Limits(header_bytes=100)


# --- methods that misbehave -----------------------------------------------------------------------------------------


def test_errors_that_cannot_be_described_cross(trouble):
    with served(trouble) as (server, stub):
        for _ in range(3):
            with pytest.raises(RemoteError, match="UnspeakableError"):
                stub.unspeakable()
            with pytest.raises(StoreError, match="xxx"):
                stub.verbose()
            with pytest.raises(RemoteError, match="SystemExit"):
                stub.inline_fails()
        assert stub.ping() == 1
        wait_until(lambda: server.statistics()["requests_held"] == 0)
        wait_until(lambda: server.statistics()["threads"] <= 3)  # Idle ones retire.


def test_failures_fit_the_smallest_limits():
    limits = rpc.Limits(header_bytes=4096)
    for error in (UnspeakableError(), StoreError("\udcff" * 10_000, a="b" * 10_000), ValueError("\u20ac" * 20_000)):
        payload, arrays, _ = failure(error, limits)
        assert len(payload) < 4096
        assert not arrays


def test_a_record_that_refuses_its_values_is_an_error_reply(trouble):
    class Lenient:
        def checked(self, value: dict[str, int]) -> int: ...

    with served(trouble) as (server, stub):
        other = rpc.connect(server.address, Lenient, timeout=DEADLINE)
        with pytest.raises(PersiaError, match="number is negative"):
            other.checked({"number": -1})
        assert other.checked({"number": 4}) == 4
        assert stub.ping() == 1
        rpc.close(other)


@pytest.mark.usefixtures("quick_ticks")
@pytest.mark.parametrize("kind", ["raises", "exits", "goes on"])
def test_iterators_that_fail_when_they_are_closed(trouble, kind, caplog):
    with served(trouble) as (server, stub):
        closed, late = stub.bad_end(kind), stub.bad_end(kind)
        assert next(closed) == next(late) == 1
        closed.close()
        wait_until(lambda: server.statistics()["streams"] == 1)
        expire_iterators(server)
        wait_until(lambda: server.statistics()["streams"] == 0)
        assert server.statistics()["streams_expired"] == 1
        assert stub.ping() == 1
        wait_until(lambda: server.statistics()["requests_held"] == 0)
        wait_until(lambda: server.statistics()["threads"] <= 3)  # Idle ones retire.
    assert "when it was closed" in caplog.text


@pytest.mark.usefixtures("quick_ticks")
def test_an_iterator_whose_end_blocks_holds_nobody_up(trouble):
    with served(trouble) as (server, stub):
        items = stub.bad_end("blocks")
        assert next(items) == 1
        expire_iterators(server)
        wait_until(lambda: server.statistics()["streams_expired"] == 1)
        assert [stub.ping() for _ in range(10)] == [1] * 10


# --- threads and locks ----------------------------------------------------------------------------------------------


def test_iterators_may_be_collected_while_the_lock_is_held(stub, service, server):
    """As the garbage collector may do, in any thread, at any place."""
    items = stub.chunks(10, 1)
    next(items)
    with stub._connection._port.lock:
        del items
        gc.collect()
    wait_until(lambda: server.statistics()["streams"] == 0)
    assert server.statistics()["streams_expired"] == 0
    assert stub.defaults(1) == "x"


def test_a_port_may_be_woken_after_it_was_closed():
    port = client_port()
    descriptor = port._wake
    port.close(0)
    port.wake()
    os.fstat(descriptor)  # Not given back yet, so nobody else's.
    del port
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_closing_while_many_threads_work(service):
    for _ in range(5):
        server = rpc.serve(service, protocol=Sample)
        stubs = [rpc.connect(server.address, Sample, timeout=DEADLINE) for _ in range(4)]
        done = threading.Event()

        def work(stub, done=done):
            while not done.is_set():
                with contextlib.suppress(DeadlineError):
                    rpc.within(stub, 0.05).defaults(1)

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, stub) for stub in stubs]
            wait_until(lambda server=server: server.statistics()["calls"] > 20)
            server.close()
            done.set()
            for future in futures:
                future.result()
        for stub in stubs:
            rpc.close(stub)
        assert server.statistics()["threads"] == 0


class Breaking:
    """A socket whose connection breaks at one of the frames."""

    copy_threshold = 1 << 16

    def __init__(self, at):
        self.at = at
        self.sent = []

    def send(self, frame, flags):
        self.sent.append(bool(flags & zmq.SNDMORE))
        if len(self.sent) == self.at + 1:
            raise zmq.Again


@contextlib.contextmanager
def breaking(at):
    port = client_port()
    real, port._socket = port._socket, Breaking(at)
    try:
        yield port, port._socket
    finally:
        port._socket = real
        port.close(0)


@pytest.mark.parametrize("at", range(4))
def test_a_connection_that_breaks_within_a_message(at):
    """ZeroMQ drops what follows up to the end of the message: it must see the end."""
    with breaking(at) as (port, socket):
        assert not port.send((b"header",), [LARGE, LARGE, LARGE])
        assert socket.sent == ([True] if at == 0 else [True, True, True, False])


def test_what_cannot_be_sent_leaves_no_half_message():
    with breaking(99) as (port, socket):
        with pytest.raises(AttributeError):
            port.send((b"header",), [LARGE, object()])
        assert socket.sent == []


# --- back-pressure --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_ticks")
def test_requests_whose_time_is_over_make_room_for_others(trouble):
    limits = rpc.Limits(threads=1, requests=4, peer_share=1)
    with served(trouble, limits) as (server, stub):
        first = rpc.start(stub.wait)
        wait_until(lambda: server.statistics()["calls"] == 1)
        hasty = rpc.within(stub, 0.1)
        futures = [rpc.start(hasty.ping) for _ in range(3)]
        wait_until(lambda: server.statistics()["expired"] == 3, "expired requests are let go of")
        assert server.statistics()["requests_held"] == 1
        for future in futures:
            with pytest.raises(DeadlineError):
                future.result()
        trouble.gate.set()
        assert first.result() == 2
        wait_until(lambda: server._backlog._peers == {})


@pytest.mark.usefixtures("quick_ticks")
def test_iterators_do_not_expire_while_requests_wait(trouble):
    with served(trouble, rpc.Limits(threads=1)) as (server, stub):
        items = stub.bad_end("raises")
        assert next(items) == 1
        blocked = [rpc.start(stub.wait) for _ in range(2)]
        wait_until(lambda: server.statistics()["calls"] == 2)  # The iterator, and the first one that blocks.
        wait_until(lambda: server.statistics()["requests_held"] >= 2)
        expire_iterators(server, 0.01)
        (stream,) = server._dispatcher.streams._streams.values()
        for _ in range(2):
            used = stream.used
            wait_until(lambda used=used: stream.used > used, "the next tick")
        assert server.statistics()["streams_expired"] == 0
        trouble.gate.set()
        assert next(items) == 2
        assert [future.result() for future in blocked] == [2, 2]


def test_calls_to_nobody_do_not_pile_up():
    stub = rpc.connect("tcp://127.0.0.1:1", Sample, timeout=0.05)
    for _ in range(3):
        with pytest.raises(DeadlineError):
            stub.floats(LARGE)
    rpc.start(stub.floats, LARGE)
    wait_until(lambda: rpc.statistics(stub)["in_flight"] == 0)
    assert not stub._connection._unsent
    rpc.close(stub)


def test_started_calls_expire_while_another_thread_waits(stub, service):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stub.wait)
        wait_until(lambda: service.waiting == 1)
        rpc.start(rpc.within(stub, 0.1).wait)
        wait_until(lambda: rpc.statistics(stub)["in_flight"] == 1, "the call that was started expires")
        service.gate.set()
        waiting.result()


# --- messages without end -------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_ticks")
def test_a_message_without_end_closes_its_connection():
    limits = rpc.Limits(message_bytes=4 << 20)
    frame = b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16)  # Long, and more to come.
    with rpc.serve(Service(), protocol=Sample, limits=limits) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        with raw_dealer(server.address) as sender:
            assert stub.defaults(1) == "x"
            end = time.monotonic() + DEADLINE
            with pytest.raises(OSError, match=r"reset|Broken"):
                while time.monotonic() < end:
                    sender.sendall(frame)
                    wait_until(lambda: stub.defaults(1) == "x")  # Others are served, and keep the rate low.
        wait_until(lambda: server.statistics()["connections_refused"] == 1)
        wait_until(lambda: server.statistics()["disconnections"] == 1)
        assert stub.defaults(1) == "x"
        assert rpc.statistics(stub)["connects"] == 1
        rpc.close(stub)


@pytest.mark.usefixtures("quick_ticks")
def test_many_messages_that_end_keep_their_connection(trouble):
    limits = rpc.Limits(message_bytes=1 << 20)
    with served(trouble, limits) as (server, stub):
        array = np.zeros(200_000, np.float32)
        intake = server._intake
        allowed = intake._most * (1 + intake._unread)  # By a server that may be behind.
        sent, ticks = 0, set()
        while len(ticks) < 3:  # The server has looked after more was sent than a message may have.
            assert stub.take(array) == len(array)
            sent += array.nbytes
            if sent > allowed:
                ticks.add(server._tick)
        assert server.statistics()["connections_refused"] == 0
        assert rpc.statistics(stub)["connects"] == 1


def test_bodies_are_checked_before_they_are_sent():
    assert body([LARGE], rpc.Limits()).arrays[0] is LARGE
    with pytest.raises(WireError, match="arrays, and 2 are allowed"):
        body([LARGE] * 3, rpc.Limits(arrays=2))
    assert Kind.CALL < Kind.RESULT


# --- methods that wait for other clients ------------------------------------------------------------------------------


class Rendezvous(Protocol):
    @rpc.waits
    def meet(self, array: np.ndarray) -> int: ...
    def fetch(self) -> int: ...


class Room:
    """Its guests wait for each other."""

    def __init__(self, guests):
        self.barrier = threading.Barrier(guests, timeout=DEADLINE)

    def meet(self, array):
        self.barrier.wait()
        return len(array)

    def fetch(self):
        return 1


@pytest.mark.parametrize("limits", [{"threads": 2}, {"requests": 4}, {"request_bytes": 1 << 20}], ids=str)
def test_calls_that_wait_for_each_other_hold_up_none(limits):
    """More of them than the server runs threads, or holds requests or bytes."""
    guests = 12
    with rpc.serve(Room(guests), protocol=Rendezvous, limits=rpc.Limits(**limits)) as server:
        stubs = [rpc.connect(server.address, Rendezvous, timeout=DEADLINE) for _ in range(guests)]
        calls = [rpc.start(stub.meet, np.zeros(100_000, np.float32)) for stub in stubs[:-1]]
        wait_until(lambda: server.statistics()["calls"] == guests - 1)
        assert server.statistics()["bytes_held"] == server.statistics()["requests_held"] == 0
        assert stubs[-1].fetch() == 1  # Others are served meanwhile.
        calls.append(rpc.start(stubs[-1].meet, np.zeros(100_000, np.float32)))
        assert [call.result() for call in calls] == [100_000] * guests
        wait_until(lambda: server.statistics()["requests_held"] == 0)
        for stub in stubs:
            rpc.close(stub)


def test_calls_that_do_not_wait_are_bounded_beside_those_that_do():
    """Threads that wait are not those of the limit."""
    gates, running = {"meet": threading.Event(), "work": threading.Event()}, []

    class Both:
        @rpc.waits
        def meet(self) -> int:
            assert gates["meet"].wait(DEADLINE)
            return 1

        def work(self) -> int:
            running.append(1)
            assert gates["work"].wait(DEADLINE)
            return 2

    with rpc.serve(Both(), limits=rpc.Limits(threads=2)) as server:
        stub = rpc.connect(server.address, Both, timeout=DEADLINE)
        for waiters in (0, 5):
            for gate in gates.values():
                gate.clear()
            running.clear()
            called = server.statistics()["calls"]
            working = [rpc.start(stub.work) for _ in range(2)]
            wait_until(lambda: len(running) == 2)
            meeting = [rpc.start(stub.meet) for _ in range(waiters)]
            wait_until(lambda: server.statistics()["calls"] == called + 2 + waiters)  # noqa: B023
            working += [rpc.start(stub.work) for _ in range(3)]
            wait_until(lambda: server.statistics()["requests_held"] == 5)
            assert len(running) == 2
            gates["meet"].set()
            assert [call.result() for call in meeting] == [1] * waiters
            assert len(running) == 2
            gates["work"].set()
            assert [call.result() for call in working] == [2] * 5
        wait_until(lambda: server.statistics()["requests_held"] == 0)
        rpc.close(stub)


def test_a_call_that_waits_overtakes_calls_without_a_free_thread():
    """What it lets go on may be what the busy threads wait for."""
    goes_on = threading.Event()

    class Both:
        @rpc.waits
        def release(self) -> None:
            goes_on.set()

        def work(self) -> int:
            assert goes_on.wait(DEADLINE)
            return 1

    with rpc.serve(Both(), limits=rpc.Limits(threads=2)) as server:
        stub = rpc.connect(server.address, Both, timeout=DEADLINE / 2)
        working = [rpc.start(stub.work) for _ in range(4)]
        wait_until(lambda: server.statistics()["requests_held"] == 4)
        stub.release()
        assert [call.result() for call in working] == [1] * 4
        rpc.close(stub)


@pytest.mark.parametrize("limits", [{"waiting": 3}, {"waiting_bytes": 1_500_000}], ids=str)
def test_calls_that_wait_are_bounded(limits):
    room, array = Room(4), np.zeros(100_000, np.float32)
    with rpc.serve(room, protocol=Rendezvous, limits=rpc.Limits(**limits, peer_share=1)) as server:
        stub = rpc.connect(server.address, Rendezvous, timeout=DEADLINE)
        calls = [rpc.start(stub.meet, array) for _ in range(3)]
        wait_until(lambda: server.statistics()["calls"] == 3)
        for _ in range(5):
            with pytest.raises(PersiaError, match=r"refused a call .*: 3 such calls with 12\d+ bytes .*wait here"):
                stub.meet(array)
        assert stub.fetch() == 1
        room.meet(array)
        assert [call.result() for call in calls] == [100_000] * 3
        wait_until(lambda: server._backlog.waiting == 0)  # A reply may be read before its call is counted as ended.
        again = [rpc.start(stub.meet, array) for _ in range(3)]  # There is space again.
        room.meet(array)
        assert [call.result() for call in again] == [100_000] * 3
        wait_until(lambda: server._backlog._peers == {})
        rpc.close(stub)


def test_a_server_that_gets_no_more_threads_keeps_one_that_reads(monkeypatch):
    start, left = threading.Thread.start, [2]

    def start_if_granted(thread):
        if thread._target == server._work:
            if not left[0]:
                raise RuntimeError("can't start new thread")
            left[0] -= 1
        start(thread)

    room, array = Room(3), np.zeros(1, np.float32)
    with rpc.serve(room, protocol=Rendezvous) as server:  # With one thread, before the others are counted.
        monkeypatch.setattr(threading.Thread, "start", start_if_granted)
        stub = rpc.connect(server.address, Rendezvous, timeout=DEADLINE / 2)
        calls = [rpc.start(stub.meet, array) for _ in range(2)]
        wait_until(lambda: server.statistics()["calls"] == 2)
        for _ in range(3):
            with pytest.raises(PersiaError, match=r"2 such calls .* on 3 threads.*pids\.max"):
                stub.meet(array)
            assert stub.fetch() == 1
        room.meet(array)
        assert [call.result() for call in calls] == [1] * 2
        rpc.close(stub)


def test_a_connection_that_nobody_answers_is_tried_again(monkeypatch):
    """A listener whose queue is full drops what connects, as a host does that is gone: there is no answer at all."""
    monkeypatch.setattr(port, "CONNECT_SECONDS", 0.1)
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()

        def dialling() -> set[str]:
            """Ports of connections that wait for an answer."""
            lines = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
            return {line[1] for line in lines if line[2].endswith(f":{address[1]:04X}") and line[3] == SYN_SENT}

        while not dialling():
            filling = held.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(address)
        filled, seen = dialling(), set()
        stub = rpc.connect(f"tcp://127.0.0.1:{address[1]}", Sample)
        held.callback(rpc.close, stub)

        def dialled() -> bool:
            seen.update(dialling() - filled)
            return len(seen) >= 3

        wait_until(dialled, "three connections one after another", DEADLINE)
