"""Importance of features: what a metric loses without them."""

import dataclasses

import msgspec
import numpy as np
import pytest
import torch
from sklearn.metrics import mean_squared_error, ndcg_score, roc_auc_score

import persia
from persia.batching.batch import Batch
from persia.dashboard.report import report
from persia.errors import ConfigError, DataError, DivergedError
from persia.metrics import watched_metric
from persia.modes import Sync
from persia.optim import Adagrad
from persia.schema import IdFeature, Label, ListwiseSoftmax
from persia.telemetry.importance import Importance
from persia.telemetry.run_record import read_run
from persia.testing import Threads

SCHEMA = persia.Schema(
    [
        IdFeature("decides", dim=4),
        IdFeature("copy", dim=4),
        IdFeature("noise", dim=4),
        IdFeature("unused", dim=4),
    ],
    ["number"],
    labels=["click"],
)
USED = ("decides", "copy", "noise")


class Network(torch.nn.Module):
    """A linear network that leaves out the feature `unused`."""

    def __init__(self, schema=SCHEMA, used=USED):
        super().__init__()
        self.used = used
        self.linear = torch.nn.Linear(4 * len(used) + schema.dense_width, schema.outputs)

    def forward(self, dense, embeddings):
        return self.linear(torch.cat([dense, *(embeddings[name] for name in self.used)], dim=1))


def columns(rows, seed):
    rng = np.random.default_rng(seed)
    user = rng.integers(0, 30, rows)
    other = rng.integers(0, 30, rows)
    number = rng.normal(size=rows).astype(np.float32)
    logit = 2.0 * (user % 3 - 1) + 0.5 * (other % 2) + number
    return {
        "decides": user,
        "copy": other,
        "noise": rng.integers(0, 20, rows),
        "unused": rng.integers(0, 9, rows),
        "number": number,
        "click": (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.float32),
    }


def batches(count=20, rows=100, seed=0, schema=SCHEMA, **more):
    raw = columns(count * rows, seed) | more
    whole = Batch.from_columns(schema, raw)
    return [whole.slice(start, start + rows) for start in range(0, len(whole), rows)]


def make_trainer(model=None, schema=SCHEMA, cluster=None, **options):
    torch.manual_seed(0)
    return persia.Trainer(
        model or Network(schema),
        schema,
        optimizer=lambda p: torch.optim.Adam(p, 1e-2),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


@pytest.fixture(scope="module")
def trained():
    t = make_trainer()
    t.fit(batches(100))
    return t


def state_of(t):
    rows = [
        (chunk.table, sorted(zip(chunk.arrays["ids"].tolist(), map(bytes, chunk.arrays["embeddings"]), strict=True)))
        for chunk in t.embeddings.connection.servers[0].export_rows()
    ]
    return sorted(rows), {n: v.numpy().tobytes() for n, v in t.model.state_dict().items()}, t.model.training


def named(result):
    return {each.name: each for each in result.features}


def test_the_feature_that_decides_comes_first(trained):
    test = batches(5, 1_000, seed=1)
    result = trained.importance(test)
    assert [each.name for each in result.features[:3]] == ["decides", "number", "copy"]
    found = named(result)
    for lost in (found["decides"].permuted, found["number"].permuted, found["decides"].emptied):
        assert lost.low > 0.02
    for lost in (found["noise"].permuted, found["noise"].emptied):
        assert lost.low < 0 < lost.high
        assert abs(lost.loss) < 0.01
    assert (result.metric, result.rows, result.repeats) == ("auc", 5_000, 5)
    assert result.step == trained.global_step
    assert result.value == trained.evaluate(test).auc


def test_a_feature_that_the_model_does_not_use_loses_nothing(trained):
    found = named(trained.importance(batches(5, seed=1)))["unused"]
    zero = {"loss": 0.0, "low": 0.0, "high": 0.0}
    assert msgspec.to_builtins(found) == {
        "name": "unused", "features": ["unused"], "permuted": zero, "emptied": zero
    }  # fmt: skip


def test_a_redundant_feature_loses_little():
    data, test = columns(10_000, 0), columns(5_000, 1)
    data["copy"], test["copy"] = data["decides"], test["decides"]
    t, alone = make_trainer(), make_trainer(Network(used=("decides", "noise")))
    for each in (t, alone):
        each.fit([Batch.from_columns(SCHEMA, data).slice(i, i + 100) for i in range(0, 10_000, 100)])
    rows = [Batch.from_columns(SCHEMA, test)]
    both, one = (named(each.importance(rows)) for each in (t, alone))
    assert both["decides"].permuted.loss < 0.8 * one["decides"].permuted.loss
    assert both["decides"].emptied.loss < 0.2 * one["decides"].emptied.loss  # The other one still tells it.


def test_the_model_and_the_store_are_unchanged(trained):
    before, test = state_of(trained), batches(5, seed=1)
    scores = [part.tobytes() for part in trained.predict(test)]
    trained.importance([dataclasses.replace(b, dense=b.dense.copy()) for b in test])
    assert state_of(trained) == before
    assert [part.tobytes() for part in trained.predict(test)] == scores


def test_losses_are_those_of_permuted_columns(trained):
    raw = columns(700, 3)
    result = trained.importance([Batch.from_columns(SCHEMA, raw)], repeats=2, seed=7)
    rng = np.random.default_rng([7, 1])
    orders = [rng.permutation(700) for _ in range(2)]

    def auc(changes):
        (answers,) = trained.predict([Batch.from_columns(SCHEMA, raw | changes)])
        return roc_auc_score(raw["click"], answers[:, 0])

    losses = [auc({}) - auc({"decides": raw["decides"][order]}) for order in orders]
    assert named(result)["decides"].permuted.loss == pytest.approx(np.mean(losses), abs=1e-5)
    without = auc({}) - auc({"decides": [None] * 700})
    assert named(result)["decides"].emptied.loss == pytest.approx(without, abs=1e-5)
    without = auc({}) - auc({"number": np.full(700, raw["number"].mean(dtype=np.float64), np.float32)})
    assert named(result)["number"].emptied.loss == pytest.approx(without, abs=1e-5)


def test_an_interval_has_the_width_of_the_sampling_error(trained):
    """Losses on other rows of the same size lie within the interval, most of them."""
    within = 0
    truth = named(trained.importance(batches(10, 1_000, seed=99), repeats=2))
    for seed in range(10):
        found = named(trained.importance(batches(1, 500, seed=100 + seed), repeats=2))
        for name in ("decides", "number", "noise"):
            lost = found[name].permuted
            within += lost.low <= truth[name].permuted.loss <= lost.high
    assert within >= 0.8 * 30


def test_nn_workers_share_the_passes_and_agree():
    train, test = batches(10), batches(5, seed=1, rows=70)

    def work(member):
        t = make_trainer(cluster=member)
        t.fit(train)
        own = []
        scored = t._components.evaluator.scored

        def counted(data):
            for batch, logits in scored(data):
                own.append(len(batch.labels))
                yield batch, logits

        t._components.evaluator.scored = counted
        return t.importance(test, repeats=2), sum(own)

    results = Threads(nn_workers=2, timeout=60.0).run(work)
    assert results[0][0] == results[1][0]
    passes = 1 + 5 * 3
    assert [rows for _, rows in results] == [passes * 70 * 3, passes * 70 * 2]
    one = make_trainer()
    one.fit(train)
    expected = one.importance(test, repeats=2)
    assert results[0][0].rows == expected.rows == 350


def of_kinds(schema):
    raw = columns(2_000, 0)
    rng = np.random.default_rng(5)
    raw["watch"] = (raw["decides"] % 3 + rng.normal(size=2_000)).astype(np.float32)
    raw["watch"][rng.random(2_000) < 0.2] = np.nan
    raw["genre"] = raw["decides"] % 3
    raw["w"] = rng.choice([0.5, 1, 3], 2_000)
    raw["session"] = rng.integers(0, 100, 2_000)
    return raw, Batch.from_columns(schema, raw)


def test_metrics_are_by_name_weighted_masked_and_by_group():
    schema = persia.Schema(
        SCHEMA.id_features,
        ["number"],
        labels=[Label("watch", "regression", missing="mask"), "click", Label("genre", "multiclass", classes=3)],
        sample_weight="w",
        group="session",
    )
    raw, whole = of_kinds(schema)
    t = make_trainer(schema=schema)
    t.fit([whole.slice(i, i + 100) for i in range(0, 2_000, 100)], epochs=3)
    result = t.importance([whole], repeats=1)
    assert result.metric == "rmse"
    answers = next(iter(t.predict([whole])))
    known = ~np.isnan(raw["watch"])
    error = mean_squared_error(raw["watch"][known], answers[known, 0], sample_weight=raw["w"][known]) ** 0.5
    assert result.value == pytest.approx(error, rel=1e-5)
    assert result.features[0].name == "decides"
    assert result.features[0].permuted.low > 0  # Errors rise: the metric is lost.
    assert t.importance([whole], metric="genre:accuracy", repeats=1).features[0].name == "decides"
    assert t.importance([whole], metric="auc", repeats=1).value == pytest.approx(
        roc_auc_score(raw["click"], answers[:, 1], sample_weight=raw["w"]), abs=1e-5
    )
    ranked = t.importance([whole], metric="click:ndcg@5", repeats=1)
    gains, shares = [], []
    for group in np.unique(raw["session"]):
        rows = raw["session"] == group
        if raw["click"][rows].any():
            gains.append(ndcg_score([raw["click"][rows]], [answers[rows, 1]], k=5) if rows.sum() > 1 else 1.0)
            shares.append(raw["w"][rows].mean())
    assert ranked.value == pytest.approx(np.average(gains, weights=shares), rel=1e-5)
    assert ranked.features[0].permuted.low > 0
    assert (
        t.importance([whole], metric="click:gauc", group_by="noise", repeats=1).value
        != t.importance([whole], metric="click:gauc", repeats=1).value
    )
    assert t.importance([whole], metric="click:calibration", repeats=1).features[0].permuted.loss is not None
    with pytest.raises(DataError, match="The rows have no groups, as gauc needs"):
        t.importance([dataclasses.replace(whole, groups=None)], metric="gauc", repeats=1)


@pytest.mark.parametrize(
    ("label", "group", "metric"),
    [
        (Label("genre", "multiclass", classes=3), None, "log_loss"),
        (Label("genre", "ordinal", classes=3), None, "log_loss"),
        (Label("genre", "regression", loss=ListwiseSoftmax()), "session", "ndcg"),
    ],
)
def test_the_default_metric_is_that_of_keep_best(label, group, metric):
    schema = persia.Schema(SCHEMA.id_features, ["number"], labels=[label], group=group)
    _, whole = of_kinds(schema)
    t = make_trainer(schema=schema)
    t.fit([whole.slice(i, i + 100) for i in range(0, 2_000, 100)])
    result = t.importance([whole], repeats=1)
    assert result.metric == watched_metric(schema).name == metric
    assert result.value == pytest.approx(watched_metric(schema).figure(t.evaluate([whole])), rel=1e-5)


def test_the_first_rows_are_used_and_a_stream_is_not_read_on(trained):
    drawn = []

    def endless():
        for seed in range(1_000):
            drawn.append(seed)
            yield batches(1, seed=seed)[0]

    result = trained.importance(endless(), rows=250, repeats=1)
    assert result.rows == 250
    assert len(drawn) == 3
    short = trained.importance(
        batches(1, seed=0) + batches(1, seed=1) + [batches(1, seed=2)[0].slice(0, 50)], repeats=1
    )
    assert short == result


def test_seeds_repeat_and_differ(trained):
    test = batches(5, seed=1)
    first, again, other = (trained.importance(test, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert named(first)["decides"] != named(other)["decides"]


def test_arguments_and_data_are_checked(trained):
    test = batches(2)
    for arguments, match in (({"rows": 1}, "rows"), ({"repeats": 0}, "repeats"), ({"seed": -1}, "seed")):
        with pytest.raises(ConfigError, match=match):
            trained.importance(test, **arguments)
    with pytest.raises(ConfigError, match=r"Invalid metric = 'rmse': click has auc, log_loss"):
        trained.importance(test, metric="rmse")
    with pytest.raises(ConfigError, match=r"Invalid metric = 'ndcg@5'.* need Schema\(group"):
        trained.importance(test, metric="ndcg@5")
    with pytest.raises(ConfigError, match="no ID-type feature 'shop'"):
        trained.importance(test, metric="gauc", group_by="shop")
    with pytest.raises(DataError, match=r"Batch 1 .*has no labels"):
        trained.importance([test[0], dataclasses.replace(test[1], labels=np.empty((100, 0), np.float32))])
    with pytest.raises(DataError, match="no batch was scored"):
        trained.importance([])
    with pytest.raises(DataError, match=r"a single persia\.Batch"):
        trained.importance(test[0])


def test_logits_that_are_not_finite_name_the_feature():
    class Strict(Network):
        def forward(self, dense, embeddings):
            return super().forward(dense, embeddings) / (embeddings["copy"].abs().sum(1, keepdim=True) > 0)

    t = make_trainer(Strict())
    t.fit(batches(50))
    with pytest.raises(DivergedError, match=r"The rows without 'copy': \d+ of 200 logits are not finite"):
        t.importance(batches(2))


def test_the_result_is_a_table_and_a_chart_of_the_report(tmp_path):
    pytest.importorskip("tensorboard", reason='TensorBoard is not installed: pip install "persia-recsys[tensorboard]"')
    t = make_trainer(log_dir=str(tmp_path))
    t.importance(batches(1), repeats=1)  # Without a record nothing is written.
    assert list(tmp_path.iterdir()) == []
    t.fit(batches(20))
    result = t.importance(batches(5, seed=1))
    lines = str(result).splitlines()
    assert f"AUC {result.value:.4f} on 500 rows at step 20" in lines[0]
    assert "decides" in next(line for line in lines if f"{result.features[0].permuted.loss:+.4g}" in line)
    assert msgspec.json.decode(msgspec.json.encode(result), type=Importance) == result
    record = read_run(tmp_path)
    assert record.importance == result
    page = report(record, "run")
    assert "Importance: AUC" in page
    assert page.count('class="dot c1"') >= 5
    t.fit(batches(20), again=True)
    assert read_run(tmp_path).importance == result  # It says of which step it is.


def test_a_metric_without_both_classes_is_none(trained):
    raw = columns(100, 0) | {"click": np.zeros(100)}
    result = trained.importance([Batch.from_columns(SCHEMA, raw)])
    assert result.value is None
    assert result.features[0].permuted == msgspec.convert({"loss": None, "low": None, "high": None}, type(
        result.features[0].permuted
    ))  # fmt: skip
    assert "none" in str(result)


def width(t, raw):
    lost = named(t.importance([Batch.from_columns(t.schema, raw)], metric="auc", repeats=1))["decides"].emptied
    return lost.high - lost.low


def test_a_bootstrap_sample_has_the_weights_and_whole_groups():
    schema = persia.Schema(SCHEMA.id_features, ["number"], ["click"], sample_weight="w", group="session")
    t = make_trainer(schema=schema)
    rows = columns(300, 1) | {"w": np.ones(300), "session": np.arange(300)}
    t.fit([Batch.from_columns(schema, columns(5_000, 0) | {"w": np.ones(5_000), "session": np.arange(5_000)})] * 20)
    alone = width(t, rows)
    more = columns(4_700, 2) | {"w": np.zeros(4_700), "session": np.arange(300, 5_000)}
    weightless = {name: np.concatenate([rows[name], more[name]]) for name in rows}
    assert 0.6 * alone < width(t, weightless) < 1.7 * alone  # Rows without weight add no certainty,
    repeated = {name: np.repeat(values, 16) for name, values in rows.items()}
    assert 0.6 * alone < width(t, repeated) < 1.7 * alone  # nor do more rows of the same groups.
    assert width(t, repeated | {"session": np.arange(4_800)}) < 0.5 * alone
