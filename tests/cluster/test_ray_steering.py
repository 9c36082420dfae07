"""Evaluations, an early end and callbacks with several NN workers on Ray."""

from __future__ import annotations

import pytest
import torch

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import PersiaError
from persia.modes import Gba, Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import BATCH, options, reader

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.parametrize("mode", [Sync(), Gba(2 * BATCH)], ids=str)
def test_two_nn_workers_stop_early_together(mode, tmp_path):
    """Rates are so small that no logit changes: the first evaluation stays the best one."""
    log = tmp_path / "events"

    class Logged(persia.Callback):
        def note(self, *words):
            with log.open("a") as file:
                print(*words, file=file)

        def on_fit_begin(self, trainer):
            self.note("begin", trainer.global_step)

        def on_evaluation(self, step, result):
            self.note("evaluation", step, result.rows)

        def on_fit_end(self, result):
            self.note("end", result.stopped_early[:13])
            if (tmp_path / "fail").exists():
                raise ValueError("a full disk")

    data, held_out = reader(100), reader(6)
    tables = [persia.Table(t.name, t.dim, initializer=persia.Zeros()) for t in data.schema.resolved_tables().values()]
    schema = persia.Schema(data.schema.id_features, data.schema.dense_features, data.schema.labels, tables)
    torch.manual_seed(0)
    with persia.cluster.Ray(1, 1, 1, 2, options(dense_ps=1)) as cluster:
        trainer = persia.Trainer(
            persia.nn.models.FFNN(schema, hidden=(4,)),
            schema,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 1e-30),
            embedding_optimizer=persia.optim.SGD(lr=1e-30),
            mode=mode,
            cluster=cluster,
            options=persia.TrainerOptions(
                progress=False, timeout=60.0, checkpoint_dir=str(tmp_path / "run"), eval_every_steps=4, patience=2
            ),
            callbacks=[Logged()],
        )
        result = trainer.fit(data, held_out)
        assert (result.global_step, result.best_step) == (12, 4)
        assert result.stopped_early.startswith("Stopped early at step 12: in 2 evaluations in a row")
        assert trainer.state.evaluations.unimproved == 2
        assert [(e.step, e.best) for e in list_checkpoints(tmp_path / "run")] == [(4, True), (12, False)]
        assert CheckpointReader(tmp_path / "run", "best").extra["value"] == result.best
        assert log.read_text().splitlines() == [
            "begin 0",
            *(f"evaluation {step} {6 * BATCH}" for step in (4, 8, 12)),
            "end Stopped early",
        ]
        assert trainer.fit(data, held_out).nothing_left.startswith("Nothing was left to train. Stopped early")
        (tmp_path / "fail").touch()
        with pytest.raises(PersiaError, match=r"Logged\.on_fit_end has failed at global step 12: ValueError"):
            trainer.fit(data, held_out)
