"""What unread messages take in memory: tiny frames take 32 times their bytes, and are bounded all the same."""

import contextlib
import struct

import numpy as np
import pytest

from persia import rpc
from persia.malloc import allocated_bytes
from persia.rpc.growth import Growth
from support.strangers import raw_dealer
from support.waiting import wait_until

counts_memory = pytest.mark.skipif(allocated_bytes() is None, reason="only glibc 2.33 or newer counts allocated bytes")


def ticks(server):
    """Waits until the server has checked its connections at least once."""
    for _ in range(2):
        last = server._tick
        wait_until(lambda last=last: server._tick != last)


@counts_memory
@pytest.mark.usefixtures("quick_ticks")
def test_tiny_frames_of_a_peer_are_bounded_by_their_memory(serve):
    """A frame of 2 bytes takes 64."""
    server, stub = serve(unread_bytes=16 << 20)
    with raw_dealer(server.address) as flood:
        ticks(server)
        before, sent, most = allocated_bytes(), 0, 0
        while sent < 4 << 20 and not server.statistics()["disconnections"]:
            with contextlib.suppress(OSError):  # It is closed.
                flood.sendall(b"\x01\x00" * (1 << 15))
            sent += 1 << 16
            ticks(server)
            most = max(most, allocated_bytes() - before)
            assert stub.defaults(1) == "x"
        assert sent > 1 << 18, "the connection was closed before its frames took much"
        assert most < 32 << 20, f"{sent:,} bytes took {most:,}"
    wait_until(lambda: server.statistics()["disconnections"] == 1)
    assert server.statistics()["connections_refused"] == 1
    wait_until(lambda: allocated_bytes() - before < 8 << 20)
    assert stub.defaults(1) == "x"
    assert rpc.statistics(stub)["connects"] == 1


@counts_memory
@pytest.mark.usefixtures("quick_ticks")
@pytest.mark.parametrize(("part", "grown"), [(24 << 20, 30 << 20), (1 << 20, 256 << 20)])
def test_a_large_message_is_read_though_memory_grows_meanwhile(serve, part, grown):
    """Together by less than the limit; or by more, but with fewer bytes than frames could have taken that in."""
    server, stub = serve(unread_bytes=64 << 20)
    with raw_dealer(server.address) as peer:
        frame = b"\x03" + struct.pack(">Q", part) + bytes(part)
        peer.sendall(frame)
        wait_until(lambda: server._intake.watching)
        held = np.empty(grown, np.uint8)
        ticks(server)
        assert server.statistics()["connections_refused"] == 0
        del held
        peer.sendall(b"\x00\x00")  # The last frame.
        wait_until(lambda: server.statistics()["malformed"] == 1, "the message is read")
    assert stub.defaults(1) == "x"


@counts_memory
@pytest.mark.usefixtures("quick_ticks")
def test_much_that_is_unread_is_looked_at_often(serve, monkeypatch):
    server, _ = serve(unread_bytes=32 << 20)
    with raw_dealer(server.address) as peer:
        peer.sendall(b"\x03" + struct.pack(">Q", 1 << 16) + bytes(1 << 16))
        wait_until(lambda: server._intake.watching)
        monkeypatch.setattr("persia.rpc.server.TICK_SECONDS", 3600.0)
        ticks(server)
        ticks(server)
    wait_until(lambda: not server._intake.watching)


@counts_memory
def test_a_small_frame_keeps_no_large_buffer(serve):
    """ZeroMQ kept 18 KiB for each frame of 34 bytes that came alone."""
    server, stub = serve()
    frames = 1000
    with raw_dealer(server.address) as peer:
        wait_until(lambda: not server._intake.strangers)
        before = allocated_bytes()
        for _ in range(frames):
            peer.sendall(b"\x01\x22" + bytes(34))
            assert stub.defaults(1) == "x"  # The thread that receives has taken the frame.
        assert allocated_bytes() - before < frames << 12


# --- readings of the test's own, in MiB -------------------------------------------------------------------------------


class Memory:
    """A bound of 1,024 MiB. Half a second passes before each check."""

    def __init__(self, monkeypatch):
        self.growth = Growth(1024 << 20, clock=lambda: self.now)
        self.bytes, self.readings, self.now = 0, 0, 1000.0
        monkeypatch.setattr("persia.rpc.growth.allocated_bytes", self.read)

    def read(self):
        self.readings += 1
        return self.bytes

    def check(self, reading, unread):
        self.now += 0.5
        self.bytes = reading << 20 if reading is not None else None
        return self.growth.check({connection: mib << 20 for connection, mib in unread.items()})


@pytest.fixture
def memory(monkeypatch):
    return Memory(monkeypatch)


def test_memory_is_read_only_while_much_is_unread(memory):
    assert memory.check(0, {}) == memory.check(5000, {5: 1}) == []
    assert (memory.readings, memory.growth.watching) == (0, False)
    assert memory.check(9000, {5: 1, 6: 1}) == []
    assert (memory.readings, memory.growth.watching) == (1, True)


def test_connections_whose_frames_may_take_the_limit_are_closed(memory):
    """Those with the most, until the frames of the others cannot."""
    assert memory.check(500, {5: 2, 6: 2, 7: 2, 8: 2}) == []
    assert memory.check(1524, {5: 10, 6: 40, 7: 20, 8: 12}) == []  # It has grown by the limit.
    assert memory.check(1525, {5: 10, 6: 40, 7: 20, 8: 12}) == [7, 6]  # 40 * (10 + 12) are below the limit.


def test_growth_before_a_message_began_is_not_due_to_it(memory):
    assert memory.check(0, {5: 2}) == []
    assert memory.check(1000, {5: 40, 6: 400}) == []
    assert memory.check(2000, {5: 40, 6: 900}) == [5]


def test_growth_before_the_end_of_a_message_is_not_due_to_the_next(memory):
    """A server that is filled by large messages, which overlap."""
    for step in range(20):
        assert memory.check(step * 500, {5 + step % 2: 200}) == []


def test_growth_while_little_is_unread_is_not_due_to_it(memory):
    assert memory.check(0, {5: 1, 6: 1}) == memory.check(2000, {5: 1}) == memory.check(2000, {5: 30}) == []
    assert memory.check(3025, {5: 30}) == [5]


def test_few_bytes_explain_no_growth(memory):
    assert memory.check(0, {5: 25}) == []
    assert memory.check(10_000, {5: 25}) == []  # They take 1,000 MiB at most.
    assert memory.check(20_000, {5: 26}) == [5]


def test_memory_that_is_freed_hides_no_growth(memory):
    for reading, closed in ((5000, []), (3000, []), (4000, []), (4025, [5])):
        assert memory.check(reading, {5: 100}) == closed


def test_nobody_is_blamed_for_memory_that_is_about_to_be_freed(memory):
    assert memory.check(0, {5: 50}) == []
    memory.growth.pause()
    assert memory.check(5000, {5: 50}) == []
    memory.growth.pause()  # It ends nevertheless.
    assert memory.check(1000, {5: 50}) == []
    memory.growth.pause()
    assert memory.check(1025, {5: 50}) == [5]
    memory.now += 0.5
    memory.growth.pause()
    assert memory.check(1025, {5: 50}) == []


def test_nobody_is_blamed_for_memory_that_is_being_freed(memory):
    assert memory.check(0, {5: 50}) == []
    memory.growth.pause()
    for reading in (5000, 4900, 4000, 3000):
        assert memory.check(reading, {5: 50}) == []
    assert memory.check(3000, {5: 50}) == [5]
    assert memory.check(2000, {5: 50}) == [5]


def test_without_readings_none_is_closed(memory):
    assert memory.check(None, {5: 1000}) == []
    assert not memory.growth.watching
