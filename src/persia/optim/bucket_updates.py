"""The updates of APMSqueeze: at full precision in the warm-up, compressed afterwards. Collectives.

They implement Algorithm 1 of arXiv 2008.11343; its lines are methods of :class:`persia.optim.buckets.Bucket`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from persia.batching.native import ThreadPool
from persia.optim.buckets import Rule
from persia.optim.cohort import Cohort
from persia.optim.exchange import Exchange
from persia.optim.native_buckets import sum_of_squares

__all__ = ["update_at_full_precision", "update_compressed"]


def update_at_full_precision(
    cohorts: Sequence[tuple[Cohort, list[Rule]]],
    exchange: Exchange,
    rates: Sequence[float],
    clip_norm: float | None,
    pool: ThreadPool | None,
) -> float:
    """Runs line 2: Adam with the average of the gradients, float32. Returns the factor by which it was clipped.

    Args:
        cohorts: cohorts with the rules of this step by parameter.
        exchange: collectives with the other workers.
        rates: learning rates, by parameter group.
        clip_norm: maximum norm of the average; None for no bound.
        pool: threads of the core, if the device is the host.
    """
    work = [(bucket, rules, cohort.scratch(bucket)) for cohort, rules in cohorts for bucket in cohort.buckets]
    waits = [
        exchange.start_sum(bucket.collect(rules, gradients), f"gradients of bucket {i}")
        for i, (bucket, rules, gradients) in enumerate(work)
    ]
    for wait in waits:
        wait()
    factor, clipped = 1.0 / exchange.size, 1.0
    if clip_norm is not None and work:
        total = sum_of_squares([gradients for _, _, gradients in work], pool)
        # Workers may round a norm differently, but its average is the same for all.
        norm = float(exchange.sum(torch.tensor([total**0.5], dtype=torch.float64), "norm")) * factor**2
        clipped = min(1.0, clip_norm / (norm + 1e-6))
        factor *= clipped
    for bucket, rules, gradients in work:
        bucket.adam(rules, gradients, factor)
    for cohort, rules in cohorts:
        cohort.end_full([rule.bias2 for rule in rules], rates)
    return clipped


def update_compressed(
    cohorts: Sequence[tuple[Cohort, list[Rule]]], exchange: Exchange, momentum: bool, step: int
) -> None:
    """Runs lines 6 to 11. Sends one bucket while packing the next one.

    Args:
        cohorts: cohorts with the rules of this step by parameter.
        exchange: collectives with the other workers.
        momentum: whether to send the momentum; otherwise gradients.
        step: number of the step.
    """
    work = [(bucket, rules) for cohort, rules in cohorts for bucket in cohort.buckets]
    scattered, gathered = [], []
    for i, (bucket, rules) in enumerate(work):
        bucket.compress(rules, momentum, _key(exchange, step, i, 0))
        scattered.append(exchange.start_all_to_all(bucket.sent, bucket.received, f"chunks of bucket {i}"))
    for i, (bucket, _) in enumerate(work):
        scattered[i]()
        bucket.average(_key(exchange, step, i, 1))
        gathered.append(exchange.start_all_gather(bucket.averaged, bucket.gathered, f"averages of bucket {i}"))
    for i, (bucket, rules) in enumerate(work):
        gathered[i]()
        bucket.apply(rules, momentum)


def _key(exchange: Exchange, step: int, bucket: int, stage: int) -> int:
    """Returns a random key per step, worker, bucket and stage; `Bucket.compress` adds the chunk."""
    return (((step * exchange.size + exchange.rank) * 65536 + bucket) * 2 + stage) * 65536
