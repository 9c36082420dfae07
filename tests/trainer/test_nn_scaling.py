"""NN workers join and leave between two phases: every batch is trained once, and nothing that trains is lost."""

import threading
from fractions import Fraction

import numpy as np
import pytest
import torch

import persia
from persia.modes import Async, Auto, Gba, HopBw, Hybrid, Sync
from persia.services import NNWorkersChange
from persia.telemetry.tracking import MLflow
from persia.trainer.checkpointing import Checkpointing
from support.moved_rows import IDS, ROWS, SCHEMA, EndlessBatches, SumOfRows, rows_of
from support.threads_of_driver import ThreadsOfDriver


def make_trainer(cluster, mode, model=None, **options):
    torch.manual_seed(0)
    return persia.Trainer(
        model or SumOfRows(),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 0.1),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, device="cpu", **options),
    )


def steps_of(parts):
    """The batches of a run, the batches of each step as one; by part, the batches of a step, and the steps."""
    source = EndlessBatches(pause=0.0).batches()
    for batches, steps in parts:
        for _ in range(steps):
            ids = np.concatenate([next(source).id_features["id"].values for _ in range(batches)])
            empty = np.zeros((len(ids), 0), np.float32), np.zeros((len(ids), 1), np.float32)
            yield persia.Batch({"id": persia.IdColumn(ids)}, *empty)


def updates_of(batches):
    return np.bincount(np.arange(batches * ROWS) * 7 % IDS, minlength=IDS).tolist()


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0)], ids=str)
def test_every_batch_is_trained_once_with_all_reduce(mode):
    """Rows and network are as in one process that trains the batches of each step as one."""
    cluster = ThreadsOfDriver(2)
    cluster.changes = [
        (10, NNWorkersChange(3)),
        (35, NNWorkersChange(1, Fraction(3))),
        (75, NNWorkersChange(2)),
        (100, NNWorkersChange(1)),
    ]
    trainer = make_trainer(cluster, mode)
    result = trainer.fit(EndlessBatches(pause=0.0), max_steps=60)
    assert (trainer.global_step, result.steps, result.failures) == (60, 60, 0)
    assert [nn_workers for nn_workers, _ in cluster.parts] == [2, 3, 1, 2]
    ends = [step for _, step in cluster.parts] + [60]
    steps = [after - before for before, after in zip([0, *ends], ends, strict=False)]
    assert min(steps) > 0
    parts = list(zip([2, 3, 3, 6, 3], steps, strict=True))
    batches = sum(each * steps for each, steps in parts)
    assert trainer.position == batches
    assert result.rows == result.progressive.rows == batches * ROWS
    rows = rows_of(trainer)
    assert np.array_equal(rows[2], updates_of(batches))
    reference = make_trainer(None, Sync())
    reference.fit(list(steps_of(parts)))
    if isinstance(mode, Sync):
        assert rows == rows_of(reference)
    torch.testing.assert_close(trainer.model.state_dict(), reference.model.state_dict())


@pytest.mark.parametrize("mode", [Gba(2 * ROWS), Async()], ids=str)
def test_every_batch_is_trained_once_with_tokens(mode):
    cluster = ThreadsOfDriver(2)
    cluster.changes = [(20, NNWorkersChange(4)), (70, NNWorkersChange(1))]
    trainer = make_trainer(cluster, mode)
    result = trainer.fit(EndlessBatches(pause=0.0), max_steps=100)
    assert [nn_workers for nn_workers, _ in cluster.parts] == [2, 4]
    report = result.asynchronous
    assert (report.lost_batches, report.lost_tokens, report.abandoned) == (0, 0, 0)
    assert report.rows + report.dropped_rows == trainer.position * ROWS
    assert set(report.workers) == {0, 1, 2, 3}
    if isinstance(mode, Gba):  # Its tolerance is not exceeded, so each batch is in an update.
        assert sum(rows_of(trainer)[2]) == trainer.position * ROWS


def test_newcomers_begin_with_the_state_of_rank_0():
    """Optimizer, statistics of BatchNorm, and a schedule go on; NN workers have different random numbers."""

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.drop = torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.5)
            self.out = torch.nn.Linear(4, 1)

        def forward(self, dense, embeddings):
            return self.out(self.drop(self.norm(embeddings["id"])))

    cluster = ThreadsOfDriver(1)
    cluster.changes = [(10, NNWorkersChange(2))]
    trainer = make_trainer(cluster, Sync(), Normed(), schedule=persia.Schedule(warmup_steps=1000))
    trainer.fit(EndlessBatches(pause=0.0), max_steps=40)
    ((_, step),) = cluster.parts
    assert trainer.model.norm.num_batches_tracked.item() == 40
    assert trainer.step.optimizer.state_dict()["state"][0]["step"].item() == 40
    assert trainer.step.scheduler.state_dict()["last_epoch"] == 40
    assert trainer.position == step + 2 * (40 - step)


@pytest.mark.parametrize(
    ("mode", "change", "why"),
    [
        (Sync(), NNWorkersChange(3, Fraction(2, 3)), "3 NN workers cannot keep the global batch: a step has 2 batches"),
        (HopBw(1), NNWorkersChange(1), "HopBw.backup = 1 with 1 NN workers"),
        (Auto(Gba(2 * ROWS)), NNWorkersChange(1, Fraction(2)), "which does not go with the mode Gba"),
    ],
    ids=["shares", "mode", "auto"],
)
def test_what_cannot_train_is_refused(mode, change, why):
    cluster = ThreadsOfDriver(2)
    cluster.changes = [(10, change)]
    trainer = make_trainer(cluster, mode)
    assert trainer.fit(EndlessBatches(pause=0.0), max_steps=30).steps == 30
    assert len(cluster.refused) == 1
    assert why in cluster.refused[0]
    assert not cluster.parts


def test_a_change_that_is_withdrawn_before_the_boundary_is_not_made():
    cluster = ThreadsOfDriver(2)
    cluster.changes, cluster.withdraws = [(10, NNWorkersChange(1))], True
    trainer = make_trainer(cluster, Sync())
    assert trainer.fit(EndlessBatches(pause=0.0), max_steps=30).steps == 30
    assert cluster.accepted == NNWorkersChange(1)
    assert not cluster.parts
    assert trainer.position == 60


def test_a_mode_with_dense_pss_ignores_that_the_global_batch_was_kept():
    cluster = ThreadsOfDriver(1)
    cluster.share = Fraction(2)
    trainer = make_trainer(cluster, Async())
    assert trainer.fit(EndlessBatches(pause=0.0), max_steps=10).steps == 10


def test_a_change_is_no_failure_for_trackers(monkeypatch):
    ends = []

    class Recorded:
        def begin(self, parameters):
            pass

        def log(self, values, step):
            pass

        def end(self, failed):
            ends.append(failed)

    monkeypatch.setattr(MLflow, "tracker", lambda _: Recorded())
    cluster = ThreadsOfDriver(2)
    cluster.changes = [(10, NNWorkersChange(1))]
    make_trainer(cluster, Sync(), trackers=[MLflow()]).fit(EndlessBatches(pause=0.0), max_steps=30)
    assert len(cluster.parts) == 1
    assert ends == [False, False]


def test_what_other_options_do_not_permit_is_refused(tmp_path):
    cluster = ThreadsOfDriver(2)
    cluster.changes = [(10, NNWorkersChange(1, Fraction(2)))]
    trainer = make_trainer(cluster, Sync(), record_dir=str(tmp_path))
    assert trainer.fit(EndlessBatches(pause=0.0), max_steps=20).steps == 20
    assert "leave accumulation_steps at 1" in cluster.refused[0]


def test_a_change_waits_while_a_checkpoint_is_written(monkeypatch):
    cluster = ThreadsOfDriver(2)
    cluster.changes = [(10, NNWorkersChange(1))]
    writes = iter([True] * 20)
    monkeypatch.setattr(Checkpointing, "busy", property(lambda _: next(writes, False)))
    make_trainer(cluster, Sync()).fit(EndlessBatches(pause=0.0), max_steps=60)
    assert next(writes, None) is None
    ((_, step),) = cluster.parts
    assert step >= 20


@pytest.mark.parametrize("rank", [0, 2])
def test_the_others_continue_from_the_last_step_after_a_death(rank):
    """No batch is trained twice or left out. Only updates of rows of the step in which it died may be lost."""
    cluster = ThreadsOfDriver(3)
    cluster.dies = rank, 60
    trainer = make_trainer(cluster, Sync())
    result = trainer.fit(EndlessBatches(pause=0.0), max_steps=30)
    assert (trainer.global_step, result.steps, result.failures) == (30, 30, 1)
    assert cluster.threads.nn_workers == 2
    before = trainer.position - 2 * 30
    assert 15 <= before <= 20
    lost = np.array(updates_of(trainer.position)) - rows_of(trainer)[2]
    last = np.array(updates_of(3 * before)) - updates_of(3 * (before - 1))
    assert not lost.any() or (lost == last).all()
    reference = make_trainer(None, Sync())
    reference.fit(list(steps_of([(3, before), (2, 30 - before)])))
    torch.testing.assert_close(trainer.model.state_dict(), reference.model.state_dict())


def test_all_restart_after_a_death_where_rows_have_updates_that_the_network_lacks():
    """Without `combine` the PSs apply gradients as they come, also of a step that is trained again."""
    cluster = ThreadsOfDriver(3)
    cluster.dies = 2, 60
    trainer = make_trainer(cluster, Hybrid(2, warmup=0, combine=False))
    result = trainer.fit(EndlessBatches(pause=0.0), max_steps=30)
    assert (trainer.global_step, result.steps, result.failures) == (30, 30, 1)
    assert trainer.position == 2 * 30  # From the beginning: there is no recovery point yet.


def test_an_error_that_is_no_death_is_raised():
    class Failing(EndlessBatches):
        def batches(self, epoch=0, start=0):
            for number, batch in enumerate(super().batches(epoch, start), start):
                if number == 31:
                    raise RuntimeError("the disk")
                yield batch

    with pytest.raises(RuntimeError, match="the disk"):
        make_trainer(ThreadsOfDriver(2), Sync()).fit(Failing(pause=0.0), max_steps=50)


def test_no_two_threads_copy_the_work_at_the_same_time():
    """Otherwise a collection in between may corrupt memory with CPython 3.11; see `ThreadsOfDriver.attempt`."""

    copied_by = set()

    class Work:
        def __deepcopy__(self, _):
            copied_by.add(threading.get_ident())
            return Work()

        def __call__(self):
            pass

    cluster = ThreadsOfDriver(2)
    assert set(cluster.attempt(Work(), halting=None).results) == {0, 1}
    assert copied_by == {threading.get_ident()}
