"""Marked ids against the twin of the filter and against an exact record."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.batching import LAST_VERSION, ChangeFilter
from persia.errors import DataError
from persia.types.packed import Packed
from support.twins import batching as reference


def packed(arrays):
    """Lists of ids as packed arrays of these names."""
    return Packed.of({name: np.array(ids, np.uint64) for name, ids in arrays.items()}, np.uint64)


ids = st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 40), max_size=9)
batches = st.lists(st.tuples(st.integers(0, 2**40) | st.integers(0, 2), ids), max_size=4)
versions = st.integers(1, 6) | st.just(LAST_VERSION)


@given(st.sampled_from([1, 4, 22, 32]), st.lists(st.tuples(batches, versions, batches, versions), max_size=6))
def test_changed_ids_are_those_of_the_twin_and_all_that_were_marked(bits, rounds):
    filter_, twin, record = ChangeFilter(bits), reference.ChangeFilter(bits), {}
    for marked, version, asked, since in rounds:
        tables, arrays = [table for table, _ in marked], packed({f"t{i}": part for i, (_, part) in enumerate(marked)})
        filter_.mark(tables, arrays, version)
        twin.mark(tables, arrays, version)
        for table, part in marked:
            record |= {(table, id_): max(version, record.get((table, id_), 0)) for id_ in part}
        parts = [*asked, *marked]
        tables, arrays = [table for table, _ in parts], packed({f"t{i}": part for i, (_, part) in enumerate(parts)})
        for after in (0, since - 1, since):
            found, found_ids = filter_.changed(tables, arrays, after)
            assert found.buffer.dtype == np.uint32
            assert {name: places.tolist() for name, places in found.items()} == twin.changed(tables, arrays, after)
            for (table, part), places, own in zip(parts, found.values(), found_ids.values(), strict=True):
                assert own.tolist() == [part[place] for place in places.tolist()]
                updated = {place for place, id_ in enumerate(part) if record.get((table, id_), 0) > after}
                assert updated <= set(places.tolist())


def test_few_other_ids_are_found():
    filter_ = ChangeFilter()
    consecutive = packed({"a": range(20_000), "b": range(10_000, 30_000)})
    filter_.mark([0, 1], consecutive, 5)
    assert len(filter_.changed([0, 1], consecutive, 4)[0].buffer) == 40_000
    assert not len(filter_.changed([0, 1], consecutive, 5)[0].buffer)
    following = packed({"a": range(20_000, 40_000), "b": range(10_000), "c": range(10_000)})
    assert len(filter_.changed([0, 1, 2], following, 0)[0].buffer) < 600
    # One slot in a hundred has a mark.
    draw = np.random.default_rng(0)
    others = packed({name: draw.integers(1 << 20, 1 << 62, 20_000) for name in "ab"})
    assert 200 < len(filter_.changed([0, 1], others, 0)[0].buffer) < 600


def resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * 4096


def test_an_unused_filter_takes_no_memory():
    before = resident_bytes()
    filter_ = ChangeFilter(28)
    filter_.mark([0], packed({"a": range(10)}), 1)
    assert resident_bytes() - before < 64 << 20  # Its slots are 512 MiB.


def test_other_arguments_are_refused_and_change_nothing():
    filter_ = ChangeFilter(10)
    good = packed({"a": [1, 2], "b": [3]})
    wrong = [
        ([0], good, 1, "tables"),
        ([0, 1, 2], good, 1, "tables"),
        ([0, 1], Packed(["a", "b"], [2, 1], np.arange(3, dtype=np.int64)), 1, "uint64"),
        ([0, 1], Packed(["a", "b"], [2, 1], np.arange(6, dtype=np.uint64)[::2]), 1, "contiguous"),
        ([0, 1], Packed(["a", "b"], [2, 2], good.buffer), 1, "fewer"),
        ([0, 1], Packed(["a", "b"], [1, 1], good.buffer), 1, "more"),
        ([0, 1], good, LAST_VERSION + 1, "version|since"),
        ([0, 1], good, -1, "version|since"),
        ([0, 1], good, 1.0, "version|since"),
    ]
    for tables, arrays, version, message in wrong:
        with pytest.raises(DataError, match=message):
            filter_.mark(tables, arrays, version)
        with pytest.raises(DataError, match=message):
            filter_.changed(tables, arrays, version)
    with pytest.raises(DataError, match="version"):
        filter_.mark([0, 1], good, 0)
    assert not len(filter_.changed([0, 1], good, 0)[0].buffer)
    for bits in (0, 33, -1, 4.0):
        with pytest.raises(DataError, match="bits"):
            ChangeFilter(bits)
