"""The bucket map of the PSs changes nothing of a run, and checkpoints load from any map to any map."""

import functools
import logging

import numpy as np
import pytest
import torch
from test_resume import adam, assert_same_rows, model, reader, schema_of

import persia
from persia import batching
from persia.checkpoint import CheckpointReader, ReshardOptions, compact, reshard
from persia.modes import Sync
from persia.optim import Adagrad
from persia.publish import PublishOptions, follow
from persia.serve import Predictor
from persia.trainer.loading import load_partitions
from persia.types import BucketMap
from support.several_ps import Several

EVEN = BucketMap.even(2)
MOVED = BucketMap.even(3).moved(2)
EMPTIED = BucketMap.even(4).reassigned(7, 3).emptied([1])
ONE = BucketMap.even(1)


def with_map(schema, buckets, **options):
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=Several(buckets.servers, buckets),
        options=persia.TrainerOptions(progress=False, **options),
    )


def trained(buckets, steps=25, schema=None, **options):
    run = with_map(schema or reader().schema, buckets, **options)
    torch.manual_seed(1)
    run.fit(reader(), epochs=2, max_steps=steps)
    return run


@functools.cache
def never_stopped():
    return trained(ONE, 40)


def rows_of(path):
    found = {}
    opened = CheckpointReader(path)
    for table in opened.manifest.tables:
        for _, arrays in opened.rows(table):
            columns = zip(arrays["ids"].tolist(), arrays["embeddings"].tolist(), arrays["state"].tolist(), strict=True)
            found.update({(table, id_): row for id_, *row in columns})
    return found


def assert_owned(run, buckets):
    """Each PS has the ids of its buckets, and only these."""
    for number, server in enumerate(run.embeddings.connection.servers):
        for chunk in server.export_rows():
            assert (batching.owners(chunk.table, chunk.arrays["ids"], buckets) == number).all()


@pytest.mark.parametrize(("before", "after"), [(ONE, MOVED), (MOVED, EVEN), (EVEN, EMPTIED), (EMPTIED, EMPTIED)])
def test_a_run_goes_on_with_another_map(tmp_path, before, after):
    whole, first = never_stopped(), trained(before)
    first.save(str(tmp_path))
    assert CheckpointReader(tmp_path).manifest.buckets == before
    assert_owned(first, before)
    second = with_map(reader().schema, after)
    second.load(str(tmp_path))
    second.fit(reader(), epochs=2)
    assert_owned(second, after)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    for run, name in ((whole, "one"), (second, "two")):
        run.save(str(tmp_path / name))
    assert rows_of(tmp_path / "one") == rows_of(tmp_path / "two")


def test_resharding_and_compacting_record_the_map(tmp_path):
    first = trained(MOVED, 10, checkpoint_dir=str(tmp_path / "a"), checkpoint_every_steps=5, checkpoint_increments=1)
    assert CheckpointReader(tmp_path / "a").manifest.base is not None
    rows = rows_of(tmp_path / "a")
    compact(tmp_path / "a")
    reshard(tmp_path / "a", tmp_path / "b", ReshardOptions(3))
    for name, expected in (("a", MOVED), ("b", BucketMap.even(3))):
        assert CheckpointReader(tmp_path / name).manifest.base is None
        assert CheckpointReader(tmp_path / name).manifest.buckets == expected
        assert rows_of(tmp_path / name) == rows
    assert_owned(first, MOVED)


def test_counts_of_ids_are_restored_by_ps_only_if_each_owns_the_same_ids(tmp_path, caplog):
    schema = schema_of()
    first = trained(MOVED, 9, schema)
    first.save(str(tmp_path))
    again = with_map(schema, BucketMap(MOVED.version + 5, 2, MOVED.runs))  # The version is that of another run.
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        again.load(str(tmp_path))
        assert not caplog.text
        assert_same_rows(first, again)
        with_map(schema, EVEN).load(str(tmp_path))
        assert "another number, bucket map, capacity or admission" in caplog.text


def test_rows_are_read_and_set_by_id():
    run = trained(EMPTIED, 5)
    embeddings, ids = run.embeddings, np.arange(500, dtype=np.uint64)
    found = embeddings.rows("id_1", ids, state=True)
    assert 0 < found.found.sum() < len(ids)
    np.testing.assert_array_equal(embeddings._rows.contains({"id_1": ids})["id_1"], found.found)
    embeddings.set_rows("id_1", ids, np.full((len(ids), found.values.shape[1]), 0.5, np.float32))
    assert_owned(run, EMPTIED)
    changed = embeddings.rows("id_1", ids)
    assert changed.found.all()
    assert (changed.values == 0.5).all()


def test_lost_partitions_are_loaded_by_the_map_of_the_run(tmp_path):
    """The checkpoint has another map: rows of the lost PS come from several of its PSs."""
    trained(MOVED, 10).save(str(tmp_path))
    run = with_map(reader().schema, EMPTIED)
    servers = run.embeddings.connection.servers
    load_partitions(servers, run.schema, str(tmp_path), [0, 2])
    assert_owned(run, EMPTIED)
    counts = [sum(t["rows"] for t in server.statistics().values()) for server in servers]
    assert counts[1] == counts[3] == 0
    load_partitions(servers, run.schema, str(tmp_path), [3])
    assert sum(t["rows"] for server in servers for t in server.statistics().values()) == len(rows_of(tmp_path))


def test_published_rows_are_served_by_the_map_of_the_epoch(tmp_path):
    url = str(tmp_path)
    run = trained(EMPTIED, 10, publish=PublishOptions(url))
    follower = follow(url)
    updates = list(follower.updates())
    assert {update.buckets for update in updates} == {EMPTIED}
    batch = next(iter(reader()))
    with Predictor(url, model(run.schema)) as predictor:
        expected = next(iter(run.predict([batch])))
        np.testing.assert_allclose(predictor.predict(batch).probabilities.reshape(expected.shape), expected, atol=1e-6)
