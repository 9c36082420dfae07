"""What is observed of a `Trainer`, from other threads than its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from persia.telemetry.metrics import Histogram, Metric, Readings, figures

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["Monitor"]


class Monitor:
    """Collects what a trainer says of itself. Told by its thread, read by any."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._rows = 0
        self._loss: float | None = None
        self._steps = Histogram()

    def trained(self, rows: int, loss: float) -> None:
        """A batch was trained, and a loss is known: its own, or on a GPU that of the one before."""
        self._rows += rows
        self._loss = loss

    def observe(self) -> Readings:
        """All figures now. Takes no lock that training holds for long, and asks no other process."""
        trainer = self._trainer
        embeddings = trainer.embeddings
        staleness = embeddings.staleness
        # Counted by the facade of several embedding workers; one in this process loses none.
        pushed = embeddings.tally.result(getattr(embeddings.connection.worker, "lost_gradients", 0))
        found = figures(
            "nn",
            {
                "step": trainer.global_step,
                "epoch": trainer.epoch,
                "rows": self._rows,
                "ready": embeddings.ready,
                "torch_threads": torch.get_num_threads(),
                "staleness_sum": round(staleness.mean * staleness.lookups),
                "staleness_lookups": staleness.lookups,
                "staleness_max": staleness.max,
                **trainer.saving.figures(),
            },
        )
        if self._loss is not None:
            found.append(Metric("nn_loss", self._loss, {}))
        for reason, rows in (("absent", pushed.absent), ("non_finite", pushed.non_finite)):
            found.append(Metric("nn_dropped_rows", rows, {"reason": reason}))
        reasons = {"released": pushed.released, "lost": pushed.lost_batches, "lost_gradient": pushed.lost_gradients}
        found += [Metric("nn_dropped_batches", count, {"reason": reason}) for reason, count in reasons.items()]
        found += _compression(trainer.step.optimizer)
        return Readings(
            found,
            [embeddings.waits.latency("nn_wait_seconds"), trainer.step.times.latency("nn_step_seconds")],
        )


def _compression(optimizer: Any) -> list[Metric]:
    """Of an optimizer that communicates; none of others."""
    statistics: dict[str, Any] = getattr(optimizer, "statistics", dict)()
    phase = statistics.pop("phase", None)
    if phase is not None:
        statistics["compressing"] = phase == "compressed"
    return figures("apmsqueeze", statistics)
