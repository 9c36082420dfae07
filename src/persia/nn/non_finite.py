"""Which tables and features have gradients that are not finite, which may be so although the logits are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from persia.nn.prepared import PreparedBatch
from persia.schema import Schema
from persia.schema.pooled_features import values_name
from persia.telemetry.logs import get_logger
from persia.telemetry.run_record import NonFiniteRows
from persia.types import BoolArray, Contribution, Floats, UpdateCounts

__all__ = ["NonFiniteLog", "extreme_inputs", "merged", "named"]

LOG = get_logger("persia.nn")

Pushed = Sequence[tuple[PreparedBatch, Contribution]]
"""The batches of a push, with their gradients."""


LARGEST_SQUARED = float(np.sqrt(np.finfo(np.float32).max))
"""Largest number whose square is a float32."""


class NonFiniteLog:
    """Collects the rows that PSs leave as they are, by table, and finds the features to blame. Thread-safe.

    It looks at gradients only once a PS has refused some, so it costs nothing before.

    Args:
        schema: the features and their tables.
        usual: whether such gradients are expected now and then, as in fp16 while the loss scale is found.
    """

    def __init__(self, schema: Schema, *, usual: bool = False) -> None:
        self._schema = schema
        self._features: dict[str, list[str]] = {}
        self._values = {feature.name: values_name(feature) for feature in schema.id_features}
        for feature in schema.id_features:
            self._features.setdefault(feature.table_name, []).append(feature.name)
        self._level = logging.INFO if usual else logging.WARNING
        self._lock = threading.Lock()
        self._found: dict[str, NonFiniteRows] = {}

    def clear(self) -> None:
        """Forgets what was found, at the beginning of a call of `fit`."""
        with self._lock:
            self._found = {}

    def found(self) -> list[NonFiniteRows]:
        """Returns what was found, by table."""
        return list(self._found.values())

    def add(self, counts: Mapping[str, UpdateCounts], step: int, pushed: Pushed) -> None:
        """Notes the outcome of a push; logs a table once.

        Args:
            counts: by table.
            step: number of the global step, from 1.
            pushed: what was pushed; where PSs combine the pushes of several NN workers, only the own part.
        """
        refused = {table: count.non_finite for table, count in counts.items() if count.non_finite}
        for table, rows in refused.items():
            one = NonFiniteRows(table, self._blamed(table, pushed), rows, step)
            with self._lock:
                known = self._found.get(table)
                self._found[table] = one if known is None else _sum(known, one)
            if known is None:
                LOG.log(
                    self._level,
                    "Global step %d: %d rows of table %r stay as they are, as their gradient, or a value after it, is "
                    "not finite (%s). Look at how the model uses %s, or lower the table's "
                    'learning rate. TrainerOptions(nonfinite="raise") ends training.%s',
                    step, rows, table, _features(one), "it" if len(one.features) == 1 else "them",
                    "".join(sorted({f" {text}" for batch, _ in pushed if (text := _of_batch(self._schema, batch))})),
                )  # fmt: skip

    def _blamed(self, table: str, pushed: Pushed) -> list[str]:
        """Returns the features whose gradients are not finite; all of the table if that is not known here."""
        features = self._features.get(table, [])
        if len(features) < 2:
            return features
        alone: set[str] = set()
        shared: set[str] = set()
        for batch, contribution in pushed:
            # Of features that an embedding worker has pooled, each has its own gradients.
            pooled = [name for name in features if self._values[name] in contribution.gradients]
            alone |= {name for name in pooled if _bad(contribution, self._values[name]).any()}
            if table not in contribution.gradients:
                continue
            bad = _of_all_rows(contribution, table, _bad(contribution, table))
            uses = np.stack([_used(batch, feature, bad) for feature in features])
            shared |= {name for name, rows in zip(features, uses, strict=True) if rows.any()}
            uses[:, uses.sum(axis=0) > 1] = False  # A row of several features does not tell which one.
            alone |= {name for name, rows in zip(features, uses, strict=True) if rows.any()}
        return [name for name in features if name in (alone or shared or features)]


def extreme_inputs(schema: Schema, dense: torch.Tensor, labels: Floats, weights: Floats | None) -> str:
    """Returns a sentence that names the labels, dense features and weights of a batch whose squares overflow float32.

    They are finite, but losses and gradients of them may not be. Empty if there are none.

    Args:
        schema: of the batch.
        dense: `[batch, Schema.dense_width]`.
        labels: `[batch, labels]`.
        weights: `[batch]`; None weighs each row 1.
    """
    columns = [(f"label {name!r}", values) for name, values in zip(schema.label_names, labels.T, strict=False)]
    inputs = dense.detach().cpu().numpy()
    columns += [(f"dense feature {name!r}", values) for name, values in zip(schema.dense_values, inputs.T, strict=True)]
    columns += [(f"weight {schema.sample_weight!r}", weights)] if weights is not None else []
    causes = []
    for name, values in columns:
        extreme = np.abs(values) > LARGEST_SQUARED
        if extreme.any():
            row = int(extreme.argmax())
            causes.append(f"{name} is {values[row]:.4g} at row {row}")
    return f"In this batch {'; '.join(causes)}: too large to square in float32. Scale or clip it." if causes else ""


def _of_batch(schema: Schema, batch: PreparedBatch) -> str:
    weights = None if batch.weights is None else batch.weights.cpu().numpy()
    return extreme_inputs(schema, batch.dense, batch.labels.cpu().numpy(), weights)


def _bad(contribution: Contribution, name: str) -> BoolArray:
    """Returns which rows of a gradient are not finite, bool `[n]`."""
    bad: BoolArray = np.logical_not(np.isfinite(contribution.gradients[name]).all(axis=1))
    if contribution.scales is not None:
        bad |= ~np.isfinite(contribution.scales[name])
    return bad


def _of_all_rows(contribution: Contribution, table: str, bad: BoolArray) -> BoolArray:
    """Returns flags of all rows of a batch, of which some may have no gradient in a contribution."""
    if contribution.part is None:
        return bad
    included = contribution.part[table]
    flags: BoolArray = np.zeros_like(included)
    flags[included] = bad
    return flags


def _used(batch: PreparedBatch, feature: str, bad: BoolArray) -> BoolArray:
    """Returns which of the bad rows of its table a feature of a batch uses."""
    used = np.zeros_like(bad)
    used[batch.inverse[feature]] = True
    return np.logical_and(used, bad)


def _sum(a: NonFiniteRows, b: NonFiniteRows) -> NonFiniteRows:
    features = a.features + [name for name in b.features if name not in a.features]
    return NonFiniteRows(a.table, features, a.rows + b.rows, min(a.step, b.step))


def merged(parts: Sequence[Sequence[NonFiniteRows]]) -> list[NonFiniteRows]:
    """Returns what several NN workers have found, by table."""
    by_table: dict[str, NonFiniteRows] = {}
    for each in (each for part in parts for each in part):
        by_table[each.table] = _sum(by_table[each.table], each) if each.table in by_table else each
    return [by_table[table] for table in sorted(by_table)]


def _features(rows: NonFiniteRows) -> str:
    return f"feature{'s' if len(rows.features) > 1 else ''} {', '.join(map(repr, rows.features))}"


def named(rows: Sequence[NonFiniteRows]) -> str:
    """Returns "37 rows of table 'item' (feature 'history') from step 12 on", and so on."""
    return "; ".join(
        f"{each.rows:,} rows of table {each.table!r} ({_features(each)}) from step {each.step} on" for each in rows
    )
