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
CHOSEN = 2**15
"""Rows of a shard at most where a PS chooses the number of shards, as it does for each table of a schema."""
SHARDS = 8
"""Shards that a PS chooses for the capacities of the scenarios below, with row numbers of 16 and of 32 bits."""
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
    most = 1024 * CHOSEN
    trainer_of(most)
    with pytest.raises(ConfigError, match="2 PSs or more"):
        trainer_of(most + 1)


def trainer_of(capacity, lr=0.1, **options):
    """Returns a trainer of one table, which any memory seems to hold."""
    table = persia.Table("item", 4, capacity=capacity, **options)
    schema = persia.Schema([persia.IdFeature("item", dim=4)], tables=[table])
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(8,)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=lr),
        mode=persia.modes.Sync(),
        cluster=persia.cluster.Embedded(overcommit=True),
    )


def batches_of(ids, size=4096):
    """Yields batches of one id in each sample, whose labels depend on it."""
    rng = np.random.default_rng(2)
    for at in range(0, len(ids), size):
        column = ids[at : at + size].astype(np.uint64)
        labels = (rng.random((len(column), 1)) < 0.2 + 0.6 * (column[:, None] % 2)).astype(np.float32)
        yield persia.Batch({"item": persia.IdColumn(column)}, np.zeros((len(column), 0), np.float32), labels)


def shards_are_chosen_so_that_half_of_the_numbers_stay_free():
    """A PS doubles the shards of a table before one exceeds half of its numbers; a schema has no say in it."""
    chosen = {
        capacity: TableConfig("t", DIM, capacity=capacity).resolved_shards
        for capacity in (SHARDS * CHOSEN, SHARDS * CHOSEN + 1, 1024 * CHOSEN)
    }
    assert list(chosen.values()) == [SHARDS, 2 * SHARDS, 1024]
    assert "shards" not in persia.Table.__struct_fields__
    # With rows on disk all numbers may be in use: of the rows in memory, and twice, of the table.
    hot, rows = SHARDS * 4096, SHARDS * (NUMBERS - 4096) // 2
    for capacity, shards in ((rows, SHARDS), (rows + 1, 2 * SHARDS)):
        assert TableConfig("t", DIM, capacity=capacity, memory_rows=hot).resolved_shards == shards


def a_full_table_of_a_trainer_evicts_what_is_oldest():
    """Each shard uses half of its numbers, all that a PS lets it. Prints what does not depend on the number of bits."""
    capacity = SHARDS * CHOSEN
    result, found = full(trainer_of(capacity), capacity)
    assert result.stored_rows == capacity
    print(result.progressive.auc, digest(found.found, found.values))


def a_full_table_on_disk_keeps_its_rows_apart():
    """Likewise with rows on disk, and a capacity for which a shard reserves all its numbers.

    Which rows are evicted depends on the number of bits: an id whose hash looks like that of a row on disk is looked up
    after the others of its batch. So values are compared with those of a table that evicts none; they do not change.
    """
    hot = 4096
    capacity, lr = SHARDS * ((NUMBERS - hot) // 2), 1e-30
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(capacity, lr, spill=folder, memory_rows=SHARDS * hot)
        result, found = full(trainer, capacity)
        # Rows leave a disk by the segment, 509 at once.
        assert capacity - SHARDS * 509 <= result.stored_rows <= capacity
        assert trainer.embeddings.statistics()["item"]["promoted"] > 10_000
    ids = np.arange(len(found.found))
    whole = trainer_of(2 * capacity, lr)
    whole.fit(list(batches_of(ids)))
    expected = whole.embeddings.rows("item", ids).values[found.found]
    assert len(np.unique(expected, axis=0)) == len(expected)
    np.testing.assert_array_equal(found.values[found.found], expected)


def full(trainer, capacity):
    """Trains on more ids than the table has rows, then on some of them again; returns the result, and rows by id."""
    ids = np.arange(capacity + 40_000)
    again = np.random.default_rng(3).choice(ids, 40_000)
    result = trainer.fit(list(batches_of(np.append(ids, again))))
    assert trainer.embeddings.statistics()["item"]["evicted"] >= 40_000
    found = trainer.embeddings.rows("item", ids)
    assert found.found.sum() == result.stored_rows
    return result, found


def a_table_has_more_rows_than_a_shard_has_numbers():
    """Trains on 150,000 ids in one table, and prints what does not depend on the number of bits."""
    ids = 150_000
    trainer = trainer_of(300_000)
    result = trainer.fit(list(batches_of(np.tile(np.arange(ids), 2))))
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
        shards_are_chosen_so_that_half_of_the_numbers_stay_free,
        a_full_table_of_a_trainer_evicts_what_is_oldest,
        a_full_table_on_disk_keeps_its_rows_apart,
        a_table_has_more_rows_than_a_shard_has_numbers,
    )
}[sys.argv[1]]()
