"""Scenarios for a core whose row numbers have 16 bits; `test_row_numbers.py` runs each in a process."""

import hashlib
import sys
import tempfile

import numpy as np
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.store import NativeStore, TableConfig

NUMBERS = 2**16 - 2
"""Rows of a shard at most."""
DIM = 2


def fed(store, batches):
    """Looks up and updates each batch, and returns the embeddings that were found."""
    found = []
    for step, ids in enumerate(batches, 1):
        rows = np.empty((len(ids), DIM), np.float32)
        store.lookup_packed([0], [len(ids)], ids, rows.reshape(-1), True)
        gradients = (rows + ids[:, None].astype(np.float32) % 7 - 3).reshape(-1)
        store.update_packed([0], [len(ids)], ids, gradients, [0.1], step)
        found.append(rows)
    return found


def stream(rng, first, count, size=8192):
    """Yields batches of new ids in order, each with as many that came before."""
    for at in range(first, first + count, size):
        new = np.arange(at, min(at + size, first + count), dtype=np.uint64)
        old = rng.integers(0, at + 1, len(new) // 4, dtype=np.uint64)
        yield rng.permutation(np.unique(np.concatenate([new, old]))) * np.uint64(0x9E3779B97F4A7C15)


def contents(store):
    """Returns ids, embeddings and state of all rows, by id."""
    ((_, rows),) = store.iterate_rows(0, max_rows=10**6)
    assert len(rows.ids) == NUMBERS
    order = np.argsort(rows.ids)
    return rows.ids[order], rows.embeddings[order], rows.state[order]


def digest(*arrays):
    """Returns what tells arrays apart from others."""
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def a_full_shard_evicts_what_is_oldest():
    """Every number of a shard is in use, and rows are evicted. Prints what does not depend on the number of bits."""
    store = NativeStore()
    store.create_table(TableConfig("t", DIM, capacity=NUMBERS, shards=1, initializer="uniform"))
    batches = list(stream(np.random.default_rng(0), 0, 120_000))
    found = fed(store, batches)
    used = {id_: number for number, ids in enumerate(batches) for id_ in ids.tolist()}
    kept, *values = contents(store)
    # From batch to batch: the oldest that is kept is no older than the newest that is not.
    assert min(used[id_] for id_ in kept.tolist()) >= max(used[id_] for id_ in used.keys() - set(kept.tolist()))
    print(digest(*found, kept, *values))


def a_full_shard_outlives_its_process():
    """A full shard in files is attached to, and goes on evicting."""
    config = TableConfig("t", DIM, capacity=NUMBERS, shards=1, initializer="uniform")
    batches = list(stream(np.random.default_rng(1), 0, 100_000))
    with tempfile.TemporaryDirectory() as folder:
        whole, halves = NativeStore(), NativeStore()
        whole.create_table(config)
        fed(whole, batches)
        halves.create_table(config, f"{folder}/t")
        fed(halves, batches[:9])
        del halves
        again = NativeStore()
        again.create_table(config, f"{folder}/t", attach=True)
        fed(again, batches[9:])
        for ours, theirs in zip(contents(again), contents(whole), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def more_rows_than_numbers_are_refused():
    """By a table with fixed shards, and by a table that exceeds the numbers of all shards that one PS may have."""
    with pytest.raises(ConfigError, match=f"exceeds {2 * NUMBERS} rows in 2 shards"):
        TableConfig("t", DIM, capacity=2 * NUMBERS + 1, shards=2)
    most = 1024 * 2**15
    trainer_of(most)
    with pytest.raises(ConfigError, match="2 PSs or more"):
        trainer_of(most + 1)


def trainer_of(capacity):
    """Returns a trainer of one table, which any memory seems to hold."""
    schema = persia.Schema([persia.IdFeature("item", dim=4)], tables=[persia.Table("item", 4, capacity=capacity)])
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(8,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        cluster=persia.cluster.Embedded(overcommit=True),
    )


def a_table_has_more_rows_than_a_shard_has_numbers():
    """Trains on 150,000 ids in one table, and prints what does not depend on the number of bits."""
    ids = 150_000
    rng = np.random.default_rng(2)
    batches = []
    for at in range(0, 2 * ids, 4096):
        column = (np.arange(at, at + 4096) % ids).astype(np.uint64)
        labels = (rng.random((4096, 1)) < 0.2 + 0.6 * (column[:, None] % 2)).astype(np.float32)
        batches.append(persia.Batch({"item": persia.IdColumn(column)}, np.zeros((4096, 0), np.float32), labels))
    trainer = trainer_of(300_000)
    result = trainer.fit(batches)
    assert result.stored_rows == ids
    found = trainer.embeddings.rows("item", np.arange(0, ids, 7))
    assert found.found.all()
    print(result.progressive.auc, digest(found.values))


{
    function.__name__: function
    for function in (
        a_full_shard_evicts_what_is_oldest,
        a_full_shard_outlives_its_process,
        more_rows_than_numbers_are_refused,
        a_table_has_more_rows_than_a_shard_has_numbers,
    )
}[sys.argv[1]]()
