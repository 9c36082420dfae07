"""Optimizers of the rows of embedding tables: the update rule of a PS, and the schedule of its learning rate."""

from __future__ import annotations

import math
from types import NoneType
from typing import Literal

import msgspec

from persia.checks import MAX_STEPS, check_choice, check_integer, check_kind, check_number, plain, plain_fields
from persia.errors import ConfigError
from persia.schema.checks import TaggedRecord

__all__ = [
    "INITIAL_ACCUMULATOR",
    "SGD",
    "Adagrad",
    "Adam",
    "EmbeddingOptimizer",
    "Ftrl",
    "RowwiseAdagrad",
    "Schedule",
]


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Learning-rate factor by global step: linear warm-up, then constant or a decay to `floor`.

    Args:
        warmup_steps: number of steps over which the factor rises linearly from 1/warmup_steps to 1.
        decay: shape after the warm-up.
        total_steps: global step at which the decay reaches `floor`; required unless `decay` is "constant".
        floor: final factor, in [0, 1].
    """

    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("Schedule.warmup_steps", self.warmup_steps, 0, MAX_STEPS)
        check_integer("Schedule.total_steps", self.total_steps, 0, MAX_STEPS)
        check_number("Schedule.floor", self.floor, 0, 1)
        check_choice("Schedule.decay", self.decay, ("constant", "linear", "cosine"))
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"Invalid Schedule.total_steps = {self.total_steps}; expected more than warmup_steps = "
                f"{self.warmup_steps}.",
                field="Schedule.total_steps",
            )

    def factor(self, step: int) -> float:
        """Returns the factor on the learning rate at a global step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        remaining = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * remaining


class _RowOptimizer(TaggedRecord, frozen=True):
    def _check_shared(self, lr: object, schedule: object) -> None:
        """Raises ConfigError unless the fields that all optimizers have are valid."""
        super().__post_init__()
        kind = type(self).__name__
        check_number(f"{kind}.lr", plain(lr), 0, open_low=True)
        check_kind(f"{kind}.schedule", schedule, (Schedule, NoneType), "a Schedule, or None")


class SGD(_RowOptimizer, frozen=True, tag="sgd"):
    """Stochastic gradient descent with momentum and L2 weight decay, applied only to the rows of a batch.

    The update rule equals `torch.optim.SGD`. State per row: the momentum vector if `momentum` > 0, else none.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check_shared(self.lr, self.schedule)
        self._number("momentum", 0, 1, open_high=True)
        self._number("weight_decay", 0, math.inf)


INITIAL_ACCUMULATOR = 1e-6
"""Default initial accumulator of Adagrad."""


class _AdagradFields(_RowOptimizer, frozen=True):
    lr: float
    initial_accumulator: float = INITIAL_ACCUMULATOR
    eps: float = 1e-10
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check_shared(self.lr, self.schedule)
        self._number("initial_accumulator", 0, math.inf)
        self._number("eps", 0, math.inf)
        self._number("weight_decay", 0, math.inf)


class Adagrad(_AdagradFields, frozen=True, tag="adagrad"):
    """Adagrad with one accumulator per element (Duchi et al., 2011), updating as `torch.optim.Adagrad` does.

    Args:
        lr: learning rate; 0.05 to 0.1 suits the default `initial_accumulator`. It bounds the first update of a number.
        initial_accumulator: first value of each accumulator, to which squared gradients are added. Gradients of rows
            are small, as the loss is a mean over the batch: 0.01 exceeds their squares by orders of magnitude, so
            rows, especially rare ones, hardly learn. 1e-6 is near their squares, so the size of a step soon approaches
            `lr`. With a much smaller value every first step has size `lr`, however small the gradient, so `lr` must be
            smaller. `python -m benchmarks 'quality.adagrad.*'` compares values.
        eps: added to the root of the accumulator.
        weight_decay: L2: adds `weight_decay * row` to the gradient of the rows of a batch.
        schedule: factor on `lr` by global step.
    """


class RowwiseAdagrad(_AdagradFields, frozen=True, tag="rowwise_adagrad"):
    """Adagrad with one accumulator per row: the mean of the squared gradient, as in FBGEMM's fused optimizer.

    Args:
        lr: learning rate; 0.05 to 0.1 suits the default `initial_accumulator`.
        initial_accumulator: first value of the accumulator. It has the scale of the accumulators of `Adagrad`, as it
            sums means over a row, so the default is the same.
        eps: added to the root of the accumulator.
        weight_decay: L2: adds `weight_decay * row` to the gradient of the rows of a batch.
        schedule: factor on `lr` by global step.
    """


class Adam(_RowOptimizer, frozen=True, tag="adam"):
    """Lazy Adam: updates only the rows of the batch; bias correction uses the number of updates of each row."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check_shared(self.lr, self.schedule)
        self._number("beta1", 0, 1, open_high=True)
        self._number("beta2", 0, 1, open_high=True)
        self._number("eps", 0, math.inf, open_low=True)
        self._number("weight_decay", 0, math.inf)


class Ftrl(_RowOptimizer, frozen=True, tag="ftrl"):
    """FTRL-proximal (McMahan et al., 2013), per coordinate; `lr` is the paper's alpha."""

    lr: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check_shared(self.lr, self.schedule)
        self._number("beta", 0, math.inf)
        self._number("l1", 0, math.inf)
        self._number("l2", 0, math.inf)


EmbeddingOptimizer = SGD | Adagrad | RowwiseAdagrad | Adam | Ftrl
