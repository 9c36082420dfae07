"""Evaluations during `fit`: what they change, the best checkpoint, and training that ends early."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import persia
from persia import Label, TrainerOptions
from persia.checkpoint import CheckpointReader, CheckpointWriter, list_checkpoints
from persia.errors import CheckpointError, ConfigError
from persia.metrics import Figures, MetricsResult, ValueFigures
from persia.modes import Async, Bsp, Gba, HopBw, Hybrid, Sync
from persia.telemetry.run_record import read_run
from persia.trainer.evaluation import Evaluator
from persia.trainer.evaluations import Evaluations
from persia.trainer.steering import Steering
from support.switching_samples import ROWS, SCHEMA, Net, adam, batches, trainer

READER = persia.data.synthetic(3_000, id_features=2, ids_per_feature=30, batch_size=50, dense_features=2)
HELD_OUT = persia.data.synthetic(500, id_features=2, ids_per_feature=30, batch_size=50, dense_features=2, seed=5)


def of_reader(seed=0, **options):
    torch.manual_seed(0)
    made = persia.Trainer(
        persia.nn.models.FFNN(READER.schema, hidden=(8,), dropout=0.3),
        READER.schema,
        optimizer=adam,
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=Sync(),
        options=TrainerOptions(**{"progress": False} | options),
    )
    torch.manual_seed(seed)
    return made


@pytest.fixture
def script(monkeypatch):
    """Values of the held-out metric by global step, in place of real ones; `seen` has the steps of evaluations."""
    made = SimpleNamespace(values={}, seen=[], kind=Figures)

    def evaluate(self, data, *_, **__):
        step = self._embeddings.global_step
        made.seen.append(step)
        value = made.values.get(step, 0.1)
        figures = made.kind(7, *[value] * (len(dataclasses.fields(made.kind)) - 1))
        return MetricsResult(7, value, value, value, value, {"click": figures})

    monkeypatch.setattr(Evaluator, "evaluate", evaluate)
    return made


def scripted(tmp_path=None, mode=None, cluster=None, **options):
    where = {} if tmp_path is None else {"checkpoint_dir": str(tmp_path)}
    return trainer(mode or Sync(), cluster, **where, **options)


def same(one, two):
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    rows = [
        {(c.table, c.shard): c.arrays for c in t.embeddings.connection.servers[0].export_rows()} for t in (one, two)
    ]
    assert rows[0].keys() == rows[1].keys()
    for key in rows[0]:
        for name, array in rows[0][key].items():
            np.testing.assert_array_equal(array, rows[1][key][name], err_msg=name)


class Random:
    """Batches that draw from all generators when they are read, as a careless data set may."""

    def __iter__(self):
        torch.rand(3), np.random.rand(3)
        yield from HELD_OUT


@pytest.mark.parametrize("accumulation", [1, 2])
def test_evaluations_do_not_change_training(tmp_path, accumulation):
    plain, steered = (of_reader(seed=1, accumulation_steps=accumulation) for _ in range(2))
    steered = of_reader(
        1, accumulation_steps=accumulation, eval_every_steps=7, eval_every_epochs=1, checkpoint_dir=str(tmp_path),
        keep_best="log_loss",
    )  # fmt: skip
    torch.manual_seed(1)
    expected = plain.fit(READER, epochs=2)
    torch.manual_seed(1)
    result = steered.fit(READER, Random(), epochs=2)
    assert len(read_run(tmp_path).held_out) >= 8
    assert result.global_step == expected.global_step
    assert result.progressive.auc == expected.progressive.auc
    same(plain, steered)


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0), Async(), Bsp(3), HopBw(0), Gba(4 * ROWS)], ids=str)
def test_every_mode_is_evaluated_on_the_way(mode, script):
    t = scripted(mode=mode, eval_every_steps=4, eval_every_epochs=2)
    result = t.fit(batches(30), batches(2), epochs=2)
    per_pass = result.global_step // 2
    expected = {*range(4, result.global_step + 1, 4), result.global_step}
    assert set(script.seen) == expected, per_pass
    assert len(script.seen) == len(expected)  # None is made twice.


def test_it_stops_once_nothing_improves_any_more(tmp_path, script, caplog):
    script.values = {5: 0.6, 10: 0.8, 15: 0.7, 20: 0.8, 25: 0.75}
    t = scripted(tmp_path, eval_every_steps=5, patience=3)
    result = t.fit(batches(100), batches(2))
    assert (result.global_step, result.best, result.best_step, result.watched) == (25, 0.8, 10, "auc")
    assert result.stopped_early == (
        "Stopped early at step 25: in 3 evaluations in a row, held-out AUC has not improved; "
        "the best is 0.8 at step 10."
    )
    assert str(result).splitlines()[-1] == result.stopped_early
    assert not t.finished
    listed = [(entry.step, entry.best) for entry in list_checkpoints(tmp_path)]
    assert listed == [(10, True), (25, False)]
    assert [(p.step, p.best) for p in read_run(tmp_path).held_out] == [
        (5, True), (10, True), (15, False), (20, False), (25, False),
    ]  # fmt: skip

    again = t.fit(batches(100, seed=3), batches(2), max_steps=3)  # Other data: it begins to count again.
    assert (again.steps, again.stopped_early) == (3, "")


def test_a_run_that_stopped_early_has_nothing_left(tmp_path, script):
    script.values = {5: 0.6}
    options = {"eval_every_steps": 5, "patience": 2}
    data = batches(100)
    t = scripted(tmp_path, **options)
    assert t.fit(data, batches(2)).global_step == 15
    result = t.fit(data, batches(2))
    assert result.steps == 0
    assert result.nothing_left.startswith("Nothing was left to train. Stopped early at step 15")
    other = scripted(tmp_path, eval_every_steps=5, patience=4)  # More patience goes on.
    other.load(str(tmp_path))
    assert other.fit(data, batches(2)).global_step == 25


@pytest.mark.parametrize("stop", [5, 7, 15, 18])
def test_a_resumed_run_continues_to_count(tmp_path, script, stop):
    script.values = {5: 0.6, 10: 0.8, 15: 0.7, 20: 0.75, 7: 0.2, 18: 0.3}
    first = scripted(tmp_path, eval_every_steps=5, patience=3)
    first.fit(batches(100), batches(2), max_steps=stop)
    second = persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=adam)
    result = second.fit(batches(100), batches(2))
    assert (result.global_step, result.best_step) == (25, 10)
    assert [step for step in script.seen if step % 5 == 0] == [5, 10, 15, 20, 25]


def test_a_signal_between_training_and_evaluation_loses_none(tmp_path, script):
    script.values = {5: 0.6, 10: 0.8}
    t = scripted(tmp_path, eval_every_steps=5, patience=1)
    trained = []

    def stop_at_ten(module, *_):
        trained.append(module.training)
        if sum(trained) == 10:
            t.stop()

    t.model.register_forward_hook(stop_at_ten)
    assert t.fit(batches(100), batches(2)).global_step == 10
    assert script.seen == [5]
    script.seen.clear()
    resumed = persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=adam)
    assert resumed.fit(batches(100), batches(2)).best_step == 10
    assert script.seen[0] == 10


def test_lower_may_be_better(tmp_path, script):
    script.kind, script.values = ValueFigures, {4: 3.0, 8: 2.0, 12: 2.5, 16: 2.5}
    schema = persia.Schema(SCHEMA.id_features, SCHEMA.dense_features, [Label("click", kind="regression")])
    t = persia.Trainer(
        Net(torch.float32), schema, optimizer=adam, embedding_optimizer=persia.optim.Adagrad(lr=0.05), mode=Sync(),
        options=TrainerOptions(
            progress=False, checkpoint_dir=str(tmp_path), eval_every_steps=4, patience=2, keep_best="click:rmse"
        ),
    )  # fmt: skip
    result = t.fit(batches(50), batches(2))
    assert (result.global_step, result.best, result.best_step) == (16, 2.0, 8)
    assert CheckpointReader(tmp_path, "best").manifest.global_step == 8
    assert (tmp_path / "BEST").read_text() == "step-000000000008 2.0 click:rmse\n"


def test_values_that_are_not_finite_are_no_improvement(script):
    script.values = dict.fromkeys(range(0, 99), float("nan"))
    result = scripted(eval_every_steps=2, patience=3).fit(batches(50), batches(2))
    assert (result.global_step, result.best, result.best_step) == (6, None, None)
    assert "none was finite. Labels of one class have no AUC: set keep_best" in result.stopped_early


def test_patience_counts_passes(script):
    script.values = {3: 0.9}
    t = scripted(eval_every_epochs=2, patience=2)
    assert t.fit(batches(3), batches(1), epochs=9).global_step == 3 * 6  # Passes 2 (the first value), 4 and 6.
    assert script.seen == [6, 12, 18]


@pytest.mark.parametrize("which", ["best", 10, "latest", None])
def test_a_step_is_chosen_by_name(tmp_path, script, which):
    script.values = {10: 0.8}
    t = scripted(tmp_path, eval_every_steps=5, patience=2, keep_last=9)
    t.fit(batches(100), batches(2))
    expected = 10 if which in ("best", 10) else 20
    assert persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=adam, step=which).global_step == expected
    other = scripted(tmp_path)
    other.load(str(tmp_path), step=which)
    assert other.global_step == expected
    assert persia.checkpoint.open(tmp_path, which).global_step == expected


def test_the_best_is_written_while_another_one_is(tmp_path, script, monkeypatch):
    """An evaluation that improves waits for its turn, where a periodic checkpoint would be left out."""
    script.values = {step: step / 100 for step in range(1, 40)}
    writes = []
    commit = CheckpointWriter.commit
    monkeypatch.setattr(CheckpointWriter, "commit", lambda self, **o: (writes.append(self._step), commit(self, **o))[1])
    t = scripted(tmp_path, eval_every_steps=2, patience=9, checkpoint_every_steps=2, checkpoint_share=0.01)
    result = t.fit(batches(12), batches(2))
    assert writes == [2, 4, 6, 8, 10, 12]
    assert result.best_step == 12


def test_a_crash_before_best_is_written_is_made_up_for(tmp_path, script, monkeypatch):
    script.values = {4: 0.5, 8: 0.9, 12: 0.6, 16: 0.4}
    options = {"eval_every_steps": 4, "patience": 2}
    t = scripted(tmp_path, **options)
    mark = CheckpointWriter._mark_best

    def crash(writer):
        if writer._step == 8:
            raise CheckpointError("power cut")
        mark(writer)

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "_mark_best", crash)
        with pytest.raises(CheckpointError, match="power cut"):
            t.fit(batches(8), batches(2))
    assert CheckpointReader(tmp_path, "best").manifest.global_step == 4
    assert CheckpointReader(tmp_path).manifest.global_step == 4  # LATEST comes after BEST.
    resumed = persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=adam)
    assert resumed.fit(batches(30), batches(2)).global_step == 16
    assert CheckpointReader(tmp_path, "best").manifest.global_step == 8


def test_saving_by_hand_keeps_the_score(tmp_path, script):
    script.values = {4: 0.5, 8: 0.9}
    t = scripted(tmp_path, keep_best="auc", checkpoint_every_steps=4)
    t.fit(batches(8), batches(2))
    t.save(str(tmp_path))
    assert CheckpointReader(tmp_path, "best").manifest.global_step == 8
    assert CheckpointReader(tmp_path).extra["value"] == 0.9


def test_checkpoints_of_before_have_no_evaluations():
    t = scripted()
    state = t.state.state_dict()
    del state["evaluations"]
    other = scripted()
    other.state.load_state_dict(state, trains_in_other_processes=False)
    assert other.state.evaluations == Evaluations()


@pytest.mark.parametrize("name", ["eval_every_steps", "eval_every_epochs"])
def test_options_that_cannot_work_are_refused(name, tmp_path):
    with pytest.raises(ConfigError, match="patience counts evaluations"):
        TrainerOptions(patience=3)
    with pytest.raises(ConfigError, match=name):
        TrainerOptions(**{name: 0})
    t = scripted(**{name: 1})
    with pytest.raises(ConfigError, match=f"{name} needs eval_data"):
        t.fit(batches(2))
    with pytest.raises(ConfigError, match=f"can be read only once, and {name} evaluates again and again"):
        t.fit(batches(2), iter(batches(2)))
    with pytest.raises(ConfigError, match="click has auc, log_loss"):
        scripted(tmp_path, keep_best="rmse")


def test_streams_have_no_patience(script, caplog):
    t = scripted(eval_every_steps=5, patience=1)
    with caplog.at_level("INFO", "persia"):
        t.state.stream = SimpleNamespace(interrupted=False)
        components = t._components
        made = Steering(components, batches(1), SimpleNamespace(end_early=lambda: 1 / 0), None, lambda: False)
    assert "patience is ignored: train_data is a stream" in caplog.text
    assert made.stopped_early == ""
