"""Batches by a budget of events: every row once, within the budget, in an order that does not depend on lengths."""

import itertools
import pickle
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import data
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data.event_budget import event_counts
from persia.data.reader import Order, StreamReader
from persia.errors import ConfigError
from persia.schema import IdFeature, Schema
from support.examples import examples

LONGEST = 9
SCHEMA = Schema(
    [IdFeature("item", dim=2), IdFeature("past", table="item", pooling=None, max_length=LONGEST)],
    dense_features=["row"],
    labels=["y"],
)


class Histories:
    """A source of rows, numbered from 0, whose histories have these lengths, in pieces of random sizes."""

    def __init__(self, lengths, seed=0):
        self.lengths = np.asarray(lengths, np.int64)
        self.random = random.Random(seed)

    def chunks(self, skip):
        while skip < len(self.lengths):
            size = min(self.random.randint(1, 25), len(self.lengths) - skip)
            offsets = np.concatenate([[0], np.cumsum(self.lengths[skip : skip + size])])
            rows = np.arange(skip, skip + size)
            ids = {
                "item": IdColumn(rows.astype(np.uint64)),
                "past": IdColumn(np.zeros(offsets[-1], np.uint64), offsets),
            }
            yield Batch(ids, rows.astype(np.float32)[:, None], np.zeros((size, 1), np.float32))
            skip += size


def rows_of(batches):
    return [batch.dense[:, 0].astype(int).tolist() for batch in batches]


def slow_batches(rows, lengths, budget, most):
    """The rows of each batch, row by row."""
    batches, events = [], 0
    for row in rows:
        length = min(lengths[row], LONGEST)
        if not batches or events + length > budget or len(batches[-1]) == most:
            batches.append([])
            events = 0
        batches[-1].append(row)
        events += length
    return batches


@settings(deadline=None, max_examples=examples(60))
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 120),
    longest=st.integers(0, LONGEST + 3),
    budget=st.integers(LONGEST, 60),
    most=st.integers(1, 30),
    shuffle_rows=st.sampled_from([0, 7, 1000]),
    similar=st.booleans(),
    shards=st.integers(1, 3),
    epoch=st.integers(0, 2),
)
def test_every_row_is_in_one_batch_within_the_budget_from_any_position(
    seed, rows, longest, budget, most, shuffle_rows, similar, shards, epoch
):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(0, longest + 1, rows)
    similar = similar and shuffle_rows > 0

    def reader(index=0, count=1):
        order = Order(most, shuffle_rows, 5, shard=(index, count), tokens_per_batch=budget, similar_lengths=similar)
        return StreamReader(SCHEMA, Histories(lengths, int(rng.integers(1 << 30))), order)

    whole = rows_of(reader().batches(epoch))
    for start in {0, 1, len(whole) // 2, len(whole)}:
        assert rows_of(reader().batches(epoch, start)) == whole[start:]
    for index in range(shards):
        assert rows_of(reader(index, shards).batches(epoch)) == whole[index::shards]
        assert rows_of(reader(index, shards).batches(epoch, 2)) == whole[index::shards][2:]
    assert sorted(itertools.chain(*whole)) == list(range(rows))
    for batch in whole:
        assert 0 < len(batch) <= most
        assert np.minimum(lengths[batch], LONGEST).sum() <= budget
    if not similar:
        assert whole == slow_batches(list(itertools.chain(*whole)), lengths, budget, most)
    if not shuffle_rows:
        assert list(itertools.chain(*whole)) == list(range(rows))


def similar(lengths, seed=0, block=2_000, budget=100, epoch=0):
    order = Order(64, block, seed, tokens_per_batch=budget, similar_lengths=True)
    return rows_of(StreamReader(SCHEMA, Histories(lengths), order).batches(epoch))


def test_similar_lengths_are_together_and_come_at_any_time():
    lengths = np.random.default_rng(0).integers(0, LONGEST + 1, 8_000)
    batches = similar(lengths)
    spreads = [np.ptp(lengths[batch]) for batch in batches]
    assert np.mean(spreads) < 0.2  # Of random rows, it would be near 9.
    # A batch per length and block is not full, so sizes are nearly as large as the budget allows.
    assert len(batches) < 1.05 * len(slow_batches(np.argsort(lengths), lengths, 100, 64))
    # The mean place of rows of each length is the middle: neither short nor long ones come first.
    places = np.empty(len(lengths))
    places[np.concatenate(batches)] = np.linspace(0, 1, len(lengths))
    for length in range(LONGEST + 1):
        assert abs(places[lengths == length].mean() - 0.5) < 0.06, length
    for number, block in enumerate(np.split(np.concatenate(batches), 4)):
        assert sorted(block) == list(range(number * 2_000, (number + 1) * 2_000))


def test_the_order_depends_on_seed_and_epoch_only():
    lengths = np.random.default_rng(0).integers(0, LONGEST + 1, 300)
    assert similar(lengths) == similar(lengths)
    assert len({str(similar(lengths, seed, 100, epoch=epoch)) for seed in range(2) for epoch in range(2)}) == 4
    # Rows of one length do not stay together from pass to pass.
    assert {frozenset(b) for b in similar(np.full(300, 5))}.isdisjoint(
        {frozenset(b) for b in similar(np.full(300, 5), 1)}
    )


def test_events_are_those_of_the_longest_sequence_up_to_max_length():
    ids = {
        "item": IdColumn(np.zeros(3, np.uint64)),
        "past": IdColumn(np.zeros(14, np.uint64), np.array([0, 0, 12, 14])),
        "shops": IdColumn(np.zeros(3, np.uint64)),
    }
    batch = Batch(ids, np.empty((3, 0), np.float32), np.empty((3, 0), np.float32))
    assert event_counts(batch, {"past": LONGEST}).tolist() == [0, 9, 2]
    assert event_counts(batch, {"past": LONGEST, "shops": 1}).tolist() == [1, 9, 2]


def test_a_reader_of_files_takes_the_options():
    lengths = [3, 0, 9, 12, 1, 2, 8]
    table = pa.table(
        {
            "item": range(7),
            "past": [list(range(length)) for length in lengths],
            "row": [float(row) for row in range(7)],
            "y": [0.0] * 7,
        }
    )
    reader = data.arrow(table, SCHEMA, tokens_per_batch=12)
    assert rows_of(reader) == [[0, 1, 2], [3, 4, 5], [6]]
    assert rows_of(pickle.loads(pickle.dumps(reader)).batches(0, 1)) == [[3, 4, 5], [6]]
    assert [len(batch) for batch in data.arrow(table, SCHEMA, 2, tokens_per_batch=100)] == [2, 2, 2, 1]
    order = reader.fingerprint().order
    assert (order["tokens_per_batch"], order["similar_lengths"]) == ("12", "False")
    assert "tokens_per_batch" not in data.arrow(table, SCHEMA).fingerprint().order


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens_per_batch": 8}, r"tokens_per_batch = 8 is less than the max_length of 'past'; set it to 9 or more"),
        ({"tokens_per_batch": -1}, "tokens_per_batch"),
        ({"tokens_per_batch": 2.5}, "tokens_per_batch"),
        ({"tokens_per_batch": 9, "drop_last": True}, "drop_last does not go with tokens_per_batch"),
        ({"tokens_per_batch": 9, "batch_size": 5, "group_rows": 2}, "group_rows does not go with tokens_per_batch"),
        (
            {"tokens_per_batch": 9, "similar_lengths": True},
            "similar_lengths sorts the rows of each block of shuffle_rows",
        ),
        ({"shuffle_rows": 9, "similar_lengths": True}, "similar_lengths sorts .* set both"),
        ({"tokens_per_batch": 9, "shuffle_rows": 9, "similar_lengths": "yes"}, "similar_lengths"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        StreamReader(SCHEMA, Histories([1]), Order(**options))


def test_a_schema_without_sequences_is_refused():
    schema = Schema([IdFeature("item", dim=2)], dense_features=["row"], labels=["y"])
    with pytest.raises(ConfigError, match=r"un-pooled features, but the schema has none; declare .* pooling=None"):
        StreamReader(schema, Histories([1]), Order(tokens_per_batch=9))
