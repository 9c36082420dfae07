"""A short run through faults of many kinds; `make chaos` runs longer ones."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia[ray]"')

from chaos_run import Plan, run
from chaos_schedule import KINDS, draw


def test_a_schedule_is_drawn_from_its_seed():
    faults = draw(1, 1800.0, 60)
    assert faults == draw(1, 1800.0, 60) != draw(2, 1800.0, 60)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert sum((fault.kind, fault.role) == ("kill", "nn_worker") for fault in draw(1, 1.0, 600)) == 15


@pytest.mark.usefixtures("ray_here")
def test_training_goes_on_through_faults(tmp_path):
    found = run(Plan(seed=1, seconds=20.0, faults=12, steps=800), tmp_path, print)
    assert found.wrong == []
    assert sum(found.made.values()) == 12
