"""Random schemas with rules, rows for them, and all ways that a row takes to a batch.

For the benchmark `features.equal` and for tests/batching/test_feature_ways.py, which also compares with a twin. A new
rule joins `COLUMNS`: a function that draws a feature and the values of its column.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import persia
from persia.data.rows import Conversion
from persia.data.streams.broker import BrokerOptions
from persia.data.streams.message_rows import MessageConverter
from persia.data.streams.options import KafkaOptions, StreamCounts
from persia.schema import NO_RULES
from persia.serve.http.bodies import Bodies
from persia.serve.http.codecs.arrow_codec import ArrowCodec
from persia.serve.http.codecs.json_codec import JsonCodec
from persia.serve.http.codecs.msgpack_codec import MsgpackCodec, column_of
from persia.serve.http.limits import ServeLimits
from persia.serve.predictor import _batch_of
from persia.types import Partition

__all__ = ["COLUMNS", "WAYS", "Case", "Drawn", "different_rows", "random_case"]

LIMITS = ServeLimits(max_rows=10_000, max_values=1_000_000)


class Drawn(NamedTuple):
    """A feature or label, and values of its columns, one for each row: numbers, texts, lists, or None if missing."""

    feature: persia.IdFeature | persia.DenseFeature | persia.Label | str
    columns: dict[str, list[Any]]


class Case(NamedTuple):
    """A fitted schema, and rows for it by column."""

    schema: persia.Schema
    columns: dict[str, list[Any]]


def _number(random: Random, most: float) -> float | int:
    kind = random.randrange(5)
    if kind == 0:
        return random.randint(-3, 3)
    if kind == 1:
        return random.randint(-int(most), int(most))
    if kind == 2:
        return random.choice([0.0, -0.0])
    return random.uniform(-1, 1) * 10.0 ** random.uniform(-5, math.log10(most))


def dense(random: Random, name: str, rows: int) -> Drawn:
    """A feature of one number with any rules."""
    fill = random.choice([None, 0, -1.5, "mean"])
    scale = random.choice(
        [None, None, "standard", "minmax", "quantile", (random.uniform(-9, 9), 10 ** random.uniform(-2, 2))]
    )
    log = random.random() < 0.4
    feature = persia.DenseFeature(
        name,
        fill=fill,
        missing_indicator=fill is not None and random.random() < 0.5,
        clip=random.choice([None, (-2.0, 3.0), (0.0, 1e4)]),
        log=log,
        scale=scale,
    )
    most = 1e12 if log or scale is not None else 1e6
    values = [_number(random, most) for _ in range(rows)]
    if random.random() < 0.3:  # A column of whole numbers.
        values = [int(value) for value in values]
    if fill is not None:
        values = [None if random.random() < 0.3 else value for value in values]
        if all(value is None for value in values):
            values[random.randrange(rows)] = 1.0  # Else there is nothing to fit.
    return Drawn(feature, {name: values})


def vector(random: Random, name: str, rows: int) -> Drawn:
    """A feature of several numbers."""
    size = random.choice([2, 3, 5])
    fill = random.choice([None, 0, 2.5])
    feature = persia.DenseFeature(
        name,
        fill=fill,
        missing_indicator=fill is not None and random.random() < 0.5,
        log=random.random() < 0.3,
        scale=random.choice([None, "standard", "quantile"]),
        size=size,
    )
    values: list[Any] = [[_number(random, 1e6) for _ in range(size)] for _ in range(rows)]
    if fill is not None:
        values = [None if number and random.random() < 0.3 else value for number, value in enumerate(values)]
    return Drawn(feature, {name: values})


def plain(random: Random, name: str, rows: int) -> Drawn:
    """A feature without rules."""
    return Drawn(name, {name: [_number(random, 1e6) for _ in range(rows)]})


def ids(random: Random, name: str, rows: int) -> Drawn:
    """A feature of one id."""
    values = [random.choice([random.randrange(100), f"t{random.randrange(9)}"]) for _ in range(rows)]
    kind = random.choice(["auto", "text"])
    return Drawn(persia.IdFeature(name, dim=4, kind=kind), {name: [str(value) for value in values]})  # type: ignore[arg-type]


COLUMNS: list[Callable[[Random, str, int], Drawn]] = [dense, dense, vector, plain, ids]


def labels(random: Random, rows: int) -> list[Drawn]:
    """A label of any kind."""
    kind = random.randrange(3)
    if kind == 0:
        return [Drawn("y", {"y": [random.randrange(2) for _ in range(rows)]})]
    if kind == 1:
        label = persia.Label("y", kind="regression", missing="mask")
        return [Drawn(label, {"y": [None if random.random() < 0.2 else _number(random, 1e5) for _ in range(rows)]})]
    names = ("low", "middle", "7")
    label = persia.Label("y", kind="multiclass", classes=names, missing="mask")
    return [Drawn(label, {"y": [random.choice([*names, None]) for _ in range(rows)]})]


def random_case(random: Random, rows: int) -> Case:
    """Draws a schema and rows, and fits the schema to them."""
    drawn = [ids(random, "c0", rows)]
    drawn += [random.choice(COLUMNS)(random, f"c{number}", rows) for number in range(1, random.randint(2, 6))]
    drawn += labels(random, rows)
    columns = {name: values for each in drawn for name, values in each.columns.items()}
    options: dict[str, str] = {}
    if random.random() < 0.5:
        options = {"sample_weight": "w", "group": "g"}
        columns["w"] = [abs(_number(random, 100)) for _ in range(rows)]
        columns["g"] = [f"s{random.randrange(9)}" for _ in range(rows)]
    schema = persia.Schema(
        [each.feature for each in drawn if isinstance(each.feature, persia.IdFeature)],
        dense_features=[each.feature for each in drawn[:-1] if isinstance(each.feature, (str, persia.DenseFeature))],
        labels=[drawn[-1].feature],  # type: ignore[list-item]
        **options,
    )
    return Case(persia.fit_features(schema, columns), columns)


# --- ways to a batch --------------------------------------------------------------------------------------------


def _read(reader: Any) -> persia.Batch:
    return persia.Batch.concat(list(reader))


def from_lists(case: Case, folder: Path) -> persia.Batch:
    return persia.Batch.from_columns(case.schema, case.columns)


def from_numpy(case: Case, folder: Path) -> persia.Batch:
    return persia.Batch.from_columns(case.schema, {name: _as_numpy(values) for name, values in case.columns.items()})


def _as_numpy(values: Sequence[Any]) -> Any:
    if any(isinstance(value, (str, list)) for value in values) and None in values:
        array = np.empty(len(values), object)
        array[:] = values
        return array
    if None in values:
        return np.array([math.nan if value is None else value for value in values], np.float64)
    return np.array(values)


def from_arrow(case: Case, folder: Path) -> persia.Batch:
    return _read(persia.data.arrow(_table(case.columns), case.schema))


def _table(columns: Mapping[str, Sequence[Any]]) -> pa.Table:
    return pa.table({name: pa.array(values) for name, values in columns.items()})


def from_parquet(case: Case, folder: Path) -> persia.Batch:
    pq.write_table(_table(case.columns), folder / "rows.parquet", row_group_size=7)
    return _read(persia.data.parquet(folder / "rows.parquet", case.schema, 5))


def from_csv(case: Case, folder: Path) -> persia.Batch:
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(case.columns)
        for row in zip(*case.columns.values(), strict=True):
            writer.writerow(json.dumps(value) if isinstance(value, list) else value for value in row)
    return _read(persia.data.csv(folder / "rows.csv", case.schema, 5))


def from_jsonl(case: Case, folder: Path) -> persia.Batch:
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in _records(case))
    return _read(persia.data.jsonl(folder / "rows.jsonl", case.schema, 5))


def _records(case: Case) -> list[dict[str, Any]]:
    return [dict(zip(case.columns, row, strict=True)) for row in zip(*case.columns.values(), strict=True)]


def from_predictor(case: Case, folder: Path) -> persia.Batch:
    view = SimpleNamespace(schema=case.schema, network=SimpleNamespace(input_rules=NO_RULES))
    return _batch_of(_inputs(case), view)  # type: ignore[arg-type]


def _inputs(case: Case) -> dict[str, list[Any]]:
    return {name: values for name, values in case.columns.items() if name in case.schema.feature_columns}


def from_json_body(case: Case, folder: Path) -> persia.Batch:
    body = msgspec.json.encode({"features": _inputs(case)})
    return Bodies(case.schema, LIMITS).samples(JsonCodec(), body)


def from_json_records(case: Case, folder: Path) -> persia.Batch:
    return Bodies(case.schema, LIMITS).samples(JsonCodec(), msgspec.json.encode(_records(case)))


def from_msgpack_body(case: Case, folder: Path) -> persia.Batch:
    columns = {name: column_of(name, _as_numpy(values)) for name, values in _inputs(case).items()}
    return Bodies(case.schema, LIMITS).samples(MsgpackCodec(), msgspec.msgpack.encode({"features": columns}))


def from_arrow_body(case: Case, folder: Path) -> persia.Batch:
    return Bodies(case.schema, LIMITS).samples(ArrowCodec(), _stream(_table(_inputs(case))))


def _stream(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()  # type: ignore[no-any-return]


def _kafka(case: Case, values: Any, messages: list[bytes]) -> persia.Batch:
    broker = BrokerOptions("x:1", ("rows",), None, 1.0)
    options = KafkaOptions(broker, values, "earliest", None, 1.0, "error", None)
    converter = MessageConverter(Conversion(case.schema), options, StreamCounts())
    found = [converter.decoder.message(number, value, 1000) for number, value in enumerate(messages)]
    batch = converter.convert(Partition("rows", 0), found, None).batch
    assert batch is not None
    return batch


def from_kafka_json(case: Case, folder: Path) -> persia.Batch:
    return _kafka(case, "json", [msgspec.json.encode(row) for row in _records(case)])


def from_kafka_msgpack(case: Case, folder: Path) -> persia.Batch:
    return _kafka(case, "msgpack", [msgspec.msgpack.encode(row) for row in _records(case)])


def from_kafka_arrow(case: Case, folder: Path) -> persia.Batch:
    table = _table(case.columns)
    return _kafka(case, "arrow", [_stream(table.slice(at, 3)) for at in range(0, len(table), 3)])


WAYS: list[Callable[[Case, Path], persia.Batch]] = [
    from_lists, from_numpy, from_arrow, from_parquet, from_csv, from_jsonl, from_predictor, from_json_body,
    from_json_records, from_msgpack_body, from_arrow_body, from_kafka_json, from_kafka_msgpack, from_kafka_arrow,
]  # fmt: skip


def different_rows(one: persia.Batch, other: persia.Batch, *, labels: bool) -> int:
    """Returns the number of rows whose bits differ in ids, weights of ids or numbers, or with `labels` in the rest."""
    different = np.zeros(len(one), np.bool_)
    for name, column in one.id_features.items():
        different |= _different_ids(column, other.id_features[name])
    different |= (one.dense.view(np.uint32) != other.dense.view(np.uint32)).any(1)
    if labels:
        different |= (one.labels.view(np.uint32) != other.labels.view(np.uint32)).any(1)
        for part in ("weights", "groups"):
            mine, theirs = getattr(one, part), getattr(other, part)
            if (mine is None) != (theirs is None):
                return len(one)
            different |= False if mine is None else mine != theirs
    return int(different.sum())


def _different_ids(one: persia.IdColumn, other: persia.IdColumn) -> Any:
    return np.array([_row(one, row) != _row(other, row) for row in range(len(one))], np.bool_)


def _row(column: persia.IdColumn, row: int) -> tuple[list[int], list[float]]:
    begin, end = (row, row + 1) if column.offsets is None else column.offsets[row : row + 2]
    weights = [] if column.weights is None else column.weights[begin:end].tolist()
    return column.values[begin:end].tolist(), weights
