"""What every reader promises: order, resuming, sharding, shuffling in a bounded buffer, pickling."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import data
from persia.batching.batch import Batch
from persia.data.reader import Order, StreamReader
from persia.errors import ConfigError
from persia.schema import IdFeature, Schema
from persia.services import Sharded

SCHEMA = Schema([IdFeature("a", dim=2), IdFeature("b", dim=2)], dense_features=["p"], labels=["y"])


def table(rows: int, first: int = 0) -> pa.Table:
    numbers = range(first, first + rows)
    return pa.table(
        {
            "a": pa.array([None if i % 23 == 0 else i for i in numbers], pa.int64()),
            "b": pa.array([[i] * (i % 3) for i in numbers], pa.list_(pa.int64())),
            "p": pa.array(numbers, pa.float64()),
            "y": pa.array([i % 2 for i in numbers], pa.int8()),
            "ms": pa.array([i * 3_600_000 for i in numbers], pa.int64()),
        }
    )


def facts(batches: Iterator[Batch]) -> list[bytes]:
    """Batches as bytes: the same only if every array is the same."""
    return [
        pickle.dumps([{n: (c.values, c.offsets) for n, c in b.id_features.items()}, b.dense, b.labels, b.day])
        for b in batches
    ]


class Rows:
    """A source that gives the rows of a table in pieces of random sizes."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.random = rows, random.Random(seed)

    def chunks(self, skip: int) -> Iterator[Batch]:
        while skip < self.rows:
            size = min(self.random.randint(1, 40), self.rows - skip)
            columns = table(size, skip)
            yield Batch.from_columns(SCHEMA, {n: columns[n] for n in columns.column_names}, columns["ms"])
            skip += size


@settings(deadline=None)
@given(
    rows=st.integers(1, 150),
    batch_size=st.integers(1, 40),
    shuffle_rows=st.sampled_from([0, 1, 7, 30, 500]),
    drop_last=st.booleans(),
    shards=st.integers(1, 3),
    start=st.integers(0, 12),
    epoch=st.integers(0, 2),
    seed=st.integers(0, 1000),
)
def test_resuming_and_sharding(
    rows: int, batch_size: int, shuffle_rows: int, drop_last: bool, shards: int, start: int, epoch: int, seed: int
) -> None:
    def reader(index: int = 0, count: int = 1) -> StreamReader:
        source = Rows(rows, random.randint(0, 1 << 30))
        return StreamReader(SCHEMA, source, Order(batch_size, shuffle_rows, seed, drop_last, (index, count)))

    whole = facts(reader().batches(epoch))
    assert facts(reader().batches(epoch, start)) == whole[start:]
    for index in range(shards):
        part = whole[index::shards]
        assert facts(reader(index, shards).batches(epoch)) == part
        assert facts(reader(index, shards).batches(epoch, start)) == part[start:]
        mine = reader().shard(index, shards)
        assert isinstance(mine, Sharded)
        assert facts(mine.batches(epoch, start)) == part[start:]
        # A share of a share.
        for inner in range(2):
            assert facts(mine.shard(inner, 2).batches(epoch, start)) == part[inner::2][start:]
    seen = [b.dense[:, 0] for b in reader().batches(epoch)]
    sizes = [len(x) for x in seen]
    assert sizes == [batch_size] * (rows // batch_size) + (
        [rows % batch_size] if rows % batch_size and not drop_last else []
    )
    if seen and not shuffle_rows:
        assert np.array_equal(np.concatenate(seen), np.arange(sum(sizes)))
    if not drop_last:
        assert sorted(np.concatenate(seen).tolist()) == list(range(rows))


def test_shuffling_depends_on_epoch_and_seed_within_its_block() -> None:
    def order(epoch: int, seed: int) -> list[float]:
        reader = StreamReader(SCHEMA, Rows(100, 0), Order(10, 25, seed))
        return [float(x) for b in reader.batches(epoch) for x in b.dense[:, 0]]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(e, s)) for e in range(2) for s in range(2)}) == 4
    for block in range(4):
        assert sorted(order(0, 0)[25 * block : 25 * block + 25]) == list(range(25 * block, 25 * block + 25))


@pytest.mark.parametrize(
    "order",
    [{"batch_size": 0}, {"batch_size": 1.5}, {"shuffle_rows": -1}, {"seed": -1}, {"shard": (1, 1)}, {"shard": (0, 0)}],
)
def test_bad_options(order: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(order))):
        Order(**order)


# --- the same promises, for each reader there is -----------------------------------------------------------------


def _parquet(path: Path, **options: Any) -> StreamReader:
    for i in range(3):
        folder = path / f"day={i:02}"
        folder.mkdir(parents=True, exist_ok=True)
        pq.write_table(table(40, 40 * i), folder / "part.parquet", row_group_size=15)
    return data.parquet(path, SCHEMA, 16, day="day", **options)


def _csv(path: Path, **options: Any) -> StreamReader:
    lines = [f"{i},{i % 5},x{i % 7},{i * 0.5},{i % 2}" for i in range(100)]
    (path / "rows.csv").write_text("\n".join(["n,a,b,p,y", *lines]))
    return data.csv(path / "rows.csv", SCHEMA, 16, **options)


def _synthetic(_: Path, *, shuffle_rows: int = 0, **options: Any) -> data.Synthetic:
    return data.synthetic(100, batch_size=16, ids_per_feature=50, dense_features=2, extra_id_features=1, **options)


READERS = {"parquet": _parquet, "csv": _csv, "synthetic": _synthetic}


@pytest.mark.parametrize("shuffle_rows", [0, 33])
@pytest.mark.parametrize("name", READERS)
def test_every_reader_resumes_shards_and_pickles(name: str, shuffle_rows: int, tmp_path: Path) -> None:
    make: Callable[..., Any] = READERS[name]
    reader = make(tmp_path, shuffle_rows=shuffle_rows)
    assert isinstance(reader, data.Reader)
    for batch in reader:
        batch.validate(reader.schema)
    for epoch in range(2):
        whole = facts(reader.batches(epoch))
        assert len(whole) >= 6
        for start in range(len(whole) + 2):
            assert facts(pickle.loads(pickle.dumps(reader)).batches(epoch, start)) == whole[start:]
        parts = [facts(make(tmp_path, shuffle_rows=shuffle_rows, shard=(i, 2)).batches(epoch)) for i in range(2)]
        assert parts == [whole[0::2], whole[1::2]]
    assert len(list(make(tmp_path, drop_last=True))) == len(whole) - 1 or name == "parquet"
    assert facts(iter(reader)) == facts(reader.batches(0, 0))


def test_two_iterators_of_one_reader_are_independent(tmp_path: Path) -> None:
    reader = _parquet(tmp_path)
    one, two = iter(reader), iter(reader)
    next(one)
    assert facts(itertools.islice(two, 1)) == facts(reader.batches())[:1]
    one.close()  # type: ignore[attr-defined]


def public_readers(tmp_path: Path) -> list[Any]:
    for number in range(3):
        pq.write_table(table(50, 50 * number), tmp_path / f"part-{number}.parquet", row_group_size=20)
    (tmp_path / "rows.csv").write_text("a,b,p,y\n" + "".join(f"{i},{i % 7},{i}.5,{i % 2}\n" for i in range(150)))
    return [
        data.parquet(tmp_path, SCHEMA, 8),
        data.parquet(tmp_path, SCHEMA, 8, shuffle_rows=30, seed=4, drop_last=True),
        data.parquet(tmp_path, SCHEMA, 8, shard=(1, 2)),
        data.csv(tmp_path / "rows.csv", SCHEMA, 8),
        data.csv(tmp_path / "rows.csv", SCHEMA, 8, shuffle_rows=64),
        data.synthetic(150, id_features=2, ids_per_feature=50, batch_size=8),
        data.synthetic(150, id_features=2, ids_per_feature=50, batch_size=8, shard=(1, 3), drop_last=True),
    ]


def test_the_shards_of_every_reader_are_the_whole(tmp_path: Path) -> None:
    for reader in public_readers(tmp_path):
        assert isinstance(reader, Sharded)
        for epoch, count in ((0, 1), (0, 2), (1, 3), (0, 40)):
            whole = facts(reader.batches(epoch))
            for index in range(count):
                assert facts(reader.shard(index, count).batches(epoch)) == whole[index::count]
        for index, count in ((2, 2), (-1, 2), (0, 0)):
            with pytest.raises(ConfigError, match="shard"):
                reader.shard(index, count)


def test_batches_of_other_shards_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []
    take = Batch.take
    monkeypatch.setattr(Batch, "take", lambda self, rows: (moved.append(len(rows)), take(self, rows))[1])
    reader = StreamReader(SCHEMA, Rows(160, 1), Order(8, shuffle_rows=40)).shard(1, 4)
    assert len(list(reader.batches())) == 5
    assert sum(moved) == 40
