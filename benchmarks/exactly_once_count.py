"""How often each click was trained, compared with what training has counted as lost and as repeated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from persia.modes import Auto, HopBw, Mode
from persia.trainer.progress import FitResult


class Repeat(NamedTuple):
    """The steps that a restart from a recovery point trains again: offsets of clicks by partition.

    Attributes:
        begins: where the recovery point is.
        ends: up to where the stream had been read when training restarted.
    """

    begins: Mapping[int, int]
    ends: Mapping[int, int]


class Deviations(NamedTuple):
    """Clicks that were not trained exactly once. All but `batches` are numbers of clicks.

    Attributes:
        untrained: clicks that were never trained.
        missing: how many of them no counted batch explains.
        repeated: times that clicks were trained after their first.
        twice: how many of them no restart explains.
        batches: batches with an untrained click.
    """

    untrained: int
    missing: int
    repeated: int
    twice: int
    batches: int


def lost_batches(result: FitResult, mode: Mode | Auto) -> int:
    """Returns the number of batches whose clicks `fit` counts as lost, wholly or in part.

    Batches of tokens that were lost are handed out again, so they are not among them. Nor are those that Gba drops from
    the network's step as too old: it drops a row only if the row has changed meanwhile, and that of a click has not.
    HopBw drops whole gradients.
    """
    report = result.asynchronous
    of_dead = report.lost_batches + report.abandoned if report is not None else 0
    dropped = report.dropped_batches if report is not None and isinstance(mode, HopBw) else 0
    return result.lost_batches + result.lost_gradients + of_dead + dropped


def deviations(times: Any, partitions: Any, offsets: Any, repeats: Sequence[Repeat], lost: int) -> Deviations:
    """Compares how often clicks were trained with what was counted. Batches are numbered as they were sent.

    Args:
        times: how often each click was trained, `[batches, clicks]`.
        partitions: partition of each batch, `[batches]`.
        offsets: offset of each batch in its partition, `[batches]`.
        repeats: one for each restart from a recovery point.
        lost: number of batches that are counted as lost.
    """
    times = np.asarray(times, np.int64)
    untrained = (times == 0).sum(axis=1)
    incomplete = np.sort(untrained[untrained > 0])[::-1]
    allowed = np.ones(len(times), np.int64)
    for repeat in repeats:
        begins, ends = (_by_partition(of, partitions) for of in repeat)
        allowed += (offsets >= begins) & (offsets < ends)
    return Deviations(
        int(untrained.sum()),
        int(incomplete[: max(0, len(incomplete) - lost)].sum()),
        int((times - 1).clip(min=0).sum()),
        int((times - allowed[:, None]).clip(min=0).sum()),
        len(incomplete),
    )


def _by_partition(offsets: Mapping[int, int], partitions: Any) -> Any:
    """Returns the offset that each batch is compared with; 0 in partitions that have none."""
    table = np.zeros(int(partitions.max(initial=-1)) + 1, np.int64)
    for partition, offset in offsets.items():
        if partition < len(table):
            table[partition] = offset
    return table[partitions]
