"""The update rules in torch give the numbers of the store, to the last bit, on tensors of a CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.nn.row_updates import CORRECTIONS, MOST_UPDATES, RowUpdates
from persia.optim import SGD, Adagrad, Adam, Ftrl, RowwiseAdagrad, Schedule
from persia.ps.table_configs import learning_rate, table_config
from persia.schema import Table
from persia.store import NativeStore, Rows
from support.examples import examples

OPTIMIZERS = [
    SGD(0.1),
    SGD(0.1, momentum=0.9, weight_decay=0.01),
    SGD(0.3, momentum=0.9, clip_row_norm=0.7, decoupled_weight_decay=0.3),
    Adagrad(0.05, initial_accumulator=0.1, weight_decay=0.01),
    Adagrad(0.05, clip_row_norm=3.0, schedule=Schedule(warmup_steps=3)),
    RowwiseAdagrad(0.1),
    RowwiseAdagrad(0.1, weight_decay=0.01, clip_row_norm=0.3),
    RowwiseAdagrad(0.1, decoupled_weight_decay=0.1),
    Adam(0.01),
    Adam(0.01, beta2=0.99, weight_decay=0.1),
    Adam(0.01, beta1=0.0, clip_row_norm=1.0, decoupled_weight_decay=0.1),
    Ftrl(0.1),
    Ftrl(0.1, beta=0.5, l1=0.01, l2=0.1, clip_row_norm=0.5),
]
DIMS = st.integers(1, 40) | st.sampled_from([63, 64, 65, 128, 257])
ODD = [0.0, -0.0, 1.0, 1e-30, -1e-42, 1e19, -3e38, np.nan, np.inf]


def store_of(table, rows, updated=0):
    """Returns a store with rows of ids 0, 1, ..., which have had a number of updates."""
    store = NativeStore(1)
    store.create_table(table_config(table, 7, None))
    ids = np.arange(rows, dtype=np.uint64)
    store.lookup_packed([0], [rows], ids, np.empty(rows * table.dim, np.float32), True)
    if updated:
        before = store.peek(0, ids)[1]
        store.import_rows(0, Rows(*before._replace(update_count=np.full(rows, updated, np.uint32))))
    return store, ids


def read(store, ids):
    """Returns values, state and update counts as tensors."""
    rows = store.peek(0, ids)[1]
    counts = torch.from_numpy(rows.update_count.astype(np.int64))
    return torch.from_numpy(rows.embeddings), torch.from_numpy(rows.state), counts


def assert_same(store, ids, rows):
    for mine, theirs in zip(rows, read(store, ids), strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


@settings(max_examples=examples(150), deadline=None)
@given(st.data())
def test_any_updates_give_the_numbers_of_the_store(data):
    optimizer, dim = data.draw(st.sampled_from(OPTIMIZERS)), data.draw(DIMS)
    bound = data.draw(st.sampled_from([0.0, 0.0, 0.4]))
    table = Table("t", dim, optimizer=optimizer, value_bound=bound)
    store, ids = store_of(table, data.draw(st.integers(1, 20)))
    rules = RowUpdates(optimizer, bound)
    values, state, counts = read(store, ids)
    assert state.shape[1] == rules.state_width(dim)
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    odd = data.draw(st.booleans())
    for step in range(data.draw(st.integers(1, 6))):
        some = np.flatnonzero(random.random(len(ids)) < 0.7)
        gradients = random.normal(scale=10.0 ** random.integers(-4, 2), size=(len(some), dim)).astype(np.float32)
        if odd and len(some):
            places = random.random(gradients.shape) < 0.02
            gradients[places] = random.choice(np.array(ODD, np.float32), int(places.sum()))
        rate = learning_rate(table, step)
        outcome = store.update_packed([0], [len(some)], ids[some], gradients.reshape(-1), [rate], step)[0]
        places = torch.from_numpy(some)
        found = rules.update(torch.from_numpy(gradients), values[places], state[places], counts[places], step)
        values[places], state[places], counts[places] = found[:3]
        assert (outcome.applied, outcome.non_finite) == (int(found.applied.sum()), int((~found.applied).sum()))
        assert_same(store, ids, (values, state, counts))


@pytest.mark.parametrize("updated", [CORRECTIONS - 2, 3 * CORRECTIONS, MOST_UPDATES - 1])
def test_adam_corrects_rows_with_many_updates_as_the_store_does(updated):
    """Beyond the corrections that are computed once, and to the largest count, which stays."""
    table = Table("t", 3, optimizer=Adam(0.01, beta2=0.99999))
    store, ids = store_of(table, 4, updated)
    rules = RowUpdates(table.optimizer)
    values, state, counts = read(store, ids)
    rules.note_counts(updated)
    for step in range(4):
        gradients = np.random.default_rng(step).normal(size=(4, 3)).astype(np.float32)
        store.update_packed([0], [4], ids, gradients.reshape(-1), [0.01], step)
        values, state, counts, applied = rules.update(torch.from_numpy(gradients), values, state, counts, step)
        assert applied.all()
        assert_same(store, ids, (values, state, counts))
    assert int(counts[0]) == min(updated + 4, MOST_UPDATES)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_gives_the_numbers_of_a_cpu(optimizer):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    random = torch.Generator().manual_seed(1)
    for dim in (3, 128):
        rules = [RowUpdates(optimizer, 0.4) for _ in range(2)]
        width = rules[0].state_width(dim)
        state = torch.rand(100, width, generator=random)
        rows = [torch.randn(100, dim, generator=random), state, torch.arange(100)]
        sides = [rows, [tensor.cuda() for tensor in rows]]
        for step in range(4):
            gradients = torch.randn(100, dim, generator=random)
            for number, (rule, side) in enumerate(zip(rules, sides, strict=True)):
                sides[number] = list(rule.update(gradients.to(side[0].device), *side, step)[:3])
            for mine, theirs in zip(*sides, strict=True):
                np.testing.assert_array_equal(mine.numpy(), theirs.cpu().numpy())
