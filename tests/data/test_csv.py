"""CSV: types of ids, lists, compression, bad files."""

from __future__ import annotations

import gzip
import io
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import xxhash

from persia import data
from persia.batching.batch import Batch
from persia.data import from_csv
from persia.data.csv_batches import LET_GO_SECONDS, csv_batches
from persia.errors import DataError
from persia.schema import IdFeature, Schema
from support.waiting import wait_until

SCHEMA = Schema([IdFeature("user", dim=2), IdFeature("site", dim=2)], dense_features=["age"], labels=["click"])
TEXT = "user,site,age,click,day\n1,a,0.5,1,3\n18446744073709551615,,2,0,4\n"


def text_id(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


def write(path: Path, text: str = TEXT) -> Path:
    path.write_text(text)
    return path


def test_header_missing_ids_and_day(tmp_path: Path) -> None:
    (batch,) = list(data.csv(write(tmp_path / "a.csv"), SCHEMA, day="day"))
    assert batch.id_features["user"].values.tolist() == [1, 2**64 - 1]
    assert batch.id_features["site"].values.tolist() == [text_id("a")]
    assert batch.id_features["site"].offsets is not None
    assert batch.id_features["site"].offsets.tolist() == [0, 1, 1]
    assert batch.dense.tolist() == [[0.5], [2.0]]
    assert batch.labels.tolist() == [[1.0], [0.0]]
    assert batch.day is not None
    assert batch.day.tolist() == [3, 4]


def test_given_names_delimiter_rename_and_compression(tmp_path: Path) -> None:
    text = "\n".join(line.replace(",", "\t") for line in TEXT.splitlines()[1:])
    with gzip.open(tmp_path / "a.tsv.gz", "wt") as stream:
        stream.write(text)
    names = ["u", "site", "age", "click", "day"]
    reader = data.csv(tmp_path, SCHEMA, column_names=names, delimiter="\t", rename={"user": "u"})
    (batch,) = list(reader)
    assert batch.id_features["user"].values.tolist() == [1, 2**64 - 1]


def test_an_id_does_not_depend_on_what_else_is_in_its_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 64)
    rows = [f"{i},{i},1,0" for i in range(50)]
    path = write(tmp_path / "a.csv", "\n".join(["user,site,age,click", *rows, "unknown,-1,1,0", "51.0,1.5,1,0"]))
    whole = Batch.concat(list(data.csv(path, SCHEMA, 20)))
    assert whole.id_features["user"].values.tolist() == [*range(50), text_id("unknown"), 51]
    assert whole.id_features["site"].values.tolist() == [*range(50), text_id("-1"), text_id("1.5")]
    assert next(iter(data.csv(path, SCHEMA, 20).batches(start=2))).id_features["user"].values[0] == 40


def test_lists_in_a_field(tmp_path: Path) -> None:
    schema = Schema([IdFeature("user", dim=2), IdFeature("genres", dim=2)], labels=["click"])
    path = write(tmp_path / "a.csv", "user,genres,click\n1|2,x|y,0\n3,,1\n,z,0\n")
    (batch,) = list(data.csv(path, schema, lists={"user": "|", "genres": "|"}))
    users, genres = batch.id_features["user"], batch.id_features["genres"]
    assert users.values.tolist() == [1, 2, 3]
    assert users.offsets is not None
    assert users.offsets.tolist() == [0, 2, 3, 3]
    assert genres.values.tolist() == [text_id(x) for x in "xyz"]


def test_memory_does_not_grow_with_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", 1 << 16)

    def peak(rows: int) -> int:
        path = write(tmp_path / f"{rows}.csv", "user,site,age,click\n" + "12345,abcdef,1.5,1\n" * rows)
        before, highest = pa.total_allocated_bytes(), 0
        for _ in data.csv(path, SCHEMA, 256):
            highest = max(highest, pa.total_allocated_bytes() - before)
        return highest

    assert peak(200_000) < 2 * peak(20_000) + (1 << 20)


BAD: dict[str, tuple[str, str]] = {
    "empty": ("", "is empty"),
    "too few fields": (TEXT + "5,b\n", "'5,b' at row 2 has 2 fields instead of 5"),
    "missing column": ("user,site,age\n1,a,2\n", "no column 'click'"),
    "text in a number": (TEXT + "5,b,old,1,3\n", "Column 'age' has 'old' at row 2"),
    "missing number": (TEXT + "5,b,,1,3\n", "Column 'age' has a missing value at row 2"),
    "label outside": (TEXT + "5,b,1,7,3\n", "Label 'click' is 7.0 at row 2"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files(name: str, tmp_path: Path) -> None:
    text, message = BAD[name]
    path = write(tmp_path / "a.csv", text)
    with pytest.raises(DataError, match=message) as caught:
        list(data.csv(path, SCHEMA))
    assert str(caught.value.fields["path"]).endswith("a.csv")
    assert "a.csv" in str(caught.value)


def test_truncated_compressed_file(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 60, 5000)
    content = gzip.compress(("user,site,age,click\n" + "".join(f"{x},a,1,0\n" for x in noise)).encode())
    (tmp_path / "a.csv.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"a\.csv\.gz cannot be read, it may be truncated"):
        list(data.csv(tmp_path, SCHEMA))


LEFT_BEHIND = """
import io, sys, time
from persia.data.csv_batches import csv_batches

class Slow(io.BytesIO):
    reads = 0

    def read(self, size=-1):
        self.reads += 1
        if self.reads > 1:
            time.sleep(0.05)
        return super().read(size)

stream = Slow(b"a,b\\n" + b"1,2\\n" * 5_000_000)
for batch in csv_batches(
    stream, None, lambda line: "error", delimiter=",", names=None, block_bytes=1 << 18, convert={}
):
    break
assert batch.num_rows and stream.reads < 70
"""


@pytest.mark.processes
def test_a_partly_read_file_leaves_no_thread_that_aborts():
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", LEFT_BEHIND], capture_output=True, text=True, timeout=60.0)
        assert (done.returncode, done.stderr) == (0, "")


def batches_of(stream: io.BytesIO) -> Iterator[Any]:
    return csv_batches(stream, None, lambda line: "error", delimiter=",", names=None, block_bytes=1 << 18, convert={})


@pytest.mark.parametrize("reads", [1, 2])
def test_an_error_of_the_file_is_not_waited_for(reads: int):
    class Failing(io.BytesIO):
        left = reads

        def read(self, size: int | None = -1) -> bytes:
            self.left -= 1
            if not self.left:
                raise OSError("the disk is gone")
            return super().read(size)

    stream = Failing(b"a,b\n" + b"1,2\n" * 500_000)
    began = time.monotonic()
    with pytest.raises(OSError, match="the disk is gone"):
        list(batches_of(stream))
    assert time.monotonic() - began < LET_GO_SECONDS


class SlowlyDeleted(bytearray):
    """A block whose deletion lets other threads run."""

    def __del__(self) -> None:
        time.sleep(0.005)


class ReadAhead(io.BytesIO):
    """Keeps track of its blocks. The third one takes long to read, so the first batch is there meanwhile."""

    def __init__(self, content: bytes) -> None:
        super().__init__(content)
        self.blocks: list[weakref.ref[SlowlyDeleted]] = []

    def read(self, size: int | None = -1) -> Any:
        block = SlowlyDeleted(super().read(size))
        self.blocks.append(weakref.ref(block))
        if len(self.blocks) == 3:
            time.sleep(0.2)
        return block


def test_blocks_that_were_read_ahead_are_let_go_with_the_file():
    stream = ReadAhead(b"a,b\n" + b"1,2\n" * 1_000_000)
    batches = batches_of(stream)
    next(batches)
    wait_until(lambda: len(stream.blocks) > 3, "that blocks are read ahead")
    began = time.monotonic()
    batches.close()
    assert time.monotonic() - began < LET_GO_SECONDS
    # One may be in the midst of its deletion, in each of Arrow's two threads.
    assert sum(block() is not None for block in stream.blocks) <= 2
