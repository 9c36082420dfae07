"""Drift between what a run trains and what a server is asked, over the log of changes."""

from __future__ import annotations

import dataclasses
import os
import time

import msgspec
import numpy as np
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.batching.sampling import EVERY, ROWS, is_sampled, sampled_ids, sampled_rows
from persia.errors import DataError, PublishError
from persia.metrics import SIGNIFICANT, DriftCounts, count_ids
from persia.publish import PublishOptions, follow
from persia.schema import DenseFeature, IdFeature, Label, Schema
from persia.serve import Predictor, ServeOptions
from persia.serve.ranking import expanded
from persia.serve.serving_drift import MAX_WAITING, ServingDrift
from persia.trainer.drift_recorder import DriftRecorder
from support.several_ps import Several

SCHEMA = Schema([IdFeature("item", dim=4), IdFeature("tags", dim=4)], dense_features=["age"], labels=["click"])


def batch(n=100, seed=0, shift=0.0):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, 3, n)
    tags = IdColumn(rng.integers(0, 40, lengths.sum()).astype(np.uint64), np.concatenate([[0], np.cumsum(lengths)]))
    dense = rng.normal(shift, 1, (n, 1)).astype(np.float32)
    item = IdColumn((rng.zipf(1.5, n) % 1000).astype(np.uint64))
    return Batch({"item": item, "tags": tags}, dense, (dense > shift).astype(np.float32))


def trained(url, batches, cluster=None, **options):
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(SCHEMA, hidden=(4,)),
        SCHEMA,
        optimizer=lambda params: torch.optim.SGD(params, 1e-6),  # Predictions stay as they are.
        embedding_optimizer=persia.optim.Adagrad(lr=1e-6),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(url), seconds=0.05), **options),
    )
    trainer.fit(batches)
    return trainer


def expected(batches):
    counts = DriftCounts(["item", "tags"], ["age"], ["click"])
    for number, each in enumerate(batches):
        if number % EVERY == 0:
            counts.add_rows(each.dense, count_ids([(c.values, c.offsets) for c in each.id_features.values()]))
    return counts


@pytest.mark.parametrize("servers", [1, 2])
def test_a_run_publishes_its_distributions_and_a_server_compares(tmp_path, servers):
    url = tmp_path / "log"
    batches = [batch(800, seed) for seed in range(2 * EVERY + 1)]
    trained(url, batches, Several(servers) if servers > 1 else None)
    follower = follow(str(url))
    assert follower.drift() is None  # It has no epoch yet.
    list(follower.updates())
    found, direct = follower.drift(), expected(batches).reference()
    assert found.rows == direct.rows == 2400
    assert (found.ids, found.lengths, found.dense) == (direct.ids, direct.lengths, direct.dense)
    assert sum(found.predictions["click"].counts) == 2400

    options = ServeOptions(poll_seconds=3600.0)
    with Predictor(str(url), persia.nn.models.FFNN(SCHEMA, hidden=(4,)), options) as predictor:
        assert predictor.state().drift == {}
        for seed in range(100, 104):
            predictor.predict(batch(800, seed))
        predictor.refresh()
        drift = predictor.state().drift
        assert set(drift) == {"item", "item.length", "tags", "tags.length", "age", "click.prediction"}
        assert max(drift.values()) < 0.1
        for seed in range(100, 108):
            predictor.predict(batch(800, seed, shift=4.0))
        predictor.refresh()
        drift = predictor.state().drift
        assert min(drift["age"], drift["click.prediction"]) > SIGNIFICANT
        assert max(drift["item"], drift["tags"], drift["tags.length"]) < 0.1


def ranking(seed, shift=0.0, items=5):
    """One user with tags and an age, and items."""
    rows = batch(items, seed, shift)
    user = Batch({"tags": rows.id_features["tags"].slice(0, 1)}, rows.dense[:1], rows.labels[:1])
    return user, Batch({"item": rows.id_features["item"]}, np.full((items, 1), np.nan, np.float32), rows.labels)


def test_a_server_that_ranks_compares_too(tmp_path):
    url = tmp_path / "log"
    trained(url, [batch(800, seed) for seed in range(2 * EVERY + 1)])
    options = ServeOptions(poll_seconds=3600.0)
    with Predictor(str(url), persia.nn.models.FFNN(SCHEMA, hidden=(4,)), options) as predictor:

        def rank(seeds, shift):
            for number, seed in enumerate(seeds, 1):
                predictor.rank(*ranking(seed, shift))
                if number % MAX_WAITING == 0:
                    predictor.refresh()
            predictor.refresh()
            return predictor.state().drift

        drift = rank(range(100, 1164), 0.0)
        assert set(drift) == {"item", "item.length", "tags", "tags.length", "age", "click.prediction"}
        assert max(drift.values()) < 0.1
        drift = rank(range(1164, 2228), 4.0)
        assert min(drift["age"], drift["click.prediction"]) > SIGNIFICANT
        assert max(drift["item"], drift["tags"], drift["tags.length"]) < 0.1


def test_a_ranking_counts_as_one_of_its_rows():
    user, items = ranking(0, items=3)
    logits = np.array([[0.5], [1.5], [2.5]], np.float32)
    rows = expanded(SCHEMA, user, items)
    wanted = []
    for row in range(3):
        alone = ServingDrift(SCHEMA)
        alone.note(rows.slice(row, row + 1), logits[row : row + 1])
        alone.count()
        wanted.append(alone._current.state_dict())
    seen = set()
    for _ in range(60):  # None of the items is left out.
        drift = ServingDrift(SCHEMA)
        drift.note_ranking(user, items, logits)
        drift.count()
        found = drift._current.state_dict()
        (row,) = [row for row, state in enumerate(wanted) if all(np.array_equal(state[k], found[k]) for k in found)]
        seen.add(row)
    assert seen == {0, 1, 2}


def test_a_damaged_file_is_an_error_of_its_own(tmp_path):
    url = tmp_path / "log"
    trained(url, [batch(800, seed) for seed in range(2 * EVERY)])
    (epoch,) = os.listdir(url)
    path = url / epoch / "drift.json"
    whole = msgspec.json.decode(path.read_bytes())
    follower = follow(str(url))
    list(follower.updates())
    for change in ({"run": "0" * 32}, {"epoch": 7}, {"training": 3}, {"more": 1}):
        path.write_bytes(msgspec.json.encode({**whole, **change}))
        with pytest.raises(PublishError):
            follower.drift()
        with Predictor(str(url), persia.nn.models.FFNN(SCHEMA, hidden=(4,))) as predictor:  # Rows are served anyway.
            assert predictor.state().drift == {}
            assert len(predictor.predict(batch()).probabilities) == 100


def test_nothing_is_counted_without_publishing():
    trainer = persia.Trainer(
        persia.nn.models.FFNN(SCHEMA, hidden=(4,)),
        SCHEMA,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False),
    )
    assert trainer._components.publishing.drift is None
    trainer.fit([batch()])


def test_samples_of_batches():
    assert [number for number in range(40) if is_sampled(number)] == [0, 17, 34]
    large = batch(3 * ROWS)
    assert np.array_equal(sampled_rows(large.dense), large.dense[::3])
    part = large.take(np.arange(0, len(large), 3))
    columns = [(part.id_features[name].values, part.id_features[name].offsets) for name in ("tags", "item")]
    assert np.array_equal(sampled_ids(large, ["tags", "item"]), count_ids(columns))


def test_windows_forget_and_batches_that_wait_are_few():
    drift = ServingDrift(SCHEMA, window=2000)
    drift.load(expected([batch(2000)]).reference())
    drift.load(None)
    logits = np.zeros((1000, 1), np.float32)
    for seed in range(4):
        drift.note(batch(1000, seed, shift=9.0), logits)
        drift.count()
    assert drift.result["age"] > SIGNIFICANT
    for seed in range(4):
        drift.note(batch(1000, seed), logits)
        drift.count()
    assert drift.result["age"] < 0.1
    for seed in range(2 * MAX_WAITING):
        drift.note(batch(10, seed), logits[:10])
    before = drift._current.rows
    drift.count()
    assert drift._current.rows <= before + 10 * MAX_WAITING or drift._current.rows <= 10 * MAX_WAITING


class Changes:
    """Remembers the rows that it is told of."""

    def __init__(self):
        self.tables = set()

    def note_changes(self, table, ids, removed):
        if len(ids):
            self.tables.add(table)

    def note_all(self):
        pass


def test_distributions_and_changes_are_there_while_a_run_goes_on(tmp_path):
    url = tmp_path / "log"
    told = Changes()

    def batches(predictor):
        deadline = time.monotonic() + 60
        seed = 0
        while not (list(url.glob("*/drift.json")) and told.tables == {"item", "tags"}):
            assert time.monotonic() < deadline
            yield batch(800, seed)
            seed += 1
            if predictor.current is None and list(url.glob("*/network/*.json")):
                predictor.start()

    class Started:
        current = None

        def start(self):
            self.current = Predictor(str(url), persia.nn.models.FFNN(SCHEMA, hidden=(4,)), options)
            self.current.listen(told)
            self.current.start()

    options, predictor = ServeOptions(poll_seconds=0.05), Started()
    trained(url, batches(predictor))
    predictor.current.close()


def test_predictions_of_other_kinds_drift_by_their_values():
    labels = ["click", Label("watch", "count"), Label("genre", "multiclass", classes=3)]
    schema = msgspec.structs.replace(SCHEMA, labels=labels)
    rng = np.random.default_rng(0)
    trained_logits = rng.normal(size=(3000, 5)).astype(np.float32)
    recorder = DriftRecorder(schema)
    counted = batch(3000)
    recorder.read(0, dataclasses.replace(counted, labels=np.zeros((3000, 3), np.float32)))
    recorder.scored(trained_logits)
    reference = recorder.reference()
    assert min(reference.predictions["watch"].edges) > 0  # Values, not their logarithms.
    assert reference.predictions["genre"].edges[0] == 0

    def drift(logits):
        serving = ServingDrift(schema)
        serving.load(reference)
        serving.note(counted, logits)
        serving.count()
        return {label: serving.result[f"{label}.prediction"] for label in ("click", "watch", "genre")}

    assert max(drift(trained_logits[::-1]).values()) < 0.1
    moved = trained_logits + np.array([0, 0, 0, 0, 3], np.float32)
    found = drift(moved)
    assert found["genre"] > SIGNIFICANT
    assert max(found["click"], found["watch"]) < 0.1


def test_each_column_of_a_dense_feature_is_counted():
    dense = [DenseFeature("v", size=3), DenseFeature("q", fill=0.0, missing_indicator=True), "lq"]
    schema = Schema([IdFeature("item", dim=4)], dense, ["click"])
    values = np.tile(np.arange(6, dtype=np.float32), (1000, 1))
    rows = Batch({"item": IdColumn(np.arange(1000, dtype=np.uint64))}, values, np.zeros((1000, 1), np.float32))
    recorder, serving = DriftRecorder(schema), ServingDrift(schema)
    for number in range(EVERY + 1):
        recorder.read(number, rows)
    reference = recorder.reference()
    assert [each.edges[0] for each in reference.dense.values()] == list(range(6))
    serving.load(reference)
    serving.note(rows.take(np.arange(1000)), np.zeros((1000, 1), np.float32))
    serving.count()
    assert list(reference.dense) == ["v[0]", "v[1]", "v[2]", "q", "q (missing)", "lq"]
    assert set(serving.result) == {*reference.dense, "item", "item.length"}
    with pytest.raises(DataError, match="3 columns got values with 6"):
        DriftCounts([], schema.dense_names, []).add_rows(values, count_ids([]))
