"""The path of the host and that of a device read the same embeddings."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import persia
from persia import batching
from persia.nn.staging import CpuStaging
from persia.serve.embedding_reader import EmbeddingReader
from persia.serve.row_sources import LocalRows, ServerRows
from persia.store.served import ServedTable
from persia.types import BucketMap

SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", 8, table="items"),
        persia.IdFeature("history", table="items", pooling=None, max_length=4, keep="last"),
        persia.IdFeature("tags", 4, pooling="mean"),
        persia.IdFeature("words", 4, pooling="sqrtn", max_length=2),
        persia.IdFeature("scored", 4, pooling="mean", max_length=3, keep="last", weights="scores"),
    ],
    ["age"],
    tables=[persia.Table("items", 8, dtype="bfloat16")],
)


class DeviceStaging(CpuStaging):
    """Has the tensors in the memory of the host, and says that they are elsewhere."""

    on_host = False


def served(servers):
    """Returns the rows of each PS; every third id has none."""
    random, ids = np.random.default_rng(1), np.arange(0, 300, dtype=np.uint64)
    ids = ids[ids % 3 > 0]
    found = [{name: ServedTable(t.dim) for name, t in SCHEMA.resolved_tables().items()} for _ in range(servers)]
    for name, table in SCHEMA.resolved_tables().items():
        values = random.normal(size=(len(ids), table.dim)).astype(np.float32)
        owners = batching.owners(name, ids, BucketMap.even(servers))
        for server, tables in enumerate(found):
            tables[name].set(ids[owners == server], values[owners == server])
    return LocalRows([ServerRows(tables, 0, 0.0) for tables in found], BucketMap.even(servers))


@pytest.mark.parametrize("servers", [1, 3])
def test_both_paths_read_the_same(servers):
    random, rows = np.random.default_rng(2), served(servers)
    readers = [EmbeddingReader(SCHEMA, rows.buckets, staging, 2) for staging in (CpuStaging(), DeviceStaging())]
    for samples in (7, 7, 20):
        columns = {
            name: [random.integers(0, 300, random.integers(0, 6)) for _ in range(samples)]
            for name in ("history", "tags", "words", "scored")
        }
        columns["scores"] = [random.random(len(each)) for each in columns["scored"]]
        columns |= {"item": random.integers(0, 300, samples), "age": random.random(samples)}
        batch = persia.Batch.from_columns(SCHEMA, columns, require_labels=False)
        (dense, labels, mine), (others, _, theirs) = (reader.read(batch, rows) for reader in readers)
        assert labels.shape == (samples, 0)
        torch.testing.assert_close(dense, others, rtol=0, atol=0)
        for name in ("item", "tags", "words", "scored"):
            torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-6)
        torch.testing.assert_close(mine["history"].values, theirs["history"].values, rtol=0, atol=0)
        assert (mine["history"].mask == theirs["history"].mask).all()
        assert mine["item"].abs().sum() > 0


@pytest.mark.parametrize("staging", [CpuStaging(), DeviceStaging()], ids=["host", "device"])
def test_a_schema_without_id_features_has_no_embeddings(staging):
    schema, rows = persia.Schema([], ["age"], labels=[]), LocalRows([ServerRows({}, 0, 0.0)], BucketMap.even(1))
    batch = persia.Batch.from_columns(schema, {"age": [0.5, 2.0]})
    dense, labels, found = EmbeddingReader(schema, rows.buckets, staging, 1).read(batch, rows)
    assert dense.tolist() == [[0.5], [2.0]]
    assert (labels.shape, found) == ((2, 0), {})


def test_single_ids_are_multiplied_by_their_weights():
    """As quick as rows of single ids are, those with weights are not read that way."""
    schema = persia.Schema([persia.IdFeature("tags", 4, weights="scores"), persia.IdFeature("words", 4)], labels=[])
    plain = persia.Schema([persia.IdFeature("tags", 4), persia.IdFeature("words", 4)], labels=[])
    scores = np.array([0.5, 1, -2, 0], np.float32)
    columns = {"tags": [1, 2, 4, 5], "words": [4, 4, 5, 8], "scores": scores}
    rows = served(1)
    _, _, found = EmbeddingReader(schema, rows.buckets, CpuStaging(), 1).read(
        persia.Batch.from_columns(schema, columns), rows
    )
    _, _, expected = EmbeddingReader(plain, rows.buckets, CpuStaging(), 1).read(
        persia.Batch.from_columns(plain, columns), rows
    )
    assert torch.equal(found["tags"], expected["tags"] * torch.from_numpy(scores)[:, None])
    assert torch.equal(found["words"], expected["words"])
