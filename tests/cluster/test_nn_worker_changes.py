"""The driver's part of NN workers that join and leave, without processes: ranks, refusals, deadlines, deaths."""

import signal
import subprocess
import sys
import threading
import time
from fractions import Fraction
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from ray.exceptions import RayTaskError

from persia.cluster.ray import nn_scaling, runs
from persia.cluster.ray.nn_scaling import NNWorkerScaling
from persia.errors import ConfigError, DeadlineError, RoleDiedError
from persia.services import NNWorkersChange


class Process:
    def __init__(self, rank, expendable=False):
        self.rank, self.expendable = rank, expendable
        self.title = f"NN worker {rank}"


class Processes:
    def __init__(self):
        self.living, self.dead = [], []

    def of(self, role):
        return sorted(self.living, key=lambda process: process.rank)

    def all(self):
        return list(self.living)

    def await_ready(self, processes, timeout):
        pass

    def need(self, processes):
        for process in processes:
            process.expendable = False

    def expended(self, processes):
        return [RoleDiedError("killed", role="nn_worker", rank=p.rank) for p in self.dead if p in processes]

    def end(self, processes):
        self.living = [process for process in self.living if process not in processes]


class Roles:
    """Roles of which only NN workers exist; `calls` notes what the placer is told."""

    def __init__(self, nn_workers, timeout=30.0):
        self.lock, self.running = threading.RLock(), threading.Lock()
        self.resting, self.moving, self.fits = threading.Lock(), threading.Lock(), 0
        self.counts, self.service, self.options = {"nn_worker": nn_workers}, None, SimpleNamespace(timeout=timeout)
        self.processes, self.placer, self.calls, self.told = Processes(), self, [], None
        self.processes.living = [Process(rank) for rank in range(nn_workers)]

    def nn_workers(self):
        return [process for process in self.processes.of("nn_worker") if not process.expendable]

    def start_nn_worker(self, rank, expendable):
        self.processes.living.append(Process(rank, expendable))
        return self.processes.living[-1]

    def set_nn_workers(self, count):
        self.counts["nn_worker"] = count

    def reserve(self, role, ranks):
        self.calls.append(("reserve", list(ranks)))

    def renumber(self, role, ranks, keep=()):
        self.calls.append(("renumber", list(ranks), *([list(keep)] if keep else [])))

    def release(self, role, ranks):
        self.calls.append(("release", list(ranks)))


def ranks(roles):
    return [process.rank for process in roles.processes.of("nn_worker")]


def scaled_while_it_runs(roles, scaling, count, done, **keep):
    """Calls `scale` while a function runs, and `done` once its change is requested; returns its error."""
    errors = []

    def scale():
        try:
            scaling.scale(count, keep.get("keep", False), lambda _: None)
        except Exception as error:
            errors.append(error)

    with roles.running:
        thread = threading.Thread(target=scale)
        thread.start()
        while scaling.requested is None and thread.is_alive():
            thread.join(0.01)
        done()
        thread.join(30)
    assert not thread.is_alive()
    return errors[0] if errors else None


def test_between_two_runs_the_number_changes_immediately():
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)
    scaling.scale(4, False, lambda joining: roles.calls.append([process.rank for process in joining]))
    assert (ranks(roles), roles.counts["nn_worker"], scaling.share) == ([0, 1, 2, 3], 4, 1)
    assert roles.calls == [("reserve", [2, 3]), [2, 3], ("renumber", [0, 1, 2, 3]), ("release", [])]
    scaling.scale(1, True, lambda _: None)
    assert (ranks(roles), roles.counts["nn_worker"], scaling.share) == ([0], 1, 4)
    assert roles.calls[-2:] == [("renumber", [0]), ("release", [1, 2, 3])]


def test_a_change_waits_for_the_run_that_ends():
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)

    def adopt():
        assert scaling.requested == NNWorkersChange(1, Fraction(2), 1)
        assert roles.counts["nn_worker"] == 2
        scaling.adopt(tell_servers=False)

    assert scaled_while_it_runs(roles, scaling, 1, adopt, keep=True) is None
    assert (ranks(roles), scaling.share, scaling.requested) == ([0], 2, None)


def test_a_change_between_two_runs_waits_while_rows_are_saved():
    roles = Roles(1, timeout=0.2)
    scaling, entered, asked = NNWorkerScaling(roles), threading.Event(), threading.Event()

    def saves():
        with scaling.fitting():
            entered.set()
            assert asked.wait(30)
            time.sleep(0.5)  # Longer than the timeout.

    def check(_):
        roles.calls.append(roles.fits)
        asked.set()

    thread = threading.Thread(target=saves)
    thread.start()
    assert entered.wait(30)
    scaling.scale(2, False, check)
    thread.join(30)
    assert (ranks(roles), roles.fits) == ([0, 1], 0)
    assert 1 in roles.calls


def test_what_is_refused_changes_nothing():
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)

    def refuse():
        number = scaling.requested.number
        scaling.refuse(number - 1, "an earlier one")
        scaling.refuse(number, "HopBw")

    error = scaled_while_it_runs(roles, scaling, 3, refuse, keep=True)
    assert isinstance(error, ConfigError)
    assert "HopBw" in error.message
    assert (ranks(roles), roles.counts["nn_worker"], scaling.share, scaling.requested) == ([0, 1], 2, 1, None)


def test_a_run_that_does_not_end_and_a_newcomer_that_dies():
    roles = Roles(2, timeout=0.2)
    scaling = NNWorkerScaling(roles)
    error = scaled_while_it_runs(roles, scaling, 3, lambda: None)
    assert isinstance(error, DeadlineError)
    assert "continues with 2 NN workers" in error.message
    roles.options.timeout = 30.0

    def die():
        roles.processes.dead.append(roles.processes.living.pop())

    assert isinstance(scaled_while_it_runs(roles, scaling, 3, die), RoleDiedError)
    assert (ranks(roles), roles.counts["nn_worker"], scaling.requested) == ([0, 1], 2, None)


def test_an_order_whose_pss_cannot_be_told_is_withdrawn(monkeypatch):
    roles = Roles(2)
    roles.service = "trains"
    scaling = NNWorkerScaling(roles)

    def late(nn_workers):
        raise DeadlineError("embedding PS 0 is late")

    monkeypatch.setattr(scaling, "_tell_servers", late)
    with pytest.raises(DeadlineError, match="embedding PS 0"):
        scaling.scale(3, False, lambda _: None)
    assert (ranks(roles), roles.counts["nn_worker"], scaling.requested) == ([0, 1], 2, None)


def test_the_others_close_up_if_one_leaves_or_dies():
    roles = Roles(4)
    scaling = NNWorkerScaling(roles)
    first, second, third, fourth = roles.processes.of("nn_worker")
    scaling._scale(None, False, lambda _: None, second)
    assert [(p.rank, p) for p in roles.processes.of("nn_worker")] == [(0, first), (1, third), (2, fourth)]
    assert roles.calls == [("renumber", [0, 2, 3]), ("release", [])]
    roles.processes.living.remove(first)
    scaling.drop([0])
    assert [(p.rank, p) for p in roles.processes.of("nn_worker")] == [(0, third), (1, fourth)]
    assert roles.counts["nn_worker"] == 2
    roles.processes.living.remove(fourth)
    scaling.drop([1])
    with pytest.raises(ConfigError, match="the only NN worker"):
        scaling._scale(None, False, lambda _: None, third)


def test_all_that_ended_meanwhile_are_not_missed():
    """All NN workers end if one dies with all-reduce; the next run starts as many as were asked for."""
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)

    def adopt():
        roles.processes.living.clear()
        scaling.adopt(tell_servers=False)

    assert scaled_while_it_runs(roles, scaling, 3, adopt) is None
    assert (ranks(roles), roles.counts["nn_worker"]) == ([], 3)


@pytest.mark.parametrize("approved", [False, True])
def test_between_two_runs_of_fit_only_what_nn_worker_0_has_accepted_is_done(approved):
    """Else `fit` would end with an error if the mode does not permit the number."""
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)

    def run_again():
        number = scaling.requested.number
        assert not scaling.accept(number - 1)
        assert not approved or scaling.accept(number)
        roles.running.release()
        scaling._adopt_between_runs()
        assert roles.counts["nn_worker"] == 2
        roles.running.acquire()
        scaling.begin_run(trains=True)
        assert roles.counts["nn_worker"] == (3 if approved else 2)
        if not approved:
            scaling.refuse(number, "Auto")

    with scaling.fitting():
        error = scaled_while_it_runs(roles, scaling, 3, run_again)
    assert approved == (error is None)
    assert ranks(roles) == [0, 1, 2][: roles.counts["nn_worker"]]


def test_between_two_runs_of_fit_an_order_waits_even_if_all_have_ended():
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)
    roles.processes.living.clear()

    def order():
        assert ranks(roles) == [2]  # The next run starts 0 and 1 again.
        assert roles.counts["nn_worker"] == 2
        scaling.refuse(scaling.requested.number, "Auto")

    with scaling.fitting():
        assert isinstance(scaled_while_it_runs(roles, scaling, 3, order), ConfigError)
    scaling.scale(3, False, lambda _: None)
    assert (ranks(roles), roles.counts["nn_worker"]) == ([], 3)


@pytest.mark.parametrize(
    ("count", "keep", "dead", "expected"),
    [
        (3, False, [0], (2, Fraction(1), [2])),  # 4 -> 3, and 0 dies: 2 of the 3 others stay.
        (3, False, [3], None),  # It was to leave anyway.
        (2, False, [0, 1], (1, Fraction(1), [1])),  # One has to stay.
        (2, True, [3], (2, Fraction(2), [2])),
        (2, True, [0], (1, Fraction(3), [1, 2])),
        (6, False, [1, 2], (4, Fraction(1), [])),
    ],
)
def test_an_order_shrinks_by_those_that_die_where_a_death_is_a_leave(count, keep, dead, expected):
    """Else the next run would start replacements."""
    roles = Roles(4)
    scaling = NNWorkerScaling(roles)

    def die():
        scaling.accept(scaling.requested.number)
        living = roles.processes.living
        roles.processes.living = [p for p in living if p.expendable or p.rank not in dead]
        scaling.drop(dead)
        order = scaling._order
        assert expected == (order and (order.change.nn_workers, order.change.factor, order.leaving))
        if order is not None:
            others = list(range(4, count))
            stay = [rank for rank in range(4) if rank not in dead]
            assert roles.calls[-1] == ("renumber", stay, *([others] if others else []))
            assert order.approved == (dead == [3])
            scaling.adopt(tell_servers=False)
            assert len(roles.nn_workers()) == roles.counts["nn_worker"] == expected[0]
            assert not [p for p in roles.nn_workers() if p.rank >= expected[0]]

    assert scaled_while_it_runs(roles, scaling, count, die, keep=keep) is None
    assert len(ranks(roles)) == roles.counts["nn_worker"]


def test_an_order_shrinks_also_while_newcomers_start():
    roles = Roles(4)
    scaling = NNWorkerScaling(roles)

    def die(joining):
        assert (scaling.requested, scaling._order.joining) == (None, joining)
        scaling.adopt(tell_servers=False)
        assert roles.counts["nn_worker"] == 4
        del roles.processes.living[1]
        scaling.drop([1])

    scaling.scale(5, False, die)
    assert (ranks(roles), roles.counts["nn_worker"]) == ([0, 1, 2, 3], 4)


def test_one_that_was_dead_before_the_order_does_not_shrink_it():
    roles = Roles(4)
    scaling = NNWorkerScaling(roles)
    del roles.processes.living[1]
    assert scaled_while_it_runs(roles, scaling, 3, lambda: scaling.drop([1])) is None
    assert (ranks(roles), roles.counts["nn_worker"]) == ([0, 1, 2], 3)


def test_what_newcomers_have_reserved_is_released_if_one_cannot_start_or_dies(monkeypatch):
    roles = Roles(1)
    scaling = NNWorkerScaling(roles)
    start = roles.start_nn_worker

    def full(rank, expendable):
        if rank == 2:
            raise ConfigError("no host for it")
        return start(rank, expendable)

    monkeypatch.setattr(roles, "start_nn_worker", full)
    with pytest.raises(ConfigError, match="no host"):
        scaling.scale(3, False, lambda _: None)
    assert ranks(roles) == [0]
    assert ("release", [1, 2]) in roles.calls
    monkeypatch.undo()
    roles.calls.clear()
    error = scaled_while_it_runs(roles, scaling, 3, lambda: roles.processes.dead.append(roles.processes.living.pop()))
    assert isinstance(error, RoleDiedError)
    assert roles.calls[-1] == ("release", [1, 2])


def test_pss_are_told_before_a_function_of_the_users_own(monkeypatch):
    """After a failed run no NN worker is there, so that nothing tells them when the number changes."""
    roles = Roles(2)
    roles.service, roles.told = "trains", 2
    scaling = NNWorkerScaling(roles)
    told = []
    monkeypatch.setattr(scaling, "_tell_servers", told.append)
    scaling.begin_run(trains=False)
    roles.processes.living.clear()
    scaling.scale(3, False, lambda _: None)
    scaling.begin_run(trains=True)  # Whether it comes to its first phase is not known.
    scaling.begin_run(trains=False)
    scaling.begin_run(trains=False)
    assert told == [3]


def test_the_share_ends_where_the_number_stays_and_the_global_batch_is_not_to():
    roles = Roles(4)
    scaling = NNWorkerScaling(roles)
    scaling.scale(2, True, lambda _: None)
    scaling.scale(2, True, lambda _: None)
    assert scaling.share == 2
    scaling.scale(2, False, lambda _: None)
    assert (scaling.share, ranks(roles)) == (1, [0, 1])
    scaling.scale(1, True, lambda _: None)
    scaling.scale(2, False, lambda _: None)

    def die():
        assert scaling.requested[:2] == (2, Fraction(1, 2))
        del roles.processes.living[1]
        scaling.drop([1])
        assert scaling.requested[:2] == (1, Fraction(1, 2))
        scaling.adopt(tell_servers=False)

    assert scaled_while_it_runs(roles, scaling, 2, die) is None
    assert (scaling.share, ranks(roles)) == (1, [0])


def test_one_that_cannot_leave_is_ended_whatever_the_reason(monkeypatch):
    roles, killed = Roles(2), []
    scaling = NNWorkerScaling(roles)
    last = roles.processes.living[1]
    last.handle = "handle"
    monkeypatch.setattr(nn_scaling.ray, "kill", lambda handle, no_restart: killed.append(handle))
    monkeypatch.setattr(scaling, "_scale", lambda *_: 1 / 0)
    scaling._let_leave(last)
    assert killed == ["handle"]


class Call:
    """A Ray call that has ended with an error; None if it never ends."""

    def __init__(self, error=None):
        self.error = error


class Running(Process):
    """An NN worker that runs a function; the driver does not get requests from it."""

    def __init__(self, rank, error=None):
        super().__init__(rank)
        self.role, self.call, self.requesting = "nn_worker", Call(error), Call()


def test_one_that_was_still_joining_when_another_died_lets_all_restart(monkeypatch):
    """It joins in a generation that has ended: an error that would end `fit`."""
    death = RoleDiedError("killed", role="nn_worker", rank=0)
    stale = RayTaskError("run", "a generation that has ended", ConfigError("joins"))
    workers, failures = [Running(0), Running(1, stale)], [death]

    def wait(calls, timeout):
        return [call for call in calls if call.error is not None and not failures], []

    def get(call):
        raise call.error

    monkeypatch.setattr(runs.ray, "wait", wait)
    monkeypatch.setattr(runs.ray, "get", get)
    processes = SimpleNamespace(
        failures=lambda: list(failures), forget_failures=lambda *_: failures.clear(), check=lambda: None
    )
    tokens = SimpleNamespace(cancel=lambda *_: False)
    replacement = runs.Departure(processes, tokens, 1, lambda others: None)
    monkeypatch.setattr(runs, "GRACE_SECONDS", 0.0)
    with pytest.raises(RoleDiedError, match="killed"):
        runs.results(processes, {worker.call: worker for worker in workers}, {}, replacement)


NOTICED = """
import sys, threading
from persia.cluster.ray.sigterm import on_sigterm
def notice():
    print("noticed", flush=True)
    return {leaves} or 1 / 0
on_sigterm(notice)
print("ready", flush=True)
threading.Event().wait()
"""


@pytest.mark.processes
@pytest.mark.parametrize("leaves", [True, False])
def test_the_first_sigterm_is_a_notice_and_the_second_one_ends(leaves):
    """Also while the main thread executes no Python."""
    script = [sys.executable, "-c", NOTICED.format(leaves=leaves)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "noticed\n"
        if leaves:
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143
