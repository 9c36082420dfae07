"""A recording attaches to roles from outside: without one, nothing of it runs, and nothing of it is on the wire."""

import inspect
import sys
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from persia import rpc
from persia.batching.id_column import IdColumn
from persia.modes import Gba, Hybrid, Sync
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.rpc.interface import describe
from persia.services import (
    DensePS,
    EmbeddingPS,
    EmbeddingWorker,
    Recordable,
    RecordableRows,
    RecordableTokens,
    RecordableWorker,
    TokenService,
)
from persia.testing import Threads
from persia.types import Contribution, LookedUp, PushHeader
from persia.worker import Worker
from support.several_ps import several_servers
from support.switching_samples import DEADLINE, ROWS, SCHEMA, batches, trainer

RECORDING = ("persia/replay/", "persia/pushes/journal.py", "persia/coordinator/recorded_arrivals.py")


def test_the_interfaces_of_roles_have_no_recording():
    beside = {name for p in (Recordable, RecordableRows, RecordableTokens, RecordableWorker) for name in describe(p)}
    assert beside == {"begin_recording", "end_recording", "recorded_lookup", "note"}
    for protocol in (EmbeddingPS, DensePS, TokenService, EmbeddingWorker):
        names = set(describe(protocol))
        assert not names & beside
        assert not [name for name in names if "record" in name or "journal" in name]


def test_rows_travel_without_a_version():
    assert LookedUp._fields == ("rows", "narrow", "wide", "offsets", "scales", "weights", "seen", "pooled", "left_out")
    server = EmbeddingServer(SCHEMA.resolved_tables(), Adagrad(0.1), Sync(), seed=1, threads=1)
    found = server.lookup({"user": np.arange(3, dtype=np.uint64)}, train=True)
    assert {name: rows.shape for name, rows in found.items()} == {"user": (3, 4)}


def functions_of_recording(run):
    """The functions of a recording that are called in new threads while it runs."""
    called = set()

    def profile(frame, event, argument):
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # Bodies of modules and classes are not: they are imports.
        if event == "call" and is_function and any(part in code.co_filename for part in RECORDING):
            called.add(code.co_name)

    threading.setprofile(profile)
    try:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    finally:
        threading.setprofile(None)
    return called


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or coverage has the hook")
@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0), Gba(2 * ROWS)], ids=str)
def test_a_step_without_a_recorder_calls_none_of_it(mode, tmp_path):
    data = batches(4)

    def fit(record_dir):
        cluster = Threads(2, dense_ps=1, timeout=DEADLINE)
        return cluster.run(lambda member: trainer(mode, member, record_dir=record_dir).fit(data).rows)

    rows = []
    assert functions_of_recording(lambda: rows.append(fit(None))) == set()
    recorded = functions_of_recording(lambda: rows.append(fit(str(tmp_path))))
    assert {"begin_recording", "read", "note", "add", "apply", "end_recording"} <= recorded
    assert rows[0] == rows[1] == [4 * ROWS] * 2


def columns(number):
    return {name: IdColumn(np.arange(number, number + 3, dtype=np.uint64)) for name in ("user", "item")}


@pytest.mark.parametrize("how", ["here", "rpc"])
def test_lookups_and_pushes_are_journaled(how):
    """The version of the rows of each batch, and the pushes in order, empty ones too; repetitions have no effect."""
    servers = several_servers(2, SCHEMA.resolved_tables(), Adagrad(0.1), Hybrid(4, warmup=0), seed=1)
    with ExitStack() as stack:

        def reached(role, *protocols):
            if how == "here":
                return role
            together = type(protocols[0].__name__, protocols, {})
            server = stack.enter_context(rpc.serve(role, protocol=together))
            stub = rpc.connect(server.address, protocols[0], timeout=DEADLINE)
            stack.callback(rpc.close, stub)
            return stub

        stubs = [reached(server, EmbeddingPS, RecordableRows) for server in servers]
        worker = reached(Worker(SCHEMA, stubs), EmbeddingWorker, RecordableWorker)
        recorders = [rpc.cast_to(RecordableRows, stub) for stub in stubs]

        def look_up(number):
            batch_id = worker.register(columns(number))
            found = rpc.cast_to(RecordableWorker, worker).recorded_lookup(batch_id)
            return Contribution(batch_id, {name: np.ones_like(rows) for name, rows in found.rows.items()})

        def header(sequence):
            return PushHeader(generation=1, rank=0, sequence=sequence, step=sequence, rows=3)

        worker.push(header(1), [look_up(0)])  # Not recorded.
        for recorder in recorders:
            recorder.begin_recording(11)
        first, second = look_up(1), look_up(2)
        worker.push(header(2), [first])
        third = look_up(3)
        servers[0].push(header(2), {})  # Repeated by a dead connection.
        worker.push(header(3), [second])
        last = look_up(4)
        worker.push(header(4), [third])
        worker.push(header(5), [])  # Its gradients are lost.
        for recorder in recorders:
            journal = recorder.end_recording()
            assert journal.version == 11
            assert [h.sequence for h in journal.headers] == [2, 3, 4, 5]
            assert journal.empty == [3]
            assert journal.reads == {
                first.batch_id: 11, second.batch_id: 11, third.batch_id: 12, last.batch_id: 13,
            }  # fmt: skip
            assert recorder.end_recording() == journal
        worker.push(header(6), [last])
        assert all(server.journal is None for server in servers)


def test_a_recorded_lookup_waits_for_an_update(monkeypatch):
    """So all its rows are of one version."""
    server = EmbeddingServer(SCHEMA.resolved_tables(), Adagrad(0.1), Hybrid(4, warmup=0), seed=1, threads=1)
    server.begin_recording(0)
    ids = {"user": np.arange(3, dtype=np.uint64)}
    updating, go_on = threading.Event(), threading.Event()
    update = server._store.update_packed

    def slow(*arguments, **options):
        updating.set()
        assert go_on.wait(DEADLINE)
        return update(*arguments, **options)

    class Slow:
        update_packed = staticmethod(slow)

        def __getattr__(self, name):
            return getattr(store, name)

    store = server._store
    monkeypatch.setattr(server, "_store", Slow())
    push = threading.Thread(target=server.push, args=(PushHeader(1, 0, 1, 0, 3), {}))
    push.start()
    assert updating.wait(DEADLINE)
    read = threading.Thread(target=server.recorded_lookup, args=(ids, 7))
    read.start()
    server.lookup(ids, train=False)  # Evaluation does not wait.
    read.join(0.05)
    assert read.is_alive()
    go_on.set()
    for thread in (push, read):
        thread.join(DEADLINE)
    assert server.end_recording().reads == {7: 1}
