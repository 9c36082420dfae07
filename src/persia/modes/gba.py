"""Global batch gradients aggregation (GBA, arXiv 2205.11048, section 4.1 and appendix B)."""

from __future__ import annotations

import math

from persia.checks import plain_fields
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
"""Maximum factor between M and the number of NN workers without a warning."""


@register
class Gba(Asynchronous, frozen=True, tag="gba"):
    """Trains asynchronously with the global batch of synchronous training, and so with the same hyper-parameters.

    A PS sums the gradients of any M = `global_batch_size` / local batch batches and applies the sum as one step. The
    token of a batch is the global step at which it was handed out; a gradient whose token is too old has decay 0. Its
    age is the version of the parameters less its token: for dense parameters the global step, for each id the version
    of its row, which is the global step after the row's last change. A row that has not changed since accepts any
    gradient; one that changes in every step decays as dense parameters do. Fast NN workers never wait.

    Deviations from the print of the paper, all in line with its text:

    - Token values are t_i = floor(i / M). The paper prints floor(i / K) once, K being the number of updates; "each
      token value repeats M times", and Figure 5, mean M.
    - Algorithm 2 tags ids with the step (line 19) before it decays by the tag (line 21); printed so, every id would
      have the tag k, and rows would decay as dense parameters do. The previous tag is meant:
      `row_limit` compares with the row's version from before the step.
    - Sums run over M gradients, where Algorithm 2 has the number of NN workers, which the paper sets equal to M.

    Args:
        global_batch_size: rows of a step; that of the synchronous training before and after a switch.
        tolerance: age in steps above which gradients have decay 0, the paper's iota.
        reduction: divisor of the weighted sum of an id's gradients, those of decay 0 included; the same as in `Sync`,
            so that a switch needs no tuning. "global" is M, as for dense parameters; "per_id" is the number of
            gradients that have the id (Algorithm 2, line 23).
    """

    global_batch_size: int
    tolerance: int = 3
    reduction: Reduction = "global"

    def __post_init__(self) -> None:
        plain_fields(self)
        check_whole("Gba", "global_batch_size", self.global_batch_size, 1, "rows of a step")
        check_whole("Gba", "tolerance", self.tolerance, 0, "maximum age of a gradient in steps")
        check_reduction("Gba", self.reduction)

    def token(self, number: int, version: int, group: int) -> int:
        """Returns t_i = floor(i / M)."""
        return number // group

    def group(self, nn_workers: int, local_batch: int) -> int:
        """Returns M."""
        if self.global_batch_size % local_batch:
            multiple = self.global_batch_size // local_batch * local_batch
            sizes = [size for size in (multiple, multiple + local_batch) if size]
            batches = _divisors(self.global_batch_size)
            near = sorted(sorted(batches, key=lambda size: abs(size - local_batch))[:3])
            raise ConfigError(
                f"Gba.global_batch_size = {self.global_batch_size} is no multiple of the local batch of {local_batch} "
                f"rows. Set it to {_either(sizes)}, or use local batches of {_either(near)} rows.",
                field="mode.global_batch_size",
            )
        return self.global_batch_size // local_batch

    def arrive(self, arrival: Arrival) -> Decision:
        """Holds gradients until there are M, each with its decay for dense parameters.

        k is constant while a group fills, so the decay is known on arrival, and a running sum suffices.
        """
        return hold_until_full(arrival, self.decay(arrival.step, arrival.token))

    def decay(self, step: int, token: int) -> float:
        """Returns 0 if step - token > tolerance, else 1 (equation 1)."""
        return 0.0 if step - token > self.tolerance else 1.0

    def row_limit(self, step: int, token: int) -> RowLimit:
        """Admits rows whose version - token <= tolerance: equation 1 with the row's version in place of k.

        In equation 1, k counts the updates that dense parameters have had: it is their version. Updates are numbered
        from 0, so a row last changed in update `last_step` has the version `last_step` + 1. Comparing `last_step`
        itself would give a row of every step one step more than dense parameters (section 4.1 and appendix B, line 21,
        have one iota for both). A `last_step` of 0 also means "never", so rows of step 0 are always admitted.
        """
        return RowLimit(max(token + self.tolerance - 1, 0), step)

    def advice(self, nn_workers: int, local_batch: int) -> str | None:
        """Returns a warning if the number of NN workers N is far from M, else None.

        With N far above M, gradients are several steps old from the start; with N far below, a step takes several
        batches of each NN worker. The paper runs N = M, "to avoid the intrinsic gradient staleness".
        """
        group = self.group(nn_workers, local_batch)
        if nn_workers <= group * NEAR and group <= nn_workers * NEAR:
            return None
        return (
            f"Gba applies {group} gradients per step, from {nn_workers} NN workers; these numbers should be about "
            f"equal. Use local batches of about {max(1, self.global_batch_size // nn_workers)} rows, or {group} NN "
            "workers."
        )


def _divisors(number: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in low]


def _either(numbers: list[int]) -> str:
    return " or ".join(map(str, dict.fromkeys(numbers)))
