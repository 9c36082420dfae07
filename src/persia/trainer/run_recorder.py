"""`RunRecorder`: collects the record of a run, which `persia report` shows, on NN worker 0."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from persia.errors import DataError
from persia.metrics import Metrics, MetricsResult
from persia.metrics.result import known
from persia.nn.collection import EmbeddingCollection
from persia.nn.prepared import PreparedBatch
from persia.telemetry.live import Snapshot
from persia.telemetry.logs import get_logger
from persia.telemetry.run_record import (
    CalibrationBin,
    CurvePoint,
    HeldOutPoint,
    NonFiniteRows,
    RunRecord,
    read_run,
    write_run,
)
from persia.trainer.options import TrainerOptions
from persia.trainer.scores import WindowScores
from persia.trainer.state import TrainingState

__all__ = ["RunRecorder"]

LOG = get_logger("persia.trainer")

_UNRECORDED = ("calibration", "normalized_entropy")
"""Metrics of binary labels that the record has in other forms, or that follow from others."""


class RunRecorder:
    """Writes `run.json` to `log_dir`, or else to `checkpoint_dir` if that is a local path; no-op without, or on others.

    The curves of an earlier call of `fit` in this directory continue.

    Args:
        options: has the directories.
        state: has the mode, and the rank of this NN worker.
        embeddings: has staleness, tables and features.
    """

    def __init__(self, options: TrainerOptions, state: TrainingState, embeddings: EmbeddingCollection) -> None:
        directory = options.log_dir or options.checkpoint_dir
        self._directory = directory if directory and "://" not in directory and state.rank == 0 else None
        self._state = state
        self._embeddings = embeddings
        self._began = time.monotonic()
        self._last: PreparedBatch | None = None
        self._record = RunRecord("", embeddings.connection.nn_workers, time.time(), 0)
        if self._directory is not None and state.global_step:
            try:
                earlier = read_run(self._directory)
                self._record.curve, self._record.held_out = earlier.curve, earlier.held_out
                self._record.importance = earlier.importance
            except DataError:
                LOG.debug("The curves begin at step %d.", state.global_step)

    @property
    def active(self) -> bool:
        """Whether this NN worker records."""
        return self._directory is not None

    def trained(self, batch: PreparedBatch) -> None:
        """Keeps the last batch, whose features are measured at the end."""
        if self._directory is not None:
            self._last = batch

    def add(self, snapshot: Snapshot, window: WindowScores) -> None:
        """Adds a point to the curves; `window` is of the rows since the point before."""
        self._record.add(
            CurvePoint(
                snapshot.step,
                time.monotonic() - self._began,
                snapshot.rows_per_second,
                _number(snapshot.loss),
                _number(snapshot.auc),
                _number(snapshot.hit_rate),
                snapshot.staleness,
                snapshot.stored_rows,
                _number(window.auc),
                snapshot.seen,
                {name: _number(value) for name, value in window.others.items()},
            )
        )

    def evaluated(self, metric: str, value: float, *, best: bool) -> None:
        """Adds an evaluation on held-out data to the curves."""
        self._record.add_held_out(HeldOutPoint(self._state.global_step, metric, _number(value), best))

    def save(self, metrics: Metrics, *, seen: bool) -> None:
        """Writes what is known without asking another process. A failure is logged.

        Args:
            metrics: of the training logits of this call, of this NN worker or of all.
            seen: whether their rows were trained in an earlier pass over the data.
        """
        record = self._record
        record.mode, record.step = str(self._state.mode), self._state.global_step
        record.calibration = {
            label: [CalibrationBin(*group) for group in groups] for label, groups in metrics.reliability().items()
        }
        record.calibration_seen = seen
        record.staleness = self._embeddings.gate.counts
        if not record.complete:
            record.non_finite = self._embeddings.push_log.non_finite.found()
        self._write()

    def complete(
        self,
        metrics: Metrics,
        seen: bool,
        tables: Mapping[str, Mapping[str, int]],
        evaluation: MetricsResult | None,
        non_finite: list[NonFiniteRows],
    ) -> None:
        """Writes the whole record. A failure is logged.

        Args:
            metrics: of the training logits of this call, of all NN workers.
            seen: whether their rows were trained in an earlier pass over the data.
            tables: counters of each table.
            evaluation: metrics on `eval_data`.
            non_finite: rows that were left as they are, by table.
        """
        if self._directory is None:
            return
        record = self._record
        record.non_finite = non_finite
        record.tables = {name: dict(counters) for name, counters in tables.items()}
        if evaluation is not None:
            record.evaluation = {
                label: {name: _number(value) for name, value in known(scores).items() if name not in _UNRECORDED}
                for label, scores in evaluation.labels.items()
            }
        if self._last is not None:
            record.features = self._embeddings.feature_costs(self._last)
            self._last = None
        record.complete = True
        self.save(metrics, seen=seen)

    def _write(self) -> None:
        if self._directory is None:
            return
        try:
            write_run(self._directory, self._record)
        except OSError as error:
            LOG.warning("The record of this run could not be written to %s: %s", self._directory, error)


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
