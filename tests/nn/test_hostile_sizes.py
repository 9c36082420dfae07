"""Sizes that nothing can hold, or that types of other widths would cut off."""

from __future__ import annotations

import numpy as np
import pytest

from persia.batching.batch import Batch
from persia.checkpoint import ReshardOptions, reshard
from persia.errors import CheckpointError, ConfigError, DataError
from persia.modes import Sync
from persia.nn import EmbeddingCollection
from persia.optim import SGD
from persia.schema import IdFeature, Schema, Table
from support.several_ps import Several


def collection(schema, **options):
    return EmbeddingCollection(schema, optimizer=SGD(1.0), mode=Sync(), **options)


def test_sequences_that_do_not_fit_name_their_shape_and_bytes():
    """256 TiB are more than a process can address, however the kernel counts memory."""
    features = [IdFeature("short", dim=2), IdFeature("history", dim=4096, pooling=None, max_length=1 << 20)]
    schema = Schema(features)
    columns = {"short": np.arange(16384), "history": [[1, 2]] * 16384, "label": np.zeros(16384)}
    embeddings = collection(schema)
    expected = r"The largest, of shape \[16384, 1048576, 4096\], has 268,435,456 MiB. Lower the max_length"
    with pytest.raises(DataError, match=expected) as caught:
        for batch in embeddings.prefetch([Batch.from_columns(schema, columns)]):
            embeddings(batch)
    assert caught.value.fields["shape"] == (16384, 1048576, 4096)


@pytest.mark.parametrize("count", [65_536, 65_537])
@pytest.mark.parametrize("cluster", [None, Several(3)])
def test_ids_at_the_limit_of_narrow_indices_reach_their_rows(count, cluster):
    schema = Schema([IdFeature("item", dim=1)])
    embeddings = collection(schema, cluster=cluster)
    ids = np.arange(count, dtype=np.uint64) * np.uint64(2**47 + 1)
    values = np.arange(count, dtype=np.float32)[:, None]
    embeddings.set_rows("item", ids, values)
    columns = {"item": ids[::-1].copy(), "label": np.zeros(count)}
    for batch in embeddings.prefetch([Batch.from_columns(schema, columns)]):
        found = embeddings(batch)["item"]
        np.testing.assert_array_equal(found.detach().numpy(), values[::-1])
        (found * found.detach()).sum().backward()
    np.testing.assert_array_equal(embeddings.rows("item", ids).values, np.zeros((count, 1)))


@pytest.mark.parametrize("capacity", [0, -1, 2**48 + 1, 1e6, True, "1000"])
def test_capacities_out_of_range_name_the_range(capacity):
    with pytest.raises(ConfigError, match=r"capacity = .*; expected a whole number from 1 to 281474976710656"):
        Table("item", dim=4, capacity=capacity)
    assert Table("item", dim=4, capacity=2**48).capacity == 2**48
    assert Table("item", dim=4).capacity is None


@pytest.mark.parametrize("length", [0, 2**20 + 1, 2.0])
def test_lengths_out_of_range_name_the_range(length):
    with pytest.raises(ConfigError, match=r"max_length = .*; expected a whole number from 1 to 1048576"):
        IdFeature("history", dim=4, max_length=length)


@pytest.mark.parametrize("servers", [0, 4_097])
def test_more_ps_than_an_owner_can_name_are_refused(tmp_path, servers):
    with pytest.raises(CheckpointError, match="expected 1 to 4096"):
        reshard(tmp_path, tmp_path / "other", ReshardOptions(servers))
