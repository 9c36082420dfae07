"""The same values have the same ids, or are refused at the same row, whatever the file, frame or array that holds them.

Two representations cannot hold every value, and are compared where they can. CSV has one text for a missing and an
empty value, and both have no id. A float column holds no whole number from 2**53 on: it must be refused, never silently
changed. Under kind="text" floats have no one text (5.0 may be "5" or "5.0"), so that any float there is refused.
"""

from __future__ import annotations

import csv
import io
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import persia
from persia import data
from persia.batching.batch import Batch
from persia.data import from_csv, from_parquet
from persia.errors import DataError
from persia.schema import IdFeature, IdKind, Schema
from support.examples import examples

Value = int | float | str | None
KINDS: list[IdKind] = ["auto", "number", "text"]

# --- the rule, said once more -----------------------------------------------------------------------------------------


def hashed(text: str) -> int:
    return xxhash.xxh64_intdigest(text.encode())


def expected_id(value: Value, kind: IdKind) -> int | None:
    """The id, None if there is none; raises ValueError if the value is refused."""
    if value is None or value == "" or value != value:
        return None
    if kind == "text":
        if isinstance(value, float):
            raise ValueError(value)
        return hashed(str(value))
    if isinstance(value, float) and abs(value) >= 2**53:
        raise ValueError(value)
    text = str(value).strip(" \t")
    if kind == "number" and text in ("", *MARKERS):
        return None
    whole = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))(\.0+)?", text)
    if whole and 0 <= int(whole[1]) < 2**64:
        return int(whole[1])
    if text in TRUTHS:
        return TRUTHS[text]
    if kind == "number":
        raise ValueError(value)
    return hashed(whole[1] if whole else str(value))


TRUTHS = {"true": 1, "True": 1, "false": 0}
MARKERS = ["NA", "NULL", "nan", "None"]

# --- representations --------------------------------------------------------------------------------------------------


def as_text(value: Value) -> str | None:
    return value if isinstance(value, str) or value is None else str(value)


def ints(values: list[Value], low: int, high: int) -> bool:
    return all(v is None or (isinstance(v, int) and low <= v < high) for v in values)


def floats(values: list[Value]) -> bool:
    return all(
        isinstance(v, (float, type(None))) or abs(v) < 2**53 for v in values if not isinstance(v, str)
    ) and not any(isinstance(v, str) for v in values)


def texts(values: list[Value], kind: IdKind) -> bool:
    """Whether texts mean the same: not for floats under "text", which are refused there."""
    return kind != "text" or not any(isinstance(v, float) for v in values)


Make = Callable[[list[Value]], Any]


def arrow_forms(values: list[Value], kind: IdKind) -> dict[str, Make]:
    """Arrow arrays that hold these values, which Parquet can be written from as well."""
    forms: dict[str, Make] = {}
    whole = {"int64": (-(2**63), 2**63), "uint64": (0, 2**64), "int32": (-(2**31), 2**31), "uint32": (0, 2**32)}
    whole |= {"int16": (-(2**15), 2**15), "uint8": (0, 2**8)}
    for name, (low, high) in whole.items():
        if ints(values, low, high):
            forms[name] = lambda v, name=name: pa.array(v, name)
            forms[f"dictionary of {name}"] = lambda v, name=name: pa.array(v, name).dictionary_encode()
    if floats(values) and (kind != "text" or all(isinstance(v, (float, type(None))) for v in values)):
        forms["float64"] = lambda v: pa.array([None if x is None else float(x) for x in v], pa.float64())
        if all(v is None or struct.unpack("f", struct.pack("f", v))[0] == v for v in values) and all(
            v is None or (float(v).is_integer() and abs(v) < 2**24) for v in values
        ):
            forms["float32"] = lambda v: pa.array([None if x is None else float(x) for x in v], pa.float32())
            forms["float32 with NaN"] = lambda v: pa.array([np.nan if x is None else x for x in v], pa.float32())
    if texts(values, kind):
        for type_ in (pa.string(), pa.large_string(), pa.string_view()):
            forms[str(type_)] = lambda v, type_=type_: pa.array(list(map(as_text, v)), type_)
        forms["binary"] = lambda v: pa.array([None if x is None else as_text(x).encode() for x in v], pa.binary())
        forms["dictionary"] = lambda v: pa.array(list(map(as_text, v)), pa.string()).dictionary_encode()
        forms["large dictionary"] = lambda v: pa.array(list(map(as_text, v)), pa.large_string()).dictionary_encode()
    return forms


def column_forms(values: list[Value], kind: IdKind) -> dict[str, Make]:
    """What `Batch.from_columns` takes for these values."""
    forms = {f"arrow {name}": make for name, make in arrow_forms(values, kind).items()}
    forms |= {f"sliced {name}": lambda v, make=make: make([*v, *v])[len(v) :] for name, make in forms.items()}
    forms |= {
        f"chunked {name}": lambda v, m=m: pa.chunked_array([m(v[:2]), m(v[2:])])
        for name, m in forms.items()
        if "sliced" not in name
    }
    forms["list"] = list
    forms["tuple of objects"] = lambda v: np.array([*v, None], dtype=object)[:-1]
    forms["pandas object"] = lambda v: pd.Series(v, dtype=object)
    forms["one list each"] = lambda v: [[] if x is None else [x] for x in v]
    if texts(values, kind):
        forms["pandas string"] = lambda v: pd.Series(list(map(as_text, v)), dtype="string")
        forms["pandas category"] = lambda v: pd.Series(list(map(as_text, v)), dtype="category")
        forms["polars texts"] = lambda v: pl.Series(list(map(as_text, v)), dtype=pl.String)
        forms["polars categories"] = lambda v: pl.Series(list(map(as_text, v)), dtype=pl.Categorical)
        if None not in values and not any("\0" in str(v) for v in values):  # numpy cuts them off at the end.
            forms["numpy texts"] = lambda v: np.array(list(map(as_text, v)))
            forms["numpy bytes"] = lambda v: np.array([as_text(x).encode() for x in v])
    if ints(values, -(2**63), 2**63):
        forms["pandas Int64"] = lambda v: pd.Series(v, dtype="Int64")
        forms["polars Int64"] = lambda v: pl.Series(v, dtype=pl.Int64)
        forms["polars list"] = lambda v: pl.Series([[] if x is None else [x] for x in v], dtype=pl.List(pl.Int64))
        if None not in values:
            forms["numpy int64"] = lambda v: np.array(v, np.int64)
            forms["numpy [batch, 1]"] = lambda v: np.array(v, np.int64)[:, None]
            forms["values and offsets"] = lambda v: (np.array(v, np.int64), np.arange(len(v) + 1))
            forms["pandas int64"] = lambda v: pd.Series(v, dtype="int64")
    if ints(values, 0, 2**64):
        forms["pandas UInt64"] = lambda v: pd.Series(v, dtype="UInt64")
        forms["polars UInt64"] = lambda v: pl.Series(v, dtype=pl.UInt64)
    if "arrow float64" in forms:
        forms["numpy float64"] = lambda v: np.array([np.nan if x is None else x for x in v], np.float64)
        forms["pandas float64"] = lambda v: pd.Series([np.nan if x is None else x for x in v], dtype="float64")
        forms["polars float64"] = lambda v: pl.Series([None if x is None else float(x) for x in v], dtype=pl.Float64)
    return forms


# --- what comes out ---------------------------------------------------------------------------------------------------


def outcome(values: list[Value], kind: IdKind) -> list[int | None] | int:
    """The ids, or the first row that is refused."""
    ids = []
    for row, value in enumerate(values):
        try:
            ids.append(expected_id(value, kind))
        except ValueError:
            return row
    return ids


def ids_of(batch: Batch) -> list[int | None]:
    column = batch.id_features["f"]
    if column.offsets is None:
        return [int(x) for x in column.values]
    bounds = zip(column.offsets, column.offsets[1:], strict=False)
    return [int(column.values[low]) if high > low else None for low, high in bounds]


def read(make: Callable[[], list[Batch]]) -> list[int | None] | int:
    try:
        return [x for batch in make() for x in ids_of(batch)]
    except DataError as error:
        return int(error.fields["row"])


def schema(kind: IdKind) -> Schema:
    return Schema([IdFeature("f", dim=2, kind=kind)], dense_features=["row"], labels=[])


WORDS = [
    "x",
    "é",
    "日本",
    "unknown",
    "5",
    "05",
    "-1",
    "1.0",
    "-0.0",
    "1.5",
    "+3",
    " 7 ",
    "1e3",
    "18446744073709551616",
    "",
    *MARKERS,
    *TRUTHS,
]
whole = st.one_of(
    st.integers(0, 300), st.integers(-(2**70), 2**70), st.sampled_from([2**53 - 1, 2**53, 2**63, 2**64 - 1, 2**64])
)
small = st.integers(-300, 300)
words = st.one_of(st.sampled_from(WORDS), st.text("ab5 .é日", max_size=4))
parts = st.one_of(small.map(float), st.sampled_from([0.5, -1.25, 0.1, 1e-7, 1e15, 2.0**53 - 1]))
gap = st.none()
columns: st.SearchStrategy[list[Value]] = st.one_of(
    *(st.lists(st.one_of(kind, gap), min_size=1, max_size=12) for kind in (small, whole, words, parts)),
    *(st.lists(kind, min_size=1, max_size=12) for kind in (st.integers(0, 200), small, words)),
    st.lists(st.one_of(small, words, parts, gap), min_size=1, max_size=12),
)
quick = settings(deadline=None, max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])


@quick
@given(values=columns, kind=st.sampled_from(KINDS))
def test_arrays_and_frames(values: list[Value], kind: IdKind) -> None:
    expected = outcome(values, kind)
    rows = np.arange(len(values))
    for name, make in column_forms(values, kind).items():
        column = make(values)
        found = read(lambda column=column: [Batch.from_columns(schema(kind), {"f": column, "row": rows})])
        assert found == expected, name


@quick
@given(values=columns, kind=st.sampled_from(KINDS))
def test_frames_and_tables_as_a_whole(values: list[Value], kind: IdKind) -> None:
    expected = outcome(values, kind)
    rows = np.arange(len(values))
    frames: list[Any] = [pd.DataFrame({"row": rows, "f": pd.Series(values, dtype=object)})]
    frames += [pa.table({"row": rows, "f": make(values)}) for make in arrow_forms(values, kind).values()]
    frames += [pl.from_arrow(table) for table in frames[1:] if "view" not in str(table.schema)]
    for frame in frames:
        assert read(lambda frame=frame: [Batch.from_columns(schema(kind), frame)]) == expected, frame


def write_csv(path: Path, values: list[Value], first: int) -> None:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(["f", "row"])
    writer.writerows(["" if v is None else as_text(v), first + i] for i, v in enumerate(values))
    path.write_text(buffer.getvalue())


@quick
@given(
    values=columns,
    kind=st.sampled_from(KINDS),
    block=st.sampled_from([64, 100, 1 << 20]),
    chunk=st.sampled_from([1, 3, 100]),
)
def test_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[Value], kind: IdKind, block: int, chunk: int
) -> None:
    monkeypatch.setattr(from_csv, "_BLOCK_BYTES", block)
    monkeypatch.setattr(from_parquet, "_CHUNK_ROWS", chunk)
    expected = outcome(values, kind)
    if texts(values, kind):
        write_csv(tmp_path / "a.csv", values, 0)
        assert read(lambda: list(data.csv(tmp_path / "a.csv", schema(kind), 4))) == expected, "csv"
    for name, make in arrow_forms(values, kind).items():
        table = pa.table({"f": make(values), "row": np.arange(len(values))})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
        assert read(lambda: list(data.parquet(tmp_path / "a.parquet", schema(kind), 4))) == expected, name


@quick
@given(days=st.lists(columns, min_size=2, max_size=4), kind=st.sampled_from(KINDS), draw=st.data())
def test_files_of_several_types_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, days: list[list[Value]], kind: IdKind, draw: st.DataObject
) -> None:
    monkeypatch.setattr(from_parquet, "_CHUNK_ROWS", 3)
    for old in tmp_path.iterdir():
        old.unlink()
    written: list[tuple[Path, list[Value]]] = []
    for day, values in enumerate(days):
        forms = arrow_forms(values, kind)
        if forms:
            make = forms[draw.draw(st.sampled_from(sorted(forms)))]
            written.append((tmp_path / f"{day}.parquet", values))
            pq.write_table(pa.table({"f": make(values), "row": np.arange(len(values))}), written[-1][0])
            if texts(values, kind):
                write_csv(tmp_path / f"{day}.csv", values, 0)
    if not written:
        return
    order = draw.draw(st.permutations(written))
    outcomes = [outcome(values, kind) for _, values in order]
    expected: list[int | None] | int = [x for one in outcomes if isinstance(one, list) for x in one]
    expected = next((one for one in outcomes if isinstance(one, int)), expected)  # Rows are counted within a file.
    paths = [path for path, _ in order]
    assert read(lambda: list(data.parquet(paths, schema(kind), 4))) == expected
    if all(texts(values, kind) for _, values in order):
        assert read(lambda: list(data.csv([p.with_suffix(".csv") for p in paths], schema(kind), 4))) == expected


@pytest.mark.parametrize(
    "column",
    [
        np.array([2.0**53, 1.0]),
        np.array([1.0, -(2.0**60)]),
        np.array([2**24, 1], np.float32),
        [1.5, 1e300],
        pa.array([2.0**53]),
        pd.Series([2.0**53, None]),
        pl.Series([2.0**53]),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["auto", "number"])
def test_floats_that_may_stand_for_several_ids_are_refused(column: Any, kind: IdKind) -> None:
    with pytest.raises(DataError, match=r"cannot tell neighbouring whole numbers apart.*nullable integer") as caught:
        Batch.from_columns(schema(kind), {"f": column, "row": np.zeros(len(column))})
    assert caught.value.fields["feature"] == "f"
    assert "row" in caught.value.fields


# --- the regression: train on one format, evaluate on others ----------------------------------------------------------


def test_the_auc_does_not_depend_on_the_format_of_evaluation(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    users = rng.integers(1, 40, 6_000)
    clicks = rng.random(6_000) < np.where(users % 2, 0.9, 0.1)  # Only the id decides.
    known: list[int | None] = [int(u) for u in users]
    train, test = slice(0, 3_000), slice(3_000, 6_000)

    with open(tmp_path / "train.csv", "w") as file:  # One text in the first block hashed the whole column once.
        rows = zip(["unknown", *known[train]], [0, *clicks[train].astype(int)], strict=True)
        file.write("user,label\n" + "".join(f"{u},{c}\n" for u, c in rows))
    for form, (low, high) in {"ints": (3_000, 4_000), "floats": (4_000, 5_000), "texts": (5_000, 6_000)}.items():
        part = known[low:high]
        if form == "floats":
            part = [None, *part[1:]]  # A gap, as pandas writes it.
        column = {
            "ints": lambda p: pa.array(p, pa.int64()),
            "floats": lambda p: pa.Table.from_pandas(pd.DataFrame({"u": p}))["u"],
            "texts": lambda p: pa.array(list(map(str, p))),
        }[form](part)
        pq.write_table(pa.table({"user": column, "label": clicks[low:high]}), tmp_path / f"{form}.parquet")
    assert pq.read_schema(tmp_path / "floats.parquet").field("user").type == pa.float64()
    with open(tmp_path / "test.csv", "w") as file:
        rows = zip([known[3_000], *known[test][1:]], clicks[test].astype(int), strict=True)
        file.write("user,label\n" + "".join(f"{'' if i == 1_000 else u},{c}\n" for i, (u, c) in enumerate(rows)))

    clicked = Schema([IdFeature("user", dim=4)])
    trainer = persia.Trainer(
        persia.nn.models.FFNN(clicked, hidden=(8,)),
        clicked,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
    )
    trainer.fit(data.csv(tmp_path / "train.csv", clicked, 100), epochs=3)
    one_format = trainer.evaluate(data.csv(tmp_path / "test.csv", clicked, 100))
    order = [tmp_path / f"{form}.parquet" for form in ("ints", "floats", "texts")]
    others = trainer.evaluate(data.parquet(order, clicked, 100))
    assert others.auc == pytest.approx(one_format.auc, abs=1e-9)
    assert others.auc > 0.8
