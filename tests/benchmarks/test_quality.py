"""Comparisons of runs with their replay."""

import math

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from benchmarks.recorded import Outcome

from benchmarks import quality

RUN = Outcome(0.7, staleness_mean=3.5, staleness_max=4, auc_apart=1e-6, network_apart=1e-7, rows_apart=0.0, moved=0.3)


@pytest.mark.parametrize("run", [RUN._replace(staleness_max=0), RUN._replace(moved=0.0)])
def test_a_run_never_stale_or_never_moved_misses_the_target(run, monkeypatch):
    monkeypatch.setattr(quality, "outcomes", lambda function, plans, preset: [RUN] * (len(plans) - 1) + [run])
    monkeypatch.setattr(quality, "runs", lambda preset, count, kind: [RUN, run])
    for found in (quality.replay("laptop"), quality.replay_parameters("laptop")):
        assert (found.value, found.holds) == (math.inf, False)
    monkeypatch.setattr(quality, "outcomes", lambda function, plans, preset: [RUN] * len(plans))
    monkeypatch.setattr(quality, "runs", lambda preset, count, kind: [RUN])
    assert quality.replay("laptop").value == pytest.approx(1e-6)
    assert quality.replay_parameters("laptop").value == pytest.approx(1e-7)
