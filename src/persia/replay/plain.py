"""Tables in numpy, in any precision: slow but readable, for checks in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import numpy as np

from persia.replay.replay_servers import Numbers, RowGradients
from persia.types import Ids

__all__ = ["PlainOptimizer", "PlainRows", "PlainTable"]

PlainOptimizer: TypeAlias = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
"""The embedding optimizers, by their names in a configuration."""


class PlainTable:
    """A table whose ids are indices.

    Args:
        initial: rows `[n, dim]`, which are copied; their dtype is used for all arithmetic.
        optimizer: SGD; Adagrad, by element or row, with initial value 0; lazy Adam, whose bias correction counts
            updates of the row; or FTRL with beta 1.
        lr: learning rate.
    """

    def __init__(self, initial: Numbers, optimizer: PlainOptimizer, lr: float) -> None:
        self.rows = initial.copy()
        self._optimizer, self._lr = optimizer, lr
        self._first = np.zeros_like(self.rows)
        self._second = np.zeros_like(self.rows)
        self._updates = np.zeros((len(self.rows), 1), np.int64)

    def update(self, ids: Ids, gradients: Numbers) -> None:
        """Updates each row once."""
        index = ids.astype(np.int64)
        if self._optimizer == "sgd":
            change = gradients
        elif self._optimizer == "adagrad":
            self._second[index] += gradients**2
            change = gradients / (np.sqrt(self._second[index]) + 1e-10)
        elif self._optimizer == "rowwise_adagrad":
            self._second[index] += (gradients**2).mean(1, keepdims=True)
            change = gradients / (np.sqrt(self._second[index]) + 1e-10)
        elif self._optimizer == "ftrl":
            before = self._second[index]
            self._second[index] += gradients**2
            root = np.sqrt(self._second[index])
            self._first[index] += gradients - (root - np.sqrt(before)) / self._lr * self.rows[index]
            self.rows[index] = -self._lr * self._first[index] / (1.0 + root)
            return
        else:
            self._updates[index] += 1
            self._first[index] = 0.9 * self._first[index] + 0.1 * gradients
            self._second[index] = 0.999 * self._second[index] + 0.001 * gradients**2
            mean = self._first[index] / (1 - 0.9 ** self._updates[index])
            square = self._second[index] / (1 - 0.999 ** self._updates[index])
            change = mean / (np.sqrt(square) + 1e-8)
        self.rows[index] -= (self._lr * change).astype(self.rows.dtype)


class PlainRows:
    """Tables by name."""

    def __init__(self, tables: Mapping[str, PlainTable]) -> None:
        self.tables = tables

    def lookup(self, ids: Mapping[str, Ids]) -> dict[str, Numbers]:
        """Returns copies of rows `[n, dim]`, by table."""
        return {table: self.tables[table].rows[keys.astype(np.int64)] for table, keys in ids.items()}

    def update(self, gradients: RowGradients, step: int) -> None:
        """Updates each row once."""
        for table, (ids, values) in gradients.items():
            self.tables[table].update(ids, values)
