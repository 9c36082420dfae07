"""Bodies of any content, in msgpack and Arrow, to a server of a real log: an answer or a refusal, never a failure."""

from __future__ import annotations

import time

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from persia.serve.http.app import create_app
from persia.serve.http.bodies import Bodies
from persia.serve.http.codecs.codec import ARROW, JSON, MSGPACK
from persia.serve.http.codecs.msgpack_codec import array_of
from persia.serve.http.limits import ServeLimits
from support.examples import examples
from support.served import CODEC
from support.trained_logs import SCHEMAS, TOWERS, columns, serve

LIMITS = ServeLimits(max_rows=50, max_values=200, max_k=20, deadline_ms=60_000)
MANY = settings(max_examples=examples(60), deadline=None, suppress_health_check=list(HealthCheck), database=None)
REFUSALS = {400, 413, 422}


@pytest.fixture(params=list(SCHEMAS))
def server(request, trained_logs):
    """A server in this process, whose answers are compared with those of its predictor."""
    schema = SCHEMAS[request.param]
    predictor, retriever = serve(schema, trained_logs[request.param])
    app = create_app(predictor, limits=LIMITS, retriever=retriever)
    with TestClient(app, base_url="http://localhost") as client:
        deadline = time.monotonic() + 60
        while client.get("/health").status_code != 200 or (retriever and retriever.state() is None):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield Server(schema, predictor, client)


class Server:
    def __init__(self, schema, predictor, client):
        self.schema, self.predictor, self.client = schema, predictor, client
        self.bodies = Bodies(schema, LIMITS)

    def ask(self, path, kind, body, accept):
        """Returns the answer, or None if the request was refused as it should be."""
        answer = self.client.post(path, content=body, headers={"Content-Type": kind, "Accept": accept})
        if answer.status_code == 200:
            assert answer.headers["Content-Type"] == accept
            return answer.content
        assert answer.status_code in REFUSALS, answer.text
        problem = answer.json()
        assert problem["error"] in ("DataError", "Refused")
        assert problem["message"]
        return None

    def predict(self, kind, body, accept):
        """Asks for predictions; those of an answer are the predictor's own. Returns whether there was one."""
        content = self.ask("/predict", kind, body, accept)
        if content is not None:
            found = self.predictor.predict(self.bodies.samples(CODEC[kind], body))
            name = "probabilities" if found.are_log_odds else "scores"
            expected = getattr(found, name)
            np.testing.assert_array_equal(answered(name, content, accept, self.schema.labels), expected)
            if found.are_log_odds:
                assert not (np.nan_to_num(expected) < 0).any()
                assert not (np.nan_to_num(expected) > 1).any()
        return content is not None

    def is_well(self):
        """Checks that the server is as it was, and that its thread of updates could count what was asked."""
        self.predictor.refresh()
        assert self.client.get("/health").json()["problem"] == ""
        assert "persia_serve_requests_total" in self.client.get("/metrics").text
        good = columns(self.schema)
        body = msgspec.msgpack.encode(packed({name: column[:9] for name, column in good.items()}))
        assert self.predict(MSGPACK, body, MSGPACK)


def answered(name, content, accept, labels):
    if accept == ARROW:
        table = pa.ipc.open_stream(content).read_all()
        assert table.column_names == list(labels)
        return np.stack([column.to_numpy() for column in table.columns], axis=1)
    if accept == JSON:
        found = msgspec.json.decode(content)[name]
        return np.stack([np.float32(found[label]) for label in labels], axis=1)
    found = msgspec.msgpack.decode(content)[name]
    assert found["labels"] == list(labels)
    return np.frombuffer(found["values"]["data"], "<f4").reshape(found["values"]["shape"])


def packed(found):
    """Returns columns of any kind as msgpack can have them."""
    return {"features": {n: array_of(c) if isinstance(c, np.ndarray) else c for n, c in found.items()}}


ACCEPT = st.sampled_from([JSON, MSGPACK, ARROW])
IDS = st.integers(0, 12) | st.sampled_from([2**31, 2**63 - 1, 2**63, 2**64 - 1])
FLOATS = st.sampled_from([0.0, 1.0, -1.5, 1e-45, 3.4e38, -3.4e38])  # The ends of float32.
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5)
DTYPES = ["uint64", "int64", "uint32", "int32", "uint16", "int16", "uint8", "int8", "float64", "float32", "bool"]


@st.composite
def arrays(draw, rows):
    """Arrays of any dtype and bits, perhaps with a shape or offsets that do not fit."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = draw(st.none() | st.sampled_from([[], [rows], [rows, 1], [1, rows], [rows, 1, 1], [-1], [2**40, 0]]))
    size = dtype.itemsize * (1 if shape == [] else rows)
    array = {"dtype": dtype.name, "data": draw(st.binary(min_size=size, max_size=size))}
    if shape is not None:
        array["shape"] = shape
    if draw(st.booleans()):
        array["offsets"] = np.array(draw(st.lists(st.integers(-1, 6), max_size=6)), "<i8").tobytes()
    return array


def id_columns(schema, name, rows):
    """Ids of a feature, one or several in each of the rows."""
    one = st.lists(IDS, min_size=rows, max_size=rows)
    if schema is TOWERS and name in ("history", "ages"):  # Aligned, so of one length.
        return st.just([[1, 2]] * rows)
    good = one | one.map(lambda ids: array_of(np.array(ids, np.uint64)))
    return good | st.lists(st.lists(IDS, max_size=3), min_size=rows, max_size=rows) if name == "tags" else good


def dense_columns(schema, name, rows):
    good = st.lists(FLOATS, min_size=rows, max_size=rows)
    return good | good.map(lambda values: array_of(np.float32(values)))


def anything(rows):
    values = st.lists(SCALARS | st.lists(SCALARS, max_size=3), min_size=max(rows - 1, 0), max_size=rows)
    return values | arrays(rows)


FAULTS = ["none", "none", "column", "column", "column", "missing", "unknown", "dense"]


@st.composite
def samples(draw, schema, names, rows=None, good=False):
    """Samples of some features: good ones, or with one fault, as a second one would hide behind the first."""
    rows = draw(st.integers(1, 4)) if rows is None else rows
    fault, name_of_fault = "none" if good else draw(st.sampled_from(FAULTS)), draw(st.sampled_from([*names, ""]))
    ids = {f.name for f in schema.id_features if not f.computed} | ({"now"} if schema is TOWERS else set())
    content = {"features": {}, "dense": {}}
    for name in names:
        at_fault = name == name_of_fault
        if at_fault and fault == "missing":
            continue
        part, columns_of = ("features", id_columns) if name in ids else ("dense", dense_columns)
        content[part][name] = draw(anything(rows) if at_fault and fault == "column" else columns_of(schema, name, rows))
    if fault == "unknown":
        content["features"][draw(st.text(max_size=3) | st.sampled_from(["user_b", "click", "price"]))] = [1] * rows
    if fault == "dense":
        content["dense"] = draw(anything(rows))
    return content


@st.composite
def damaged(draw, bodies):
    """Bodies of which some bytes are others, or the end is missing."""
    body = bytearray(draw(bodies))
    if draw(st.integers(0, 3)):
        return bytes(body)
    for _ in range(draw(st.integers(1, 4))):
        body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
    return bytes(body[: draw(st.integers(0, len(body)) | st.just(len(body)))])


def names_of(schema):
    """Returns the columns of a request, without labels."""
    return [name for name in columns(schema) if name not in schema.labels]


def test_predictions_of_any_msgpack(server):
    names = names_of(server.schema)

    @MANY
    @given(damaged(samples(server.schema, names).map(msgspec.msgpack.encode)), ACCEPT)
    def check(body, accept):
        server.predict(MSGPACK, body, accept)

    check()
    server.is_well()


def test_rankings_of_any_msgpack(server):
    names = names_of(server.schema)

    @st.composite
    def requests(draw):
        events = draw(st.booleans())  # Parts of one event stay together.
        ours = {name for name in names if (events if name in ("history", "ages", "now") else draw(st.booleans()))}
        good, rows = draw(st.sampled_from(["user", "items", "both"])), draw(st.integers(1, 4))
        mine, theirs = ([name for name in names if (name in ours) == of_user] for of_user in (True, False))
        user = draw(samples(server.schema, mine, 1, good=good != "items"))
        items = draw(samples(server.schema, theirs, rows, good=good != "user"))
        return msgspec.msgpack.encode({"user": user, "items": items})

    @MANY
    @given(damaged(requests()), ACCEPT)
    def check(body, accept):
        content = server.ask("/rank", MSGPACK, body, accept)
        if content is not None:
            expected = server.predictor.rank(*server.bodies.user_and_items(CODEC[MSGPACK], body)).scores
            np.testing.assert_array_equal(answered("scores", content, accept, server.schema.labels), expected)

    check()
    server.is_well()


def test_embeddings_of_any_msgpack(server):
    tables = list(server.schema.resolved_tables())

    @MANY
    @given(
        st.sampled_from(tables) | st.text(max_size=3),
        st.lists(IDS, max_size=5).map(lambda ids: array_of(np.array(ids, np.uint64))) | anything(4),
        ACCEPT,
    )
    def check(table, ids, accept):
        body = msgspec.msgpack.encode({"table": table, "ids": ids})
        content = server.ask("/embeddings", MSGPACK, body, accept)
        if content is not None and accept == MSGPACK:
            found, rows = server.predictor.embeddings(*server.bodies.ids(CODEC[MSGPACK], body))
            answer = msgspec.msgpack.decode(content)
            np.testing.assert_array_equal(np.frombuffer(answer["found"]["data"], np.bool_), found)
            np.testing.assert_array_equal(np.frombuffer(answer["rows"]["data"], "<f4").reshape(rows.shape), rows)

    check()
    server.is_well()


@pytest.mark.parametrize("server", ["two_towers"], indirect=True)
def test_searches_of_any_msgpack(server):
    pytest.importorskip("usearch", reason='usearch is not installed: pip install "persia-recsys[usearch]"')
    names = [name for name in names_of(TOWERS) if name not in ("item", "price")]

    requests = st.fixed_dictionaries({"users": samples(TOWERS, names)}, optional={"k": st.integers(-1, 25)})

    @MANY
    @given(damaged(requests.map(msgspec.msgpack.encode)), ACCEPT)
    def check(body, accept):
        content = server.ask("/retrieve", MSGPACK, body, accept)
        if content is not None and accept == JSON:
            found = msgspec.json.decode(content)
            assert np.shape(found["ids"]) == np.shape(found["scores"])
            assert np.isfinite(np.float64(found["scores"])).all()

    check()
    server.is_well()


TYPES = [
    pa.uint64(), pa.int64(), pa.int8(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.binary(),
    pa.large_string(), pa.timestamp("s"), pa.timestamp("ns", "UTC"), pa.date32(), pa.date64(), pa.time32("s"),
    pa.duration("us"), pa.decimal128(9, 2), pa.null(), pa.list_(pa.uint64()), pa.large_list(pa.int32()),
    pa.list_(pa.int64(), 2), pa.list_(pa.list_(pa.int8())), pa.list_(pa.string()), pa.struct([("a", pa.int8())]),
    pa.dictionary(pa.int8(), pa.string()), pa.map_(pa.int8(), pa.int8()), pa.string_view(),
]  # fmt: skip
"""Types of columns, of which the server takes some."""


def arrow_array(values, kind):
    """Returns an array of a type, with nulls in place of values that it cannot have."""
    found = []
    for value in values:
        try:
            found.append(pa.array([value], kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            found.append(pa.nulls(1, kind))
    return pa.concat_arrays(found)


@st.composite
def streams(draw, schema):
    """Arrow streams: good ones, or with a column of any type and nulls; and several batches."""
    rows, names = draw(st.integers(1, 4)), names_of(schema)
    other = draw(st.sampled_from([*names, ""]))
    made = {}
    for name in names:
        if name == other:
            kind = draw(st.sampled_from(TYPES))
            made[name] = arrow_array(
                draw(st.lists(SCALARS | st.lists(IDS, max_size=3), min_size=rows, max_size=rows)), kind
            )
        elif name in schema.dense_features:
            made[name] = pa.array(draw(st.lists(FLOATS, min_size=rows, max_size=rows)), pa.float32())
        elif name in ("history", "ages", "tags"):
            made[name] = pa.array(
                [[1, 2]] * rows, draw(st.sampled_from([pa.list_(pa.uint64()), pa.list_(pa.int32(), 2)]))
            )
        else:
            made[name] = pa.array(draw(st.lists(IDS, min_size=rows, max_size=rows)), pa.uint64())
    table = pa.table(made)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=draw(st.integers(1, 4)))
    return sink.getvalue().to_pybytes()


def test_predictions_of_any_arrow_stream(server):
    @MANY
    @given(damaged(streams(server.schema)), ACCEPT)
    def check(body, accept):
        server.predict(ARROW, body, accept)

    check()
    server.is_well()
