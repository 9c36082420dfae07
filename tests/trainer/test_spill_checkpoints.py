"""Checkpoints of tables with rows on disk: they are those of tables in memory."""

from __future__ import annotations

import functools

import pytest
import torch
from test_checkpointing import ids_and_values
from test_resume import adam, model, reader

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.modes import Hybrid, Sync
from persia.optim import Adagrad
from support.several_ps import Several


def schema_of(spill=None, memory_rows=None, ttl=None):
    base = reader().schema
    settings = {} if spill is None else {"spill": str(spill), "memory_rows": memory_rows}
    tables = [persia.Table(name, 16, capacity=10_000, ttl=ttl, **settings) for name in base.resolved_tables()]
    return persia.Schema(base.id_features, base.dense_features, base.labels, tables)


def trainer(schema, ps, mode=None, **options):
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode or Sync(),
        cluster=Several(ps),
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


def on_disk(t):
    return sum(counts.get("disk_rows", 0) for counts in t.embeddings.statistics().values())


@functools.cache
def in_memory():
    """A run that was never stopped."""
    whole = trainer(schema_of(), 1)
    torch.manual_seed(1)
    whole.fit(reader(), epochs=2)
    return whole


@pytest.mark.parametrize(("before", "after"), [((1, 60), (3, 30)), ((2, 40), (1, None)), ((1, None), (2, 50))])
def test_another_number_of_servers_and_of_rows_in_memory(tmp_path, before, after):
    """(PSs, rows of memory; None: all). Training is what it would be in memory, before and after a resume."""

    def made(ps, memory_rows, name):
        return trainer(schema_of(tmp_path / name if memory_rows else None, memory_rows), ps)

    whole, first = in_memory(), made(*before, "first")
    torch.manual_seed(1)
    first.fit(reader(), epochs=2, max_steps=25)
    first.save(str(tmp_path / "saved"))
    second = made(*after, "second")
    second.load(str(tmp_path / "saved"))
    assert (on_disk(first) > 0, on_disk(second) > 0) == (before[1] is not None, after[1] is not None)
    second.fit(reader(), epochs=2)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    one, two = tmp_path / "one", tmp_path / "two"
    whole.save(str(one))
    second.save(str(two))
    for table in reader().schema.resolved_tables():
        assert ids_and_values(one, table) == ids_and_values(two, table)


def test_increments_add_up(tmp_path):
    options = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every_steps": 2, "checkpoint_increments": 3}
    t = trainer(schema_of(tmp_path / "ssd", 50), 2, Hybrid(2, warmup=0), **options, keep_last=99)
    for _ in range(6):  # Each call ends with its checkpoint written, so none is left out.
        t.fit(reader(), max_steps=2)
    assert on_disk(t) > 0
    kinds = [CheckpointReader(tmp_path / "saved", e.step).manifest.base for e in list_checkpoints(tmp_path / "saved")]
    assert [base.step if base else None for base in kinds] == [None, 2, 4, 6, None, 10]
    t.save(str(tmp_path / "whole"))
    for table in reader().schema.resolved_tables():
        expected = ids_and_values(tmp_path / "whole", table)
        assert ids_and_values(tmp_path / "saved", table) == expected
        assert len(expected) > 100


def test_rows_that_have_left_are_in_no_checkpoint(tmp_path):
    found = []
    for name, spill in (("plain", None), ("disk", tmp_path / "ssd")):
        t = trainer(schema_of(spill, 50, ttl=persia.Steps(4)), 1)
        t.fit(reader(), max_steps=18)
        t.save(str(tmp_path / name))
        found.append({table: ids_and_values(tmp_path / name, table) for table in reader().schema.resolved_tables()})
    assert found[0] == found[1]
    assert all(0 < len(rows) < 400 for rows in found[0].values())
