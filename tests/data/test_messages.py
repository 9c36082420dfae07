"""Messages are converted together as each is by itself: values of any types, hostile ones, and bounds on their size."""

from __future__ import annotations

import io
import itertools
import json
import re
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.data.rows import Conversion
from persia.data.streams import message_decoding as module
from persia.data.streams.broker import BrokerOptions, Buffer
from persia.data.streams.message_decoding import MAX_BYTES, MAX_OBJECT_BYTES, MAX_ROWS, MessageDecoder
from persia.data.streams.message_rows import MAX_REASON, Converted, MessageConverter
from persia.data.streams.options import EventTime, KafkaOptions, StreamCounts
from persia.errors import DataError
from persia.types import Partition
from support.examples import examples
from support.old_arrow import old_compressed

SCHEMA = persia.Schema(
    [
        persia.IdFeature("a", dim=4),
        persia.IdFeature("n", dim=4, kind="number"),
        persia.IdFeature("t", dim=4, kind="text"),
    ],
    dense_features=["price"],
    labels=["click"],
)
PARTITION = Partition("clicks", 0)
GOOD = {"a": 1, "n": 1, "t": "1", "price": 0.5, "click": 1}


class Case:
    """A converter of messages, and what it counts."""

    def __init__(self, values="json", poison="skip", at=None, key=None, rows=True, **conversion: Any) -> None:
        self.counts = StreamCounts()
        options = KafkaOptions(
            BrokerOptions("x:1", ("clicks",), None, 1.0), values, "earliest", None, 1.0, poison, None, at
        )
        self.converter = MessageConverter(
            Conversion(conversion.pop("schema", SCHEMA), **conversion), options, self.counts, key, rows
        )

    def convert(self, values, newest=None, first=0) -> Converted:
        decoder = self.converter.decoder
        found = [decoder.message(first + n, value, 1000 * (first + n)) for n, value in enumerate(values)]
        return self.converter.convert(PARTITION, found, newest)

    def counted(self, name):
        return next(metric.value for metric in self.counts.observe() if metric.name == f"stream_{name}")


def listed(column):
    if column is None:
        return None
    bounds = np.arange(len(column) + 1) if column.offsets is None else column.offsets
    return [column.values[i:j].tolist() for i, j in itertools.pairwise(bounds)]


def rows_of(found: Converted):
    """Returns what is in each row."""
    batch = found.batch
    if batch is None:
        return []
    columns = [listed(column) for column in batch.id_features.values()]
    columns += [batch.dense.tolist(), batch.labels.tolist()]
    columns += [None if x is None else x.tolist() for x in (batch.day, found.times)]
    columns.append(listed(found.keys))
    return list(zip(*([None] * len(batch) if column is None else column for column in columns), strict=True))


def one_by_one(messages, newest=None, **options):
    """The slow twin: each message by itself. Returns rows, newest time, offsets of poison, late rows, reasons."""
    case, rows, bad, reasons = Case(poison="error", **options), [], [], []
    for offset, value in enumerate(messages):
        try:
            found = case.convert([value], newest, offset)
        except DataError as error:
            bad.append(offset)
            reasons.append(re.sub("0x[0-9a-f]+", "", error.message))
            continue
        newest = found.newest
        rows += rows_of(found)
    return rows, newest, bad, case.counted("late"), reasons


def check(messages, newest=None, **options):
    """Checks that messages are converted together as one by one."""
    expected, last, bad, late, reasons = one_by_one(messages, newest, **options)
    case = Case(**options)
    found = case.convert(messages, newest)
    assert rows_of(found) == expected
    assert found.newest == last
    assert (case.counted("poison"), case.counted("late")) == (len(bad), late)
    strict = Case(poison="error", **options)
    if not bad:
        assert rows_of(strict.convert(messages, newest)) == expected
        return
    with pytest.raises(DataError, match=f"Offset {bad[0]} of partition 0") as raised:
        strict.convert(messages, newest)
    assert raised.value.fields["offset"] == bad[0]
    assert re.sub("0x[0-9a-f]+", "", raised.value.message) == reasons[0]


# --- JSON objects and msgpack maps ----------------------------------------------------------------------------------

EXACT = 2**53
NUMBERS = [0, 1, 5, -1, EXACT - 1, EXACT, EXACT + 1, -EXACT, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1]
FLOATS = [0.0, -0.0, 5.0, 0.5, -5.0, 1e-5, float(EXACT), float(EXACT - 1), 1e300, 9.1e12, 4.5e15]
TEXTS = ["", "5", "5.0", "-0", "a", "true", "NA", "2024-05-01", "2024-05-01T00:00:00Z", "1.5.2024", " 5", "\ud7ff\x00"]
SCALARS = st.sampled_from([None, True, False, *NUMBERS, *FLOATS, *TEXTS]) | st.integers(-(2**65), 2**65)
BINARY = st.sampled_from([b"5", b"", b"\xff", float("nan"), float("inf"), datetime(2024, 5, 1, tzinfo=UTC)])
COLUMNS = ("a", "n", "t", "price", "click", "at", "day", "stars", "more")


def objects(scalars):
    values = scalars | st.lists(scalars, max_size=3)
    values |= st.sampled_from([[[1]], [["a"], 1], {}, {"x": 1}, [{}]])
    changes = st.dictionaries(st.sampled_from(COLUMNS), values, max_size=3)
    missing = st.sets(st.sampled_from(COLUMNS), max_size=1)
    full = GOOD | {"at": 5, "day": 3, "stars": 4}
    return st.builds(lambda c, m: {k: v for k, v in (full | c).items() if k not in m}, changes, missing)


ONE = json.dumps(GOOD).encode()
HALVES = [b'{"a": [1', b"2]}", b"{", b"}", ONE[:-1], ONE[1:], b'{"more": "', b'"}', b'{"a": 1}, {"a": 2', b'{"more": {']
HOSTILE = [
    *HALVES, ONE + b"," + ONE, ONE + b"\n" + ONE, ONE + b" " + ONE, b"[" + ONE + b"]", b"", b" ", b"null", b"1", None,
    b"[]", b"," + ONE, ONE + b",", b'{"a": ' + b"[" * 50_000, b'{"a": ' + b"9" * 5000 + b"}", b'{"a": "\xff"}',
    b'{"a": "\\ud800"}', b'{"a": NaN}', b'{"a": 1e999}', b"\xef\xbb\xbf" + ONE, b'{"a":1,"a":"2"}',
]  # fmt: skip
JSON = objects(SCALARS).map(lambda row: json.dumps(row).encode()) | st.sampled_from(HOSTILE)
OPTIONS = [
    {},
    {"fill": {"price": 0.0, "click": 0.0}},
    {"at": EventTime("at", 1000, 0, True), "day": "day"},
    {"at": EventTime("at", 1, 3000, False), "key": "a"},
    {"at": EventTime("kafka.timestamp", 1, 0, True), "key": "t", "rows": False},
    {"labels": {"click": "stars >= 4"}, "day": "kafka.timestamp", "day_unit": "ms"},
    {"labels": {"click": lambda stars: pa.compute.is_valid(stars)}},
]


@given(st.lists(JSON, max_size=12), st.sampled_from(OPTIONS), st.sampled_from([None, 4_000]))
@settings(max_examples=examples(150))
def test_json_messages_are_converted_together_as_one_by_one(values, options, newest):
    check(values, newest, **options)


def packed(row):
    return msgspec.msgpack.encode(row)


def small(row):
    """As msgpack, whose whole numbers have 64 bits at most."""

    def bounded(value):
        if isinstance(value, list):
            return [bounded(v) for v in value]
        return 7 if type(value) is int and not -(2**63) <= value < 2**64 else value

    return packed({name: bounded(value) for name, value in row.items()})


THREE = packed(GOOD) * 3
SWALLOWS = [
    b"\x81\xa4more\xc6" + len(THREE).to_bytes(4, "big"),  # A map whose value is the next three messages.
    b"\x81\xa4more\xdb" + len(THREE).to_bytes(4, "big"),
    b"\x82\xa4more\xc0", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\x81\xa1a\xdd\xff\xff\xff\xff",
    b"\xc1", b"", b"\xc0", packed(GOOD) + packed(GOOD), packed([GOOD]), packed(GOOD)[:-1], packed(GOOD) + b"\xc0",
    b"\x81\xa1a" + b"\x91" * 5000, b"\x81\xa1\xff\x01",
    b"\x81\xa1a\xd5\x05ab", b"\x81\x01\x01", b"\x81\xa1a\x81\x01\x02",
    None,
]  # fmt: skip
MSGPACK = objects(SCALARS | BINARY).map(small) | st.sampled_from(SWALLOWS)


@given(st.lists(MSGPACK, max_size=12), st.sampled_from(OPTIONS), st.sampled_from([None, 4_000]))
@settings(max_examples=examples(150))
def test_msgpack_messages_are_converted_together_as_one_by_one(values, options, newest):
    check(values, newest, values="msgpack", **options)


@given(st.lists(objects(SCALARS), min_size=1, max_size=12))
@settings(max_examples=examples(150))
def test_values_of_messages_have_the_ids_and_numbers_of_a_list(rows):
    expected, bad = [], 0
    for row in rows:
        try:
            batch = persia.Batch.from_columns(SCHEMA, {name: [row.get(name)] for name in GOOD})
        except DataError:
            bad += 1
        else:
            expected += rows_of(Converted(batch, None))
    case = Case()
    assert rows_of(case.convert([json.dumps(row).encode() for row in rows])) == expected
    assert case.counted("poison") == bad


@pytest.mark.parametrize("values", ["json", "msgpack"])
@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("a", 5, "5"), ("a", 5, True), ("a", 2**63, -1), ("a", EXACT + 1, 5.0), ("a", EXACT, 5.5), ("a", [1], ["1"]),
        ("a", [1], 1), ("a", [1, "1"], 1), ("a", [EXACT, 0.5], [1]), ("a", -0.0, "x"), ("t", 5, "5"), ("n", True, "7"),
        ("click", 1, True), ("price", 0.5, "0.5"), ("price", 2**63, 0.5), ("a", ["x", True, 3], None),
    ],
)  # fmt: skip
def test_messages_whose_values_differ_in_type_are_good(name, one, other, values):
    encode = packed if values == "msgpack" else msgspec.json.encode
    rows = [GOOD | {name: one}, GOOD | {name: other}]
    case = Case(values, poison="error")
    found = rows_of(case.convert([encode(row) for row in rows]))
    assert found == [
        row for r in rows for row in rows_of(Converted(persia.Batch.from_columns(SCHEMA, {n: [r[n]] for n in r}), None))
    ]


def test_messages_of_many_types_take_few_conversions(monkeypatch):
    """Not one for each message, as a batch would take seconds."""
    rows = [GOOD | {"a": [1, "1", True][n % 3], "price": [0.5, "0.5"][n % 2]} for n in range(600)]
    case, conversions = Case(poison="error"), []
    convert = case.converter._rows
    monkeypatch.setattr(case.converter, "_rows", lambda *x: conversions.append(x) or convert(*x))
    assert len(case.convert([json.dumps(row).encode() for row in rows]).batch) == 600
    assert len(conversions) == 6


@pytest.mark.parametrize("hostile", SWALLOWS[:2])
def test_a_msgpack_message_does_not_swallow_the_next_ones(hostile):
    own = packed(GOOD | {"a": 666})
    values = [hostile, *[packed(GOOD | {"a": n}) for n in range(3)], own + own * 3]
    case = Case("msgpack")
    assert listed(case.convert(values).batch.id_features["a"]) == [[0], [1], [2]]
    assert case.counted("poison") == 2


def test_json_messages_do_not_complete_one_another():
    values = [b'{"a": [1', b'2], "n": 1, "t": "1", "price": 0.5, "click": 1}', ONE + b"," + ONE, ONE]
    case = Case()
    assert len(case.convert(values).batch) == 1
    assert case.counted("poison") == 3


# --- Arrow IPC streams ----------------------------------------------------------------------------------------------


def stream(*batches, compression=None):
    sink = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write(batch)
    return sink.getvalue()


def table(**columns):
    arrays = {name: pa.array([value]) for name, value in GOOD.items()} | {"at": pa.array([5]), "day": pa.array([3])}
    rows = next((len(column) for column in columns.values() if column is not None), 1)
    arrays = {name: pa.concat_arrays([array] * rows) if rows else array[:0] for name, array in arrays.items()}
    arrays |= columns
    return pa.table({name: array for name, array in arrays.items() if array is not None})


def texts(values, kind):
    return pa.array(values, pa.string()).cast(kind) if "view" in str(kind) else pa.array(values, kind)


ARRAYS = [
    *[[pa.array([5, None], kind)] for kind in (pa.int8(), pa.uint64(), pa.int64(), pa.float32(), pa.float64())],
    *[[texts(["5", "a", ""], kind)] for kind in (pa.string(), pa.large_string(), pa.binary())],
    [pa.array([0.1, 2.0**24, 2.0**24 + 2], pa.float32())], [pa.array([0.1, 2.0**53])],
    [pa.array([-1, EXACT + 1])],
    [pa.array([2**63, 2**64 - 1], pa.uint64())], [pa.array([True, None])], [pa.nulls(2)],
    [pa.array([1, 2], pa.decimal128(5))],
    [pa.array(["a", None, "a"]).dictionary_encode()], [pa.array([7, 8, 7]).dictionary_encode()],
    [pa.array([[1, 2], [], None])], [pa.array([["1"], [None, "x"]])], [pa.array([[None]])],
    [pa.array([[1, 2]], pa.list_(pa.int8(), 2))],
    [pa.array([{"x": 1}])], [pa.array([datetime(2024, 5, 1, tzinfo=UTC)])], [pa.array([1], pa.timestamp("s"))],
    [pa.array([], pa.int64())], [pa.array([[[1]]])],
]  # fmt: skip
ARRAYS = [array for (array,) in ARRAYS]


def arrow_table(changes, missing):
    rows = len(next(iter(changes.values()))) if changes else 1
    cut = {name: array for name, array in changes.items() if len(array) == rows}
    return table(**cut, **dict.fromkeys(missing - set(cut)))


TABLES = st.builds(
    arrow_table,
    st.dictionaries(
        st.sampled_from(["a", "n", "t", "price", "click", "at", "day"]), st.sampled_from(ARRAYS), max_size=2
    ),
    st.sets(st.sampled_from(["a", "price", "at"]), max_size=1),
)  # fmt: skip


@st.composite
def arrow_values(draw):
    rows = draw(TABLES)
    value = stream(*rows.to_batches() or [rows], compression=draw(st.sampled_from([None, "zstd", "lz4"])))
    match draw(st.sampled_from(["whole"] * 6 + ["cut", "twice", "noise", "none"])):
        case "cut":
            return value[: draw(st.integers(0, len(value) - 1))]
        case "twice":
            return value + value
        case "noise":
            return b"\xff\xff\xff\xff" + draw(st.binary(max_size=40))
        case "none":
            return draw(st.sampled_from([None, b"", ONE]))
    return value


ARROW_OPTIONS = [
    {},
    {"fill": {"price": 0.0, "click": 0.0}},
    {"at": EventTime("at", 1000, 0, True), "day": "day"},
    {"at": EventTime("kafka.timestamp", 1, 0, False), "key": "a"},
    {"at": EventTime("at", 1, 3000, False), "key": "t", "rows": False},
]


@given(st.lists(arrow_values(), max_size=8), st.sampled_from(ARROW_OPTIONS), st.sampled_from([None, 4_000]))
@settings(max_examples=examples(150))
def test_arrow_messages_are_converted_together_as_one_by_one(values, options, newest):
    check(values, newest, values="arrow", **options)


@pytest.mark.parametrize(
    ("name", "one", "other"),
    [
        ("a", pa.array([5]), pa.array(["5"])),
        ("a", pa.array([EXACT + 1]), pa.array([5.0])),
        ("a", pa.array([2**63], pa.uint64()), pa.array([-1])),
        ("a", pa.array([0.1], pa.float32()), pa.array([0.1])),  # 0.1 is another id than 0.10000000149011612.
        ("a", pa.array([[1]]), pa.array([["1"]])),
        ("price", pa.array([0.5]), pa.array(["0.5"])),
        ("click", pa.array([1]), pa.array([True])),
    ],
)
def test_arrow_messages_whose_types_differ_are_good(name, one, other):
    case = Case("arrow", poison="error")
    tables = [table(**{name: one}), table(**{name: other}), table()]
    found = rows_of(case.convert([stream(*t.to_batches()) for t in tables]))
    assert found == [row for t in tables for row in rows_of(Converted(persia.Batch.from_columns(SCHEMA, t), None))]


def test_rows_of_arrow_messages_of_two_schemas_keep_their_order():
    numbers = [pa.array([n, n + 1]) for n in (0, 2)], [pa.array([str(n), str(n + 1)]) for n in (10, 12)]
    values = [stream(*table(a=a).to_batches()) for pair in zip(*numbers, strict=True) for a in pair]
    found = Case("arrow", poison="error").convert(values)
    assert listed(found.batch.id_features["a"]) == [[0], [1], [10], [11], [2], [3], [12], [13]]


def test_dictionaries_that_cannot_be_unified_are_good():
    """Their indices have 8 bits, and 200 texts in all need 9."""
    kind = pa.dictionary(pa.int8(), pa.string())
    values = [stream(*table(a=pa.array([f"{first + n}" for n in range(100)], kind)).to_batches()) for first in (0, 100)]
    case = Case("arrow", poison="error")
    assert listed(case.convert(values).batch.id_features["a"]) == [[n] for n in range(200)]


def test_a_column_that_occurs_twice_is_poison():
    names = [*table().column_names, "at"]
    twice = pa.table([*table().columns, pa.array([5])], names)
    case = Case("arrow", at=EventTime("at", 1, None, True))
    assert len(case.convert([stream(*t.to_batches()) for t in (table(), twice)]).batch) == 1
    assert case.counted("poison") == 1


def test_a_name_that_is_no_text_is_poison():
    value = stream(*table(**{"é": pa.array([1])}).to_batches())
    case = Case("arrow")
    assert len(case.convert([value.replace("é".encode(), b"\xff\xfe"), value]).batch) == 1
    assert case.counted("poison") == 1


# --- bounds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_an_arrow_message_with_too_many_rows_is_poison(compression):
    rows = 60_000_000
    zeros = pa.RecordBatch.from_arrays(
        [pa.Array.from_buffers(pa.bool_(), rows, [None, pa.py_buffer(bytes(rows // 8))])], ["a"]
    )
    bomb = stream(zeros, compression=compression)
    assert len(bomb) < 40_000
    before = pa.total_allocated_bytes()
    case = Case("arrow")
    decoded = case.converter.decoder.message(0, bomb, 0)
    assert (decoded.rows, decoded.too_large) == (1, True)
    assert pa.total_allocated_bytes() - before < 1 << 20
    assert len(case.convert([bomb, stream(*table().to_batches())]).batch) == 1
    assert (case.counted("poison"), case.counted("too_large")) == (1, 1)
    with pytest.raises(DataError, match=r"Offset 0 .*: it has 60,000,000 rows, which is more than 262,144"):
        Case("arrow", poison="error").convert([bomb])


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_an_arrow_message_that_expands_too_far_is_poison(compression, monkeypatch):
    monkeypatch.setattr(module, "MAX_BYTES", 1 << 20)
    text = pa.array(["x" * (2 << 20)])
    bomb = stream(*table(more=text).to_batches(), compression=compression)
    assert len(bomb) < 20_000
    monkeypatch.setattr(module, "read_stream", None)  # It is refused before it is read.
    with pytest.raises(DataError, match=r"it takes 2,[0-9,]+ bytes, which is more than 1,048,576"):
        Case("arrow", poison="error").convert([bomb])


def test_a_message_with_the_compression_before_arrow_1_is_poison():
    bomb = old_compressed(2 << 20)
    before = pa.total_allocated_bytes()
    case = Case("arrow")
    assert len(case.convert([bomb, stream(*table().to_batches())]).batch) == 1
    assert case.counted("poison") == 1
    assert pa.total_allocated_bytes() - before < 1 << 20
    with pytest.raises(DataError, match=r"compression format of Arrow before 1\.0"):
        Case("arrow", poison="error").convert([bomb])


@pytest.mark.parametrize("compression", [None, "zstd", "lz4"])
def test_the_size_that_a_message_declares_is_that_of_its_buffers(compression):
    rows = table(a=pa.array(["x" * 100, None, "y"] * 500), n=pa.array([5, 6, 7] * 500).dictionary_encode())
    value = stream(*rows.to_batches(700), compression=compression)
    found, size = module.declared_size(value)
    assert found == 1500
    assert rows.nbytes <= size <= 1.2 * rows.nbytes + 10_000


LENGTH = 1 << 16
TEXT = b"x" * LENGTH


def views():
    """Texts of which each is all of one buffer."""
    view = np.array([LENGTH, int.from_bytes(TEXT[:4], "little"), 0, 0], np.int32)
    buffers = [None, pa.py_buffer(np.tile(view, LENGTH).tobytes()), pa.py_buffer(TEXT)]
    return pa.Array.from_buffers(pa.string_view(), LENGTH, buffers)


def booleans():
    """A list of so many booleans that their ids take more than a message may."""
    count = MAX_BYTES // 8 + 8
    values = pa.Array.from_buffers(pa.bool_(), count, [None, pa.py_buffer(bytes(count // 8))])
    return pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), values)


GROWING = {
    "entries of a dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0] * LENGTH, pa.int8()), [TEXT.decode()]
    ),
    "views": views,
    "nulls": lambda: pa.FixedSizeListArray.from_arrays(pa.nulls(LENGTH * 3000), 3000),
    "booleans": booleans,
}  # fmt: skip


@pytest.mark.parametrize("made", GROWING.values(), ids=GROWING)
def test_a_message_whose_shared_bytes_expand_too_far_is_poison(made):
    column = made()
    rows = pa.record_batch({"a": column} | {n: pa.array([GOOD[n]] * len(column)) for n in ("n", "t", "price", "click")})
    value = stream(rows)
    assert len(value) < 10 << 20
    before = pa.total_allocated_bytes()
    case = Case("arrow")
    assert len(case.convert([value, stream(*table().to_batches())]).batch) == 1
    assert case.counted("poison") == 1
    assert pa.total_allocated_bytes() - before < 1 << 20
    with pytest.raises(DataError, match=r"takes [0-9,]+ bytes once it is expanded, which is more than 268,435,456"):
        Case("arrow", poison="error").convert([value])


@pytest.mark.parametrize("values", ["json", "msgpack"])
def test_an_object_with_too_many_bytes_is_poison(values):
    large = b" " * MAX_OBJECT_BYTES + ONE
    encode = packed if values == "msgpack" else msgspec.json.encode
    case = Case(values)
    assert len(case.convert([large, encode(GOOD)]).batch) == 1
    assert (case.counted("poison"), case.counted("too_large")) == (1, 1)
    with pytest.raises(DataError, match=r"takes 16,[0-9,]+ bytes, which is more than 16,777,216"):
        Case(values, poison="error").convert([large])


def test_a_message_with_the_most_rows_is_good():
    rows = table(a=pa.array(np.arange(MAX_ROWS)))
    assert len(Case("arrow", poison="error").convert([stream(*rows.to_batches())]).batch) == MAX_ROWS
    case = Case("arrow")
    assert case.convert([stream(*table(a=pa.array(np.arange(MAX_ROWS + 1))).to_batches())]).batch is None
    assert case.counted("too_large") == 1


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=20),
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(0, 20),
)
@settings(max_examples=examples(100))
def test_a_batch_has_so_many_rows_and_bytes_or_one_message(sizes, rows, size, end):
    buffer = Buffer()
    for offset, (of_rows, of_size) in enumerate(sizes):
        buffer.append(module.StreamMessage(offset, of_rows, of_size, 0, b""))
    buffer.drop_from(end + 1)
    kept = sizes[: end + 1]
    taken = []
    while buffer.messages:
        assert buffer.holds(sum(r for r, _ in kept[len(taken) :]), 1 << 40)
        assert buffer.holds(1 << 40, sum(s for _, s in kept[len(taken) :]))
        part = buffer.take(rows, size)
        assert len(part) == 1 or (sum(m.rows for m in part) <= rows and sum(m.size for m in part) <= size)
        if buffer.messages:  # The next one would have been too much.
            more = [*part, buffer.messages[0]]
            assert sum(m.rows for m in more) > rows or sum(m.size for m in more) > size
        taken += [m.offset for m in part]
    assert taken == list(range(len(kept)))
    assert (buffer.rows, buffer.size) == (0, 0)


# --- reasons and joins ----------------------------------------------------------------------------------------------


def test_a_reason_that_quotes_a_long_value_is_cut(caplog):
    """The header of a dead letter that had all of it would be too large to be written, which ends training."""
    long = json.dumps(GOOD | {"price": "x" * 100_000}).encode()
    with pytest.raises(DataError) as raised:
        Case(poison="error").convert([long])
    assert len(raised.value.message) < MAX_REASON + 300
    Case().convert([long])
    assert len(caplog.messages[0]) < MAX_REASON + 300


@pytest.mark.parametrize("changes", [{"at": None}, {"a": [1, 2]}])
def test_an_event_that_cannot_be_joined_is_poison(changes):
    rows = [GOOD | {"at": 1}, GOOD | {"at": 2} | changes, GOOD | {"at": 3}]
    case = Case(at=EventTime("at", 1, None, True), key="a")
    found = case.convert([json.dumps(row).encode() for row in rows])
    assert found.times.tolist() == [1, 3]
    assert case.counted("poison") == 1


def test_a_decoder_of_no_columns_gives_times():
    decoder = MessageDecoder("json", ["kafka.timestamp"])
    (part,) = decoder.decode([decoder.message(n, ONE, n) for n in range(3)])
    assert part.columns["kafka.timestamp"].to_pylist() == [0, 1, 2]


def test_lags_of_partitions_that_are_read_elsewhere_now_are_left_out():
    counts = StreamCounts()
    counts.set_lags({("t", 0): 5, ("t", 1): 7, ("t", 2): None})
    counts.set_lags({("t", 0): None, ("t", 2): 3})
    lags = {m.labels["partition"]: m.value for m in counts.observe() if m.name == "stream_lag"}
    assert lags == {"0": 5, "2": 3}
