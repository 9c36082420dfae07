"""Global batch gradients aggregation (GBA, arXiv 2205.11048, section 4.1 and appendix B)."""

from __future__ import annotations

import math

from persia.errors import ConfigError
from persia.modes.base import (
    Arrival,
    Asynchronous,
    Decision,
    Reduction,
    RowLimit,
    check_reduction,
    check_whole,
    hold_until_full,
)
from persia.modes.registry import register

__all__ = ["Gba"]

NEAR = 2.0
"""Within this factor of M, the number of NN workers is as it should be."""


@register
class Gba(Asynchronous, frozen=True, tag="gba"):
    """Asynchronous, with the global batch of synchronous training, so that both take the same hyper-parameters.

    A PS sums the gradients of any M = `global_batch_size` / local batch batches and applies the sum as one step. A
    batch has a token, the global step at which it was handed out; a gradient whose token is too old has weight 0. What
    is too old is decided for the dense parameters by the global step, and for each id by the step in which its row
    was last changed: a row that nobody has touched meanwhile takes any gradient. Fast NN workers never wait.

    Deviations from the paper's print, all towards its text:

    - Token values are t_i = floor(i / M). The paper prints floor(i / K) once, K being the number of updates; "each
      token value repeats M times", and Figure 5, mean M.
    - Algorithm 2 tags ids with the step (line 19) before it decays by the tag (line 21); printed so, every id would
      have the tag k, and rows would decay as dense parameters do. The tag of the appearance before is meant:
      `row_limit` is about the row's `last_step` as it is before the step.
    - Sums run over M gradients, where Algorithm 2 has the number of NN workers, which the paper sets equal to M.

    Args:
        global_batch_size: rows of a step; that of the synchronous training it is switched with.
        tolerance: gradients older than so many steps have weight 0, the paper's iota.
        reduction: "per_id" divides an id's weighted sum by the gradients that have the id (Algorithm 2, line 23),
            those of weight 0 included; "global" by M. Use what Sync uses.
    """

    global_batch_size: int
    tolerance: int = 3
    reduction: Reduction = "per_id"

    def __post_init__(self) -> None:
        check_whole("Gba", "global_batch_size", self.global_batch_size, 1, "rows that make a step")
        check_whole("Gba", "tolerance", self.tolerance, 0, "steps that a gradient may be old")
        check_reduction("Gba", self.reduction)

    def token(self, number: int, version: int, group: int) -> int:
        """t_i = floor(i / M)."""
        return number // group

    def group(self, nn_workers: int, local_batch: int) -> int:
        """M."""
        if self.global_batch_size % local_batch:
            multiple = self.global_batch_size // local_batch * local_batch
            sizes = [size for size in (multiple, multiple + local_batch) if size]
            batches = _divisors(self.global_batch_size)
            near = sorted(sorted(batches, key=lambda size: abs(size - local_batch))[:3])
            raise ConfigError(
                f"Gba.global_batch_size = {self.global_batch_size} is no multiple of the local batch of {local_batch} "
                f"rows. Give {_either(sizes)}, or local batches of {_either(near)} rows.",
                field="mode.global_batch_size",
            )
        return self.global_batch_size // local_batch

    def arrive(self, arrival: Arrival) -> Decision:
        """Held until there are M, with the weight that the dense parameters give it.

        k is constant while a group fills, so the weight is known on arrival and running sums suffice.
        """
        return hold_until_full(arrival, self.weight(arrival.step, arrival.token))

    def weight(self, step: int, token: int) -> float:
        """Equation 1: 0 if step - token > tolerance, else 1."""
        return 0.0 if step - token > self.tolerance else 1.0

    def row_limit(self, step: int, token: int) -> RowLimit:
        """Equation 1 with the row's own `last_step` in place of k: `last_step` - token <= tolerance."""
        return RowLimit(token + self.tolerance, step)

    def advice(self, nn_workers: int, local_batch: int) -> str | None:
        """What to tell the user whose number of NN workers is far from M; None if all is well.

        With N far above M gradients are several steps old from the start; far below, a step lasts several batches of
        each NN worker. The paper runs N = M, "to avoid the intrinsic gradient staleness".
        """
        group = self.group(nn_workers, local_batch)
        if nn_workers <= group * NEAR and group <= nn_workers * NEAR:
            return None
        return (
            f"Gba applies {group} gradients at a time, from {nn_workers} NN workers. They work best when these are "
            f"about equal: local batches of about {max(1, self.global_batch_size // nn_workers)} rows, or "
            f"{group} NN workers."
        )


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in low]


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, dict.fromkeys(numbers)))
