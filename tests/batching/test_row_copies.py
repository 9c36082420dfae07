"""Plans of copies of rows against their twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia import batching
from persia.batching import CopiedTable
from persia.errors import DataError
from support.twins import batching as reference

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}


def tables_of(batch, slots):
    """The tables of a batch `[table][ids]`, with `slots[table]`: ids and steps."""
    tables, row, first, spare = [], 0, 0, sum(len(ids) for ids, _ in slots)
    for ids, (slot_ids, steps) in zip(batch, slots, strict=True):
        ids = np.array(ids, np.uint64)
        tables.append(CopiedTable(ids, slot_ids, steps, np.ones(len(ids), np.bool_), row, first, spare))
        row, first = row + len(ids), first + len(slot_ids)
    return tables


batches = st.lists(
    st.tuples(
        st.tuples(*[st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9), max_size=9, unique=True)] * 2),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=8,
)


@given(batches, st.tuples(st.integers(1, 12), st.integers(1, 4)), st.integers(0, 5), st.sampled_from(list(POOLS)))
def test_a_plan_is_that_of_its_twin(batches, sizes, limit, threads):
    ours, theirs = ([(np.zeros(n, np.uint64), np.zeros(n, np.int64)) for n in sizes] for _ in range(2))
    for step, (batch, behind) in enumerate(batches):
        mine, twin = tables_of(batch, ours), tables_of(batch, theirs)
        places = [np.full(2 * sum(map(len, batch)), -1, np.int32) for _ in range(2)]
        at = step, max(0, step - behind), limit
        found = batching.plan_copies(mine, *at, places[0], POOLS[threads])
        assert found == reference.plan_copies(twin, *at, places[1])
        np.testing.assert_array_equal(*places)
        for a, b in zip(mine, twin, strict=True):
            for ours_, theirs_ in zip(a[:4], b[:4], strict=True):
                np.testing.assert_array_equal(ours_, theirs_)


def test_a_plan_of_other_arrays_is_refused_and_changes_nothing():
    slots = [(np.zeros(4, np.uint64), np.zeros(4, np.int64))]
    (table,) = tables_of([[1, 2]], slots)
    places = np.full(4, -1, np.int32)
    wrong = [
        table._replace(ids=np.zeros(2, np.int64)),
        table._replace(ids=np.zeros(3, np.uint64)),
        table._replace(slot_ids=np.zeros(0, np.uint64)),
        table._replace(slot_steps=np.zeros(3, np.int64)),
        table._replace(slot_steps=np.zeros(4, np.int32)),
        table._replace(wanted=np.zeros(3, np.bool_)),
        table._replace(wanted=np.zeros(2, np.uint8)),
        table._replace(first_row=1 << 31),
        table._replace(first_row=(1 << 31) - 1),
        table._replace(first_slot=-1),
        table._replace(spare=None),
        (1, 2),
    ]
    for one in wrong:
        with pytest.raises(DataError):
            batching.plan_copies([one], 0, 0, 4, places, POOLS[1])
    for others in (np.zeros(3, np.int32), np.zeros(4, np.int64)):
        with pytest.raises(DataError, match=r"int32|two entries"):
            batching.plan_copies([table], 0, 0, 4, others, POOLS[1])
    for at in ((-1, 0, 4), (0, (1 << 62) + 1, 4), (0, 0, -1)):
        with pytest.raises(DataError, match=r"step, applied and limit"):
            batching.plan_copies([table], *at, places, POOLS[1])
    assert not slots[0][0].any()
    assert not slots[0][1].any()
    assert table.wanted.all()
    assert (places == -1).all()
    assert batching.plan_copies([table], 0, 0, 4, places, POOLS[1]) == ([0], 0)
    assert batching.plan_copies([], 0, 0, 4, places[:0], POOLS[1]) == ([], 0)


def test_memory_used_twice_is_not_written_beyond_its_end():
    """The places are wrong then, but nothing else is."""
    whole = np.full(40, -7, np.int32)
    places = whole[:16]
    ids = np.arange(8, dtype=np.uint64)
    slots = np.zeros(1000, np.uint64), np.zeros(1000, np.int64)
    table = CopiedTable(ids, *slots, np.ones(8, np.bool_), 0, 0, 1000)
    batching.plan_copies([table], 0, 0, 4, places, POOLS[1])
    for wanted in (places.view(np.bool_)[:8], slots[1].view(np.bool_)[:8], ids.view(np.bool_)[:8]):
        batching.plan_copies([table._replace(wanted=wanted)], 1, 1, 4, places, POOLS[1])
        assert (whole[16:] == -7).all()
