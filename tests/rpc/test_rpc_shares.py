"""One client holds a share of a server's limits, and others are served in between."""

import threading
import time

import numpy as np
import pytest

from persia import rpc
from persia.errors import ConfigError, DeadlineError, PersiaError
from persia.rpc.dispatch import Backlog, Job
from support.rpc_samples import DEADLINE
from support.waiting import wait_until

LARGE = np.zeros(1 << 20, np.uint8)


class Shared:
    """Methods that take a number until a test lets them end; `waits` ones, too."""

    def __init__(self):
        self.proceed = threading.Event()
        self.order = []

    def take(self, number: int) -> int:
        assert self.proceed.wait(DEADLINE)
        self.order.append(number)
        return number

    def take_bytes(self, array: np.ndarray) -> int:
        assert self.proceed.wait(DEADLINE)
        return len(array)

    @rpc.waits
    def meet(self, number: int) -> int:
        assert self.proceed.wait(DEADLINE)
        return number

    def ping(self) -> int:
        return 1


@pytest.fixture
def shared():
    found = Shared()
    yield found
    found.proceed.set()


@pytest.fixture
def connect():
    stubs = []

    def make(server, limits=None):
        stubs.append(rpc.connect(server.address, Shared, timeout=DEADLINE, limits=limits))
        return stubs[-1]

    yield make
    for stub in stubs:
        rpc.close(stub)


def held(server):
    return server.statistics()["requests_held"]


@pytest.mark.parametrize(
    "limits", [rpc.Limits(requests=8), rpc.Limits(request_bytes=8 << 20), rpc.Limits(requests=8, threads=2)], ids=str
)
def test_a_client_keeps_its_calls_until_others_are_answered(limits, shared, connect):
    with rpc.serve(shared, limits=limits) as server:
        greedy, other = connect(server, limits), connect(server, limits)
        calls = [rpc.start(greedy.take_bytes, LARGE) for _ in range(40)]
        wait_until(lambda: held(server) >= 3)
        threads = [threading.Thread(target=greedy.take_bytes, args=(LARGE,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        if limits.threads > 2:
            assert [other.ping() for _ in range(20)] == [1] * 20
        wait_until(lambda: held(server) <= 4)  # A call of the other is settled after its reply.
        assert len(greedy._connection._unsent) >= 36
        shared.proceed.set()
        assert [call.result() for call in calls] == [len(LARGE)] * 40
        for thread in threads:
            thread.join(DEADLINE)
            assert not thread.is_alive()
        assert server.statistics()["requests_refused"] == 0
        wait_until(lambda: held(server) == server.statistics()["bytes_held"] == 0)
        assert server._backlog._peers == {}
        assert greedy._connection._held == other._connection._held == [0, 0]


@pytest.mark.parametrize("limits", [rpc.Limits(requests=8), rpc.Limits(request_bytes=8 << 20)], ids=str)
def test_a_client_with_other_limits_is_refused_beyond_its_share(limits, shared, connect):
    with rpc.serve(shared, limits=limits) as server:
        greedy, other = connect(server), connect(server)
        calls = [rpc.start(greedy.take_bytes, LARGE) for _ in range(10)]
        wait_until(lambda: server.statistics()["requests_refused"] >= 6)
        assert held(server) in (3, 4)
        with pytest.raises(PersiaError, match=r"already has [34] calls .*Limits.peer_share is 0.5.*the same Limits"):
            greedy.take_bytes(LARGE)
        assert other.ping() == 1
        shared.proceed.set()
        answers = []
        for call in calls:
            try:
                answers.append(call.result())
            except PersiaError:
                answers.append(None)
        assert len(answers) - answers.count(None) in (3, 4)
        assert greedy.take_bytes(LARGE) == len(LARGE)  # There is space again.


def test_a_single_message_may_exceed_the_share(shared, connect):
    limits = rpc.Limits(request_bytes=1 << 20)
    shared.proceed.set()
    with rpc.serve(shared, limits=limits) as server:
        for stub in (connect(server), connect(server, limits)):
            for _ in range(20):  # A client may send the next one as soon as it has the reply.
                assert stub.take_bytes(LARGE) == len(LARGE)


def test_calls_that_wait_for_others_have_a_share_too(shared, connect):
    with rpc.serve(shared, limits=rpc.Limits(waiting=6)) as server:
        greedy, other = connect(server), connect(server)
        calls = [rpc.start(greedy.meet, number) for number in range(3)]
        wait_until(lambda: server.statistics()["calls"] == 3)
        with pytest.raises(PersiaError, match=r"already has 3 calls .*may have 3 calls"):
            greedy.meet(3)
        assert greedy.ping() == 1  # Of another kind.
        calls.append(rpc.start(other.meet, 3))
        wait_until(lambda: server.statistics()["calls"] == 5)
        shared.proceed.set()
        assert [call.result() for call in calls] == [0, 1, 2, 3]
        wait_until(lambda: server._backlog._peers == {})


def test_clients_take_turns(shared, connect):
    """Otherwise a request would wait for all that another client has sent before."""
    with rpc.serve(shared, limits=rpc.Limits(threads=1)) as server:
        greedy, other = connect(server), connect(server)
        calls = [rpc.start(greedy.take, number) for number in range(30)]
        wait_until(lambda: held(server) == 30)
        calls += [rpc.start(other.take, number) for number in (100, 101)]
        wait_until(lambda: held(server) == 32)
        shared.proceed.set()
        for call in calls:
            call.result()
    assert shared.order.index(100) <= 2
    assert shared.order.index(101) <= 4
    assert [number for number in shared.order if number < 100] == list(range(30))


def test_a_call_is_sent_when_those_before_it_are_given_up(shared, connect):
    with rpc.serve(shared) as server:
        stub = connect(server, rpc.Limits(requests=2))
        first = rpc.start(stub.take, 1)
        wait_until(lambda: held(server) == 1)
        waiting = threading.Thread(target=stub.ping)
        waiting.start()
        wait_until(lambda: len(stub._connection._unsent) == 1)
        with stub._connection._port.lock:
            for call in stub._connection._calls.values():
                call.expires = time.monotonic() if call.sent else call.expires
        with pytest.raises(DeadlineError):
            first.result()
        wait_until(lambda: not stub._connection._unsent, seconds=DEADLINE / 2)  # Before the server answers the first.
        shared.proceed.set()
        waiting.join(DEADLINE)
        assert not waiting.is_alive()


def test_a_new_connection_holds_nothing(shared, connect):
    with rpc.serve(shared) as server:
        stub = connect(server, rpc.Limits(requests=4))
        calls = [rpc.start(stub.take, number) for number in range(3)]
        wait_until(lambda: held(server) == 2)
        with server._port.lock:
            server._intake.end_all()
        wait_until(lambda: held(server) == 4, "both calls are sent again")
        shared.proceed.set()
        assert [call.result() for call in calls] == [0, 1, 2]
        wait_until(lambda: stub._connection._held == [0, 0])


@pytest.mark.parametrize("share", [0, 1.5, -1])
def test_a_share_is_at_most_all(share):
    with pytest.raises(ConfigError, match="peer_share"):
        rpc.Limits(peer_share=share)


def job(peer, number, waits=False):
    return Job(peer, 1, 1e9, lambda: None, waits, number)


def test_turns_of_jobs():
    """A client that was idle gets no turns in arrears, and one that floods none in advance."""
    backlog = Backlog(rpc.Limits())

    def taken(count, only_waiting=False):
        found = [backlog.take(only_waiting) for _ in range(count)]
        return [(one.peer, one.call) for one in found]

    for number in range(10):
        backlog.put(job(b"a", number))
    assert taken(4) == [(b"a", number) for number in range(4)]
    for number in range(3):
        backlog.put(job(b"b", number))
        backlog.put(job(b"c", number, waits=True))
    assert taken(6) == [(b"a", 4), (b"b", 0), (b"c", 0), (b"a", 5), (b"b", 1), (b"c", 1)]
    assert taken(1, only_waiting=True) == [(b"c", 2)]
    assert taken(5) == [(b"a", 6), (b"b", 2), (b"a", 7), (b"a", 8), (b"a", 9)]
    assert backlog.take(False) is None
