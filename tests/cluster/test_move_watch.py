"""What the driver counts as progress of a move, and when it withdraws its order."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from persia.cluster.ray import ps_scaling
from persia.cluster.ray.ps_scaling import MOST_TRIES, scale_servers
from persia.errors import ClosedError, DeadlineError, PersiaError
from persia.services import MapState, MoveProgress
from persia.types import BucketMap

BEFORE = BucketMap.even(1)
AFTER = BEFORE.moved(2)
TIMEOUT = 10.0


class Clock:
    """Each poll takes a second."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, _):
        self.now += 1.0


class Maps:
    """A coordinator whose state is a function of the time."""

    def __init__(self, clock, state):
        self.clock, self.state, self.withdrawn = clock, state, None

    def map_state(self):
        return self.state(int(self.clock.now))

    def withdraw_map(self, after):
        if self.map_state().buckets == after:
            return False
        self.withdrawn = self.clock.now
        return True


class Processes:
    """One PS of the run, and one that joins."""

    def __init__(self):
        self.servers = [SimpleNamespace(rank=rank, expendable=rank > 0) for rank in range(2)]

    def of(self, role):
        return self.servers

    def expended(self, processes):
        return []

    def need(self, processes):
        for process in processes:
            process.expendable = False


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(ps_scaling, "time", clock)
    monkeypatch.setattr("persia.retry.time", clock)
    return clock


def roles_of(processes):
    running = threading.Lock()
    running.acquire()  # A function runs, so NN worker 0 makes the rounds.
    return SimpleNamespace(
        options=SimpleNamespace(timeout=TIMEOUT),
        running=running,
        resting=threading.Lock(),
        fits=0,
        started=lambda check=True: (processes, None, None),
    )


def wait(clock, state):
    """Returns what was withdrawn and when, and the error."""
    processes, maps = Processes(), Maps(clock, state)
    watch = ps_scaling._Watch(roles_of(processes), maps, AFTER, processes.servers[1:])
    try:
        watch.wait()
    except DeadlineError as error:
        return maps.withdrawn, error.message
    return maps.withdrawn, None


def ordered(*progress, **others):
    return MapState(BEFORE, AFTER, 0, MoveProgress(1, *progress, **others))


DONE = MapState(AFTER, None, 1, MoveProgress(1, 3, 100))


def test_a_first_pass_may_take_longer_than_the_timeout(clock):
    assert wait(clock, lambda now: ordered(0, 10 * now) if now < 10 * TIMEOUT else DONE) == (None, None)


@pytest.mark.parametrize(
    "state",
    [
        lambda now: ordered(now, 100 + now),  # So many rows change that no pass is short.
        lambda now: ordered(0, 10 * now % 50),  # A copy fails again and again.
        lambda now: ordered(1, 100, problem=f"PS 0 waits for {now}"),
        lambda now: MapState(BEFORE, AFTER, 0, MoveProgress(0, now, now)),  # Of the move before.
    ],
)
def test_what_never_ends_is_withdrawn(clock, state):
    withdrawn, message = wait(clock, state)
    assert TIMEOUT <= withdrawn < 5 * TIMEOUT
    assert "bucket map 1 has not advanced for 10 s; the order is withdrawn" in message


def test_a_move_that_is_given_up_again_and_again_is_withdrawn(clock):
    def state(now):  # Another generation of NN workers counts from 0.
        tries = now // 8
        return ordered(now % 8, gave_up=tries if tries < 3 else tries - 3, problem="disk full" if now % 8 < 4 else "")

    withdrawn, message = wait(clock, state)
    assert withdrawn == 8 * (MOST_TRIES + 1)  # Of which the new generation has seen one less.
    assert f"was given up {MOST_TRIES} times; the order is withdrawn. The last problem: disk full." in message


def test_give_ups_of_an_order_before_do_not_count(clock):
    assert wait(clock, lambda now: ordered(now, gave_up=7) if now < 5 else DONE) == (None, None)


def test_the_adoption_of_a_committed_map_has_a_deadline(clock):
    withdrawn, message = wait(clock, lambda now: ordered(now) if now < 4 else DONE._replace(adopted=0))
    assert withdrawn is None
    assert "Bucket map 1 was not adopted by all embedding PSs within 10 s" in message
    assert TIMEOUT + 3 <= clock.now <= TIMEOUT + 5


def test_no_rows_move_while_a_lost_ps_is_reloaded_between_two_runs_of_a_fit(clock, monkeypatch):
    """Nor is the order withdrawn meanwhile. The rounds go on once NN workers train again, or `fit` has ended."""
    processes, rounds = Processes(), []
    roles = roles_of(processes)
    roles.fits = 1

    def started(check=True):  # Until it has restarted, it is a failure, and its restart holds the lock.
        assert not 3 <= clock.now < 5 * TIMEOUT
        return processes, None, None

    def state(now):
        if now == 3:
            roles.running.release()
        elif now == 5 * TIMEOUT:
            roles.fits = 0
        return ordered(1, 100) if now < 5 * TIMEOUT + 3 else DONE

    roles.started = started
    monkeypatch.setattr(ps_scaling._Watch, "_begin_rounds", lambda _: rounds.append(clock.now))
    maps = Maps(clock, state)
    ps_scaling._Watch(roles, maps, AFTER, processes.servers[1:]).wait()
    assert maps.withdrawn is None
    assert rounds == [5 * TIMEOUT + more for more in range(3)]


@pytest.mark.parametrize("committed", [True, False])
def test_a_ps_with_rows_is_needed_though_scale_fails(clock, monkeypatch, committed):
    processes, removed = Processes(), []
    maps = Maps(clock, lambda now: DONE if committed else ordered(1))

    def fails(*_):
        raise ClosedError("The coordinator is gone.")

    roles = roles_of(processes)
    roles.moving, roles.lock, roles.plan, roles.service = threading.Lock(), threading.RLock(), object(), object()
    roles.counts, roles.processes = {"embedding_ps": 1}, processes
    roles.add_servers, roles.remove_servers = (lambda count: processes.servers[1:]), removed.append
    noted = []
    roles.note_servers = lambda count, now: noted.append((count, now, list(removed)))
    monkeypatch.setattr(ps_scaling, "_maps", lambda _: maps)
    monkeypatch.setattr(ps_scaling, "_settle", lambda *_: None)
    monkeypatch.setattr(ps_scaling, "_end_missing", lambda *_: None)
    monkeypatch.setattr(ps_scaling, "bucket_map", lambda _: BEFORE)
    monkeypatch.setattr(ps_scaling, "_move", fails)
    with pytest.raises(PersiaError, match="The coordinator is gone"):
        scale_servers(roles, 2, lambda: None)
    assert [process.expendable for process in processes.servers] == [False, not committed]
    assert removed == ([] if committed else [1])
    assert noted == ([] if committed else [(1, True, [])])  # Before they end.
