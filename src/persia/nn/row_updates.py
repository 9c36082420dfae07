"""The update rules of embedding optimizers as operations of torch, on rows with their optimizer state.

The store of a parameter server has the same rules in its core (`cpp/src/optim.cpp`). Each operation here rounds once,
in the order of the core, so that on tensors of a CPU all numbers are those of the core
(`tests/nn/test_row_updates.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from persia.schema import SGD, Adagrad, Adam, EmbeddingOptimizer, Ftrl, RowwiseAdagrad

__all__ = ["MOST_UPDATES", "RowUpdates", "UpdatedRows"]

LANES = 16
"""Partial sums of the core's sums over a row."""

CORRECTIONS = 1 << 15
"""Numbers of updates whose bias corrections of Adam are computed once."""

MOST_UPDATES = (1 << 32) - 1
"""The largest update count of a row."""


class UpdatedRows(NamedTuple):
    """The result of an update. Rows that were not updated have their earlier values.

    Attributes:
        values: embeddings, float32 `[n, dim]`.
        state: optimizer state, float32 `[n, width]`.
        counts: number of updates of each row, int64 `[n]`.
        applied: whether each row was updated, bool `[n]`: its gradient and all new values are finite.
    """

    values: Tensor
    state: Tensor
    counts: Tensor
    applied: Tensor


class _Rows(NamedTuple):
    """Inputs of a rule: gradients, values and state of rows; the learning rate, float32 `[1]`; new update counts."""

    gradients: Tensor
    values: Tensor
    state: Tensor
    rate: Tensor
    counts: Tensor


class RowUpdates:
    """Updates rows on any device as the store of a parameter server does. For one thread.

    Duchi et al. 2011 (Adagrad), Kingma and Ba 2015 (Adam, corrected by the updates of each row), McMahan et al. 2013
    (FTRL). Rows are float32; the updates of 16-bit rows round stochastically, which this does not.

    Args:
        optimizer: the rule and its parameters.
        value_bound: embeddings stay within [-value_bound, value_bound]; 0 for no bound.
    """

    def __init__(self, optimizer: EmbeddingOptimizer, value_bound: float = 0.0) -> None:
        self._optimizer = optimizer
        self._bound = value_bound
        rules: dict[type, Callable[[_Rows], tuple[Tensor, Tensor]]] = {
            SGD: self._sgd,
            Adagrad: self._adagrad,
            RowwiseAdagrad: self._rowwise_adagrad,
            Adam: self._adam,
            Ftrl: self._ftrl,
        }
        self._rule = rules[type(optimizer)]
        self._corrections: Tensor | None = None
        """Bias corrections of Adam by update count, float32 `[CORRECTIONS, 2]`; made where they are first used."""
        self._most = 0
        """No row has had more updates."""

    def state_width(self, dim: int) -> int:
        """Returns the number of floats of optimizer state of a row."""
        match self._optimizer:
            case SGD(momentum=momentum):
                return dim if momentum else 0
            case Adagrad():
                return dim
            case RowwiseAdagrad():
                return 1
            case _:
                return 2 * dim

    def rate(self, step: int) -> float:
        """Returns the learning rate at a global step, counted from 0."""
        schedule = self._optimizer.schedule
        return self._optimizer.lr * (schedule.factor(step) if schedule is not None else 1.0)

    def note_counts(self, most: int) -> None:
        """Takes note of rows that have had up to `most` updates elsewhere."""
        self._most = max(self._most, most)

    @torch.no_grad()
    def update(self, gradients: Tensor, values: Tensor, state: Tensor, counts: Tensor, step: int) -> UpdatedRows:
        """Returns the rows after one update with each gradient. Does not wait for the device.

        Args:
            gradients: float32 `[n, dim]`, one for each row.
            values: embeddings, float32 `[n, dim]`.
            state: optimizer state, float32 `[n, width]`.
            counts: number of updates of each row so far, int64 `[n]`; none is above those that were noted by
                `note_counts`, plus the calls since.
            step: global step, counted from 0, which sets the learning rate.
        """
        rate = values.new_full((1,), self.rate(step))
        self._most = min(self._most + 1, MOST_UPDATES)
        later = (counts + 1).clamp(max=MOST_UPDATES)
        clipped, decayed = self._clipped(gradients), self._decayed(values, rate)
        changed, new_state = self._rule(_Rows(clipped, decayed, state, rate, later))
        if self._bound:
            changed = changed.clamp(-self._bound, self._bound)
        applied = gradients.isfinite().all(1) & changed.isfinite().all(1) & new_state.isfinite().all(1)
        rows = applied.unsqueeze(1)
        return UpdatedRows(
            torch.where(rows, changed, values),
            torch.where(rows, new_state, state),
            torch.where(applied, later, counts),
            applied,
        )

    # --- before the rule --------------------------------------------------------------------------------------------

    def _clipped(self, gradients: Tensor) -> Tensor:
        """Returns gradients of at most the norm that is set, which is computed in double as in the core."""
        if not self._optimizer.clip_row_norm:
            return gradients
        wide, limit = gradients.double(), float(np.float32(self._optimizer.clip_row_norm))
        lanes = _lanes(wide * wide)
        width = LANES // 2
        while width:
            lanes = lanes[:, :width] + lanes[:, width : 2 * width]
            width //= 2
        norms = _root(lanes)
        scaled = (wide * (norms.new_full((1,), limit) / norms)).float()
        return torch.where(norms > limit, scaled, gradients)

    def _decayed(self, values: Tensor, rate: Tensor) -> Tensor:
        """Returns rows after decoupled weight decay."""
        decay = getattr(self._optimizer, "decoupled_weight_decay", 0.0)
        if not decay:
            return values
        return values * (1.0 - rate.double() * float(np.float32(decay))).float()

    # --- the rules --------------------------------------------------------------------------------------------------

    def _sgd(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        assert isinstance(self._optimizer, SGD)
        gradients = _with_decay(rows, self._optimizer.weight_decay)
        if not self._optimizer.momentum:
            return rows.values - rows.rate * gradients, rows.state
        moved = self._optimizer.momentum * rows.state + gradients
        return rows.values - rows.rate * moved, moved

    def _adagrad(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        assert isinstance(self._optimizer, Adagrad)
        gradients = _with_decay(rows, self._optimizer.weight_decay)
        squares = rows.state + gradients * gradients
        return rows.values - rows.rate * gradients / (_root(squares) + self._optimizer.eps), squares

    def _rowwise_adagrad(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        assert isinstance(self._optimizer, RowwiseAdagrad)
        gradients = _with_decay(rows, self._optimizer.weight_decay)
        lanes = _lanes(gradients * gradients)
        eight = lanes[:, :8] + lanes[:, 8:]
        four = eight[:, :4] + eight[:, 4:]
        total = (four[:, :1] + four[:, 2:3]) + (four[:, 1:2] + four[:, 3:])
        # By a tensor: on a GPU torch multiplies by the reciprocal of a number.
        squares = rows.state + total / total.new_full((1,), gradients.shape[1])
        return rows.values - rows.rate / (_root(squares) + self._optimizer.eps) * gradients, squares

    def _adam(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        rule = self._optimizer
        assert isinstance(rule, Adam)
        gradients = _with_decay(rows, rule.weight_decay)
        first, second = rows.state.split(gradients.shape[1], 1)
        scale, root_scale = self._corrections_of(rows.counts).split(1, 1)
        mean = rule.beta1 * first + (1.0 - rule.beta1) * gradients
        squares = rule.beta2 * second + (1.0 - rule.beta2) * (gradients * gradients)
        changed = rows.values - rows.rate * scale * mean / (_root(squares) * root_scale + rule.eps)
        return changed, torch.cat([mean, squares], 1)

    def _ftrl(self, rows: _Rows) -> tuple[Tensor, Tensor]:
        rule, gradients = self._optimizer, rows.gradients
        assert isinstance(rule, Ftrl)
        z, n = rows.state.split(gradients.shape[1], 1)
        squares = n + gradients * gradients
        root = _root(squares)
        sigma = (root - _root(n)) / rows.rate
        moved = z + (gradients - sigma * rows.values)
        l1 = moved.new_full((1,), rule.l1)
        solved = -(moved - l1.copysign(moved)) / ((rule.beta + root) / rows.rate + rule.l2)
        return torch.where(moved.abs() <= l1, 0.0, solved), torch.cat([moved, squares], 1)

    def _corrections_of(self, counts: Tensor) -> Tensor:
        """Returns the bias corrections of Adam after some numbers of updates, float32 `[n, 2]`."""
        if self._most >= CORRECTIONS:
            return self._correction(counts)
        if self._corrections is None or self._corrections.device != counts.device:
            self._corrections = self._correction(torch.arange(CORRECTIONS, device=counts.device))
        return self._corrections.index_select(0, counts)

    def _correction(self, counts: Tensor) -> Tensor:
        assert isinstance(self._optimizer, Adam)
        first = 1.0 - _power(self._optimizer.beta1, counts)
        second = 1.0 - _power(self._optimizer.beta2, counts)
        one = first.new_ones(1)
        return torch.stack([one / first, one / _root(second)], 1).float()


def _with_decay(rows: _Rows, decay: float) -> Tensor:
    """Returns gradients with the term of L2 regularisation."""
    return rows.gradients + decay * rows.values if decay else rows.gradients


def _root(values: Tensor) -> Tensor:
    """Returns square roots, to the nearest number: on a CPU torch may take them from a library that is less exact."""
    if values.device.type != "cpu":
        return values.sqrt()
    with np.errstate(invalid="ignore"):
        return torch.from_numpy(np.sqrt(values.numpy()))


def _lanes(values: Tensor) -> Tensor:
    """Returns sums `[n, LANES]` of every sixteenth value `[n, dim]`, added one after another."""
    parts = torch.nn.functional.pad(values, (0, -values.shape[1] % LANES)).split(LANES, 1)
    total: Tensor = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def _power(base: float, exponents: Tensor) -> Tensor:
    """Returns powers in double, by squaring: the multiplications of the core, which round alike everywhere."""
    result = torch.ones_like(exponents, dtype=torch.float64)
    factor = result.new_full((1,), base)
    for bit in range(MOST_UPDATES.bit_length()):
        result = torch.where((exponents >> bit) & 1 == 1, result * factor, result)
        factor = factor * factor
    return result
