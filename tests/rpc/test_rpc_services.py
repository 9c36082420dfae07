"""The embedding PS and worker behave alike in this process and over rpc; each of their calls has a deadline."""

import threading
from collections.abc import Mapping
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest

from persia import rpc
from persia.batching.id_column import IdColumn
from persia.errors import ClosedError, DeadlineError, StaleBatchError, StoreError
from persia.modes import Async, Auto, Hybrid, Sync
from persia.ps import EmbeddingServer, ServerOptions
from persia.rpc.interface import describe
from persia.schema import Adagrad, Adam, AdmitMinFrequency, IdFeature, Schema, Table
from persia.services import (
    BucketMaps,
    Coordinator,
    DataLoader,
    DensePS,
    EmbeddingPS,
    EmbeddingWorker,
    MovableRows,
    MovedCounts,
    MovedRows,
    MoveProgress,
    RecordableRows,
    RecordableTokens,
    RecordableWorker,
    Round,
    RowChunk,
    RowsVersion,
    ServedRows,
    StatePiece,
    TokenService,
    TrainingPhase,
)
from persia.store import NativeStore
from persia.telemetry.metrics import Metric, Readings
from persia.types import (
    BucketMap,
    Caller,
    Contribution,
    DenseState,
    Feed,
    Gradients,
    LookedUp,
    Moment,
    PublishOptions,
    PublishOrder,
    PushedDense,
    PushHeader,
    PushId,
    ReadRecord,
    RowsToRead,
    RowsToWrite,
    StepTiming,
    TableToRead,
    UpdateCounts,
)
from persia.worker import Worker
from support.rpc_samples import DEADLINE
from support.twins.store import ReferenceStore

SCHEMA = Schema(
    id_features=[
        IdFeature("item", dim=8),
        IdFeature("history", dim=8, table="item", pooling="mean"),
        IdFeature("user", dim=4),
    ],
    tables=[Table("user", dim=4, capacity=10_000, optimizer=Adam(0.01), admission=AdmitMinFrequency(1))],
)
IDS = {"item": np.arange(5, dtype=np.uint64), "user": np.arange(3, dtype=np.uint64)}
ROWS = {"item": np.ones((5, 8), np.float32), "user": np.ones((3, 4), np.float32)}
COUNTS = MovedCounts("user", 0, 8, 256, np.array([1], np.uint32), np.ones((1, 64), np.uint16))
STATE = DenseState([], [], np.empty(0, np.uint8), [], "[]", [], np.empty(0, np.uint8), "{}", -1)
COLUMNS = {
    "item": IdColumn(np.array([1, 2, 1], np.uint64)),
    "history": IdColumn(np.array([1, 5, 6], np.uint64), np.array([0, 2, 2, 3], np.int64)),
    "user": IdColumn(np.array([7, 8, 7], np.uint64)),
}


def header(sequence):
    return PushHeader(generation=1, rank=0, sequence=sequence, step=sequence, rows=3)


def new_ps(store=NativeStore):
    options = ServerOptions(store=store)
    return EmbeddingServer(SCHEMA.resolved_tables(), Adagrad(0.1), Hybrid(4), seed=1, threads=1, options=options)


@contextmanager
def reached(service, protocol, how):
    if how == "here":
        yield service
        return
    with rpc.serve(service, protocol=protocol) as server:
        stub = rpc.connect(server.address, protocol, peer=f"{protocol.__name__} 0", timeout=DEADLINE)
        try:
            yield stub
        finally:
            rpc.close(stub)


@pytest.fixture(params=["here", "rpc", "reference"])
def ps(request):
    if request.param == "reference":
        yield new_ps(ReferenceStore)
        return
    with reached(new_ps(), EmbeddingPS, request.param) as found:
        yield found


@pytest.fixture(params=["here", "rpc"])
def worker(request, ps):
    with reached(Worker(SCHEMA, [ps], rank=3), EmbeddingWorker, request.param) as found:
        yield found


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert np.array_equal(a, b)
    elif isinstance(a, Mapping):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    else:
        assert a == b


def test_ps(ps):
    twin = new_ps()
    assert dict(ps.tables()) == dict(twin.tables())
    assert_same(ps.lookup(IDS, train=True), twin.lookup(IDS, train=True))
    gradients = {name: Gradients(IDS[name], ROWS[name]) for name in IDS}
    for sequence in (1, 2, 2):
        counts = ps.push(header(sequence), gradients)
        assert_same(counts, twin.push(header(sequence), gradients))
        assert all(type(count) is UpdateCounts for count in counts.values())
    assert_same(ps.lookup(IDS, train=False), twin.lookup(IDS, train=False))
    statistics, expected = ps.statistics(), twin.statistics()
    assert statistics["item"]["rows"] == 5
    for table in expected:
        assert statistics[table].pop("bytes") > 0  # Each kind of store needs a number of its own.
        expected[table].pop("bytes")
    assert_same(statistics, expected)


def test_ps_moves_to_another(ps):
    ps.lookup(IDS, train=True)
    ps.push(header(1), {name: Gradients(IDS[name], ROWS[name]) for name in IDS})
    other = new_ps()
    for chunk in ps.export_rows():
        assert type(chunk) is RowChunk
        other.import_rows(chunk)
    for pieces in ps.export_state():
        assert all(type(piece) is StatePiece for piece in pieces)
        other.import_state(pieces)
    assert_same(other.lookup(IDS, train=False), ps.lookup(IDS, train=False))
    with reached(new_ps(), EmbeddingPS, "rpc") as third:  # And into one over rpc.
        for chunk in ps.export_rows():
            third.import_rows(chunk)
        for pieces in ps.export_state():
            third.import_state(pieces)
        assert_same(third.lookup(IDS, train=False), ps.lookup(IDS, train=False))
        assert_same(list(third.export_state()), list(ps.export_state()))


@pytest.mark.parametrize("how", ["here", "rpc"])
def test_state_moves_in_pieces_of_bounded_size(how, monkeypatch):
    """Whatever their size, the same state comes out; a repetition has the effect of one."""
    table = Table("item", dim=8, capacity=10_000, admission=AdmitMinFrequency(2))
    schema = Schema(id_features=[IdFeature("item", dim=8)], tables=[table])

    def new():
        return EmbeddingServer(schema.resolved_tables(), Adagrad(0.1), Hybrid(4), seed=1, threads=1)

    with reached(new(), EmbeddingPS, how) as ps, reached(new(), EmbeddingPS, how) as other:
        for _ in range(2):
            ps.lookup({"item": IDS["item"]}, train=True)
        (whole,) = ps.export_state()
        monkeypatch.setattr("persia.ps.state_transfer.CHUNK_BYTES", 4096)
        chunks = list(ps.export_state())
        assert len(chunks) > 1
        assert all(sum(piece.values.nbytes for piece in pieces) <= 4096 for pieces in chunks)
        assert any(piece.start for pieces in chunks for piece in pieces)
        for pieces in [*chunks, *chunks]:
            other.import_state(pieces)
        assert_same(list(other.export_state()), chunks)
        monkeypatch.undo()
        assert_same(list(other.export_state()), [whole])


def test_state_that_does_not_fit(ps):
    piece = next(iter(ps.export_state()))[0]
    assert piece.array == "clocks"
    for wrong in (
        {"table": "nope"},
        {"shard": 99},
        {"shard": -1},
        {"array": "clients"},
        {"array": "nope"},
        {"start": 1},
        {"start": -1},
        {"values": piece.values.astype(np.float32)},
    ):
        with pytest.raises(StoreError):
            ps.import_state([piece._replace(**wrong)])


def test_ps_is_read_while_it_trains(ps, tmp_path):
    twin = new_ps()
    gradients = {name: Gradients(IDS[name], ROWS[name]) for name in IDS}
    for server in (ps, twin):
        server.lookup(IDS, train=True)
        server.push(header(1), gradients)
    info = ps.begin_snapshot("a", {}, str(tmp_path))
    assert info.whole
    assert ps.begin_snapshot("a", {}, str(tmp_path)) == info  # A repetition.
    ps.push(header(2), gradients)
    ps.lookup({"item": np.array([77], np.uint64)}, train=True)
    found = list(ps.snapshot_rows("a"))
    assert_same(found, list(twin.export_rows()))
    assert list(ps.snapshot_removed("a")) == []
    with pytest.raises(StoreError, match="no snapshot 'b'"):
        list(ps.snapshot_rows("b"))
    second = ps.begin_snapshot("b", info.numbers, str(tmp_path))  # The first one is given up.
    assert not second.whole
    changed = [chunk.arrays["ids"] for chunk in ps.snapshot_rows("b") if chunk.table == "item"]
    assert sorted(np.concatenate(changed).tolist()) == [0, 1, 2, 3, 4, 77]
    with pytest.raises(StoreError, match="no snapshot 'a'"):
        list(ps.snapshot_rows("a"))
    assert ps.begin_snapshot("c", info.numbers, str(tmp_path)).whole  # The one in between took the changes.
    ps.end_snapshot("c")
    ps.end_snapshot("c")
    ps.import_rows(RowChunk("item", 0, found[0].arrays))


def test_rows_without_state_begin_with_the_first_one(ps):
    rows = {
        "ids": IDS["user"],
        "embeddings": ROWS["user"],
        "update_count": np.full(3, 9, np.uint32),
        "last_step": np.full(3, 5, np.uint32),
        "stamp": np.full(3, 1, np.uint32),
    }
    ps.import_rows(RowChunk("user", 0, rows))
    chunks = [chunk.arrays for chunk in ps.export_rows() if chunk.table == "user"]
    assert sum(len(arrays["ids"]) for arrays in chunks) == 3
    for arrays in chunks:
        assert not arrays["state"].any()
        assert not arrays["update_count"].any()
        assert not arrays["last_step"].any()  # It is not kept.


def test_ps_errors(ps):
    with pytest.raises(StoreError, match="no table 'nope'") as caught:
        ps.lookup({"nope": IDS["item"]}, train=False)
    assert caught.value.fields == {"table": "nope"}
    with pytest.raises(StoreError):
        ps.push(header(1), {"item": Gradients(IDS["item"], np.ones((2, 3), np.float32))})


def test_worker(worker):
    batch_id = worker.register(COLUMNS)
    found = worker.lookup(batch_id)
    ids = worker.distinct_ids(batch_id)
    part = worker.lookup_part(batch_id, {name: mine > 0 for name, mine in ids.items()})
    assert_same(dict(part.rows), {name: found.rows[name][mine > 0] for name, mine in ids.items()})
    twin = Worker(SCHEMA, [new_ps()], rank=3)
    assert twin.register(COLUMNS) == batch_id
    expected = twin.lookup(batch_id)
    assert type(found) is LookedUp
    assert_same(found, expected)
    contribution = Contribution(batch_id, {name: np.ones_like(rows) for name, rows in found.rows.items()})
    assert_same(worker.push(header(1), [contribution]), twin.push(header(1), [contribution]))
    assert_same(worker.evaluate(COLUMNS), twin.evaluate(COLUMNS))
    with pytest.raises(StaleBatchError) as caught:
        worker.lookup(batch_id)
    assert caught.value.fields == {"batch_id": batch_id}
    assert worker.release(batch_id) is None


TABLE_TO_READ = TableToRead("item", "item", True, np.array([1024], np.uint64), np.array([3], np.uint32))

CALLS = {
    EmbeddingPS: {
        "tables": (),
        "buckets": (),
        "lookup": (IDS, True),
        "lookup_ahead": (IDS,),
        "refresh": (IDS, Moment(1, 0)),
        "push": (header(1), {"item": Gradients(IDS["item"], ROWS["item"])}),
        "statistics": (),
        "contains": (IDS,),
        "read_rows": ("item", IDS["item"], True),
        "set_rows": (1, "item", IDS["item"], ROWS["item"], None),
        "export_rows": ("item",),
        "begin_snapshot": ("snapshot", {"item": 2}, "/tmp", True),
        "snapshot_rows": ("snapshot",),
        "snapshot_removed": ("snapshot",),
        "write_snapshot": ("snapshot", RowsToWrite("/tmp", 12, 0, "0" * 8, 1, 0.5)),
        "write_state": (RowsToWrite("/tmp", 12, 0, "0" * 8, 1, 0.5),),
        "hurry_snapshot": ("snapshot",),
        "end_snapshot": ("snapshot",),
        "check_place": ("/tmp", "step-000000000012/mark-1", "crc32:00000000"),
        "check_row_parts": ("/tmp", 12, "crc32:00000000", 0, 2),
        "read_own_rows": (RowsToRead("/tmp", 12, "crc32:00000000", 1, 0, [TABLE_TO_READ], True),),
        "publish": (PublishOrder(PublishOptions("changes"), 0, "0" * 32, 0, 0),),
        "published": (),
        "approve": ("0" * 32, 1),
        "end_publishing": (True,),
        "import_rows": (RowChunk("item", 0, {"ids": IDS["item"]}),),
        "export_state": (),
        "import_state": ([StatePiece("item", 0, "clocks", 0, IDS["item"])],),
        "end_import": (),
        "switch": (Sync(), 1, 0, 2),
        "drain": (1, 0, 0),
        "row_staleness": (),
    },
    DensePS: {
        "load": (STATE, 1, 0, Async()),
        "pull": (-1, 0, PushId(0, 1), 1.0),
        "push": (header(1), PushedDense(0.0, None, None, None)),
        "drain": (1, 0, 0),
        "export": (),
        "statistics": (),
    },
    TokenService: {
        "begin": (TrainingPhase(1, 1, Async(), 1, 0, 0, 0, None),),
        "take": (Caller(1, 1, 0), 1),
        "end": (Caller(1, 1, 0), 1),
        "stop": (),
        "draw": (Caller(1, 1, 0), 1, 0, 8, 0, 0),
        "arrive": (Caller(1, 1, 0), 1, 8, 0),
        "abandoned": (Caller(1, 1, 0), 0),
        "quiesce": (Caller(1, 1, 0), 0, 0),
        "drained": (Caller(1, 1, 0), 0),
        "announce": (1, 8),
        "request": (Async(),),
        "requested": (),
        "resolve": (Async(),),
        "begin_auto": (Auto(Async()), 1, False),
        "report_timings": (0, [StepTiming(1.0, 0.5)]),
        "evidence": (),
        "cancel": (1, 0),
        "summary": (),
    },
    ServedRows: {"state": (), "lookup": (RowsVersion(0, 2, "0" * 32, 7), IDS)},
    RecordableRows: {"begin_recording": (0,), "end_recording": (), "recorded_lookup": (IDS, 1)},
    RecordableWorker: {"recorded_lookup": (1,)},
    RecordableTokens: {
        "begin_recording": (),
        "note": (ReadRecord(0, 1, 0, 8, 1, [0]),),
        "end_recording": (),
    },
    EmbeddingWorker: {
        "register": (COLUMNS,),
        "lookup": (1,),
        "distinct_ids": (1,),
        "lookup_ahead": (1,),
        "refresh": (1, [Moment(1, 0)]),
        "lookup_part": (1, {"item": np.ones(2, np.bool_)}),
        "push": (header(1), [Contribution(1, ROWS)]),
        "release": (1,),
        "evaluate": (COLUMNS,),
        "follow_map": (1,),
        "statistics": (),
    },
    DataLoader: {
        "begin": (Feed(0, 0, 1, 0, 1, 2),),
        "take": (0, 0, 0),
        "end": (),
        "statistics": (),
    },
    Coordinator: {
        "join": ("data_loader", 0, "tcp://127.0.0.1:1"),
        "depart": ("data_loader", 0, 1),
        "retire": ("data_loader", 0),
        "regenerate": (1,),
        "membership": (),
        "report": ("data_loader", 0, {"rows": 1.0}),
        "statistics": (),
    },
    BucketMaps: {
        "map_state": (),
        "order_map": (BucketMap.even(2).moved(3),),
        "withdraw_map": (BucketMap.even(2).moved(3),),
        "commit_map": (Round(1, 2), BucketMap.even(2).moved(3)),
        "map_adopted": (1, 1),
        "report_move": (MoveProgress(1, 2, 3, 0.5, "late"),),
        "request_scale": ("ticket", {"ps": 3}, True),
        "scale_request": (),
        "answer_scale": ("ticket", "no host"),
        "report_scaler": (Readings([Metric("scaler_processes", 2.0, {"of": "ps"})], [], ("ps 2 -> 3",)),),
    },
    MovableRows: {
        "begin_move": (BucketMap.even(2).moved(3),),
        "moving": (),
        "cancel_move": (1, BucketMap.even(2).moved(3)),
        "finish_move": (Round(1, 2), BucketMap.even(2).moved(3)),
        "complete_move": (Round(1, 2), BucketMap.even(2).moved(3)),
        "adopt": (Round(1, 2), BucketMap.even(2).moved(3), Sync(), 7, 3),
        "begin_receiving": (BucketMap.even(2).moved(3), 0, "0" * 32),
        "receive": (MovedRows(1, 0, "0" * 32, 1, [], [RowChunk("item", 0, {"ids": IDS["item"]})], [COUNTS]),),
    },
}


@pytest.mark.parametrize(
    ("protocol", "method"), [(protocol, method) for protocol in CALLS for method in describe(protocol)]
)
def test_every_call_has_a_deadline(protocol, method, monkeypatch):
    monkeypatch.setattr("persia.rpc.server.DELIVERY_SECONDS", 0.0)  # Nobody takes the replies.
    gate = threading.Event()

    class Stuck:
        def __getattr__(self, name):
            return lambda *arguments: gate.wait(DEADLINE)

    with rpc.serve(Stuck(), protocol=protocol) as server:
        stub = rpc.connect(server.address, protocol, peer="embedding PS 2", timeout=0.02)
        with pytest.raises(DeadlineError, match=rf"embedding PS 2 at {server.address} is late: {method} ") as caught:
            getattr(stub, method)(*CALLS[protocol][method])
        assert caught.value.fields == {
            "peer": "embedding PS 2", "address": server.address, "operation": method, "seconds": 0.02,
        }  # fmt: skip
        gate.set()
        rpc.close(stub)


def test_tables_cross_as_the_records_they_are():
    table = Table("t", 4, optimizer=Adam(0.1), admission=AdmitMinFrequency(3))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(table), type=Table) == table


def test_a_stub_of_another_protocol_is_on_the_same_connection():
    server = new_ps()
    assert rpc.cast_to(RecordableRows, server) is server
    with rpc.serve(server, protocol=type("Both", (EmbeddingPS, RecordableRows), {})) as served:
        stub = rpc.connect(served.address, EmbeddingPS, timeout=DEADLINE)
        recorder = rpc.cast_to(RecordableRows, stub)
        recorder.begin_recording(5)
        assert not hasattr(stub, "begin_recording")
        assert recorder.end_recording().version == 5
        assert rpc.statistics(stub)["calls"] == 2
        rpc.close(stub)
        with pytest.raises(ClosedError):
            recorder.end_recording()
