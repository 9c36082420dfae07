"""Training over three hosts whose network loses, delays, cuts and resets; every row is right by value at the end."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import chaos_network_training as training
from chaos_network import HOSTS, INJECTORS, MOST_SECONDS, NUMBERS, NetworkFault, Run, Shares, draw, train_through
from chaos_network_training import Scaling

from persia.errors import ConfigError, DeadlineError, RoleDiedError
from support.hosts import UnavailableError

BRIEF = [
    NetworkFault("delay", 1, 4.0),
    NetworkFault("loss", 2, 4.0, 0.05),
    NetworkFault("reset", 1),
    NetworkFault("mute", 1, 3.0),
    NetworkFault("stop", 0, 3.0, role="embedding_ps"),
    NetworkFault("kill", 0, role="embedding_ps"),
    NetworkFault("full", 0, 3.0),
]
LONG = [
    NetworkFault("scale", role="embedding_ps", count=4),
    NetworkFault("delay", 0, 10.0),
    NetworkFault("loss", 1, 10.0, 0.01),
    NetworkFault("loss", 2, 10.0, 0.1),
    NetworkFault("narrow", 1, 10.0),
    NetworkFault("scale", role="nn_worker", count=3),
    NetworkFault("mute", 2, 10.0),
    NetworkFault("deaf", 1, 10.0),
    NetworkFault("scale", role="embedding_ps", count=2),
    NetworkFault("partition", 2, 30.0),
    NetworkFault("stop", 1, 20.0, role="embedding_ps"),
    NetworkFault("stop", 1, 20.0, role="nn_worker"),
    NetworkFault("kill", 1, role="embedding_ps"),
    NetworkFault("scale", role="nn_worker", count=2),
    NetworkFault("kill", 1, role="nn_worker"),
    NetworkFault("full", 0, 10.0),
    NetworkFault("full", 1, 10.0),
    NetworkFault("reset", 2),
]


def test_a_schedule_is_drawn_from_its_seed():
    faults = draw(1, 40)
    assert faults == draw(1, 40) != draw(2, 40)
    assert {fault.kind for fault in faults} == {*INJECTORS} - {"scale"}
    assert all(0.01 <= fault.amount <= 0.1 for fault in faults if fault.kind == "loss")
    assert all(bool(fault.role) == (fault.kind in ("stop", "kill")) for fault in faults)
    assert all(fault.seconds <= MOST_SECONDS.get(fault.kind, 10.0) for fault in faults)


def test_numbers_of_processes_change_where_it_is_asked_for():
    faults = draw(1, 240, scales=True)
    assert {fault.kind for fault in faults[:12]} == {*INJECTORS}
    numbers = {"embedding_ps": training.PS, "nn_worker": training.NN_WORKERS}
    for fault in faults:
        if fault.kind == "scale":
            assert fault.count != numbers[fault.role]
            numbers[fault.role] = fault.count
    asked = {(fault.role, fault.count) for fault in faults if fault.kind == "scale"}
    assert asked == {(role, count) for role, counts in NUMBERS.items() for count in counts}


def test_the_share_of_the_time_with_training():
    """A worker that begins again has looked up less; a report that is late stands for two seconds."""
    shares = Shares()
    assert shares.add(10.0, {"embedding_worker-0": 5.0})
    assert shares.add(11.0, {"embedding_worker-0": 6.0})
    assert not shares.add(12.0, {"embedding_worker-0": 6.0})
    assert not shares.add(13.0, {"embedding_worker-0": 2.0})
    assert shares.add(23.0, {"embedding_worker-0": 3.0})
    assert (shares.seconds, shares.trained) == (13.0, 3.0)
    shares.restart()
    shares.add(25.0, {"embedding_worker-0": 3.0, "embedding_worker-1": 1.0})
    assert (shares.seconds, shares.trained) == (2.0, 2.0)


def test_numbers_of_processes_change_one_after_another_and_what_fails_is_told_apart():
    calls: list[dict[str, int]] = []
    errors = {4: DeadlineError("rows did not move"), 5: RoleDiedError("it has died"), 6: ConfigError("it cannot")}

    def scale(**counts: int) -> None:
        calls.append(counts)
        (count,) = counts.values()
        if count in errors:
            raise errors[count]

    scaling = Scaling(scale)
    for role, count in (("embedding_ps", 3), ("nn_worker", 1), *(("embedding_ps", count) for count in errors)):
        scaling.begin(role, count)
    scaling.finish(60.0)
    assert calls == [{"ps": 3}, {"nn_workers": 1}, {"ps": 4}, {"ps": 5}, {"ps": 6}]
    assert (scaling.changes, len(scaling.seconds)) == (5, 2)
    assert scaling.refused == ["4 embedding_ps: rows did not move", "5 embedding_ps: it has died"]
    (wrong,) = scaling.wrong
    assert "it cannot" in wrong


def test_a_change_of_numbers_that_does_not_end_is_told():
    gate = threading.Event()
    scaling = Scaling(lambda **_: gate.wait())
    scaling.begin("embedding_ps", 4)
    scaling.finish(0.01)
    gate.set()
    assert scaling.wrong == ["1 changes of the numbers of processes have not ended within 0.01 s"]


def test_faults_befall_a_process_once_it_is_there(tmp_path):
    """A signal to one that has ended is no death."""
    processes = [{"role": role, "rank": 0, "pid": 7, "host": "b"} for role in ("nn_worker", "embedding_ps")]
    later = time.monotonic() + 60.0
    messages = [
        {"at": later, "looked_up": {}, "processes": processes[:1]},
        {"at": later + 1, "looked_up": {"embedding_worker-0": 1.0}, "processes": processes},
        {"outcome": {"wrong": []}},
    ]
    sent, said = io.StringIO(), io.StringIO("".join(f"{json.dumps(message)}\n" for message in messages))
    driver = SimpleNamespace(stdin=sent, stdout=said, wait=lambda: 0)
    ran: list[tuple[object, ...]] = []
    returned = iter([0, 1])

    def run(number, *command):
        ran.append((number, *command))
        return SimpleNamespace(returncode=next(returned) if command[0] == "kill" else 0)

    namespaces = SimpleNamespace(run=run, addresses=["a", "b", "c"], close=lambda: None)
    hosts = SimpleNamespace(start=lambda *_, **__: driver, hosts=namespaces)
    with contextlib.closing(Run(hosts, tmp_path, "sync", True)) as training_run:
        mounts = len(ran)
        assert mounts == HOSTS
        for _ in range(2):
            INJECTORS["kill"](training_run, NetworkFault("kill", 2, role="embedding_ps"))
        assert ran[mounts:] == [(1, "kill", "-KILL", "7")] * 2
        assert training_run.killed == {"embedding_ps": 1}
        INJECTORS["scale"](training_run, NetworkFault("scale", role="nn_worker", count=3))
        assert training_run.stop() == {"wrong": []}
        assert sent.getvalue() == "scale nn_worker 3\nstop 1\n"


def outcome_of(faults, mode, folder):
    try:
        return train_through(faults, mode, folder, print)
    except UnavailableError as reason:
        pytest.skip(str(reason))


@pytest.mark.hosts
@pytest.mark.processes
@pytest.mark.timeout(900)
def test_training_over_a_network_that_fails_briefly(tmp_path):
    outcome = outcome_of(BRIEF, "hybrid", tmp_path)
    assert outcome["wrong"] == []
    assert outcome["steps"] > 20


@pytest.mark.hosts
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["sync", "hybrid", "gba"])
def test_training_over_a_network_that_fails(mode, tmp_path):
    outcome = outcome_of(LONG, mode, tmp_path)
    assert outcome["wrong"] == []
    assert outcome["steps"] > 50
