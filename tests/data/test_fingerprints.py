"""By what a source is recognised, and reading of some of its parts."""

import os
import pickle

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.data import Split, arrow, csv, days, negatives, parquet, synthetic
from persia.data.fingerprints import fingerprint_of_frame
from persia.errors import DataError
from persia.services import fingerprint_of
from support.examples import examples

SCHEMA = persia.Schema([persia.IdFeature("row", 4, kind="number")], labels=["click"])


def table(first=0, rows=40):
    ids = np.arange(first, first + rows)
    return pa.table({"row": ids, "click": ids % 2, "day": ids // 20})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Files of 40, 40, 0 and 25 rows, numbered over all of them."""
    path = tmp_path_factory.mktemp("files")
    for number, rows in enumerate((40, 40, 0, 25)):
        pq.write_table(table(number * 40 if number < 3 else 80, rows), path / f"{number}.parquet")
        pa.csv.write_csv(table(number * 40 if number < 3 else 80, rows), path / f"{number}.csv")
    return path


def read(source):
    return [int(row) for batch in source for row in batch.id_features["row"].values]


def test_files_are_recognised_by_path_size_and_time(folder):
    found = fingerprint_of(parquet(folder, SCHEMA, 7))
    assert found == fingerprint_of(parquet([folder / f"{n}.parquet" for n in range(4)], SCHEMA, 7))
    part, stat = found.parts[0], os.stat(folder / "0.parquet")
    assert (part.name, part.size, part.modified) == (str(folder / "0.parquet"), stat.st_size, stat.st_mtime_ns)
    assert found == fingerprint_of(pickle.loads(pickle.dumps(parquet(folder, SCHEMA, 7))))


def test_a_file_of_a_file_system_has_size_and_time_too():
    import fsspec

    system = fsspec.filesystem("memory")
    with system.open("/fingerprints/a.csv", "wb") as file:
        file.write(b"row,click\n1,1\n")
    (part,) = fingerprint_of(csv("memory://fingerprints/a.csv", SCHEMA)).parts
    assert (part.name, part.size) == ("memory:///fingerprints/a.csv", 14)
    assert part.modified is not None
    system.rm("/fingerprints", recursive=True)


def test_a_file_that_is_listed_twice_has_two_parts(folder):
    paths = [folder / "0.parquet", folder / "0.parquet"]
    assert len({*fingerprint_of(parquet(paths, SCHEMA)).keys()}) == 2


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"batch_size": 8}, False),
        ({"shuffle_rows": 16}, False),
        ({"where": "row > 3"}, False),
        ({"where": lambda row: pa.compute.greater(row, 3)}, False),
        ({"split": Split("train")}, False),
        ({"shard": (0, 2)}, False),
        ({"seed": 4}, True),
        ({"drop_last": True}, True),
        ({"day": "day"}, True),
        ({"require_labels": False}, True),
    ],
    ids=lambda value: "same" if value is True else "other" if value is False else next(iter(value)),
)
def test_what_moves_rows_is_in_the_fingerprint_and_nothing_else(folder, options, same):
    plain = fingerprint_of(parquet(folder, SCHEMA, **{"batch_size": 7}))
    assert (fingerprint_of(parquet(folder, SCHEMA, **{"batch_size": 7} | options)) == plain) == same


def test_the_seed_counts_with_shuffling_and_rules_by_their_code(folder):
    def of(**options):
        return fingerprint_of(parquet(folder, SCHEMA, **options))

    assert of(shuffle_rows=16, seed=1) != of(shuffle_rows=16, seed=2)
    assert of(where=lambda row: pa.compute.greater(row, 3)) == of(where=lambda row: pa.compute.greater(row, 3))
    assert of(where=lambda row: pa.compute.greater(row, 3)) != of(where=lambda row: pa.compute.greater(row, 4))
    assert of(split=Split("train")).numbered
    assert not of(split=Split("train", by="hash", column="row")).numbered


@pytest.mark.parametrize("kind", ["pandas", "polars", "table", "batch", "dataset"])
def test_frames_are_recognised_by_their_content(kind, folder):
    def make(first, rows=40):
        made = table(first, rows)
        if kind == "dataset":
            return pa.dataset.dataset(str(folder / f"{first // 40}.parquet"))
        frames = {"pandas": made.to_pandas, "polars": lambda: pl.from_arrow(made), "table": lambda: made}
        return frames[kind]() if kind in frames else made.to_batches()[0]

    one, again, other = (fingerprint_of(arrow(make(first), SCHEMA)) for first in (0, 0, 40))
    assert one == again != other
    assert one is not None
    if kind != "dataset":
        assert one != fingerprint_of(arrow(make(0, 41), SCHEMA))


def test_a_slice_of_a_frame_is_its_rows():
    whole = table(0, 4000)
    assert fingerprint_of(arrow(whole.slice(1000, 40), SCHEMA)) == fingerprint_of(arrow(table(1000, 40), SCHEMA))
    frame = pd.DataFrame({"row": ["a", None, "c"], "click": [0, 1, 0], "fingerprint": [1, 2, 3]})
    assert fingerprint_of(arrow(frame, SCHEMA)) is not None


def test_a_function_needs_a_fingerprint_to_be_recognised():
    class Query:
        def __call__(self):
            return table()

        def fingerprint(self):
            return "select *"

    assert fingerprint_of(arrow(lambda: table(), SCHEMA)) is None
    assert fingerprint_of(arrow(Query(), SCHEMA)).parts[0].name == "select *"


def test_wrapped_readers(folder):
    plain = parquet(folder, SCHEMA, 7, day="day")
    assert fingerprint_of(negatives(plain, ["row"], 2)).parts == fingerprint_of(plain).parts
    first, second = days(parquet(folder / "0.parquet", SCHEMA, 10, day="day"), 10, 0, 1).values()
    assert fingerprint_of(first) != fingerprint_of(second)
    longer = days(parquet(folder, SCHEMA, 10, day="day"), 10, 0, 1)[0]
    assert fingerprint_of(first) == fingerprint_of(longer)  # Days behind it may be added.
    assert fingerprint_of(synthetic(100)) == fingerprint_of(synthetic(100)) != fingerprint_of(synthetic(100, seed=1))


def test_a_source_with_parts_but_no_of_parts_is_refused():
    class Own:
        def fingerprint(self):
            return persia.data.SourceFingerprint("own", (persia.data.SourcePart("a"), persia.data.SourcePart("b")))

    with pytest.raises(DataError, match="has 2 parts, but Own has no method `of_parts`"):
        fingerprint_of(Own())


@pytest.mark.parametrize("make", [parquet, csv])
@given(data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_parts_are_read_in_any_order_and_rows_keep_their_numbers(folder, make, data):
    numbers = data.draw(st.permutations(range(4)), "files")
    read_numbers = data.draw(st.sets(st.sampled_from(numbers)), "those that are read")
    split = Split("train", test=0.4) if data.draw(st.booleans(), "split") else None
    paths = [str(folder / f"{n}.{make.__name__}") for n in numbers]
    chosen = tuple(place for place, number in enumerate(numbers) if number in read_numbers)
    order = tuple(range(4)) if split is not None else chosen
    found = read(make(paths, SCHEMA, 7, split=split).of_parts(order, chosen))
    whole = read(make(paths, SCHEMA, 7, split=split))
    assert found == [row for row in whole if _file(row) in read_numbers]


def _file(row):
    return 0 if row < 40 else 1 if row < 80 else 3


def test_a_frame_of_texts_as_polars_keeps_them_has_a_fingerprint():
    polars = pytest.importorskip("polars", reason="needs the extra polars")
    one, same, other = (polars.DataFrame({"user": ["a" * 20, name, None]}) for name in ("b", "b", "c"))
    first, second, third = (fingerprint_of_frame("frame", each) for each in (one, same, other))
    assert first == second != third
