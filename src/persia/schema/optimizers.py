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


class _RowOptimizer(TaggedRecord, frozen=True, kw_only=True):
    clip_row_norm: float = 0.0

    def _check_shared(self, lr: object, schedule: object) -> None:
        """Raises ConfigError unless the fields that all optimizers have are valid."""
        super().__post_init__()
        kind = type(self).__name__
        check_number(f"{kind}.lr", plain(lr), 0, open_low=True)
        check_kind(f"{kind}.schedule", schedule, (Schedule, NoneType), "a Schedule, or None")
        self._number("clip_row_norm", 0, math.inf)


class _DecayingOptimizer(_RowOptimizer, frozen=True, kw_only=True):
    decoupled_weight_decay: float = 0.0

    def _check_decay(self, lr: float, weight_decay: float) -> None:
        """Raises ConfigError unless both kinds of weight decay are valid."""
        kind, decoupled = type(self).__name__, self.decoupled_weight_decay
        check_number(f"{kind}.weight_decay", weight_decay, 0, math.inf)
        check_number(f"{kind}.decoupled_weight_decay", decoupled, 0, math.inf)
        if weight_decay and decoupled:
            raise ConfigError(
                f"{kind}.weight_decay = {weight_decay} and decoupled_weight_decay = {decoupled} are two kinds of decay "
                "of the same rows. Set one of them to 0.",
                field=f"{kind}.decoupled_weight_decay",
            )
        if lr * decoupled > 1:
            raise ConfigError(
                f"{kind}.decoupled_weight_decay = {decoupled} times lr = {lr} exceeds 1, so an update would turn the "
                f"sign of a row. Set it to at most 1 / lr = {1 / lr:g}.",
                field=f"{kind}.decoupled_weight_decay",
            )


class SGD(_DecayingOptimizer, frozen=True, tag="sgd"):
    """Stochastic gradient descent with momentum and weight decay, applied only to the rows of a batch.

    The update rule equals `torch.optim.SGD`. State per row: the momentum vector if `momentum` > 0, else none.

    Args:
        lr: learning rate.
        momentum: factor of the momentum vector, in [0, 1).
        weight_decay: L2: adds `weight_decay * row` to the gradient of the rows of a batch.
        schedule: factor on `lr` by global step.
        decoupled_weight_decay: multiplies the rows of a batch by `1 - lr * decoupled_weight_decay` before their update.
        clip_row_norm: maximum L2 norm of a row's gradient in an update; larger gradients are scaled down to it. 0 for
            no clipping.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check_shared(self.lr, self.schedule)
        self._number("momentum", 0, 1, open_high=True)
        self._check_decay(self.lr, self.weight_decay)


INITIAL_ACCUMULATOR = 1e-6
"""Default initial accumulator of Adagrad."""


class _AdagradFields(_DecayingOptimizer, frozen=True):
    lr: float
    initial_accumulator: float = INITIAL_ACCUMULATOR
    eps: float = 1e-10
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._check_shared(self.lr, self.schedule)
        self._number("initial_accumulator", 0, math.inf)
        self._number("eps", 0, math.inf)
        self._check_decay(self.lr, self.weight_decay)


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
        decoupled_weight_decay: multiplies the rows of a batch by `1 - lr * decoupled_weight_decay` before their update.
        clip_row_norm: maximum L2 norm of a row's gradient in an update; larger gradients are scaled down to it. 0 for
            no clipping.
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
        decoupled_weight_decay: multiplies the rows of a batch by `1 - lr * decoupled_weight_decay` before their update.
        clip_row_norm: maximum L2 norm of a row's gradient in an update; larger gradients are scaled down to it. 0 for
            no clipping.
    """


class Adam(_DecayingOptimizer, frozen=True, tag="adam"):
    """Lazy Adam: updates only the rows of the batch; bias correction uses the number of updates of each row.

    Args:
        lr: learning rate.
        beta1: decay of the first moment, in [0, 1).
        beta2: decay of the second moment, in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: L2: adds `weight_decay * row` to the gradient of the rows of a batch.
        schedule: factor on `lr` by global step.
        decoupled_weight_decay: multiplies the rows of a batch by `1 - lr * decoupled_weight_decay` before their update,
            as AdamW does (Loshchilov and Hutter, ICLR 2019).
        clip_row_norm: maximum L2 norm of a row's gradient in an update; larger gradients are scaled down to it. 0 for
            no clipping.
    """

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
        self._check_decay(self.lr, self.weight_decay)


class Ftrl(_RowOptimizer, frozen=True, tag="ftrl"):
    """FTRL-proximal (McMahan et al., 2013), per coordinate; `lr` is the paper's alpha.

    Args:
        lr: the paper's alpha.
        beta: the paper's beta, added to the root of the sum of squares.
        l1: L1 regularisation; rows become exactly 0 where it outweighs their gradients.
        l2: L2 regularisation.
        schedule: factor on `lr` by global step.
        clip_row_norm: maximum L2 norm of a row's gradient in an update; larger gradients are scaled down to it. 0 for
            no clipping.
    """

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
