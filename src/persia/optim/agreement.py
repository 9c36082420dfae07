"""Agreement of the APMSqueeze workers about a step, before it changes anything."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from persia.batching.native import ThreadPool
from persia.optim.cohort import Cohort
from persia.optim.exchange import Exchange
from persia.optim.native_buckets import squares

__all__ = ["Agreement", "agree"]


class Agreement(NamedTuple):
    """Facts about a step that all workers agree on.

    Attributes:
        finite: whether all gradients of all workers are finite.
        norm: root mean square of the norms of the workers' gradients, unscaled.
        ready: whether all workers would end the warm-up, by cohort.
        active: whether any worker has a gradient for a parameter, by parameter.
        squares: mean of the squared norms of the workers' gradients by parameter, unscaled; empty unless tracked.
    """

    finite: bool
    norm: float
    ready: list[bool]
    active: list[bool]
    squares: list[float]


def agree(
    gradients: Sequence[torch.Tensor | None],
    cohorts: Sequence[Cohort],
    exchange: Exchange,
    pool: ThreadPool | None,
    *,
    scale: float,
    overflow: bool,
    track_scale: bool,
    what: str,
) -> Agreement:
    """Computes all facts that workers must agree on before a buffer changes, in one small sum. A collective; blocks.

    Args:
        gradients: gradients of this worker, by parameter.
        cohorts: all cohorts.
        exchange: collectives with the other workers.
        pool: threads of the core, if the device is the host.
        scale: factor that undoes the loss scale.
        overflow: whether a GradScaler has found non-finite gradients.
        track_scale: whether to also agree on the norms of each parameter.
        what: name of the step, for errors.

    Raises:
        DeadlineError: a worker was late.
    """
    each = [square * scale**2 for square in squares([g for g in gradients if g is not None], pool)]
    total_square = sum(each)
    bad = not math.isfinite(total_square) or overflow
    numbers = [float(bad), 0.0 if bad else total_square]
    numbers += [float(cohort.ready()) for cohort in cohorts]
    numbers += [float(g is not None) for g in gradients]
    if track_scale:
        parameter_squares = iter(each)
        numbers += [0.0 if g is None or bad else next(parameter_squares) for g in gradients]
    total = exchange.sum(torch.tensor(numbers, dtype=torch.float64), what).tolist()
    count = 2 + len(cohorts)
    last = count + len(gradients)
    return Agreement(
        finite=total[0] == 0.0,
        norm=(total[1] / exchange.size) ** 0.5,
        ready=[number == exchange.size for number in total[2:count]],
        active=[number > 0.0 for number in total[count:last]],
        squares=[number / exchange.size for number in total[last:]],
    )
