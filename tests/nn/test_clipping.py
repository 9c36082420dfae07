"""Gradients of all rows of a batch, scaled down to a global norm."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_frozen_tables import batches, schema_of, squares
from test_transfer import Compressing

from persia.errors import ConfigError
from persia.modes import Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.nn.clipping import clipped, clipped_tensors
from persia.optim import SGD
from persia.types import Packed
from support.examples import examples

VALUES = st.floats(width=32)


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(VALUES, min_size=2, max_size=20), st.floats(1e-3, 1e3))
def test_host_and_device_scale_alike(values, limit):
    rows = np.array(values, np.float32).reshape(-1, 1)
    parts = {"a": rows[:1], "b": rows[1:]}
    tensors = clipped_tensors({name: torch.from_numpy(part.copy()) for name, part in parts.items()}, limit)
    packed = clipped(Packed.of(parts, np.float32), limit)
    finite = np.isfinite(rows)
    for name, part in packed.items():
        np.testing.assert_allclose(tensors[name].numpy(), part, rtol=1e-6, atol=1e-44)
    found = packed.buffer.astype(np.float64)
    assert np.isfinite(found[finite[:, 0]]).all()
    norms = [np.linalg.norm(numbers[finite[:, 0]]) for numbers in (rows[:, 0].astype(np.float64), found)]
    np.testing.assert_allclose(norms[1], min(norms[0], limit), rtol=1e-5, atol=1e-38)


UNMOVED = 1e-30


def trained(limit, on_host=True, compressed=False, accumulation_steps=1):
    """All rows after one step, whose rate of 1 moves them by their gradients."""
    embeddings = EmbeddingCollection(
        schema_of(),
        optimizer=SGD(lr=1.0),
        mode=Sync(),
        cluster=Compressing() if compressed else None,
        options=CollectionOptions(clip_embedding_norm=limit, accumulation_steps=accumulation_steps),
    )
    embeddings._expander.on_host = embeddings._transfer._on_host = on_host
    for batch in embeddings.prefetch(batches(accumulation_steps)):
        squares(embeddings, batch).backward()
    ids = np.arange(20, dtype=np.uint64)
    return np.concatenate([embeddings.rows(name, ids).values.ravel() for name in ("fixed", "user", "page")])


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("on_host", [True, False])
def test_all_rows_of_a_batch_move_within_the_norm(on_host, compressed):
    start, free, tight = (trained(limit, on_host, compressed) for limit in (UNMOVED, None, 0.01))
    moved = free - start
    assert np.linalg.norm(moved) > 0.02
    np.testing.assert_allclose(tight - start, 0.01 * moved / np.linalg.norm(moved), atol=2e-5)
    assert np.linalg.norm(tight - start) == pytest.approx(0.01, rel=1e-2)


def test_each_batch_of_an_accumulation_is_clipped_by_itself():
    start, tight = (trained(limit, accumulation_steps=3) for limit in (UNMOVED, 0.01))
    assert 0.011 < np.linalg.norm(tight - start) <= 0.03


@pytest.mark.parametrize("limit", [0, -1.0, float("nan"), "1"])
def test_a_limit_that_is_none_is_refused(limit):
    with pytest.raises(ConfigError, match="clip_embedding_norm"):
        CollectionOptions(clip_embedding_norm=limit)
