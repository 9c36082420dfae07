"""Bodies of any kind become the same batches; hostile ones are refused with a message, whatever they are."""

from __future__ import annotations

import decimal

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia.errors import DataError
from persia.serve.client import _samples
from persia.serve.http.bodies import Bodies
from persia.serve.http.codecs.codec import ARROW, JSON, MSGPACK, MalformedBodyError
from persia.serve.http.codecs.msgpack_codec import array_of
from persia.serve.http.limits import ServeLimits
from persia.serve.http.openapi import openapi
from support.old_arrow import old_compressed
from support.served import CODEC, SCHEMA

LIMITS = ServeLimits(max_rows=100, max_values=1000)
LARGE = "x" * 100_000
LARGE_ENTRY = pa.DictionaryArray.from_arrays([0] * 90, [LARGE])
LARGE_LIST = pa.ListArray.from_arrays([0, 90], LARGE_ENTRY)
_ONE_VIEW = pa.array([LARGE], pa.string_view()).buffers()
LARGE_VIEW = pa.Array.from_buffers(
    pa.string_view(), 90, [None, pa.py_buffer(_ONE_VIEW[1].to_pybytes()[:16] * 90), _ONE_VIEW[2]]
)
MANY_NULLS = pa.ListArray.from_arrays([0, 1_000_000], pa.nulls(1_000_000))
BODIES = Bodies(SCHEMA, LIMITS)

COLUMNS = {
    "user": [5, 6, 2**64 - 1],
    "tags": [[1, 2], [], [3]],
    "code": [7, 8, 9],
    "price": [0.5, 1.5, -2.0],
    "age": [1.0, 2.0, 3.0],
}
WANTED = persia.Batch.from_columns(SCHEMA, COLUMNS, require_labels=False)
IDS = ("user", "tags", "code")
DENSE = ("price", "age")
RECORDS = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]


def as_json(content):
    return msgspec.json.encode(content)


def as_msgpack(content):
    return msgspec.msgpack.encode(content)


def as_arrow(table, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def with_compressed_dictionary(table):
    """Returns a stream whose rows are plain."""
    plain, packed = (list(pa.ipc.MessageReader.open_stream(as_arrow(table, compression=how))) for how in (None, "zstd"))
    assert [message.type for message in packed] == ["schema", "dictionary", "record batch"]
    return b"".join(m.serialize().to_pybytes() for m in (plain[0], packed[1], plain[2])) + b"\xff" * 4 + b"\0" * 4


def columns(**changes):
    values = {**COLUMNS, **changes}
    return {
        "features": {name: values[name] for name in values if name not in DENSE},
        "dense": {name: values[name] for name in DENSE if values[name] is not None},
    }


TABLE = pa.table(
    {
        "user": pa.array(COLUMNS["user"], pa.uint64()),
        "tags": COLUMNS["tags"],
        "code": COLUMNS["code"],
        "price": COLUMNS["price"],
        "age": pa.array(COLUMNS["age"], pa.float32()),
    }
)
PACKED = {
    "user": np.array(COLUMNS["user"], np.uint64),
    "tags": (np.array([1, 2, 3], np.int32), np.array([0, 2, 2, 3])),
    "code": np.array([7, 8, 9], np.uint8),
    "price": np.array(COLUMNS["price"]),
    "age": np.array(COLUMNS["age"], np.float32),
}
MATRIX = np.stack([PACKED["price"], PACKED["age"]], axis=1).astype(np.float32)


def same(found):
    for name, column in WANTED.id_features.items():
        np.testing.assert_array_equal(found.id_features[name].values, column.values, strict=True)
        if column.offsets is not None:
            np.testing.assert_array_equal(found.id_features[name].offsets, column.offsets)
    np.testing.assert_array_equal(found.dense, WANTED.dense, strict=True)
    assert found.labels.shape == (3, 0)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, as_json(columns())),
        (JSON, as_json({**columns(), "dense": MATRIX.tolist()})),
        (JSON, b" \n" + as_json(RECORDS)),
        (JSON, as_json({"features": COLUMNS})),
        (JSON, as_json([{**record, "click": 1} for record in RECORDS])),
        (MSGPACK, as_msgpack(columns())),
        (MSGPACK, as_msgpack(RECORDS)),
        (MSGPACK, as_msgpack(RECORDS * 6)),
        (MSGPACK, as_msgpack(_samples(PACKED))),
        (MSGPACK, as_msgpack(_samples(COLUMNS))),
        (MSGPACK, as_msgpack({**_samples({k: PACKED[k] for k in IDS}), "dense_array": array_of(MATRIX)})),
        (ARROW, as_arrow(TABLE)),
        (ARROW, as_arrow(TABLE.append_column("click", [[1.0, 0.0, 1.0]]))),
        (ARROW, as_arrow(pa.concat_tables([TABLE[:1], TABLE[1:]]))),
    ],
    ids=str,
)
def test_all_forms_of_samples_are_the_same(kind, body):
    found = BODIES.samples(CODEC[kind], body)
    same(found.slice(0, 3))


BIG = [1] * 101

OFFSETS = pa.py_buffer(np.array([0, 2**30, 1], np.int32))
OUTSIDE = pa.ListArray.from_buffers(pa.list_(pa.int64()), 2, [None, OFFSETS], children=[pa.array([1])])
"""Lists that reach beyond their values: memory of the process, if nobody looks."""

REFUSED = [
    (JSON, as_json(columns(user=[1, 2])), "'tags' has 3 rows, but 'user' has 2"),
    (JSON, as_json(columns(code=[1, -2, 3])), "'code' has '-2' at row 1"),
    (JSON, as_json(columns(code=["a", 2, 3])), "'code' has 'a' at row 0"),
    (JSON, as_json(columns(code=[2**64, 2, 3])), "out of range|'18446744073709551616' at row 0"),
    (JSON, as_json(columns(price=["x", 2, 3])), "'price' has 'x' at row 0"),
    (JSON, as_json(columns(price=[None, 2, 3])), "'price' has a missing value at row 0"),
    (JSON, as_json(columns(price=None)), "'price' .* is missing"),
    (JSON, as_json(columns(usr=[1, 2, 3])), "no feature 'usr'; remove it, or correct it: .*'user'"),
    (JSON, as_json(columns(user_b=[1, 2, 3])), "no feature 'user_b'"),
    (JSON, as_json(columns(user=[[[1]], 2, 3])), r"at `\$.features"),
    (JSON, as_json(columns(user=[{"a": 1}, 2, 3])), r"at `\$.features"),
    (JSON, as_json(columns(user=BIG, code=BIG)), "has 101 rows; the server takes 100"),
    (JSON, as_json(columns(tags=[[1] * 1001, [], []])), "'tags' has 1001 values; the server takes 1000"),
    (JSON, as_json([RECORDS[0]] * 101), "'records' has 101 rows"),
    (JSON, as_json([{**RECORDS[0], "price": None}]), "'price' has a missing value"),
    (JSON, as_json([{"user": 1}]), "'tags' .* is missing"),
    (JSON, as_json([{}]), "no columns"),
    (JSON, b"[]", "no columns"),
    (JSON, as_json({"features": {}}), "no columns"),
    (JSON, as_json({**columns(), "dense": [[1]] * 3}), "'dense' has another form at row 0; expected values of 2"),
    (JSON, as_json({**columns(price=[1, 2, 3]), "features": COLUMNS}), "in 'features' and in 'dense'"),
    (JSON, b'{"features": {"user": [1e999]}}', "out of range"),
    (JSON, b"[" * 100_000, "another form"),
    (JSON, b"", "not valid JSON"),
    (JSON, b'{"features": {"user": [NaN]}}', "not valid JSON"),
    (JSON, b'{"features": {"\xff": [1]}}', "not valid JSON"),
    (JSON, b'[{"user": ' + b"9" * 100_000 + b"}]", "out of range"),
    (JSON, b'[{"user": 1}]garbage', "not valid JSON"),
    (MSGPACK, b"", "not valid msgpack"),
    (MSGPACK, b"\xdd\xff\xff\xff\xff", "not valid msgpack"),
    (MSGPACK, b"\xdf\xff\xff\xff\xff\xa1a", "unknown field `a`"),
    (MSGPACK, b"\x91" * 100_000, "another form"),
    (MSGPACK, as_msgpack(columns(price=[float("inf"), 2, 3])), "'price' is inf at row 0"),
    (MSGPACK, as_msgpack(columns(user=[float("inf"), 2, 3])), "'user' is inf at row 0"),
    (MSGPACK, as_msgpack(columns(price=[float("nan"), 2, 3])), "'price' has a missing value at row 0"),
    (MSGPACK, as_msgpack(_samples({**PACKED, "age": np.array([1, np.nan, 2])})), "'age' is nan at row 1"),
    (MSGPACK, as_msgpack(_samples({**PACKED, "code": np.array([1, -1, 2])})), "'code' has '-1' at row 1"),
    (MSGPACK, as_msgpack(_samples({**PACKED, "user": np.array([0.5, 2.0**60, 1])})), "'user' has the float64"),
    (
        MSGPACK,
        as_msgpack(_samples({**PACKED, "tags": (np.array([1, 2]), np.array([0, 9, 1, 2]))})),
        "Offsets of feature 'tags' fall",
    ),
    (
        MSGPACK,
        as_msgpack(_samples({**PACKED, "tags": (np.array([1, 2]), np.array([0, 1, 2, 2**62]))})),
        "Offsets of feature 'tags' end at",
    ),
    (MSGPACK, as_msgpack(columns(user={"dtype": "uint64", "data": b"1234567"})), "'user' .* cannot be read"),
    (MSGPACK, as_msgpack(columns(user={"dtype": "object", "data": b"12345678"})), "Invalid enum value 'object'"),
    (MSGPACK, as_msgpack(columns(user={"dtype": "uint8", "data": b"123", "shape": [3, 2**40]})), "cannot be read"),
    (MSGPACK, as_msgpack(columns(user={"dtype": "uint8", "data": b"", "shape": [-1, 0]})), "cannot be read"),
    (
        MSGPACK,
        as_msgpack(columns(user={"dtype": "uint8", "data": b"", "shape": [2**62, 0]})),
        "has 4611686018427387904",
    ),
    (MSGPACK, as_msgpack(columns(user={"dtype": "uint8", "data": b"1", "shape": [1] * 3})), "one or two dimensions"),
    (MSGPACK, as_msgpack(columns(user={"dtype": "uint8", "data": b"1", "shape": []})), "one or two dimensions"),
    (MSGPACK, as_msgpack(columns(user={"dtype": "uint8", "data": b"1", "offsets": b"1"})), "cannot be read"),
    (ARROW, b"", "not a valid Arrow IPC stream"),
    (ARROW, as_arrow(TABLE)[:-100], "not a valid Arrow IPC stream"),
    (ARROW, b"\xff\xff\xff\xff\xff\xff\xff\x7f" + b"0" * 100, "not a valid Arrow IPC stream"),
    (ARROW, as_arrow(TABLE, compression="zstd"), "is compressed"),
    (ARROW, old_compressed(2 << 20), "is compressed"),
    (ARROW, as_arrow(pa.table({"user": OUTSIDE})), "not a valid Arrow IPC stream"),
    (ARROW, as_arrow(pa.concat_tables([TABLE] * 34)), "has 102 rows or more"),
    (ARROW, as_arrow(pa.table({"tags": MANY_NULLS})), "'tags' has 1000000 values"),
    (ARROW, as_arrow(pa.table({"user": LARGE_ENTRY})), "have 9000000 bytes or more once each row has its own"),
    (
        ARROW,
        as_arrow(pa.table({"tags": pa.array([[0]]).cast(pa.list_(pa.int8()))}).append_column("user", LARGE_LIST)),
        "bytes or more once each row has its own",
    ),
    (ARROW, as_arrow(pa.table({"user": LARGE_VIEW})), "have 9000000 bytes or more once each row has its own"),
    (ARROW, with_compressed_dictionary(pa.table({"user": pa.array(["a"]).dictionary_encode()})), "is compressed"),
    (ARROW, as_arrow(pa.table({"user": pa.array([1]).cast(pa.duration("s"))})), "is duration.*; cast it"),
    (ARROW, as_arrow(pa.table({"user": pa.array([{"a": 1}])})), "'user' of the Arrow stream is struct"),
    (ARROW, as_arrow(TABLE.drop(["age"])), "'age' .* is missing"),
    (ARROW, as_arrow(TABLE.append_column("usr", [[1, 2, 3]])), "no feature 'usr'"),
    (ARROW, as_arrow(TABLE.append_column("user", [[1, 2, 3]])), "Two columns"),
    (ARROW, as_arrow(pa.table({"tags": pa.array([[1] * 1001])})), "'tags' has 1001 values"),
    (ARROW, as_arrow(TABLE.select([])), "no columns"),
]


DECIMALS = pa.array([decimal.Decimal("0.50"), decimal.Decimal("1.50"), decimal.Decimal("-2.00")])
TAKEN = {
    "decimal128": TABLE.set_column(3, "price", DECIMALS),
    "decimal256": TABLE.set_column(3, "price", DECIMALS.cast(pa.decimal256(40, 2))),
    "decimals as ids": TABLE.set_column(0, "user", TABLE["user"].cast(pa.decimal128(20, 0))),
    "lists of decimals": TABLE.set_column(1, "tags", TABLE["tags"].cast(pa.list_(pa.decimal128(20, 0)))),
    "texts": TABLE.set_column(3, "price", TABLE["price"].cast(pa.string())),
    "dictionary": TABLE.set_column(0, "user", TABLE["user"].cast(pa.string()).dictionary_encode()),
    "dictionary of numbers": TABLE.set_column(3, "price", TABLE["price"].combine_chunks().dictionary_encode()),
    "dictionaries of each batch": pa.Table.from_batches(
        [row.set_column(0, "user", row["user"].cast(pa.string()).dictionary_encode()) for row in TABLE.to_batches(1)]
    ),
    "views": TABLE.set_column(0, "user", TABLE["user"].cast(pa.string()).cast(pa.string_view())),
    # Not by a cast: those of Arrow up to 24 leave views of freed memory.
    "binary views": TABLE.set_column(
        3, "price", pa.array([str(price).encode() for price in TABLE["price"].to_pylist()], pa.binary_view())
    ),
}
"""Tables of the same values in types that readers of files take, too."""


@pytest.mark.parametrize("name", TAKEN)
def test_arrow_columns_of_all_types_that_readers_take(name, tmp_path):
    table = TAKEN[name]
    same(BODIES.samples(CODEC[ARROW], as_arrow(table)))
    same(next(iter(persia.data.arrow(table, SCHEMA, require_labels=False))))


def test_columns_without_values_are_taken():
    table = TABLE.set_column(0, "user", pa.nulls(3)).set_column(1, "tags", pa.array([[None], [], [None, None]]))
    found = BODIES.samples(CODEC[ARROW], as_arrow(table))
    assert [len(found.id_features[name].values) for name in ("user", "tags", "code")] == [0, 0, 3]


@pytest.mark.parametrize(("kind", "body", "message"), REFUSED, ids=[f"{k}-{m}" for k, _, m in REFUSED])
def test_bad_samples_are_refused_with_what_is_wrong(kind, body, message):
    with pytest.raises(DataError, match=message) as error:
        BODIES.samples(CODEC[kind], body)
    assert isinstance(error.value, MalformedBodyError) == ("not valid" in message or "not a valid" in message)


def test_a_user_and_items_have_the_features_between_them():
    user = {"features": {"user": [5], "tags": [[1, 2]]}, "dense": {"age": [4.0]}}
    items = {"features": {"code": [1, 2]}, "dense": {"price": [0.5, 1.5]}}
    for kind, encode in ((JSON, as_json), (MSGPACK, as_msgpack)):
        mine, theirs = BODIES.user_and_items(CODEC[kind], encode({"user": user, "items": items}))
        np.testing.assert_array_equal(mine.dense, [[np.nan, 4.0]])
        np.testing.assert_array_equal(theirs.dense, [[0.5, np.nan], [1.5, np.nan]])
        whole = {"user": [5, 5], "tags": [[1, 2]] * 2, "code": [1, 2], "price": [0.5, 1.5], "age": [4.0] * 2}
        wanted = persia.Batch.from_columns(SCHEMA, whole, require_labels=False)
        assert {*mine.id_features} == {"user", "tags", "user_b"}
        for name in ("code", "user_code"):  # A cross of both is with the items.
            np.testing.assert_array_equal(theirs.id_features[name].values, wanted.id_features[name].values)
        assert {*theirs.id_features} == {"code", "user_code"}


@pytest.mark.parametrize(
    ("user", "items", "message"),
    [
        ({"user": [5, 6], "tags": [1, 2]}, {"code": [1], "price": [1], "age": [2]}, "The user has 2 rows"),
        ({"user": [5]}, {"code": [1], "price": [1], "age": [2]}, "'tags' of the schema is missing"),
        ({"user": [5], "tags": [1]}, {"code": [1], "user": [1], "price": [1], "age": [2]}, "'user' is given for the"),
        ({"user": [5], "tags": [1]}, {"code": [], "price": [], "age": []}, "no rows"),
        ({}, {"user": [5], "tags": [1], "code": [1], "price": [1], "age": [2]}, "no columns in the part 'user'"),
        ({"user": [5], "tags": [1]}, {"code": BIG, "price": BIG, "age": BIG}, "101 rows"),
    ],
)
def test_bad_rankings_are_refused(user, items, message):
    body = {"user": {"features": user}, "items": {"features": items}}
    for kind, encode in ((JSON, as_json), (MSGPACK, as_msgpack)):
        with pytest.raises(DataError, match=message):
            BODIES.user_and_items(CODEC[kind], encode(body))


def test_ids_of_a_table():
    for kind, encode, ids in (
        (JSON, as_json, [1, "2", "a"]),
        (MSGPACK, as_msgpack, [1, 2, "a"]),
    ):
        table, found = BODIES.ids(CODEC[kind], encode({"table": "user", "ids": ids}))
        wanted = persia.Batch.from_columns(SCHEMA, {**COLUMNS, "user": [1, 2, "a"]}, require_labels=False)
        assert table == "user"
        np.testing.assert_array_equal(found, wanted.id_features["user"].values)
    packed = as_msgpack({"table": "code", "ids": array_of(np.array([3, 4], np.uint64))})
    np.testing.assert_array_equal(BODIES.ids(CODEC[MSGPACK], packed).ids, np.array([3, 4], np.uint64), strict=True)
    for ids, message in (([1, None], "no id, or several, at row 1"), ([[1, 2]], "row 0"), (BIG, "101 rows")):
        with pytest.raises(DataError, match=message):
            BODIES.ids(CODEC[JSON], as_json({"table": "user", "ids": ids}))
    with pytest.raises(DataError, match="no table 'x'; the model has 'user'"):
        BODIES.ids(CODEC[JSON], as_json({"table": "x", "ids": [1]}))


VALID = [(JSON, as_json(columns())), (MSGPACK, as_msgpack(_samples(PACKED))), (ARROW, as_arrow(TABLE))]


@given(st.sampled_from([JSON, MSGPACK, ARROW]), st.binary(max_size=400))
def test_any_bytes_are_refused(kind, body):
    for read in (BODIES.samples, BODIES.user_and_items, BODIES.ids):
        if kind != ARROW or read == BODIES.samples:
            with pytest.raises(DataError):
                read(CODEC[kind], body)


@given(st.sampled_from(VALID), st.data())
def test_damaged_bodies_are_read_or_refused(valid, data):
    kind, body = valid
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    damaged = damaged[: data.draw(st.integers(0, len(body)) | st.just(len(body)))]
    try:
        found = BODIES.samples(CODEC[kind], bytes(damaged))
    except DataError:
        pass
    else:
        found.validate(SCHEMA, require_labels=False)
        assert len(found) <= LIMITS.max_rows


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
ANYTHING = st.recursive(
    SCALARS | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["dtype", "data", "offsets", "shape", *COLUMNS]) | st.text(max_size=3), inner)
    ),
    max_leaves=20,
)


@given(
    st.fixed_dictionaries(
        {"features": st.dictionaries(st.sampled_from([*COLUMNS, "x"]), ANYTHING)},
        optional={"dense": ANYTHING, "dense_array": ANYTHING},
    )
    | ANYTHING
)
def test_any_content_is_read_or_refused(content):
    for read in (BODIES.samples, BODIES.user_and_items, BODIES.ids):
        try:
            read(CODEC[MSGPACK], as_msgpack(content))
        except DataError:
            continue


@pytest.mark.parametrize(("kind", "encode"), [(JSON, as_json), (MSGPACK, as_msgpack)])
def test_booleans_are_one_and_zero_as_in_files(kind, encode):
    found = BODIES.samples(
        CODEC[kind], encode(columns(user=[True, False, 2], code=[False, True, 5], price=[True, False, 2.5]))
    )
    wanted = pa.table({**COLUMNS, "user": [1, 0, 2], "code": [0, 1, 5], "price": [1.0, 0.0, 2.5]})
    wanted = persia.Batch.from_columns(SCHEMA, wanted, require_labels=False)
    for name in IDS[::2]:
        np.testing.assert_array_equal(found.id_features[name].values, wanted.id_features[name].values)
    np.testing.assert_array_equal(found.dense, wanted.dense)


def test_dense_matrices_have_the_values_of_vectors():
    schema = persia.Schema(
        [persia.IdFeature("user", dim=4)],
        dense_features=["a", persia.DenseFeature("v", size=2, fill=7), persia.DenseFeature("b", log=True)],
        sample_weight="w",
    )
    bodies = Bodies(schema, LIMITS)
    columns = {"user": [1, 2], "a": [0, 1], "v": [[2, 3], [4, 5]], "b": [0, 0]}
    expected = persia.Batch.from_columns(schema, columns, require_labels=False)
    matrix = [[0, 2, 3, 0], [1, 4, 5, 0]]
    for codec, body in (
        (CODEC[JSON], as_json({"features": {"user": [1, 2]}, "dense": matrix})),
        (CODEC[JSON], as_json({"features": columns | {"w": [1, 1], "label": [0, 1]}})),
        (CODEC[MSGPACK], as_msgpack({"features": {"user": [1, 2]}, "dense_array": array_of(np.array(matrix, float))})),
    ):
        assert (bodies.samples(codec, body).dense == expected.dense).all()
    with pytest.raises(DataError, match=r"3 dense features in each row, in the order of the schema: 4 numbers"):
        bodies.samples(CODEC[JSON], as_json({"features": {"user": [1]}, "dense": [[0, 1, 2]]}))
    user, items = bodies.user_and_items(
        CODEC[JSON],
        as_json(
            {"user": {"features": {"user": [1]}, "dense": {"v": [None]}}, "items": {"features": {"a": [1], "b": [2]}}}
        ),
    )
    assert user.dense[0, 1:3].tolist() == [7, 7]
    assert np.isnan(user.dense[0, [0, 3]]).all()
    assert np.isnan(items.dense[0, 1:3]).all()


WEIGHTED = persia.Schema(
    [persia.IdFeature("user", dim=2, weights="trust"), persia.IdFeature("tags", dim=2, weights="scores")],
    labels=["click"],
)
WEIGHTED_COLUMNS = {"user": [5, 6], "trust": [0.5, 2], "tags": [[1, 2], []], "scores": [[0.25, -1], []]}


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (JSON, as_json({"features": WEIGHTED_COLUMNS})),
        (
            JSON,
            as_json(
                [dict(zip(WEIGHTED_COLUMNS, row, strict=True)) for row in zip(*WEIGHTED_COLUMNS.values(), strict=True)]
            ),
        ),
        (MSGPACK, as_msgpack({"features": WEIGHTED_COLUMNS})),
        (
            MSGPACK,
            as_msgpack(
                _samples(
                    {
                        "user": np.array([5, 6]),
                        "trust": np.array([0.5, 2]),
                        "tags": (np.array([1, 2]), np.array([0, 2, 2])),
                        "scores": (np.array([0.25, -1]), np.array([0, 2, 2])),
                    }
                )
            ),
        ),
        (ARROW, as_arrow(pa.table(WEIGHTED_COLUMNS))),
    ],
    ids=str,
)
def test_weights_come_with_their_ids(kind, body):
    found = Bodies(WEIGHTED, LIMITS).samples(CODEC[kind], body).id_features
    expected = persia.Batch.from_columns(WEIGHTED, WEIGHTED_COLUMNS, require_labels=False).id_features
    for name, column in expected.items():
        np.testing.assert_array_equal(found[name].values, column.values)
        np.testing.assert_array_equal(found[name].weights, column.weights, strict=True)


def test_weights_are_given_in_the_part_of_their_ids():
    body = {
        "user": {"features": {"user": [5], "trust": [0.5]}},
        "items": {"features": {"tags": [[1]], "scores": [[2]]}},
    }
    user, items = Bodies(WEIGHTED, LIMITS).user_and_items(CODEC[JSON], as_json(body))
    assert user.id_features["user"].weights.tolist() == [0.5]
    assert items.id_features["tags"].weights.tolist() == [2]
    body["items"]["features"]["trust"] = body["user"]["features"].pop("trust")
    with pytest.raises(DataError, match=r"'trust' \(weights of 'user'"):
        Bodies(WEIGHTED, LIMITS).user_and_items(CODEC[JSON], as_json(body))


def test_weights_are_documented():
    jsonschema = pytest.importorskip("jsonschema")
    post = openapi(WEIGHTED, LIMITS, False)["paths"]["/predict"]["post"]["requestBody"]["content"][JSON]
    jsonschema.validate({"features": WEIGHTED_COLUMNS}, post["schema"])
    for example in post["examples"].values():
        jsonschema.validate(example["value"], post["schema"])
        Bodies(WEIGHTED, LIMITS).samples(CODEC[JSON], as_json(example["value"]))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"features": {**WEIGHTED_COLUMNS, "scores": [[{}], []]}}, post["schema"])
