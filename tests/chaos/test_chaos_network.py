"""Training over three hosts whose network loses, delays, cuts and resets; every row is right by value at the end."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from chaos_network import INJECTORS, NetworkFault, draw, train_through

from support.hosts import UnavailableError

BRIEF = [
    NetworkFault("delay", 1, 4.0),
    NetworkFault("loss", 2, 4.0, 0.05),
    NetworkFault("reset", 1),
    NetworkFault("mute", 1, 3.0),
    NetworkFault("stop", 0, 3.0, role="embedding_ps"),
    NetworkFault("full", 0, 3.0),
]
LONG = [
    NetworkFault("delay", 0, 10.0),
    NetworkFault("loss", 1, 10.0, 0.01),
    NetworkFault("loss", 2, 10.0, 0.1),
    NetworkFault("narrow", 1, 10.0),
    NetworkFault("mute", 2, 10.0),
    NetworkFault("deaf", 1, 10.0),
    NetworkFault("partition", 2, 30.0),
    NetworkFault("stop", 1, 20.0, role="embedding_ps"),
    NetworkFault("stop", 1, 20.0, role="nn_worker"),
    NetworkFault("full", 0, 10.0),
    NetworkFault("full", 1, 10.0),
    NetworkFault("reset", 2),
]


def test_a_schedule_is_drawn_from_its_seed():
    faults = draw(1, 40)
    assert faults == draw(1, 40) != draw(2, 40)
    assert {fault.kind for fault in faults} == set(INJECTORS)
    assert all(0.01 <= fault.amount <= 0.1 for fault in faults if fault.kind == "loss")
    assert all(fault.role for fault in faults if fault.kind == "stop")


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
