"""Checkpoints that nobody asked for: a cluster of processes with a `checkpoint_dir` writes them now and then."""

import logging
import time

import pytest
from test_resume import adam, model, reader

import persia
from persia.checkpoint import CheckpointReader, CheckpointWriter, list_checkpoints
from persia.checkpoint.row_files import RowFiles
from persia.errors import CheckpointError, ConfigError, RemoteError
from persia.modes import Sync
from persia.optim import Adagrad
from persia.trainer import checkpointing as saving
from persia.trainer import options as declared
from persia.trainer.evaluation import Evaluator


class InProcesses:
    """As a cluster of processes connects an NN worker, which then keeps recovery points."""

    def connect(self, *arguments):
        return persia.cluster.Embedded().connect(*arguments)._replace(save_recovery_point=lambda _: None)


def trainer(cluster, **options):
    schema = reader().schema
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, keep_last=99, **options),
    )


@pytest.fixture
def often(monkeypatch):
    """As if ten minutes had passed after each few steps, in which nothing was written."""
    monkeypatch.setattr(declared, "DEFAULT_SECONDS", 1e-3)
    monkeypatch.setattr(saving, "MOST_TIME", 1.0)
    monkeypatch.setattr(saving.Checkpointing, "busy", False)


@pytest.mark.parametrize(
    ("cluster", "options", "some"),
    [
        (InProcesses, {}, True),
        (persia.cluster.Embedded, {}, False),
        (InProcesses, {"checkpoint_every_seconds": None}, False),
        (InProcesses, {"checkpoint_every_steps": 1000}, False),
    ],
)
def test_who_writes_them(tmp_path, often, cluster, options, some):
    trainer(cluster(), checkpoint_dir=str(tmp_path), **options).fit(reader())
    steps = [entry.step for entry in list_checkpoints(tmp_path)]
    assert steps[-1] == 20
    assert (len(steps) > 1) == some


def test_without_a_directory_there_are_none(often):
    t = trainer(InProcesses())
    assert t.options.checkpoint_seconds(in_processes=True) is None
    t.fit(reader(), max_steps=2)
    with pytest.raises(ConfigError, match="checkpoint_every_seconds needs checkpoint_dir"):
        trainer(InProcesses(), checkpoint_every_seconds=600.0)


def test_every_ten_minutes():
    assert persia.TrainerOptions(checkpoint_dir="runs").checkpoint_seconds(in_processes=True) == 600.0
    own = persia.TrainerOptions(checkpoint_dir="runs", checkpoint_every_seconds=30.0)
    assert own.checkpoint_seconds(in_processes=True) == own.checkpoint_seconds(in_processes=False) == 30.0


@pytest.mark.parametrize(
    ("seconds", "ago", "due"), [(61.0, 539.0, False), (59.0, 541.0, True), (0.1, 600.0, True), (7000.0, 600.0, False)]
)
@pytest.mark.parametrize("asked_for", [False, True])
def test_they_take_at_most_a_tenth_of_the_time(tmp_path, seconds, ago, due, asked_for):
    options = {"checkpoint_every_seconds": 600.0} if asked_for else {}
    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path), **options)
    t.fit(reader(), max_steps=1)
    t.checkpointing._attempt = saving._Written(time.monotonic() - ago, 1, seconds)
    assert t.checkpointing.begin_periodic() == (due or asked_for)
    t.checkpointing.wait()


def test_they_are_not_evaluated(tmp_path, often, monkeypatch):
    """For `keep_best`: an evaluation may take long, and was not asked for."""
    evaluated = []
    evaluate = Evaluator.evaluate
    monkeypatch.setattr(
        Evaluator, "evaluate", lambda *args, **named: evaluated.append(None) or evaluate(*args, **named)
    )
    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path), keep_best="auc")
    t.fit(reader(), reader())
    assert len(list_checkpoints(tmp_path)) > 1
    assert len(evaluated) == 1  # At the end.


def full(*_, **__):
    raise CheckpointError("full")


@pytest.mark.parametrize("where", ["before", "while"])
def test_their_failures_do_not_end_training(tmp_path, often, monkeypatch, caplog, where):
    """And are logged ever more rarely: nobody may look at them for days."""
    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path))
    t.fit(reader(), max_steps=1)
    checkpointing = t.checkpointing
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "persia.checkpoint"):
        if where == "before":
            patch.setattr(saving, "CheckpointWriter", full)
        else:
            patch.setattr(CheckpointWriter, "commit", full)
            patch.setattr(RowFiles, "rows", full)
        for _ in range(9):
            checkpointing.begin_periodic()
            if checkpointing._thread is not None:
                checkpointing._thread.join()
        if where == "while":
            with pytest.raises(CheckpointError, match="full"):
                checkpointing.wait()
    assert checkpointing.metrics()["checkpoint_failures"] == 9
    numbers = [record.args[0] for record in caplog.records if "training continues" in record.msg]
    assert numbers == [1, 2, 4, 8]
    assert t.fit(reader()).global_step == 20


def test_those_that_were_asked_for_end_it(tmp_path, monkeypatch):
    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path), checkpoint_every_steps=1000)
    t.fit(reader(), max_steps=1)
    monkeypatch.setattr(saving, "CheckpointWriter", full)
    assert not t.checkpointing.begin_periodic()
    with pytest.raises(CheckpointError, match="full"):
        t.checkpointing.begin_periodic()


@pytest.mark.parametrize("where", ["before", "while"])
def test_the_time_of_failed_ones_counts_as_well(tmp_path, monkeypatch, where):
    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path))
    t.fit(reader(), max_steps=1)

    def slowly(*_, **__):
        time.sleep(0.05)
        raise CheckpointError("full")

    monkeypatch.setattr(saving, "MOST_TIME", 1e-9)
    monkeypatch.setattr(saving, "write_states" if where == "before" else "write_rows", slowly)
    monkeypatch.setattr(saving, "held_states", lambda _: None if where == "before" else [])
    t.checkpointing._attempt = None
    assert t.checkpointing.begin_periodic() == (where == "while")
    if where == "while":
        t.checkpointing._thread.join()
    assert t.checkpointing._attempt.seconds >= 0.05
    assert not t.checkpointing.begin_periodic()
    assert t.checkpointing.metrics()["checkpoint_failures"] == 1
    t.checkpointing._failure = None


def test_a_ps_that_cannot_do_it_does_not_end_training(tmp_path, often, monkeypatch):
    """Nothing but the checkpoint is harmed by a PS without memory or threads for it."""

    def broken(*_, **__):
        raise RemoteError("MemoryError", kind="MemoryError")

    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path), checkpoint_every_steps=10)
    t.fit(reader(), max_steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(saving, "write_rows", broken)
        assert t.checkpointing.begin_periodic()
        t.checkpointing._thread.join()
    assert t.fit(reader()).global_step == 20
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1, 11, 20]


@pytest.mark.parametrize("options", [{}, {"checkpoint_every_steps": 5, "eval_every_steps": 3}])
@pytest.mark.parametrize("steps", [10, None])
def test_the_last_state_is_scored_though_an_unscored_checkpoint_of_it_was_begun(tmp_path, often, steps, options):
    t = trainer(InProcesses(), checkpoint_dir=str(tmp_path), keep_best="auc", **options)
    begun = []
    begin = t.checkpointing.begin_periodic
    t.checkpointing.begin_periodic = lambda: begun.append(t.global_step) or begin()
    t.fit(reader(), reader(), max_steps=steps)
    assert begun[-1] == t.global_step
    assert CheckpointReader(tmp_path, t.global_step).extra["metric"] == "auc"
    if not options:
        assert CheckpointReader(tmp_path, "best").manifest.global_step == t.global_step
