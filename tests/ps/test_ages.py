"""Rows that leave a table after its time to live, in steps or in the time that training runs."""

import msgspec
import numpy as np
import pytest
import torch

from persia import Days, Schema, Steps, Table, Trainer, TrainerOptions
from persia.errors import ConfigError, StoreError
from persia.modes import Sync
from persia.nn.models import FFNN
from persia.optim import Adagrad
from persia.ps import EmbeddingServer, ServerOptions
from persia.ps.ages import RowAges
from persia.ps.row_chunks import set_rows
from persia.replay import check_replayable
from persia.replay.virtual import VirtualTraining
from persia.schema import IdFeature
from persia.services import StatePiece
from persia.store import NativeStore, TableConfig
from persia.types import Gradients, Packed, PushHeader, RowsSet
from support.stores import STORES, lookup, update
from support.twins.store import ReferenceStore

U = np.uint64


def ids(*values):
    return np.array(values, U)


def server_of(ttl, store=NativeStore):
    return EmbeddingServer({"t": Table("t", 4, ttl=ttl)}, Adagrad(0.1), Sync(), 1, 1, ServerOptions(store=store))


def train(server, step, *met):
    """One global step whose batch has these ids."""
    server.lookup({"t": ids(*met)}, True)
    gradients = {"t": Gradients(ids(*met), np.ones((len(met), 4), np.float32))}
    return server.push(PushHeader(1, 0, step + 1, step, len(met)), gradients)["t"]


def present(server, *asked):
    return server.contains(Packed.of({"t": ids(*asked)}, U))["t"].tolist()


@pytest.mark.parametrize("store", [NativeStore, ReferenceStore])
def test_rows_leave_after_steps(store):
    server = server_of(Steps(32), store)
    train(server, 0, 1, 2)
    trained = server.read_rows("t", ids(1, 2), False).values
    for step in range(1, 33):
        train(server, step, 2)
        assert present(server, 1, 2) == [True, True]
    for step in range(33, 38):
        train(server, step, 2)
    assert present(server, 1, 2) == [False, True]
    train(server, 38, 1)
    assert present(server, 1, 2) == [True, True]
    np.testing.assert_array_equal(server.read_rows("t", ids(1), False).values, trained[:1])  # a new row, one step
    assert server.statistics()["t"]["evicted"] == 0  # Nobody has to raise the capacity.


def test_an_evaluation_is_no_meeting():
    server = server_of(Steps(8))
    train(server, 0, 1)
    for step in range(1, 12):
        server.lookup({"t": ids(1)}, False)
        train(server, step, 2)
    assert present(server, 1) == [False]
    assert not server.lookup({"t": ids(1)}, False)["t"].any()


class Told:
    """What a store is told of the time."""

    def __init__(self):
        self.calls = []

    def advance_clock(self, table, by):
        self.calls.append((table, by))


def test_time_without_training_does_not_count():
    told, now = Told(), [1000.0]
    ages = RowAges(told, {3: Days(1)}, lambda: now[0])
    for seconds in (5, 1800, 40 * 86_400, 1800, 2000):
        ages.updated(1)
        now[0] += seconds
    ages.updated(1)
    assert sum(by for _, by in told.calls) == 5 + 1800 + 3600 + 1800 + 2000
    assert {table for table, _ in told.calls} == {3}


def test_seconds_add_up_however_short_the_steps_are():
    told, now = Told(), [0.0]
    ages = RowAges(told, {0: Days(1)}, lambda: now[0])
    for _ in range(10 * 86_400 // 50):
        ages.updated(1)
        now[0] += 0.25
    assert sum(by for _, by in told.calls) == 4319


def test_each_step_counts_once():
    told = Told()
    ages = RowAges(told, {0: Steps(64)})
    for step in (500, 501, 499, 503, 501, 503, 504):  # Some come late.
        ages.updated(step)
    assert sum(by for _, by in told.calls) == 5
    ages.renumber()
    for step in (0, 1, 1, 2):  # Another run begins.
        ages.updated(step)
    assert sum(by for _, by in told.calls) == 8


@pytest.mark.parametrize("ttl", [Steps(640), Days(640 / 86_400)])
def test_short_processes_add_up(ttl):
    """A job that trains for a while every day, each time from a checkpoint."""
    clock = [0.0]
    pieces, chunks, step = [], [], 0
    for day in range(100):
        server = server_of(ttl)
        for chunk in chunks:
            server.import_rows(chunk)
        server.import_state(pieces)
        server._ages._clock = lambda: clock[0]
        for _ in range(9):  # An age is of 10.
            train(server, step, *([1, 2] if step == 0 else [2]))
            step, clock[0] = step + 1, clock[0] + 1.01
        pieces = [StatePiece(*piece) for part in server.export_state() for piece in part]
        chunks = list(server.export_rows())
        if day == 60:
            assert present(server, 1, 2) == [True, True]
    assert present(server, 1, 2) == [False, True]


def test_a_step_that_restarts_counts():
    server = server_of(Steps(64))
    for step in range(1000):
        train(server, step, 1)
    server.switch(Sync(), 2, 0)
    for step in range(80):
        server.lookup({"t": ids(2)}, True)
        gradients = {"t": Gradients(ids(2), np.ones((1, 4), np.float32))}
        server.push(PushHeader(2, 0, step + 1, step, 1), gradients)
    assert present(server, 1, 2) == [False, True]


def test_tables_without_a_time_to_live_are_not_asked():
    told = Told()
    RowAges(told, {}).updated(1)
    assert not told.calls


@pytest.mark.parametrize("ttl", [30, "30 days", True, 1.5])
def test_a_time_to_live_needs_a_unit(ttl):
    with pytest.raises(ConfigError, match=r"Days\(\.\.\.\), Steps\(\.\.\.\) or None"):
        Table("t", 4, ttl=ttl)


@pytest.mark.parametrize("make", [lambda: Days(0), lambda: Days(float("nan")), lambda: Steps(0), lambda: Steps(1.5)])
def test_times_to_live_are_positive(make):
    with pytest.raises(ConfigError, match=r"Days|Steps"):
        make()


def test_a_restored_server_continues():
    """With rows and state of a checkpoint; a table that gets its time to live later has no state of it."""
    server = server_of(Steps(16))
    for step in range(6):
        train(server, step, 1, 2)
    for step in range(6, 20):
        train(server, step, 2)
    states = [StatePiece(*piece) for pieces in server.export_state() for piece in pieces]
    assert {piece.array for piece in states} > {"ages"}
    assert not any(p.array == "ages" for pieces in server_of(None).export_state() for p in pieces)
    for ttl, pieces, leaves in (
        (Steps(16), states, True),
        (None, states, False),
        (Steps(16), [piece for piece in states if piece.array != "ages"], False),
    ):
        other = server_of(ttl)
        for chunk in server.export_rows():
            other.import_rows(chunk)
        other.import_state(pieces)
        for step in range(20, 24):
            train(other, step, 2)
        assert present(other, 1, 2) == [not leaves, True]


@pytest.mark.parametrize("name", STORES)
def test_imported_rows_have_not_left(name):
    """As when an older checkpoint is loaded into a cluster that has trained for long."""
    store, old = STORES[name](), STORES[name]()
    config = TableConfig("t", 4, shards=1, ttl=4)
    for each in (store, old):
        each.create_table(config)
    lookup(old, ids(7, 8))
    for n in range(20):
        lookup(store, ids(n + 100))
        store.advance_clock(0, 1)
    for _, rows in old.iterate_rows(0):
        store.import_rows(0, rows)
    for _ in range(4):
        assert store.contains(0, ids(7, 8)).all()
        lookup(store, ids(100))
        store.advance_clock(0, 1)
    for _ in range(3):
        store.advance_clock(0, 1)
    assert not store.contains(0, ids(7, 8)).any()


@pytest.mark.parametrize("name", STORES)
def test_another_unit_restarts_the_time(name):
    store = STORES[name]()
    store.create_table(TableConfig("t", 4, shards=1, ttl=10**6))
    for n in range(100):
        lookup(store, ids(n))
        store.advance_clock(0, 1000)
    other = STORES[name]()
    other.create_table(TableConfig("t", 4, shards=1, ttl=100, ttl_unit="seconds"))
    for _, rows in store.iterate_rows(0):
        other.import_rows(0, rows)
    other.import_state(0, 0, store.export_state(0, 0))
    other.advance_clock(0, 0)
    other.advance_clock(0, 99)
    assert other.contains(0, np.arange(100, dtype=U)).all()
    other.advance_clock(0, 10)
    assert not other.contains(0, np.arange(100, dtype=U)).any()


def test_memory_stops_growing_where_popular_rows_lie_together():
    """Rows that stay use up the looks of those that are inserted beside them."""
    hot, new, ttl, steps = 200, 4, 40, 2500
    store = NativeStore()
    store.create_table(TableConfig("t", 1, shards=1, ttl=ttl))
    sizes = []
    for step in range(steps):
        fresh = 10**6 + np.arange(step * new, (step + 1) * new)
        lookup(store, np.append(np.arange(hot), fresh).astype(U))
        store.advance_clock(0, 1)
        sizes.append(store.size(0))
    alive = hot + new * ttl
    assert sizes[-1] < 2.5 * alive
    assert sizes[-1] == sizes[steps // 2]


def test_rows_that_have_left_are_not_called_evicted():
    store = left()
    for n in range(50):
        lookup(store, ids(2, 100 + n))
        store.advance_clock(0, 1)
    assert store.size(0) < 20
    assert store.statistics(0)["evicted"] == 0
    assert set_rows(store, 0, ids(300, 301), np.ones((2, 4), np.float32), None) == RowsSet(2, 0, 0)


@pytest.mark.parametrize("name", STORES)
@pytest.mark.parametrize(
    ("at", "value"), [(2, 2**32 - 1), (2, 2**40), (0, 0), (4, 10**9), (5, 2**32 - 1), (3, 2**33)], ids=str
)
def test_ages_that_contradict_the_clock_are_refused(name, at, value):
    """Else each new row would have left at once."""
    store = STORES[name]()
    store.create_table(TableConfig("t", 4, shards=1, ttl=4))
    for _ in range(3):
        lookup(store, ids(1))
        store.advance_clock(0, 1)
    state = store.export_state(0, 0)
    state["ages"][at] = value
    with pytest.raises(StoreError, match="ages"):
        store.import_state(0, 0, state)
    assert store.contains(0, ids(1)).all()
    state = store.export_state(0, 0)
    state["ages"][1] = 2**64 - 1
    store.import_state(0, 0, state)


def test_days_cannot_be_replayed(tmp_path):
    schema = Schema([IdFeature("ad", dim=4, table="t")], tables=[Table("t", 4, ttl=Days(30))])
    with pytest.raises(ConfigError, match="Steps"):
        check_replayable(schema)
    check_replayable(Schema([IdFeature("ad", dim=4, table="t")], tables=[Table("t", 4, ttl=Steps(30))]))
    model = torch.nn.Linear(4, 1)
    with pytest.raises(ConfigError, match="Steps"):
        VirtualTraining(model, schema, lambda n: None, torch.optim.Adam, Adagrad(0.1))
    options = TrainerOptions(record_dir=str(tmp_path), progress=False)
    with pytest.raises(ConfigError, match="Steps"):
        Trainer(FFNN(schema), schema, optimizer=torch.optim.Adam, embedding_optimizer=Adagrad(0.1), options=options)


def test_regions_keep_ages(tmp_path):
    path = str(tmp_path / "t")
    store = NativeStore()
    store.create_table(TableConfig("t", 4, shards=1, ttl=16), files=path)
    store.advance_clock(0, 0)
    lookup(store, ids(1))
    store.advance_clock(0, 1)
    lookup(store, ids(2))
    store.advance_clock(0, 14)
    del store
    store = NativeStore()
    store.create_table(TableConfig("t", 4, shards=1, ttl=16), files=path, attach=True)
    assert store.contains(0, ids(1, 2)).all()
    store.advance_clock(0, 2)
    assert store.contains(0, ids(1, 2)).tolist() == [False, True]
    del store
    store = NativeStore()  # What has left does not come back, whatever the time to live is then.
    store.create_table(TableConfig("t", 4, shards=1), files=path, attach=True)
    assert store.contains(0, ids(1, 2)).tolist() == [False, True]


def test_damaged_ages_of_a_region_are_forgotten(tmp_path):
    """A threshold above the clock would make each new row leave at once."""
    path, config = str(tmp_path / "t"), TableConfig("t", 4, shards=1, ttl=4)
    store = NativeStore()
    store.create_table(config, files=path)
    lookup(store, ids(1))
    store.advance_clock(0, 1)
    del store
    with open(path + ".0", "r+b") as region:
        region.seek(9720 + 16)  # TtlState::expired_before
        region.write(np.uint32(2**32 - 1).tobytes())
    store = NativeStore()
    store.create_table(config, files=path, attach=True)
    lookup(store, ids(2))
    assert store.contains(0, ids(1, 2)).all()


def left():
    """A store that row 1 has left, and row 2 has not."""
    store = NativeStore()
    store.create_table(TableConfig("t", 4, shards=1, ttl=4))
    store.keep_last_steps(0)
    store.advance_clock(0, 0)
    for n in range(6):
        met = ids(1, 2) if n == 0 else ids(2)
        lookup(store, met)
        update(store, met, np.ones((len(met), 4)), step=n + 1)
        store.advance_clock(0, 1)
    assert store.contains(0, ids(1, 2)).tolist() == [False, True]
    return store


def test_a_row_that_has_left_has_no_last_step():
    """Asynchronous modes take gradients for a new row, however old."""
    assert left().last_steps(0, ids(1, 2)).tolist() == [0, 6]


def test_a_table_that_was_cleared_begins_anew():
    store = left()
    store.clear(0)
    lookup(store, ids(1, 2, 3))
    assert store.contains(0, ids(1, 2, 3)).all()


def test_rows_stay_when_recency_is_numbered_anew():
    store = left()
    state = store.export_state(0, 0)
    state["clocks"][0] = 2**32 - 2
    store.import_state(0, 0, state)
    for _ in range(3):
        lookup(store, ids(2))
    assert store.contains(0, ids(1, 2)).tolist() == [False, True]
    for _ in range(8):
        store.advance_clock(0, 1)
    assert not store.contains(0, ids(2)).any()


def test_a_time_to_live_in_a_file():
    schema = Schema([IdFeature("ad", dim=4, table="t")], tables=[Table("t", 4, ttl=Days(30))])
    assert msgspec.json.decode(msgspec.json.encode(schema), type=Schema).tables == list(schema.tables)
    toml = """
id_features = [{name = "ad", dim = 4, table = "t"}]
tables = [{name = "t", dim = 4, ttl = {kind = "steps", steps = 1000}}]
"""
    assert msgspec.toml.decode(toml, type=Schema).tables[0].ttl == Steps(1000)
