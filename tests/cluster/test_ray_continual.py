"""`persia continual` from cluster to cluster: more NN workers with smaller batches in Gba, and back to Sync."""

import math

import pytest

from persia.cli.continual import Recipe
from persia.cli.run_config import RunConfig
from persia.config import convert

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

pytestmark = pytest.mark.usefixtures("ray_here")

GLOBAL, DAY = 128, 1280
SYNC, GBA = {"kind": "sync"}, {"kind": "gba", "global_batch_size": GLOBAL}


def trained(output, first, last, nn_workers, mode, inherit=None):
    """Trains days on a cluster of its own; returns their records, the batch size, and Adam's step counts."""
    tree = {
        "data": {
            "kind": "synthetic",
            "batch_size": GLOBAL // nn_workers,
            "options": {"rows": 7 * DAY, "days": 7, "drift": 0.05, "id_features": 4, "ids_per_feature": 50, "dim": 4},
        },
        "mode": mode,
        "model": {"kind": "deepfm", "options": {"hidden": [8]}},
        "optimizer": {"kind": "adam", "lr": 1e-2},
        "cluster": {"kind": "ray", "threads": 1, "nn_workers": nn_workers, "ray": {"timeout": 60.0}},
        "trainer": {"progress": False, "checkpoint_dir": str(output)},
    }
    config = convert(tree, RunConfig, "test")
    recipe = Recipe(config, str(output))
    trainer = config.build_trainer(config.reader().schema)
    with trainer.cluster:
        list(recipe.run(trainer, range(first, last + 1), inherit and str(inherit)))
        counts = {int(state["step"]) for state in trainer.step.optimizer.state.values()}
        return recipe.records, trainer.state.local_batch, counts


@pytest.mark.slow
def test_two_nn_workers_four_and_two_again(tmp_path):
    runs = [
        trained(tmp_path / "sync", 0, 1, 2, SYNC),
        trained(tmp_path / "gba", 2, 3, 4, GBA, inherit=tmp_path / "sync"),
        trained(tmp_path / "back", 4, 5, 2, SYNC, inherit=tmp_path / "gba"),
    ]
    records = [record for part, _, _ in runs for record in part]
    assert [(r.day, r.step, r.global_step) for r in records] == [
        (day, day * DAY // GLOBAL, (day + 1) * DAY // GLOBAL) for day in range(6)
    ]
    assert [rows for _, rows, _ in runs] == [64, 32, 64]
    assert [counts for _, _, counts in runs] == [{20}, {40}, {60}]
    scores = [record.auc for record in records]
    assert all(score is not None and math.isfinite(score) for score in scores)
    assert scores[-1] > scores[0] + 0.02
    assert min(scores[2:]) > scores[1] - 0.02  # Nothing is learned anew after a change.
    assert records[2].dropped_batches == records[3].dropped_batches == 0
