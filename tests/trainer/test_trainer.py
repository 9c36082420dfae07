"""Fit, evaluate, predict; precision, accumulation, several labels; the same figures twice."""

import msgspec
import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import GroupedMetrics
from persia.modes import Hybrid, Sync
from persia.optim import Adagrad
from persia.testing import Threads


def reader(rows=4_000, **options):
    options = {"id_features": 3, "ids_per_feature": 50, "dense_features": 2, "batch_size": 200} | options
    return persia.data.synthetic(rows, **options)


def trainer(schema, mode=None, model=None, optimizer=None, cluster=None, **options):
    torch.manual_seed(0)
    return persia.Trainer(
        model or persia.nn.models.FFNN(schema, hidden=(16,)),
        schema,
        optimizer=optimizer or (lambda p: torch.optim.Adam(p, 1e-2)),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode or Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


def test_fit_learns_and_reports():
    data = reader(40_000, days=2)
    result = trainer(data.schema).fit(data, eval_data=reader(4_000, seed=0).batches(epoch=5))
    assert result.rows == 40_000
    assert result.steps == result.global_step == 200
    assert result.progressive.rows == 40_000
    assert set(result.progressive.auc_per_day) == {0, 1}
    assert result.progressive.auc_per_day[1] > 0.6
    assert result.evaluation.auc > 0.65
    assert result.stored_rows == 150
    assert result.stored_bytes > 0
    assert result.staleness_max == 0


def test_a_result_prints_as_three_lines():
    data = reader(2_000)
    result = trainer(data.schema).fit(data)
    lines = str(result).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("Trained 2000 rows in ")
    assert lines[0].endswith(" rows/s), 10 steps; global step 10")
    scores = f"AUC {result.progressive.auc:.4f}, log loss {result.progressive.log_loss:.4f}"
    assert lines[1] == f"progressive {scores}"
    assert lines[2].startswith("150 embedding rows stored (")
    assert lines[2].endswith(" MB)")
    assert repr(result).startswith("FitResult(rows=2000, ")
    more = msgspec.structs.replace(result, evaluation=result.progressive, non_finite_rows=3, failures=1)
    assert str(more).splitlines()[1] == f"progressive {scores}; evaluation {scores}"
    assert str(more).endswith(" MB); non_finite_rows 3; failures 1")


def test_sync_gives_the_same_figures_twice():
    results = []
    for _ in range(2):
        data = reader()
        t = trainer(data.schema)
        result = t.fit(data, epochs=2)
        results.append(
            (result.progressive.auc, result.progressive.log_loss, [p.sum().item() for p in t.model.parameters()])
        )
    assert results[0] == results[1]


def test_progressive_metrics_precede_the_update():
    data = reader(200)
    t = trainer(data.schema)
    before = np.concatenate(list(trainer(data.schema).predict(data)))
    result = t.fit(data)
    labels = next(iter(data)).labels
    expected = -np.mean(np.log(np.where(labels > 0, 0.5, 0.5)))
    # Evaluation reads zeros for unseen ids, training reads their first values: near each other, not equal.
    assert result.progressive.log_loss == pytest.approx(expected, abs=0.1)
    assert before.shape == (200, 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_reduced_precision_trains(precision):
    data = reader(20_000)
    result = trainer(data.schema, precision=precision).fit(data)
    full = trainer(data.schema).fit(reader(20_000))
    assert result.progressive.auc == pytest.approx(full.progressive.auc, abs=0.01)
    assert result.non_finite_rows < result.rows


def test_accumulation_counts_steps_and_applies_the_rest():
    data = reader(1_400)
    t = trainer(data.schema, accumulation_steps=3)
    result = t.fit(data)
    assert result.steps == 3
    assert result.rows == 1_400


def test_schedules_and_clipping():
    data = reader(2_000)
    t = trainer(
        data.schema,
        schedule=persia.Schedule(warmup_steps=5, decay="cosine", total_steps=10),
        clip_norm=0.1,
        optimizer=lambda p: torch.optim.SGD(p, 1.0),
    )
    t.fit(data)
    assert t.step.optimizer.param_groups[0]["lr"] == pytest.approx(0.0)


def test_max_steps_and_going_on():
    data = reader(4_000)
    stopped = trainer(data.schema)
    assert stopped.fit(data, max_steps=np.int64(7)).steps == 7
    assert stopped.position == 7
    stopped.fit(data)
    whole = trainer(data.schema)
    whole.fit(data)
    for a, b in zip(stopped.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_plain_list_of_batches_and_hybrid_auto():
    batches = list(reader())
    t = trainer(reader().schema, mode=Hybrid("auto", warmup=0))
    assert t.fit(batches, epochs=2).rows == 8_000


def test_an_iterator_cannot_be_read_twice():
    t = trainer(reader().schema)
    with pytest.raises(ConfigError, match="read twice"):
        t.fit(iter(list(reader())), epochs=2)


@pytest.mark.parametrize("nn_workers", [1, 2])
def test_samples_are_ranked_within_the_ids_of_a_feature(nn_workers):
    data = reader(2_000)

    def work(member):
        t = trainer(data.schema, cluster=member)
        t.fit(data)
        return t.evaluate(data, group_by="id_1", at=(3, 5)), list(t.predict(data))

    result, predictions = Threads(nn_workers=nn_workers, timeout=60.0).run(work)[0]
    expected = GroupedMetrics((3, 5))
    for batch, probabilities in zip(data, predictions, strict=True):
        p = probabilities[:, 0].astype(np.float64)
        expected.update(batch.id_features["id_1"].values, np.log(p / (1 - p)), batch.labels[:, 0])
    found, expected = result.grouped["click"], expected.result()
    assert (found.groups, found.rows) == (50, 2_000)
    assert found.auc == pytest.approx(expected.auc, abs=1e-4)
    assert found.recall == pytest.approx(expected.recall, abs=1e-3)
    assert found.ndcg == pytest.approx(expected.ndcg, abs=1e-3)


def test_groups_are_ids_of_a_feature_with_one_for_each_sample():
    data = reader(400)
    t = trainer(data.schema)
    assert not t.evaluate(data).grouped
    with pytest.raises(ConfigError, match="id_0, id_1, id_2"):
        t.evaluate(data, group_by="user")
    for offsets in ([0, 2, 3], [0, 1, 2], [0, 2, 2]):
        ids = {f"id_{i}": np.arange(2) for i in range(3)} | {"id_1": (np.arange(offsets[-1]), np.array(offsets))}
        batch = persia.Batch.from_columns(
            data.schema, ids | {f"dense_{i}": [0.5, 1] for i in range(2)} | {"click": [0, 1]}
        )
        if offsets == [0, 1, 2]:
            assert t.evaluate([batch], group_by="id_1").grouped["click"].groups == 2
        else:
            with pytest.raises(DataError, match="one id for each sample"):
                t.evaluate([batch], group_by="id_1")


def test_evaluation_and_prediction_change_nothing():
    data = reader()
    t = trainer(data.schema)
    t.fit(data)
    before = t.embeddings.statistics()
    first, second = t.evaluate(reader(seed=3)), t.evaluate(reader(seed=3))
    assert first == second
    probabilities = np.concatenate(list(t.predict(reader(1_000))))
    assert probabilities.shape == (1_000, 1)
    assert ((probabilities > 0) & (probabilities < 1)).all()
    assert t.embeddings.statistics() == before


def test_several_labels_with_a_loss_of_the_model():
    schema = persia.Schema([persia.IdFeature("a", dim=4)], labels=["click", "buy"])

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.head = torch.nn.Linear(4, 2)
            self.asked = 0

        def forward(self, dense, embeddings):
            return self.head(embeddings["a"])

        def loss(self, logits, labels):
            self.asked += 1
            return torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)

    rng = np.random.default_rng(0)
    batches = []
    for _ in range(50):
        ids = rng.integers(0, 20, 100)
        batches.append(persia.Batch.from_columns(schema, {"a": ids, "click": ids % 2 == 0, "buy": ids % 3 == 0}))
    net = Net()
    result = trainer(schema, model=net).fit(batches)
    assert net.asked == 50
    assert result.progressive.labels["click"].auc > 0.8
    assert result.progressive.labels["buy"].auc > 0.8


def test_a_bad_batch_leaves_the_trainer_usable():
    data = reader()
    t = trainer(data.schema)
    batches = list(data)
    bad = persia.Batch({}, batches[0].dense, batches[0].labels)
    with pytest.raises(DataError):
        t.fit([batches[0], bad])
    assert t.global_step == 1
    assert t.fit(batches[:3], epochs=1).global_step >= 1


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    data = reader(12_000)
    trainer(data.schema, log_dir=str(tmp_path)).fit(data)
    assert list(tmp_path.glob("events.*"))


def test_options_are_checked():
    for wrong in ({"precision": "fp8"}, {"accumulation_steps": 0}, {"clip_norm": -1.0}, {"seed": -1}, {"seed": 1.5}):
        with pytest.raises(ConfigError):
            persia.TrainerOptions(**wrong)
    schema = reader().schema
    for wrong in ({"checkpoint_every_steps": 5}, {"device": "banana"}, {"device": "meta"}):
        with pytest.raises(ConfigError):
            trainer(schema, **wrong)
    with pytest.raises(ConfigError, match="optimizer"):
        trainer(schema, optimizer=lambda p: None)
    for wrong in ({"epochs": 0}, {"epochs": None}, {"epochs": True}, {"max_steps": -3}):
        with pytest.raises(ConfigError):
            trainer(schema).fit(reader(), **wrong)


def test_after_a_finished_fit_the_next_one_trains_other_data():
    t = trainer(reader().schema)
    assert t.fit(reader(2_000)).steps == 10
    assert t.fit(reader(1_000)).steps == 5
    batches = iter(list(reader(1_400)))
    assert t.fit(batches, max_steps=3).steps == 3
    assert t.fit(batches).steps == 4


def test_an_unfinished_prediction_leaves_everything_as_it_was():
    data = reader()
    t = trainer(data.schema)
    next(t.predict(data))
    assert torch.is_grad_enabled()
    assert t.model.training
    assert t.fit(data, max_steps=2).steps == 2


def test_an_error_keeps_network_and_embeddings_in_step():
    data = reader()
    t = trainer(data.schema, accumulation_steps=3)
    batches = list(data)
    bad = persia.Batch({}, batches[0].dense, batches[0].labels)
    before = [p.clone() for p in t.model.parameters()]
    with pytest.raises(DataError):
        t.fit([batches[0], batches[1], bad])
    assert t.global_step == 1
    assert not all(torch.equal(a, b) for a, b in zip(before, t.model.parameters(), strict=True))
    assert all(p.grad is None for p in t.model.parameters())
    assert t.metrics.rows == 400


def test_a_bad_batch_changes_neither_store_nor_model():
    data = reader()
    t = trainer(data.schema)
    t.fit(data, max_steps=3)
    batches = list(data)
    bad = persia.Batch(batches[0].id_features, batches[0].dense * np.nan, batches[0].labels)
    before = ([p.clone() for p in t.model.parameters()], rows_of(t))
    with pytest.raises(DataError, match="dense"):
        t.fit([bad])
    assert all(torch.equal(a, b) for a, b in zip(before[0], t.model.parameters(), strict=True))
    for a, b in zip(before[1], rows_of(t), strict=True):
        np.testing.assert_array_equal(a, b)


def rows_of(t):
    server = t.embeddings.connection.servers[0]
    return [chunk.arrays[name] for chunk in server.export_rows() for name in sorted(chunk.arrays)]


def without_labels(batches):
    for batch in batches:
        yield persia.Batch(batch.id_features, batch.dense, np.zeros((len(batch), 0), np.float32), batch.day)


def test_data_without_labels_are_predicted_but_not_evaluated():
    data = reader(1_000)
    t = trainer(data.schema)
    t.fit(data)
    with_labels = np.concatenate(list(t.predict(data)))
    np.testing.assert_array_equal(np.concatenate(list(t.predict(without_labels(data)))), with_labels)
    before = t.embeddings.statistics()
    with pytest.raises(DataError, match=r"no labels.*`predict`") as raised:
        t.evaluate([*list(data)[:2], *without_labels(data)])
    assert raised.value.fields["batch"] == 2
    assert t.embeddings.statistics() == before
    assert t.evaluate(data).rows == 1_000


class Diverging(torch.nn.Module):
    """Logits, or the loss alone, are not finite from one call on, in training or in evaluation."""

    def __init__(self, at, bad, in_loss):
        super().__init__()
        self.head = torch.nn.Linear(16, 1)
        self.at, self.bad, self.in_loss = at, bad, in_loss
        self.calls = {True: 0, False: 0}

    @property
    def diverged(self):
        return self.calls[self.training] > self.at

    def forward(self, dense, embeddings):
        self.calls[self.training] += 1
        logits = self.head(embeddings["id_0"])
        return logits * self.bad if self.diverged and not self.in_loss else logits

    def loss(self, logits, labels):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss * self.bad if self.diverged and self.in_loss else loss


@pytest.mark.parametrize("in_loss", [False, True], ids=["logits", "loss"])
@pytest.mark.parametrize("at", [0, 7, 19], ids=["first", "middle", "last"])
@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_model_that_diverges_is_reported_with_its_batch(tmp_path, in_loss, at, accumulation):
    data, bad = reader(), float("inf" if (in_loss + at // 7 + accumulation // 3) % 2 else "nan")  # Both with each.
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 1, "accumulation_steps": accumulation}
    t = trainer(data.schema, model=Diverging(at, bad, in_loss), **options)
    what = "the loss is" if in_loss else "of 200 logits"
    with pytest.raises(
        DivergedError, match=rf"step {at // accumulation + 1} \(batch {at} of epoch 0.*{what}"
    ) as raised:
        t.fit(data)
    assert raised.value.fields == {"step": at // accumulation + 1, "batch": at, "epoch": 0}
    assert t.position == at + 1
    # Only what was trained before is in a checkpoint.
    steps = [entry.step for entry in persia.checkpoint.list_checkpoints(str(tmp_path))]
    assert max(steps, default=0) <= at // accumulation
    assert bool(steps) == (at >= accumulation)


def test_an_evaluation_names_the_batch_with_non_finite_logits():
    data = reader(1_000)
    t = trainer(data.schema, model=Diverging(3, float("nan"), in_loss=False))
    with pytest.raises(DivergedError, match="Batch 3 of the data to evaluate: 200 of 200"):
        t.evaluate(data)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_that_overflows_in_fp16_keeps_the_schedule(clip):
    data = reader()
    schedule = persia.Schedule(warmup_steps=100)
    t = trainer(data.schema, precision="fp16", schedule=schedule, clip_norm=clip)
    t.step.scaler.load_state_dict(t.step.scaler.state_dict() | {"scale": 2.0**28})
    result = t.fit(data)  # A warning of PyTorch's would be an error.
    updates = next(iter(t.step.optimizer.state.values()))["step"].item()
    assert 0 < updates < result.steps == 20
    assert t.step.scheduler.last_epoch == updates
    assert t.step.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * schedule.factor(int(updates)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_cuda_trains(precision):
    data = reader(20_000)
    result = trainer(data.schema, device="cuda", precision=precision, mode=Hybrid(4, warmup=0)).fit(data)
    full = trainer(data.schema, device="cpu", mode=Hybrid(4, warmup=0)).fit(reader(20_000))
    assert result.progressive.auc == pytest.approx(full.progressive.auc, abs=0.01)


def test_divergence_is_reported_with_its_batch_in_token_modes():
    data = reader()
    t = trainer(data.schema, model=Diverging(7, float("nan"), False), mode=persia.modes.Gba(400))
    with pytest.raises(DivergedError, match=r"batch 7 of epoch 0") as raised:
        t.fit(data)
    assert raised.value.fields["batch"] == 7
