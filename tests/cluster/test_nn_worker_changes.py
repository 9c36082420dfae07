"""The driver's part of NN workers that join and leave, without processes: ranks, refusals, deadlines, deaths."""

import signal
import subprocess
import sys
import threading
from fractions import Fraction
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

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
        self.resting, self.moving = threading.Lock(), threading.Lock()
        self.counts, self.service, self.options = {"nn_worker": nn_workers}, None, SimpleNamespace(timeout=timeout)
        self.processes, self.placer, self.calls = Processes(), self, []
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

    def renumber(self, role, ranks):
        self.calls.append(("renumber", list(ranks)))

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
        assert scaling.requested == NNWorkersChange(1, Fraction(2))
        assert roles.counts["nn_worker"] == 2
        scaling.adopt(tell_servers=False)

    assert scaled_while_it_runs(roles, scaling, 1, adopt, keep=True) is None
    assert (ranks(roles), scaling.share, scaling.requested) == ([0], 2, None)


def test_what_is_refused_changes_nothing():
    roles = Roles(2)
    scaling = NNWorkerScaling(roles)
    error = scaled_while_it_runs(roles, scaling, 3, lambda: scaling.refuse("HopBw"), keep=True)
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


NOTICED = """
import sys, threading
from persia.cluster.ray.sigterm import on_sigterm
def notice():
    print("noticed", flush=True)
    return {leaves}
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
