"""Warns if an evaluation pass has found rows for hardly any id of a feature."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from persia.batching.id_column import IdColumn
from persia.nn.row_access import RowAccess
from persia.schema import Schema
from persia.telemetry.logs import get_logger
from persia.types import Ids

__all__ = ["IdSample", "warn_of_unknown_ids"]

HARDLY_ANY = 0.01
"""Share of a feature's sampled ids that have a row, below which a warning is logged. Users and items that are new since
training are common, so a small share is no error. With ids of another mapping, only accidental matches are found."""

FEWEST_IDS = 100
"""Smallest sample that can show a share of 1 %."""

IDS_PER_BATCH = 128
MOST_BATCHES = 8
"""Maximum numbers: together they bound the cost of a sample, whatever the size of the data."""

REMEDY = (
    "Ids without a row read as zeros. Likely the values are written differently than in training (such as 7 there and "
    "'007' here), another IdFeature.kind maps them to other ids, or the data or the checkpoint belong to another "
    "model. Read the column as in training, and check what is stored with `EmbeddingCollection.rows`. If all ids are "
    "new, such as users that training has not seen, this is expected."
)

log = get_logger("persia.nn")


class IdSample:
    """Up to 1,024 ids of each feature, spread evenly over the batches of a pass: an id counts as often as it occurs."""

    def __init__(self) -> None:
        self._batches: list[dict[str, Ids]] = []
        self._every = 1
        self._number = 0

    def add(self, id_features: Mapping[str, IdColumn]) -> None:
        """Samples ids of every k-th batch; k doubles whenever there are too many."""
        if self._number % self._every == 0:
            self._batches.append({name: _spread(column.values).copy() for name, column in id_features.items()})
            if len(self._batches) == MOST_BATCHES:
                self._batches = self._batches[::2]
                self._every *= 2
        self._number += 1

    def ids(self) -> dict[str, Ids]:
        """Returns the sample by feature, for features that have enough ids."""
        names = self._batches[0] if self._batches else {}
        ids_by_feature = {name: np.concatenate([batch[name] for batch in self._batches]) for name in names}
        return {name: ids for name, ids in ids_by_feature.items() if len(ids) >= FEWEST_IDS}


def warn_of_unknown_ids(sample: IdSample, rows: RowAccess, schema: Schema) -> None:
    """Logs a warning that names the features of which hardly any sampled id has a row, though their table has rows.

    Makes one call to each PS, or two if there is something to warn of.
    """
    ids = sample.ids()
    if not ids:
        return
    table_of = {name: schema.feature(name).table_name for name in ids}
    tables = {table: [name for name in ids if table_of[name] == table] for table in table_of.values()}
    has_row = rows.contains({table: np.concatenate([ids[name] for name in names]) for table, names in tables.items()})
    shares: dict[str, float] = {}
    for table, names in tables.items():
        end = 0
        for name in names:
            start, end = end, end + len(ids[name])
            shares[name] = np.count_nonzero(has_row[table][start:end]) / len(ids[name])
    unknown = [name for name, share in shares.items() if share < HARDLY_ANY]
    if not unknown:
        return
    counters = rows.statistics()
    lines = [
        f"{name!r} ({100 * shares[name]:.1f} % of {len(ids[name])} sampled ids; table {table_of[name]!r} has {stored} "
        "rows)"
        for name in unknown
        if (stored := counters[table_of[name]]["rows"])
    ]
    if lines:
        log.warning("Hardly any id of these ID-type features has a row: %s. %s", ", ".join(lines), REMEDY)


def _spread(ids: Ids) -> Ids:
    """Returns at most `IDS_PER_BATCH` of the ids, evenly spaced."""
    return ids[:: max(1, -(-len(ids) // IDS_PER_BATCH))]
