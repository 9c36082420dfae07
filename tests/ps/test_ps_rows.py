"""Rows that an embedding PS reads and sets by id: once per call, with eviction, beside checkpoints."""

from contextlib import contextmanager

import numpy as np
import pytest

from persia import rpc
from persia.errors import StoreError
from persia.modes import Hybrid
from persia.optim import Adagrad, Adam
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import AdmitMinFrequency, Table
from persia.services import EmbeddingPS, RowChunk
from persia.store import NativeStore
from persia.types import Gradients, Packed, PushHeader, RowsSet, RowState
from persia.types.half_floats import LARGEST, to_halves
from support.twins.store import ReferenceStore

DEADLINE = 20.0
U = np.uint64


def ids(*values):
    return np.array(values, U)


@contextmanager
def served(how, **table):
    tables = {"t": Table("t", 4, **table)}
    options = ServerOptions(store=ReferenceStore if how == "reference" else NativeStore)
    server = EmbeddingServer(tables, Adagrad(0.1, initial_accumulator=0.5), Hybrid(), 1, 1, options)
    if how != "rpc":
        yield server
        return
    with rpc.serve(server, protocol=EmbeddingPS) as port:
        stub = rpc.connect(port.address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
        try:
            yield stub
        finally:
            rpc.close(stub)


@pytest.fixture(params=["here", "rpc", "reference"])
def how(request):
    return request.param


def values(count, factor=1.0):
    return np.arange(4 * count, dtype=np.float32).reshape(count, 4) * np.float32(factor)


def test_what_is_set_is_read(how):
    with served(how) as ps:
        assert ps.set_rows(1, "t", ids(3, 8), values(2), None) == RowsSet(2, 0, 0)
        found = ps.read_rows("t", ids(8, 5, 3, 8), True)
        assert found.found.tolist() == [True, False, True, True]
        np.testing.assert_array_equal(found.values, values(2)[[1, 0, 0, 1]] * np.array([[1], [0], [1], [1]]))
        np.testing.assert_array_equal(found.state.values[:, 0], [0.5, 0, 0.5, 0.5])
        assert ps.read_rows("t", ids(3), False).state is None
        assert ps.contains(Packed.of({"t": ids(5, 8)}, U))["t"].tolist() == [False, True]
        np.testing.assert_array_equal(ps.lookup({"t": ids(8)}, train=False)["t"], values(2)[1:])


def test_a_repeated_call_has_no_effect_and_the_same_answer(how):
    with served(how) as ps:
        first = ps.set_rows(1, "t", ids(3), values(1), None)
        ps.set_rows(2, "t", ids(3), values(1, 9), None)
        assert ps.set_rows(1, "t", ids(3), values(1), None) == first == RowsSet(1, 0, 0)
        np.testing.assert_array_equal(ps.read_rows("t", ids(3), False).values, values(1, 9))
        assert ps.set_rows(3, "t", ids(3), values(1), None) == RowsSet(0, 1, 0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["here", "reference"])
def test_rows_of_a_checkpoint_have_a_dtype_of_tables(how, dtype):
    columns = {name: np.zeros(1, np.uint32) for name in ("last_step", "stamp")}
    good = values(1) + 0.5
    with served(how, dtype=dtype) as ps:
        for wrong in (np.float64, np.int64, np.int16, np.uint8, np.bool_):
            with pytest.raises(StoreError, match=f"'t': embeddings have dtype {np.dtype(wrong)}; expected float32"):
                ps.import_rows(RowChunk("t", 0, {"ids": ids(1), "embeddings": good.astype(wrong), **columns}))
        with pytest.raises(StoreError, match="'t' lack embeddings"):
            ps.import_rows(RowChunk("t", 0, {"ids": ids(1), **columns}))
        with pytest.raises(StoreError, match="shape"):
            ps.import_rows(RowChunk("t", 0, {"ids": ids(1), "embeddings": good[:, :3], **columns}))
        assert not ps.contains(Packed.of({"t": ids(1)}, U))["t"].any()
        for other in ("float32", "bfloat16", "float16"):
            ps.import_rows(RowChunk("t", 0, {"ids": ids(1), "embeddings": to_halves(good, other), **columns}))
            np.testing.assert_array_equal(ps.read_rows("t", ids(1), False).values, good)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rows_of_a_chunk_come_back(dtype):
    special = np.array([[np.inf, np.nan, -np.inf, LARGEST[dtype]]], np.float32)
    with served("here", dtype=dtype) as ps, served("here", dtype=dtype) as other:
        ps.set_rows(1, "t", ids(3), special, None)
        (chunk,) = ps.export_rows()
        assert chunk.arrays["embeddings"].dtype == (np.float16 if dtype == "float16" else np.uint16)
        other.import_rows(chunk)
        np.testing.assert_array_equal(other.read_rows("t", ids(3), False).values, special)


def test_an_error_names_the_dtypes_that_fit():
    with served("here", dtype="float16") as ps, pytest.raises(StoreError, match="'bfloat16' or 'float32'"):
        ps.set_rows(1, "t", ids(3), np.full((1, 4), 1e5, np.float32), None)
    with served("here", dtype="bfloat16") as ps, pytest.raises(StoreError, match="dtype = 'float32'"):
        ps.set_rows(1, "t", ids(3), np.full((1, 4), 3.4e38, np.float32), None)


def test_answers_are_kept_for_the_last_calls_only():
    with served("here") as ps:
        for call in range(200):
            ps.set_rows(call, "t", ids(call), values(1), None)
        assert len(ps._setter._answers) == 64
        assert ps.set_rows(199, "t", ids(199), values(1), None).inserted == 1


def test_reading_changes_nothing(how):
    with served(how, capacity=2, admission=AdmitMinFrequency(1)) as ps:
        ps.lookup({"t": ids(1)}, train=True)
        ps.lookup({"t": ids(2)}, train=True)
        before = ps.statistics(), [[p.values.tolist() for p in pieces] for pieces in ps.export_state()]
        ps.read_rows("t", ids(1, 7), True)
        ps.contains(Packed.of({"t": ids(1, 7)}, U))
        assert (ps.statistics(), [[p.values.tolist() for p in pieces] for pieces in ps.export_state()]) == before
        ps.lookup({"t": ids(3)}, train=True)  # Evicts 1: reading has not made it recent.
        assert ps.contains(Packed.of({"t": ids(1, 2, 3)}, U))["t"].tolist() == [False, True, True]


def test_set_rows_are_the_most_recent_and_evictions_are_counted(how):
    with served(how, capacity=4) as ps:
        for id_ in (1, 2, 3, 4):
            ps.lookup({"t": ids(id_)}, train=True)
        ps.set_rows(1, "t", ids(1), values(1), None)
        assert ps.set_rows(2, "t", ids(10, 11), values(2), None) == RowsSet(2, 0, 2)
        assert ps.contains(Packed.of({"t": ids(1, 2, 3, 4, 10, 11)}, U))["t"].tolist() == [
            True, False, False, True, True, True,
        ]  # fmt: skip
        ps.lookup({"t": ids(12)}, train=True)
        assert not ps.contains(Packed.of({"t": ids(4)}, U))["t"][0]
        # More than the table holds: the first ones stay.
        assert ps.set_rows(3, "t", np.arange(20, 26, dtype=U), values(6), None) == RowsSet(6, 0, 6)
        assert ps.contains(Packed.of({"t": np.arange(20, 26, dtype=U)}, U))["t"].tolist() == [True] * 4 + [False] * 2
        assert ps.statistics()["t"]["rows"] == 4


def test_admission_is_not_asked(how):
    with served(how, admission=AdmitMinFrequency(5)) as ps:
        ps.set_rows(1, "t", ids(3), values(1), None)
        np.testing.assert_array_equal(ps.lookup({"t": ids(3)}, train=True)["t"], values(1))
        assert ps.statistics()["t"]["rejected"] == 0


def test_rows_set_during_a_checkpoint_are_in_the_next_increment(how, tmp_path):
    """The checkpoint has the rows before; the next one adds what was set, and nothing else."""
    with served(how) as ps:
        ps.lookup({"t": np.arange(10, dtype=U)}, train=True)
        first = ps.begin_snapshot("a", {}, str(tmp_path))
        before = ps.lookup({"t": ids(3)}, train=False)["t"]
        ps.set_rows(1, "t", ids(3, 20), values(2), None)
        chunks = [chunk.arrays for chunk in ps.snapshot_rows("a")]
        found, rows = (np.concatenate([arrays[name] for arrays in chunks]) for name in ("ids", "embeddings"))
        assert sorted(found.tolist()) == list(range(10))
        np.testing.assert_array_equal(rows[found == 3], before)
        ps.end_snapshot("a")
        second = ps.begin_snapshot("b", first.numbers, str(tmp_path))
        assert not second.whole
        chunks = [chunk.arrays for chunk in ps.snapshot_rows("b")]
        found, rows = (np.concatenate([arrays[name] for arrays in chunks]) for name in ("ids", "embeddings"))
        np.testing.assert_array_equal(rows[np.argsort(found)], values(2))
        assert sorted(found.tolist()) == [3, 20]


def test_rows_that_were_looked_up_ahead_are_read_again_if_they_are_set(how):
    with served(how) as ps:
        wanted = Packed.of({"t": np.arange(10, dtype=U)}, U)
        seen = ps.lookup_ahead(wanted).seen
        ps.set_rows(1, "t", ids(3, 20), values(2), None)
        fresh = ps.refresh(wanted, seen)
        assert fresh.places["t"].tolist() == [3]
        np.testing.assert_array_equal(fresh.rows["t"], values(1))
        assert not ps.refresh(wanted, fresh.seen[0]).places["t"].size


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nope", ids(1), values(1), None), "no table 'nope'"),
        (("t", ids(1, 2), values(1), None), r"shape \[2, 4\]"),
        (("t", ids(1), np.ones((1, 3), np.float32), None), r"\[1, 3\]"),
        (("t", ids(1), values(1), RowState(np.ones((1, 3), np.float32), *2 * [np.ones(1, np.uint32)])), "4 columns"),
        (("t", ids(1), values(1), RowState(np.ones((1, 4), np.float32), *2 * [np.ones(2, np.uint32)])), "length"),
    ],
)
def test_what_does_not_fit_is_refused(how, arguments, message):
    with served(how) as ps:
        with pytest.raises(StoreError, match=message):
            ps.set_rows(1, *arguments)
        assert ps.statistics()["t"]["rows"] == 0
        ps.set_rows(1, "t", ids(1), values(1), None)  # The failed call is not remembered.
        assert ps.statistics()["t"]["rows"] == 1


def test_ids_of_another_dtype_are_refused():
    """In this process; a message with them does not fit its type."""
    ps = EmbeddingServer({"t": Table("t", 4)}, Adam(0.1), Hybrid(), 1, 1)
    with pytest.raises(StoreError, match=r"ids are uint64 \[n\]"):
        ps.set_rows(1, "t", np.array([1]), values(1), None)


def test_adam_goes_on_from_the_state_that_was_set():
    """Bias correction follows the update count that came with the state."""
    tables = {"t": Table("t", 4)}
    one, two = (EmbeddingServer(tables, Adam(0.1), Hybrid(), 1, 1) for _ in range(2))

    def push(ps, sequence):
        ps.push(PushHeader(1, 0, sequence, sequence, 1), {"t": Gradients(ids(3), values(1, 0.1))})

    one.lookup({"t": ids(3)}, train=True)
    push(one, 1)
    push(one, 2)
    read = one.read_rows("t", ids(3), True)
    two.set_rows(1, "t", read.ids, read.values, read.state)
    push(one, 3)
    push(two, 3)
    mine, theirs = (ps.read_rows("t", ids(3), True) for ps in (one, two))
    np.testing.assert_array_equal(mine.values, theirs.values)
    for a, b in zip(mine.state, theirs.state, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_import_ends_in_all_tables(monkeypatch):
    server = EmbeddingServer({name: Table(name, 4) for name in "abc"}, Adagrad(0.1), Hybrid(), 1, 1, ServerOptions())
    ended = []
    monkeypatch.setattr(NativeStore, "end_import", lambda _, table: ended.append(table))
    server.end_import()
    assert sorted(ended) == [0, 1, 2]
