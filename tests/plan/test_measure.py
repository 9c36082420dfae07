"""Rates that `persia bench rates` measures."""

from pathlib import Path

import pytest

from persia.memory import IN_MEMORY, file_system
from persia.plan import measure


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
