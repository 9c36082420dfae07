"""How far lookups may run ahead where training must have the results of lookups that wait, as in `Sync`.

Finding a row early is safe as long as no lookup ahead changes what an earlier batch finds, or what its gradients meet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from persia.modes import Dense, Mode
from persia.nn.options import CollectionOptions
from persia.schema import AdmitAll, Schema, Table

__all__ = ["Refresh", "crowded", "refreshes"]

MARGIN = 4
"""Multiple of the rows of the batches ahead that a table has to hold: its shards do not fill evenly."""


class Refresh(NamedTuple):
    """How the rows of a pass are refreshed.

    Attributes:
        tables: tables of the schema, by name.
        lookahead: `Mode.lookahead`.
        accumulation: batches of a step.
        exact: whether rows have all updates when they are used.
        leaves_out: whether lookups leave out rows that batches in flight have: not where all rows are in memory of this
            process, so that nothing is sent.
    """

    tables: Mapping[str, Table]
    lookahead: int
    accumulation: int
    exact: bool
    leaves_out: bool


def refreshes(mode: Mode, schema: Schema, near: bool, options: CollectionOptions) -> Refresh | None:
    """Returns how the rows of a pass are refreshed; None if they are not.

    `Sync`, whose rows have all updates, looks ahead only where that leaves each row as it would be otherwise. That is
    not so with an admission policy, as a batch ahead might admit an id for which the gradient of an earlier one is
    skipped; nor where rows expire, as time would pass between lookup and use; nor where a row's first update, which
    comes later then, changes which rows a full table evicts.

    Args:
        mode: of the training.
        schema: of the batches.
        near: whether all rows are in memory of this process, where such modes have nothing to hide, unless the training
            thread looks rows up while a device computes.
        options: of the collection.
    """
    tables = schema.resolved_tables()
    plain = all(
        isinstance(table.admission, AdmitAll) and table.ttl is None and table.eviction == "lru"
        for table in tables.values()
    )
    asynchronous = mode.dense() is Dense.SERVER
    exact = mode.initial_depth() == 0 and not asynchronous
    hidden = not near or bool(options.one_thread)
    if not mode.refresh or (exact and not plain) or (exact and not hidden) or (near and asynchronous):
        return None
    return Refresh(tables, mode.lookahead, options.accumulation_steps, exact, not near)


def crowded(rows: Mapping[str, int], tables: Mapping[str, Table], batches: int) -> bool:
    """Returns whether lookups of batches ahead might evict rows of batches that are not trained yet.

    Args:
        rows: distinct rows of a batch, by table; other names are of values, which take no space in a table.
        tables: by name.
        batches: number of batches that may be looked up and not trained, of all NN workers.
    """
    for name, count in rows.items():
        table = tables.get(name)
        if table is None:
            continue
        held = table.memory_rows if table.memory_rows is not None else table.capacity
        if held is not None and count * batches * MARGIN > held:
            return True
    return False
