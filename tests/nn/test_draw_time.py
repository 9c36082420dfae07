"""When tokens are drawn: ahead, just before the network is free, or when a batch is wanted."""

import threading

import pytest

from persia.nn.draw_time import RECENT, DrawTime
from persia.nn.token_client import TokenClient
from persia.types import NO_LOSSES, Caller, PushHeader, Ticket, Token

DEADLINE = 60.0


def test_a_draw_begins_so_that_it_ends_with_the_shortest_computation():
    times = DrawTime()
    assert times.delay is None
    times.computed(5.0)
    assert times.delay is None
    times.drew(1.0)
    assert times.delay == 4.0
    times.computed(3.0)
    times.drew(2.0)
    assert times.delay == 4.0  # One of each may have stalled.
    times.computed(3.0)
    times.drew(2.0)
    assert times.delay == 1.0
    times.drew(9.0)
    assert times.delay == 1.0
    times.drew(9.0)
    assert times.delay == 0.0


def test_waiting_at_the_gate_is_no_part_of_a_draw(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("persia.nn.token_client.time.monotonic", lambda: clock[0])

    class Slow(Tokens):
        def draw(self, *arguments):
            clock[0] += 100.0
            return super().draw(*arguments)

    client = TokenClient(Slow(), Caller(1, 1, 0), Worker(), Dense(), 0, losses=lambda: NO_LOSSES)
    client._numbers.append(0)
    client.draw(1)
    clock[0] += 0.25
    client.ready()
    client._draw_time.computed(1.0)
    assert client._draw_time.delay == 0.5


def test_times_of_long_ago_are_forgotten():
    times = DrawTime()
    for _ in range(2):
        times.computed(1.0)
        times.drew(9.0)
    for _ in range(RECENT):
        times.computed(5.0)
        times.drew(1.0)
    assert times.delay == 4.0


class Tokens:
    """A token scheduler that grants everything, and notes what it was asked."""

    def __init__(self):
        self.drawn = []
        self.arrived = []

    def draw(self, caller, sequence, number, rows, done, filled, lost, request):
        self.drawn.append(sequence)
        return Token(0, 0, None, [])

    def arrive(self, caller, sequence, rows, version):
        self.arrived.append(sequence)
        return Ticket(False, PushHeader(1, 0, sequence, 0, rows), 1.0)


class Dense:
    """A network without parameters."""

    version = 0

    def pull(self, least, still_wanted, after):
        return lambda: None

    def push_empty(self, header):
        pass


class Worker:
    def push(self, header, contributions):
        return {}


class Lookups:
    """A client, and the lookup thread of a pass: `passed` grows with each token that it may draw."""

    def __init__(self, ahead):
        self.tokens = Tokens()
        self.client = TokenClient(self.tokens, Caller(1, 1, 0), Worker(), Dense(), 0, losses=lambda: NO_LOSSES)
        self.passed = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, args=(ahead,), daemon=True)
        self._numbers = self.client.batches(lambda number: number)
        self._thread.start()

    def _run(self, ahead):
        while self.client.pass_lookup(ahead=ahead):
            self.client._numbers.append(0)
            self.client.draw(1)
            self.client.ready()
            self.passed.release()

    def drew(self, seconds=DEADLINE):
        return self.passed.acquire(timeout=seconds)

    def computed(self):
        """The network has computed a batch; its gradient arrives."""
        self.client.push(len(self.tokens.arrived) + 1, 1, 0, [], None)

    def close(self):
        self.client.close()
        self._thread.join(DEADLINE)
        assert not self._thread.is_alive()


@pytest.fixture(params=[False, True], ids=["when wanted", "ahead"])
def lookups(request):
    lookups = Lookups(request.param)
    lookups.ahead = request.param
    yield lookups
    lookups.close()


def test_a_token_is_drawn_while_the_network_computes(lookups):
    lookups.client.want()
    assert lookups.drew()
    lookups.client.computing()
    lookups.client.want()  # Now both times are known: nearly 0.
    assert lookups.drew(DEADLINE if lookups.ahead else 0.05) is lookups.ahead  # With one token open.
    lookups.computed()
    if not lookups.ahead:
        assert lookups.drew()
    lookups.client.computing()
    assert lookups.drew(DEADLINE if lookups.ahead else 0.05) is lookups.ahead  # Nobody wants it yet.
    assert not lookups.drew(0.05)  # Two tokens are open, or none is wanted.
    lookups.client.want()
    lookups.computed()
    if not lookups.ahead:
        assert lookups.drew()
    assert lookups.tokens.drawn == [1, 2, 3]


def test_no_token_is_drawn_long_before_the_network_is_free():
    lookups = Lookups(ahead=True)
    client = lookups.client
    client.want()
    assert lookups.drew()
    client._draw_time.computed(3600.0)
    client.computing()
    assert not lookups.drew(0.05)  # The network will be free in an hour.
    client.close()
    assert lookups.tokens.drawn == [1]
    lookups.close()


def test_closing_gives_up_waiting(lookups):
    lookups.close()
    assert lookups.tokens.drawn == []
