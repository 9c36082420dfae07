"""A model that diverges: what it leaves in checkpoints, logs of changes and rows, and what names the reason."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest
import torch
from test_trainer import reader, rows_of, trainer

import persia
from persia.checkpoint import list_checkpoints
from persia.dashboard.report import report
from persia.errors import ConfigError, DivergedError
from persia.modes import Gba, Hybrid, Sync
from persia.nn.non_finite import extreme_inputs
from persia.optim import SGD, Adagrad
from persia.publish import PublishOptions, Replica, follow
from persia.schema import Label
from persia.telemetry.run_record import read_run
from support.several_ps import Several


class Exploding(torch.nn.Module):
    """Sums products of features; from one training step on, gradients of the rows are so large that logits overflow."""

    def __init__(self, at):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.at, self.steps = at, 0

    def forward(self, dense, embeddings):
        if self.training:
            self.steps += 1
            if self.steps == self.at:
                embeddings["id_0"].register_hook(lambda gradient: gradient.sign() * 1e25)
                embeddings["id_1"].register_hook(lambda gradient: gradient.sign() * 1e25)
        return (embeddings["id_0"] * embeddings["id_1"]).sum(1, keepdim=True) + self.bias


def exploding(at, data, mode=None, cluster=None, embedding_optimizer=None, **options):
    """Training whose update of the step `at` makes rows of 1e25, which are finite, while their products are not."""
    return persia.Trainer(
        Exploding(at),
        data.schema,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
        embedding_optimizer=embedding_optimizer or SGD(lr=1.0),
        mode=mode or Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


def steps_in(directory):
    return [entry.step for entry in list_checkpoints(str(directory))]


MODES = pytest.mark.parametrize(
    ("mode", "servers"), [(Sync(), 1), (Hybrid(3, warmup=0), 1), (Gba(200), 1), (Sync(), 2)], ids=str
)


@MODES
def test_no_checkpoint_has_the_state_after_the_divergence(tmp_path, mode, servers):
    data = reader(2_000)
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 2, "keep_last": 1}
    t = exploding(6, data, mode, Several(servers) if servers > 1 else None, **options)
    t.fit(data, max_steps=4)
    with pytest.raises(DivergedError, match="After global step 6"):
        t.fit(data)
    assert steps_in(tmp_path) == [4]
    again = persia.Trainer.resume(str(tmp_path), Exploding(0), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    assert np.isfinite(np.concatenate(list(again.predict(data)))).all()
    again.fit(data)
    assert again.global_step == 10


def test_a_due_checkpoint_of_a_diverged_state_is_refused(tmp_path):
    data = reader(2_000)
    t = exploding(6, data, checkpoint_dir=str(tmp_path), checkpoint_every_steps=6)
    with pytest.raises(DivergedError, match=r"After global step 6 \(batch 5 of epoch 0 again.*200 logits are not"):
        t.fit(data)
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("steps", [None, 6], ids=["at the end of the data", "after max_steps"])
def test_the_last_checkpoint_gives_finite_logits(tmp_path, steps):
    data = reader(1_200 if steps is None else 2_000)
    t = exploding(6, data, checkpoint_dir=str(tmp_path))
    with pytest.raises(DivergedError, match="After global step 6"):
        t.fit(data, max_steps=steps)
    assert steps_in(tmp_path) == []
    with pytest.raises(DivergedError, match="After global step 6"):
        t.save(str(tmp_path))
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize("mode", [Sync(), Gba(200)], ids=str)
def test_the_batch_trained_last_is_looked_up_again(mode):
    data = reader(1_000)
    t = trainer(data.schema, mode=mode, cluster=Several(2) if mode == Sync() else None)
    seen = []
    t._components.finite.trained = lambda batch, epoch: seen.append(batch)
    t.fit(data, max_steps=3)
    logits = [logits for _, logits in t._components.evaluator.scored(data)]
    np.testing.assert_array_equal(t._components.evaluator.again(seen[2]), logits[2])
    # Earlier ones have the rows that they were trained with, as their ids are not there any more.
    assert not np.array_equal(t._components.evaluator.again(seen[1]), logits[1])


def test_a_check_changes_nothing_that_is_trained(tmp_path):
    def trained(**options):
        data = reader(2_000)
        torch.manual_seed(3)
        t = trainer(data.schema, model=persia.nn.models.FFNN(data.schema, hidden=(16,), dropout=0.5), **options)
        t.fit(data)
        return [p.tolist() for p in t.model.parameters()], [rows.tobytes() for rows in rows_of(t)]

    checked, unchecked = trained(checkpoint_dir=str(tmp_path), checkpoint_every_steps=2), trained()
    assert checked[0] == unchecked[0]
    assert checked[1] == unchecked[1]


def test_rows_that_an_update_would_make_infinite_are_unchanged():
    data = reader(2_000)
    t = exploding(3, data, embedding_optimizer=Adagrad(lr=0.1))  # The square of 1e25 is infinite, and no logit is.
    t.fit(data, max_steps=2)
    before = contents_of(t)
    result = t.fit(data, max_steps=1)
    after = contents_of(t)
    assert before["id_0"].keys() == after["id_0"].keys()
    assert before["id_0"] == after["id_0"]
    assert [(each.table, each.step) for each in result.non_finite] == [("id_0", 3), ("id_1", 3)]
    assert t.fit(data, max_steps=1).non_finite == []


def contents_of(t):
    """By table and id: embedding, state and number of updates of the rows in the store."""
    found: dict[str, dict[int, tuple]] = {}
    for chunk in t.embeddings.connection.servers[0].export_rows():
        columns = [chunk.arrays[name] for name in ("ids", "embeddings", "state", "update_count")]
        for id_, embedding, state, count in zip(*columns, strict=True):
            found.setdefault(chunk.table, {})[int(id_)] = embedding.tobytes(), state.tobytes(), int(count)
    return found


# --- gradients -------------------------------------------------------------------------------------------------------


class BadFeature(torch.nn.Module):
    """Uses one feature so that its gradient is NaN, though the logits are finite."""

    def __init__(self, bad, features, once=False):
        super().__init__()
        self.head = torch.nn.Linear(16, 1)
        self.bad, self.features, self.once, self.calls = bad, features, once, 0

    def forward(self, dense, embeddings):
        self.calls += 1
        total = sum(embeddings[name] for name in self.features)
        if self.training and not (self.once and self.calls > 1):
            total = total + (embeddings[self.bad] * 0).sqrt()  # The derivative is 0 * inf.
        return self.head(total)


def with_bad_feature(data, shared=False, once=False, **options):
    schema = data.schema
    names = [feature.name for feature in schema.id_features]
    return trainer(schema, model=BadFeature("id_1", names, once), **options)


def sharing(rows=1_000):
    """Two features of one table, whose ids overlap in part, and one of another."""
    schema = persia.Schema(
        id_features=[
            persia.IdFeature("a", table="shared", dim=16),
            persia.IdFeature("b", table="shared", dim=16),
            persia.IdFeature("c", dim=16),
        ],
        labels=["label"],
    )
    random = np.random.default_rng(0)

    def batch():
        ids = {"a": random.integers(0, 30, 100), "b": random.integers(20, 50, 100), "c": random.integers(0, 9, 100)}
        features = {name: persia.IdColumn(values.astype(np.uint64)) for name, values in ids.items()}
        labels = random.integers(0, 2, (100, 1)).astype(np.float32)
        return persia.Batch(features, np.zeros((100, 0), np.float32), labels)

    return schema, [batch() for _ in range(rows // 100)]


@pytest.mark.parametrize("mode", [Sync(), Hybrid(3, warmup=0), Gba(200)], ids=str)
def test_a_non_finite_gradient_is_named_by_table_and_feature(tmp_path, caplog, mode):
    data = reader(1_000)
    t = with_bad_feature(data, mode=mode, checkpoint_dir=str(tmp_path))
    with caplog.at_level(logging.WARNING, "persia.nn"):
        result = t.fit(data)
    (found,) = result.non_finite
    assert (found.table, found.features, found.step) == ("id_1", ["id_1"], 1)
    assert found.rows == result.non_finite_rows == t.embeddings.statistics()["id_1"]["nonfinite"] > 0
    (line,) = [r.getMessage() for r in caplog.records if r.name == "persia.nn"]
    assert line.startswith("Global step 1: ")
    assert "rows of table 'id_1' stay as they are" in line
    assert "feature 'id_1'" in line
    assert str(result).splitlines()[-1].endswith("rows of table 'id_1' (feature 'id_1') from step 1 on")
    record = read_run(tmp_path)
    assert record.non_finite == result.non_finite
    assert "Rows that the last fit call left unchanged" in report(record, "run")
    t.model.bad, t.model.features = "id_0", ["id_2"]
    result = t.fit(data, again=True)
    assert [each.table for each in result.non_finite] == ["id_0"]  # Those of this call.


def test_the_feature_of_a_non_finite_gradient_is_named():
    schema, batches = sharing()
    t = trainer(schema, model=BadFeature("b", ["a", "b", "c"]))
    (found,) = t.fit(batches).non_finite
    assert (found.table, found.features) == ("shared", ["b"])


def test_a_result_without_such_rows_says_nothing():
    data = reader(1_000)
    result = trainer(data.schema).fit(data)
    assert result.non_finite == []
    assert len(str(result).splitlines()) == 3


@pytest.mark.parametrize("mode", [Sync(), Hybrid(3, warmup=0), Gba(200)], ids=str)
def test_training_ends_if_it_is_to_raise(tmp_path, mode):
    data = reader(4_000)
    t = with_bad_feature(data, mode=mode, nonfinite="raise", checkpoint_dir=str(tmp_path), checkpoint_every_steps=10)
    with pytest.raises(DivergedError, match=r"rows of table 'id_1' \(feature 'id_1'\) from step 1 on") as raised:
        t.fit(data)
    assert raised.value.fields == {"tables": ["id_1"], "features": ["id_1"], "step": 1}
    assert t.global_step < 10
    assert steps_in(tmp_path) == []


def test_a_gradient_of_the_last_step_is_found_too():
    data = reader(200)
    with pytest.raises(DivergedError, match="id_1"):
        with_bad_feature(data, nonfinite="raise").fit(data)


@pytest.mark.parametrize(
    ("options", "match"), [({"nonfinite": "raise", "precision": "fp16"}, "fp16"), ({"nonfinite": "stop"}, "nonfinite")]
)
def test_options_are_checked(options, match):
    with pytest.raises(ConfigError, match=match):
        persia.TrainerOptions(**options)


# --- publishing ------------------------------------------------------------------------------------------------------


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("servers", [1, 2])
def test_rows_and_network_of_a_model_that_diverges_are_not_seen(tmp_path, servers):
    """The reader gets a state of before the diverging update, however much time there is to publish the other one."""
    data = reader(2_000)
    url = str(tmp_path / "log")
    replica = Replica(follow(url))
    publish = PublishOptions(url, seconds=0.05)
    t = exploding(6, data, cluster=Several(servers) if servers > 1 else None, publish=publish)
    ps = t.embeddings.connection.servers

    def batches():
        for number, batch in enumerate(data.batches()):
            if number == 5:  # Steps 0 to 4 are trained, and are waited for.
                until(lambda: replica.refresh() or replica.epoch == 0)
            if number == 6:  # The update of the sixth step is written, and waits.
                until(lambda: all(server.published().waiting for server in ps))
            yield batch

    with pytest.raises(DivergedError):
        t.fit(batches())
    replica.refresh()
    assert replica.epoch == 0
    for name in ("id_0", "id_1", "id_2"):
        assert all(np.abs(row).max() < 1e20 for row in replica.rows(name).values())
    assert not any(thread.name == "persia-publish-approve" and thread.is_alive() for thread in threading.enumerate())


def test_the_last_state_is_published_only_with_finite_logits(tmp_path):
    data = reader(1_200)
    url = str(tmp_path / "log")
    t = exploding(6, data, publish=PublishOptions(url, seconds=3600.0))
    with pytest.raises(DivergedError, match="After global step 6"):
        t.fit(data)
    replica = Replica(follow(url))
    replica.refresh()
    assert all(np.abs(row).max() < 1e20 for row in (replica.rows("id_0") if replica.epoch >= 0 else {}).values())


# --- inputs that are finite and too large ----------------------------------------------------------------------------

WATCH = persia.Schema([persia.IdFeature("user", dim=4)], ["age"], [Label("watch", "regression")], sample_weight="w")


def watched(**extreme):
    rng = np.random.default_rng(0)
    raw = {"user": np.arange(20), "age": rng.normal(size=20), "watch": rng.normal(size=20), "w": np.ones(20)}
    for name, value in extreme.items():
        raw[name][7] = value
    return persia.Batch.from_columns(WATCH, raw)


def test_a_label_whose_square_overflows_is_named(caplog):
    with pytest.raises(DivergedError, match=r"Global step 1 .*the loss is inf.* label 'watch' is 1e\+30 at row 7: too"):
        trainer(WATCH, model=persia.nn.models.FFNN(WATCH, hidden=(4,)), mode=Sync()).fit([watched(watch=1e30)])
    assert "In this batch label 'watch' is 1e+30 at row 7" in caplog.text  # Of the rows that stay as they are, too.


def test_extreme_inputs_are_named_and_no_others():
    batch = watched(age=2e19, w=1e30)
    dense = torch.from_numpy(batch.dense)
    assert extreme_inputs(WATCH, dense, batch.labels, batch.weights) == (
        "In this batch dense feature 'age' is 2e+19 at row 7; weight 'w' is 1e+30 at row 7: too large to square in "
        "float32. Scale or clip it."
    )
    batch = watched(age=1.8e19)
    assert extreme_inputs(WATCH, torch.from_numpy(batch.dense), batch.labels, None) == ""


def test_an_evaluation_names_an_extreme_input():
    class Squares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1))

        def forward(self, dense, embeddings):
            return dense.square() + embeddings["user"].sum(1, keepdim=True) + self.bias

    t = trainer(WATCH, model=Squares(), mode=Sync())
    with pytest.raises(
        DivergedError, match=r"Batch 1 .*1 of 20 logits are not finite\. In this batch dense feature 'age'"
    ):
        t.evaluate([watched(), watched(age=1e25)])
