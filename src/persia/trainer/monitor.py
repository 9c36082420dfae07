"""Metrics of one NN worker for `persia health` and Prometheus, read by other threads than the training thread."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import torch

from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.telemetry.metrics import Metric, Readings, metrics_of
from persia.trainer.checkpointing import Checkpointing
from persia.trainer.run_publishing import Publishing
from persia.trainer.state import TrainingState

__all__ = ["Monitor"]


AUC_SECONDS = 5.0
"""Seconds between two calculations of the AUC."""

WATCHED_SECONDS = 60.0
"""Seconds after a reading of the metrics for which the AUC is kept up to date."""


class Monitor:
    """Collects the metrics of one NN worker. The training thread calls `trained`, any thread may call `observe`.

    Args:
        state: has the step and the epoch.
        network: has the step times, and an optimizer that may count what it sends.
        embeddings: has staleness, waits and dropped gradients.
        checkpointing: has the age and the failures of checkpoints.
        publishing: has the age of the published network.
    """

    def __init__(
        self,
        state: TrainingState,
        network: DenseStep,
        embeddings: EmbeddingCollection,
        checkpointing: Checkpointing,
        publishing: Publishing,
    ) -> None:
        self._state = state
        self._network = network
        self._embeddings = embeddings
        self._checkpointing = checkpointing
        self._publishing = publishing
        self._rows = 0
        self._loss: float | None = None
        self._auc = math.nan
        self._others: Mapping[str, float] = {}
        """Metrics of labels that are not binary, by "LABEL:METRIC"."""
        self._held_out: Metric | None = None
        self._scored_at = 0.0
        self._observed_at = -math.inf

    def trained(self, rows: int, loss: float) -> None:
        """Counts a batch, and keeps the loss that is known now: its own, or on a GPU the loss of the batch before."""
        self._rows += rows
        self._loss = loss
        # Here, as metrics change in this thread only. It takes milliseconds, so only while somebody looks.
        now = time.monotonic()
        if now - self._observed_at < WATCHED_SECONDS and now - self._scored_at > AUC_SECONDS:
            self._scored_at = now
            self._auc = self._state.scores.of_call.auc()
            self._others = self._state.scores.of_call.headlines()

    def evaluated(self, metric: str, value: float) -> None:
        """Keeps the last value of the watched metric of held-out data, of all NN workers."""
        self._held_out = Metric("nn_held_out", value, {"metric": metric}) if math.isfinite(value) else None

    def observe(self) -> Readings:
        """Returns all metrics. Takes no lock that training holds for long, and asks no other process."""
        self._observed_at = time.monotonic()
        embeddings = self._embeddings
        staleness = embeddings.staleness
        # `EmbeddingWorkers`, the facade of several processes, counts them; a worker in this process loses none.
        pushed = embeddings.push_log.counts(getattr(embeddings.connection.worker, "lost_gradients", 0))
        readings = metrics_of(
            "nn",
            {
                "step": self._state.global_step,
                "epoch": self._state.epoch,
                "rows": self._rows,
                "ready": embeddings.ready,
                "loading_seconds": embeddings.waits.loading_seconds,
                "torch_threads": torch.get_num_threads(),
                "staleness_sum": round(staleness.mean * staleness.lookups),
                "staleness_lookups": staleness.lookups,
                "staleness_max": staleness.max,
                "cache_hits": embeddings.cached.hits,
                "cache_misses": embeddings.cached.misses,
                **self._checkpointing.metrics(),
                **self._publishing.metrics(),
            },
        )
        if self._loss is not None:
            readings.append(Metric("nn_loss", self._loss, {}))
        if not math.isnan(self._auc):
            readings.append(Metric("nn_auc", self._auc, {}))
        for name, value in self._others.items():
            if not math.isnan(value):
                label, _, metric = name.rpartition(":")
                readings.append(Metric("nn_metric", value, {"label": label, "metric": metric}))
        if self._held_out is not None:
            readings.append(self._held_out)
        for reason, rows in (("absent", pushed.absent), ("non_finite", pushed.non_finite)):
            readings.append(Metric("nn_dropped_rows", rows, {"reason": reason}))
        reasons = {"released": pushed.released, "lost": pushed.lost_batches, "lost_gradient": pushed.lost_gradients}
        readings += [Metric("nn_dropped_batches", count, {"reason": reason}) for reason, count in reasons.items()]
        readings += _compression(self._network.optimizer)
        if self._state.stream is not None:
            readings += self._state.stream.observe()
        return Readings(
            readings,
            [embeddings.waits.latency(), self._network.times.latency("nn_step_seconds")],
        )


def _compression(optimizer: Any) -> list[Metric]:
    """Returns the metrics of APMSqueeze, which communicates; none for other optimizers."""
    statistics: dict[str, Any] = getattr(optimizer, "statistics", dict)()
    phase = statistics.pop("phase", None)
    if phase is not None:
        statistics["compressing"] = phase == "compressed"
    return metrics_of("apmsqueeze", statistics)
