"""`Evaluations`: what a run remembers of its evaluations on held-out data."""

from __future__ import annotations

import math

import msgspec

from persia.metrics import WatchedMetric

__all__ = ["Evaluations"]


class Evaluations(msgspec.Struct, frozen=True):
    """Evaluations of a run so far. Part of checkpoints, so a resumed run continues to count.

    Attributes:
        metric: name of the watched metric; empty before the first evaluation.
        last: its last value; None if it was not finite.
        last_step: global step of the last evaluation.
        best: its best value.
        best_step: global step of the best one.
        unimproved: evaluations at intervals, in a row, that did not improve it. Those at the end of a call of `fit` are
            not counted.
    """

    metric: str = ""
    last: float | None = None
    last_step: int | None = None
    best: float | None = None
    best_step: int | None = None
    unimproved: int = 0

    def after(self, watched: WatchedMetric, value: float, step: int, *, counts: bool) -> Evaluations:
        """Returns the evaluations with one more. One of another metric begins again.

        Args:
            watched: the metric.
            value: its value; one that is not finite is no improvement.
            step: global step.
            counts: whether it was made at an interval.
        """
        before = self if self.metric == watched.name else Evaluations(watched.name)
        finite = math.isfinite(value)
        improved = finite and (before.best is None or watched.score(value) > watched.score(before.best))
        return Evaluations(
            metric=watched.name,
            last=value if finite else None,
            last_step=step,
            best=value if improved else before.best,
            best_step=step if improved else before.best_step,
            unimproved=0 if improved else before.unimproved + counts,
        )

    def is_best(self, step: int) -> bool:
        """Returns whether the state of a step is the best so far."""
        return self.best_step is not None and self.best_step == step

    def waiting_again(self) -> Evaluations:
        """Returns the evaluations with the count of unimproved ones at 0, for training on other data."""
        return msgspec.structs.replace(self, unimproved=0)
