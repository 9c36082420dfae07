"""Hybrid on Ray is Sync with the rows of earlier steps, by a rule that is written out in plain PyTorch."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from benchmarks.recorded import Plan, train_smooth

from persia.modes import Hybrid
from persia.optim import Adagrad

pytestmark = pytest.mark.usefixtures("ray_here")

BATCH = 64


def test_a_run_on_ray_is_delayed_sync():
    """Two NN workers; in the last step one batch is smaller."""
    found = train_smooth(
        Plan("ray", 2, Hybrid(3, warmup=0), Adagrad(lr=0.05), seed=0, rows=41 * BATCH + 10, batch=BATCH)
    )
    assert found.staleness_max >= 1
    assert found.moved > 0.05
    assert found.network_apart <= 1e-5
    assert found.rows_apart <= 1e-5
