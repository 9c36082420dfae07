"""Batches of whole groups: no group is divided, and every position can be resumed, sharded and shuffled."""

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data.reader import Order, StreamReader
from persia.errors import ConfigError, DataError
from persia.schema import IdFeature, Schema
from support.examples import examples

SCHEMA = Schema([IdFeature("a", dim=2)], dense_features=["row"], labels=["y"], group="session")


def batch_of(rows, groups):
    return Batch(
        {"a": IdColumn(np.asarray(rows, np.uint64))},
        np.asarray(rows, np.float32)[:, None],
        np.zeros((len(rows), 1), np.float32),
        groups=np.asarray(groups, np.uint64),
    )


class Sessions:
    """A source of rows, numbered from 0, whose groups have these lengths and ids, in pieces of random sizes."""

    def __init__(self, lengths, ids, seed=0):
        self.groups = np.repeat(ids, lengths)
        self.random = random.Random(seed)

    def chunks(self, skip):
        while skip < len(self.groups):
            size = min(self.random.randint(1, 25), len(self.groups) - skip)
            yield batch_of(range(skip, skip + size), self.groups[skip : skip + size])
            skip += size


def rows_of(batches):
    return [batch.dense[:, 0].astype(int).tolist() for batch in batches]


def slow_batches(groups, window):
    """The rows of each batch: those whose group begins in the window of the batch."""
    batches, begin = {}, 0
    for row, group in enumerate(groups):
        if row and group != groups[row - 1]:
            begin = row
        batches.setdefault(begin // window, []).append(row)
    return list(batches.values())


@settings(deadline=None, max_examples=examples(250))
@given(
    seed=st.integers(0, 2**32 - 1),
    sessions=st.integers(1, 90),
    longest=st.integers(1, 6),
    more=st.integers(0, 20),
    shuffle_rows=st.sampled_from([0, 6, 17, 1000]),
    shards=st.integers(1, 3),
    epoch=st.integers(0, 2),
)
def test_groups_stay_whole_from_any_position(seed, sessions, longest, more, shuffle_rows, shards, epoch):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, sessions)
    ids = rng.integers(0, 4, sessions)  # Often the same again: such sessions are apart, and must not meet.
    ids = np.cumsum(ids + (np.diff(ids, prepend=-1) == 0)) % 5
    ids[1:] += (ids[1:] == ids[:-1]) * 100
    groups = np.repeat(ids, lengths)
    runs = [list(run) for _, run in itertools.groupby(range(len(groups)), groups.tolist().__getitem__)]
    longest = max(map(len, runs))
    size = 2 * longest - 1 + more

    def reader(index=0, count=1):
        order = Order(size, max(shuffle_rows, longest) if shuffle_rows else 0, 5, False, (index, count), longest)
        return StreamReader(SCHEMA, Sessions(lengths, ids, int(rng.integers(1 << 30))), order)

    whole = rows_of(reader().batches(epoch))
    for start in range(len(whole) + 1):
        assert rows_of(reader().batches(epoch, start)) == whole[start:]
    for index in range(shards):
        for start in range(4):
            assert rows_of(reader(index, shards).batches(epoch, start)) == whole[index::shards][start:]
    assert all(0 < len(rows) <= size for rows in whole)
    assert sorted(itertools.chain(*whole)) == list(range(len(groups)))
    batch_of_row = {row: number for number, rows in enumerate(whole) for row in rows}
    assert all(len({batch_of_row[row] for row in run}) == 1 for run in runs)
    places = {row: place for place, row in enumerate(itertools.chain(*whole))}
    assert all([places[row] - places[run[0]] for row in run] == list(range(len(run))) for run in runs)
    if not shuffle_rows:
        assert whole == slow_batches(groups, size - longest + 1)


def test_shuffling_moves_groups_by_seed_and_epoch():
    def order(seed, epoch):
        source = Sessions([3] * 40, np.arange(40))
        return rows_of(StreamReader(SCHEMA, source, Order(16, 60, seed, group_rows=3)).batches(epoch))

    assert order(0, 0) == order(0, 0)
    assert len({str(order(seed, epoch)) for seed in range(2) for epoch in range(2)}) == 4


def test_a_group_that_is_too_long_names_its_row():
    reader = StreamReader(SCHEMA, Sessions([2, 3, 9, 1], [1, 2, 3, 4], seed=3), Order(9, group_rows=5))
    with pytest.raises(DataError, match=r"group that begins at row 5 has more than group_rows = 5 rows; raise"):
        list(reader)


def test_rows_without_groups_are_refused():
    class Ungrouped:
        def chunks(self, skip):
            yield dataclasses.replace(batch_of([0], [0]), groups=None)

    source = Ungrouped()
    with pytest.raises(DataError, match=r"the rows have none; set Schema\.group"):
        list(StreamReader(SCHEMA, source, Order(9, group_rows=5)))
    with pytest.raises(ConfigError, match="the schema declares none"):
        StreamReader(Schema([IdFeature("a", dim=2)]), source, Order(9, group_rows=5))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 8}, r"batch_size = 8 with group_rows = 5 leaves batches without a group; set .* to 9"),
        ({"shuffle_rows": 4}, "shuffle_rows = 4 is less than the rows of a group; set it to group_rows = 5"),
        ({"drop_last": True}, "drop_last does not go with group_rows"),
        ({"group_rows": -1}, "group_rows"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ConfigError, match=message):
        Order(**{"batch_size": 9, "group_rows": 5, **options})
