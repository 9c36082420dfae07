"""The embedding PS in asynchronous modes: here and over rpc, in the order of arrival, against the slow sums."""

from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import rpc
from persia.errors import PersiaError, StalePushError, StoreError
from persia.modes import Async, Bsp, Gba, Hybrid, Sync
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import SGD, Adam, Table
from persia.services import EmbeddingPS, RowChunk
from persia.store import NativeStore, TableConfig
from persia.types import Gradients, PushHeader
from support.examples import examples
from support.stores import lookup, update
from support.twins.pushes import ReferenceAccumulator
from support.twins.store import ReferenceStore

DEADLINE = 20.0
DIM = 3
TABLES = {"t": Table("t", DIM)}


def new_ps(mode, optimizer=None, store=NativeStore):
    made = EmbeddingServer(TABLES, optimizer or SGD(1.0), mode, 0, 1, ServerOptions(2, DEADLINE, store=store))
    made.switch(mode, 1, 0)
    return made


@pytest.fixture(params=["here", "rpc", "reference"])
def ps(request):
    """Makes a PS of a mode."""
    with ExitStack() as stack:

        def make(mode):
            made = new_ps(mode, store=ReferenceStore if request.param == "reference" else NativeStore)
            if request.param != "rpc":
                return made
            server = stack.enter_context(rpc.serve(made, protocol=EmbeddingPS))
            stub = rpc.connect(server.address, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
            stack.callback(rpc.close, stub)
            return stub

        yield make


def header(number, group, rows=8, token=0, generation=1):
    """The header of a push whose NN worker has pushed nothing else, with the place that the token scheduler gave it."""
    step, slot = divmod(number, group)
    return PushHeader(generation, number, 1, step, rows, slot=slot, group=group, token=token)


def gradient(ids, value):
    return {"t": Gradients(np.array(ids, np.uint64), np.full((len(ids), DIM), value, np.float32))}


def rows(ps, *ids):
    return ps.lookup({"t": np.array(ids, np.uint64)}, False)["t"][:, 0]


@pytest.mark.parametrize("reduction", ["global", "per_id"])
def test_a_step_is_applied_with_its_last_push(ps, reduction):
    server = ps(Bsp(3, reduction))
    before = server.lookup({"t": np.arange(3, dtype=np.uint64)}, True)["t"][:, 0].copy()
    assert server.push(header(1, 3), gradient([1], 3.0)) == {}
    assert server.push(header(2, 3), {}) == {}
    np.testing.assert_array_equal(rows(server, 0, 1, 2), before)
    counts = server.push(header(0, 3), gradient([0, 1], 1.0))
    assert counts["t"].applied == 2
    after = before - np.array([1.0, 4.0, 0.0]) / (3 if reduction == "global" else [1, 2, 1])
    np.testing.assert_allclose(rows(server, 0, 1, 2), after, atol=1e-6)
    assert server.push(header(0, 3), gradient([0, 1], 1.0)) == {}  # A repetition.
    np.testing.assert_allclose(rows(server, 0, 1, 2), after, atol=1e-6)


def test_rows_are_counted_once_by_the_call_that_completes_a_step(ps):
    server = ps(Bsp(2))
    server.lookup({"t": np.arange(5, dtype=np.uint64)}, True)
    assert server.push(header(1, 2), gradient([0, 1], 1.0)) == {}
    counts = server.push(header(3, 2), gradient([2, 3, 9], 1.0))
    assert (counts["t"].applied, counts["t"].absent) == (4, 1)
    assert server.push(header(3, 2), gradient([2, 3, 9], 1.0)) == {}
    assert server.push(header(2, 2), {}) == {}
    assert server.push(header(0, 2), {}) == {}


def test_an_ids_gradient_is_as_old_as_its_row_is_new(ps):
    """Tolerance 1: a row that nobody has changed takes any gradient, one that was just changed no old one."""
    server = ps(Gba(8, tolerance=1))
    before = server.lookup({"t": np.arange(2, dtype=np.uint64)}, True)["t"][:, 0].copy()
    for number in range(4):
        server.push(header(number, 1, token=number), gradient([0], 1.0))
    server.push(header(4, 1, token=0), gradient([0, 1], 1.0))
    np.testing.assert_allclose(rows(server, 0, 1), before - [4.0, 1.0], atol=1e-5)
    counts = server.row_staleness()
    assert (counts.rows, counts.stale) == (6, 1)


@pytest.mark.parametrize(("token", "applied"), [(4, 1), (3, 1), (2, 0)])
def test_a_row_of_every_step_is_as_old_as_dense_parameters(ps, token, applied):
    """Tolerance 1: four updates later a gradient of the version before the last still counts, an older one does not."""
    server = ps(Gba(8, tolerance=1))
    server.lookup({"t": np.arange(1, dtype=np.uint64)}, True)
    for number in range(4):
        server.push(header(number, 1, token=number), gradient([0], 1.0))
    before = rows(server, 0)
    server.push(header(4, 1, token=token), gradient([0], 1.0))
    np.testing.assert_allclose(rows(server, 0), before - applied, atol=1e-5)
    assert Gba(8, tolerance=1).decay(4, token) == applied


def test_a_row_from_after_a_rollback_counts_as_never_touched(ps):
    """NN workers go back to step 3 after rows have reached step 10: their gradients are fresh, not 7 steps old."""
    server = ps(Gba(8, tolerance=1))
    before = server.lookup({"t": np.arange(1, dtype=np.uint64)}, True)["t"][:, 0].copy()
    for number in range(10):
        server.push(header(number, 1, token=number), gradient([0], 1.0))
    server.switch(Gba(8, tolerance=1), 2, 3)
    for number in range(3, 7):
        server.push(header(number, 1, token=number, generation=2), gradient([0], 1.0))
    np.testing.assert_allclose(rows(server, 0), before - 14.0, atol=1e-5)
    assert server.row_staleness().stale == 0
    server.push(header(7, 1, token=4, generation=2), gradient([0], 1.0))  # Changed in step 6 since: too old.
    assert server.row_staleness().stale == 1


def test_gradients_of_loaded_rows_count(ps):
    """Rows of step 500 are put into a run that begins at step 0."""
    server = ps(Gba(8, tolerance=3))
    loaded = {
        "ids": np.array([0], np.uint64),
        "embeddings": np.zeros((1, DIM), np.float32),
        "state": np.zeros((1, 0), np.float32),
        "update_count": np.full(1, 9, np.uint32),
        "last_step": np.full(1, 500, np.uint32),
        "stamp": np.zeros(1, np.uint32),
    }
    server.import_rows(RowChunk("t", 0, loaded))
    assert server.push(header(0, 1, token=0), gradient([0], 1.0))["t"].applied == 1
    np.testing.assert_allclose(rows(server, 0), -1.0)
    counts = server.row_staleness()
    assert (counts.rows, counts.stale, counts.staleness_max) == (1, 0, 0)


def test_a_remainder_is_divided_by_what_has_come(ps):
    server = ps(Bsp(4))
    before = server.lookup({"t": np.arange(1, dtype=np.uint64)}, True)["t"][:, 0].copy()
    server.push(header(0, 4), gradient([0], 1.0))
    server.push(header(1, 4), gradient([0], 2.0))
    with pytest.raises(PersiaError, match="Out of phase"):
        server.drain(1, 0, 3)
    assert server.drain(1, 0, 2)["t"].applied == 1
    assert server.drain(1, 0, 2) == {}
    np.testing.assert_allclose(rows(server, 0), before - 1.5, atol=1e-6)


def test_to_another_mode_and_back(ps):
    server = ps(Bsp(2))
    server.lookup({"t": np.arange(2, dtype=np.uint64)}, True)
    server.push(header(0, 2), gradient([0], 1.0))
    with pytest.raises(PersiaError, match="drain"):
        server.switch(Async(), 1, 1)
    server.drain(1, 0, 1)
    server.switch(Async(), 1, 1)
    assert server.push(header(1, 1), gradient([0], 1.0))["t"].applied == 1
    server.switch(Sync(), 1, 2)


def test_rows_of_a_synchronous_phase_take_any_gradient_once(ps):
    """The switch to Gba begins to keep the step of each row; no gradient from before it is left."""
    server = ps(Hybrid(1, combine=False))
    before = server.lookup({"t": np.arange(1, dtype=np.uint64)}, True)["t"][:, 0].copy()
    for step in range(4):
        server.push(PushHeader(1, 0, step + 1, step, 8), gradient([0], 1.0))
    assert not np.concatenate([chunk.arrays["last_step"] for chunk in server.export_rows()]).any()
    server.switch(Gba(8, tolerance=1), 2, 4)
    server.push(header(4, 1, token=4, generation=2), gradient([0], 1.0))
    assert np.concatenate([chunk.arrays["last_step"] for chunk in server.export_rows()]).tolist() == [4]
    server.push(header(5, 1, token=2, generation=2), gradient([0], 1.0))  # Too old for what was changed in step 4.
    np.testing.assert_allclose(rows(server, 0), before - 5.0, atol=1e-5)
    assert server.row_staleness().stale == 1


def test_what_does_not_fit_is_refused_and_changes_nothing(ps):
    server = ps(Bsp(2))
    with pytest.raises(StoreError, match="no table"):
        server.push(header(0, 2), {"u": gradient([0], 1.0)["t"]})
    with pytest.raises(StoreError, match="Invalid slot 2"):
        server.push(header(0, 2)._replace(slot=2), {})
    with pytest.raises(StalePushError, match="generation 2"):
        server.push(header(0, 2, generation=2), {})
    with pytest.raises(StalePushError, match="generation 0"):
        server.push(header(0, 2, generation=0), {})
    server.push(header(0, 2), {})
    server.push(header(1, 2), {})


@settings(max_examples=examples(80), deadline=None)
@given(st.data())
def test_any_order_of_arrival_is_the_order_of_steps(data):
    random = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    group, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    tolerance = data.draw(st.integers(0, 2))
    reduction = data.draw(st.sampled_from(["per_id", "global"]))
    server = new_ps(Gba(8, tolerance, reduction), Adam(0.1))
    store = ReferenceStore()
    store.create_table(TableConfig("t", DIM, optimizer="adam"))
    store.keep_last_steps(0)
    universe = np.arange(6, dtype=np.uint64)
    server.lookup({"t": universe}, True)
    lookup(store, universe)
    pushes = []
    for number in range(group * steps):
        ids = random.choice(universe, random.integers(0, 7), replace=False)
        values = random.normal(size=(len(ids), DIM)).astype(np.float32)
        token = max(0, number // group - int(random.integers(0, 4)))
        pushes.append((header(number, group, int(random.choice([0, 8, 8, 4])), token), Gradients(ids, values)))
    pushes = [pushes[n] for n in random.permutation(len(pushes))]
    for head, gradients in pushes:
        server.push(head, {"t": gradients})
    for step in range(steps):
        sums = ReferenceAccumulator(reduction)
        last = dict(enumerate(store.last_steps(0, universe).astype(np.int64)))
        for head, gradients in pushes[step * group : (step + 1) * group]:
            newest = max(head.token + tolerance - 1, 0)
            weights = np.array([last[int(i)] <= newest for i in gradients.ids], np.float32)
            sums.add({"t": (gradients, weights)}, head.rows)
        mean = sums.take().get("t", {})
        ids = np.array(list(mean), np.uint64)
        values = np.array(list(mean.values()), np.float32).reshape(len(ids), DIM)
        update(store, ids, values, 0.1, step)
    np.testing.assert_allclose(
        server.lookup({"t": universe}, False)["t"], lookup(store, universe, train=False), atol=2e-4
    )
