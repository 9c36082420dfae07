"""Rows/s of the file readers, compared with pyarrow alone, which only decodes the columns.

    python -m benchmarks 'reading.*' [--preset smoke|laptop|full] [--json FILE]

A row has 4 ids that are numbers, 3 that are texts, a list of ids, 5 dense features and a label. Batches have 4,096
rows; both sides use one thread.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq

import persia
from benchmarks import runner

ROWS = {"smoke": 5_000, "laptop": 300_000, "full": 2_000_000}
ROUNDS = {"smoke": 1, "laptop": 9, "full": 9}
BATCH = 4096

SCHEMA = persia.Schema(
    [
        *(persia.IdFeature(f"number{i}", dim=8) for i in range(4)),
        *(persia.IdFeature(f"text{i}", dim=8) for i in range(3)),
        persia.IdFeature("list", dim=8),
    ],
    dense_features=[f"dense{i}" for i in range(5)],
    labels=["click"],
)


def table(rows: int) -> pa.Table:
    rng = np.random.default_rng(0)
    columns = {f"number{i}": rng.integers(0, 10 ** (3 + 2 * i), rows) for i in range(4)}
    columns |= {f"text{i}": [f"{x:08x}" for x in rng.integers(0, 1 << 32, rows)] for i in range(3)}
    columns |= {"list": [[int(x)] * int(x % 4) for x in rng.integers(0, 1000, rows)]}
    columns |= {f"dense{i}": np.round(rng.random(rows) * 10**i, 4) for i in range(5)}
    return pa.table(columns | {"click": rng.integers(0, 2, rows)})


def write(directory: str, rows: int) -> tuple[Path, Path]:
    """The same rows as CSV and as Parquet."""
    data = table(rows)
    pq.write_table(data, Path(directory) / "data.parquet")
    lists = pa.array(["|".join(map(str, x)) for x in data["list"].to_pylist()])
    pc.write_csv(data.set_column(data.schema.get_field_index("list"), "list", lists), Path(directory) / "data.csv")
    return Path(directory) / "data.csv", Path(directory) / "data.parquet"


def rate(call: Callable[[], int]) -> Callable[[], float]:
    """Rows/s of a call that returns how many it has read."""

    def measure() -> float:
        start = time.perf_counter()
        rows = call()
        return rows / (time.perf_counter() - start)

    return measure


@runner.measures("reading.csv")
def read_csv(preset: str) -> runner.Measure:
    with tempfile.TemporaryDirectory() as directory:
        path, _ = write(directory, ROWS[preset])
        reader = persia.data.csv(path, SCHEMA, BATCH, lists={"list": "|"})
        options = pc.ReadOptions(use_threads=False, block_size=4 << 20)
        return runner.ratio(
            "reading.csv",
            ours=rate(lambda: sum(map(len, reader))),
            theirs=rate(lambda: sum(map(len, pc.open_csv(path, read_options=options)))),
            of="rows/s",
            rounds=ROUNDS[preset],
        )


@runner.measures("reading.parquet")
def read_parquet(preset: str) -> runner.Measure:
    with tempfile.TemporaryDirectory() as directory:
        _, path = write(directory, ROWS[preset])
        reader = persia.data.parquet(path, SCHEMA, BATCH)
        return runner.ratio(
            "reading.parquet",
            ours=rate(lambda: sum(map(len, reader))),
            theirs=rate(lambda: sum(map(len, pq.ParquetFile(path).iter_batches(use_threads=False)))),
            of="rows/s",
            rounds=ROUNDS[preset],
        )


@runner.measures("reading.arrow")
def read_arrow(preset: str) -> runner.Measure:
    """A table in memory, over the same rows in a Parquet file, both with the readers here."""
    with tempfile.TemporaryDirectory() as directory:
        _, path = write(directory, ROWS[preset])
        frame = persia.data.arrow(pq.read_table(path), SCHEMA, BATCH)
        file = persia.data.parquet(path, SCHEMA, BATCH)
        return runner.ratio(
            "reading.arrow",
            ours=rate(lambda: sum(map(len, frame))),
            theirs=rate(lambda: sum(map(len, file))),
            of="rows/s",
            rounds=ROUNDS[preset],
            at_least=1.0,
        )
