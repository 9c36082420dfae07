"""Rates that `persia bench rates` measures."""

from pathlib import Path

import numpy as np
import pytest

from persia import Batch, IdColumn, IdFeature, Schema
from persia.memory import IN_MEMORY, file_system
from persia.plan import measure, workload


def read_bytes():
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["read_bytes"])


@pytest.mark.slow
def test_rows_that_move_come_from_pages_of_their_own(monkeypatch, tmp_path):
    if file_system(tmp_path).kind in IN_MEMORY:
        pytest.skip("the temporary directory is not on a disk")
    passes = []

    class Store(measure.NativeStore):
        def tier_counts(self, table):
            counts = super().tier_counts(table)
            passes.append((read_bytes(), counts["promoted"]))
            return counts

    monkeypatch.setattr(measure, "NativeStore", Store)
    assert 0 < measure._moved_row(tmp_path) < 1
    (before, moved), (after, all_of_them) = passes[-2:]
    # A record of 104 bytes, in a page of 4 KiB that is read for it alone, mostly.
    assert (after - before) / (all_of_them - moved) > 3000


def test_offsets_and_weights_of_ids_are_counted_by_table():
    features = [IdFeature("one", dim=4), IdFeature("many", dim=4, table="one", weights="w"), IdFeature("other", dim=4)]
    ids = np.arange(4, dtype=np.uint64)
    many = IdColumn(ids, np.array([0, 1, 4]), np.ones(4, np.float32))
    columns = {"one": IdColumn(ids[:2]), "many": many, "other": IdColumn(ids[:2])}
    batch = Batch(columns, np.zeros((2, 0), np.float32), np.zeros((2, 1), np.float32))
    assert workload._offsets_by_table(Schema(features), batch) == {"one": 3 * 8 + 4 * 4, "other": 0}
