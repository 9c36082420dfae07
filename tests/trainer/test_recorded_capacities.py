"""Capacities in checkpoints are of all PSs together."""

import numpy as np
import pytest
import torch

import persia
from persia.modes import Sync
from persia.optim import Adagrad
from persia.trainer.loading import load_partitions
from support.several_ps import Several

ROWS = 7_000


def schema_of(capacity):
    return persia.Schema(
        [persia.IdFeature("item", dim=2), persia.IdFeature("user", dim=2)],
        tables=[persia.Table("item", 2, capacity=capacity), persia.Table("user", 2)],
    )


def model(schema):
    torch.manual_seed(0)
    return persia.nn.models.FFNN(schema, hidden=(4,))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def trainer(servers, capacity):
    schema = schema_of(capacity)
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=Several(servers),
        options=persia.TrainerOptions(progress=False),
    )


def rows(t):
    return t.embeddings.statistics()["item"]["rows"]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two PSs with 7,000 rows and a capacity of 8,000."""
    t = trainer(2, 8_000)
    t.embeddings.set_rows("item", np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, 2), np.float32))
    t.save(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_resumed_run_has_the_total_capacity_of_the_checkpoint(saved, servers):
    t = persia.Trainer.resume(str(saved), model(schema_of(None)), optimizer=adam, cluster=Several(servers))
    assert t.schema.resolved_tables()["item"].capacity == 8_000
    assert rows(t) == ROWS
    more = np.arange(20_000, dtype=np.uint64)
    t.embeddings.set_rows("item", more, np.zeros((len(more), 2), np.float32))
    assert rows(t) == 8_000


def test_rows_that_a_smaller_capacity_evicts_are_warned_of(saved, caplog):
    t = trainer(2, 4_000)
    t.load(str(saved))
    assert rows(t) == 4_000
    assert "Table 'item': 3000 of 7000 rows do not fit its capacity, 4000 in 2 PSs" in caplog.text
    caplog.clear()
    trainer(2, 8_000).load(str(saved))
    assert "do not fit" not in caplog.text


def test_evictions_are_not_counted_as_rows_of_the_checkpoint(saved, caplog):
    t = trainer(1, 8_000)
    t.embeddings.set_rows("item", np.arange(10_000, 18_000, dtype=np.uint64), np.ones((8_000, 2), np.float32))
    t.load_rows(str(saved), ["item"])
    assert "Table 'item': 7000 rows, old or loaded, exceeded its capacity, 8000 in 1 PSs" in caplog.text


def test_only_evictions_of_the_ps_that_are_loaded_are_counted(saved, caplog, monkeypatch):
    """PS 1 keeps its rows, and evicts some at the same time."""
    t = trainer(2, 8_000)
    servers = t.embeddings.connection.servers
    counts = servers[1].statistics()
    calls = iter(range(1000))

    def busy():
        return {name: {**mine, "evicted": next(calls)} for name, mine in counts.items()}

    monkeypatch.setattr(servers[1], "statistics", busy)
    load_partitions(servers, t.declared.schema, str(saved), [0])
    assert "capacity" not in caplog.text
    assert servers[0].statistics()["item"]["rows"] > 3_000


@pytest.mark.parametrize("way", ["load, as saved", "load, other PSs", "load_rows", "load_partitions"])
def test_each_ps_ends_its_import_after_the_last_row(saved, monkeypatch, way):
    """Else the first new ids of a full table wait for a scan of it."""
    t = trainer(3 if way == "load, other PSs" else 2, 8_000)
    servers = t.embeddings.connection.servers
    calls = []

    def note(number, name):
        original = getattr(servers[number], name)

        def noted(*arguments):
            calls.append((number, name))
            return original(*arguments)

        monkeypatch.setattr(servers[number], name, noted)

    for number in range(len(servers)):
        for name in ("import_rows", "import_state", "end_import"):
            note(number, name)
    if way == "load_partitions":
        load_partitions(servers, t.declared.schema, str(saved), [1])
    elif way == "load_rows":
        t.load_rows(str(saved), ["item"])
    else:
        t.load(str(saved))
    imported = {number for number, name in calls if name == "import_rows"}
    assert imported == ({1} if way == "load_partitions" else set(range(len(servers))))
    assert {number for number, name in calls if name == "end_import"} == imported
    for number in imported:
        names = [name for other, name in calls if other == number]
        assert names.index("end_import") == len(names) - 1
        assert ("import_state" in names) == (way in ("load, as saved", "load_partitions"))
