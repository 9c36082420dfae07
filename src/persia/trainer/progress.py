"""One call of `Trainer.fit`: its bookkeeping, and what it returns."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch

from persia.coordinator import TokenReport
from persia.errors import DataError, DivergedError
from persia.metrics import MetricsResult, merged_metrics
from persia.modes import ModeChoice
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import Staging
from persia.telemetry.live import LiveLine, Snapshot, summary_writer
from persia.trainer.intervals import Interval
from persia.types import Floats, Int32Array

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["FitProgress", "FitResult", "TrainedRows", "check_finite"]

LOG = logging.getLogger("persia.data")

LOG_EVERY = 50
"""Batches between two points of TensorBoard."""


class FitResult(msgspec.Struct, frozen=True):
    """Result of one `Trainer.fit` call.

    Attributes:
        rows: samples trained.
        seconds: of the training loop, checkpoints within it included.
        rows_per_second: rows / seconds.
        steps: global steps of this call.
        global_step: global steps in all.
        progressive: metrics of the training logits themselves, each batch scored before it is trained; they and the
            counts below go on from call to call, and over a resume.
        evaluation: metrics on `eval_data` after training, or None.
        staleness_mean: measured, in own steps; like the counts, it goes on.
        staleness_max: likewise.
        stored_rows: rows in the embedding store at the end.
        stored_bytes: memory of the store at the end.
        absent_rows: gradient rows skipped because their id had no row (not admitted, or evicted).
        non_finite_rows: gradient rows dropped because of a NaN or Inf.
        released_batches: batches without a backward pass.
        lost_batches: batches skipped because their embedding worker was gone.
        lost_gradients: batches trained whose embedding gradients were lost with their embedding worker.
        row_staleness_mean: in asynchronous modes, steps by which a row was newer than what its gradient was computed
            with, over all rows of gradients.
        row_staleness_max: likewise.
        asynchronous: what asynchronous modes did, since the cluster began; None if there were none.
        mode_choices: decisions of the mode Auto since the cluster started, one per window.
        failures: how often NN workers began anew in this call, as one of them, a dense PS or a host had died. `rows`
            and `steps` count what was trained again only once, `seconds` do not count what is lost.
    """

    rows: int
    seconds: float
    rows_per_second: float
    steps: int
    global_step: int
    progressive: MetricsResult
    evaluation: MetricsResult | None
    staleness_mean: float
    staleness_max: int
    stored_rows: int
    stored_bytes: int
    absent_rows: int
    non_finite_rows: int
    released_batches: int
    lost_batches: int = 0
    lost_gradients: int = 0
    row_staleness_mean: float = 0.0
    row_staleness_max: int = 0
    asynchronous: TokenReport | None = None
    mode_choices: list[ModeChoice] = []
    failures: int = 0


class TrainedRows(NamedTuple):
    """Rows that one NN worker, or all of them, trained in a call, and the seconds it took."""

    rows: int
    seconds: float


class _Unscored(NamedTuple):
    """Logits, labels and loss of a batch on their way to the host, and the batch's number."""

    arrays: Callable[[], dict[str, Floats]]
    day: Int32Array | None
    step: int
    epoch: int
    number: int


class FitProgress:
    """The bookkeeping of one call of `fit`: bounds, scores, progress."""

    def __init__(self, trainer: Trainer, staging: Staging, max_steps: int | None) -> None:
        self._trainer = trainer
        self._staging = staging
        self._first_step = trainer.global_step
        self._last_step = None if max_steps is None else trainer.global_step + max_steps
        options, replicas = trainer.options, trainer.step.replicas
        self.checkpoints = Interval(
            lambda: trainer.global_step, replicas, options.checkpoint_every_steps, options.checkpoint_every_seconds
        )
        self.keeps = trainer.embeddings.connection.save_recovery_point is not None
        """Whether there is a process that keeps the state of NN workers."""
        kept = options.snapshot_every_seconds if self.keeps else None
        self.snapshots = Interval(lambda: trainer.global_step, replicas, None, kept)
        self._saved_step: int | None = None
        self._began = time.monotonic()
        self._rows = 0
        self._batches = 0
        self._loss = float("nan")
        self._seconds = 0.0
        self._unscored: _Unscored | None = None
        self._stopped = False
        self._empty = False
        self.next_switch: int | None = None
        """Global step at which the schedule changes the mode."""
        self._shown = (self._began, 0)
        first = trainer.embeddings.connection.rank == 0
        self.line = LiveLine(trainer.options.progress and first)
        self._writer = summary_writer(trainer.options.log_dir) if trainer.options.log_dir and first else None

    def told_to_stop(self) -> bool:
        """At rest: whether an NN worker was told to stop. All call it. Blocks."""
        self._stopped = any(self._trainer.step.replicas.gather(b"stop" if self._trainer.stopping else b""))
        return self._stopped

    def check_pass(self) -> None:
        """A pass has ended: had it any batch?

        Raises:
            DataError: it had none, and that was not expected.
        """
        trainer = self._trainer
        if trainer.position or self._empty:
            return
        what = f"train_data are empty: epoch {trainer.epoch} has no batch, so nothing was trained."
        if not trainer.options.allow_empty:
            raise DataError(
                f"{what} Check the path, the filter and `drop_last` of the reader. If there may be no data, set "
                "TrainerOptions(allow_empty=True).",
                epoch=trainer.epoch,
            )
        self._empty = True
        LOG.warning("%s", what)

    def check_trained(self, epochs: int) -> None:
        """Tells if a run that is resumed at the end of its data has nothing left to train."""
        trainer = self._trainer
        nothing = trainer.epoch >= epochs and trainer.global_step == self._first_step and not self._empty
        if nothing and trainer.embeddings.connection.rank == 0:
            LOG.warning(
                "Nothing was left to train: the run is at the end of its data, at step %d, with epoch %d of %d done. "
                "To train on, raise `epochs`, which counts the epochs before a resume too.",
                trainer.global_step, trainer.epoch, epochs,
            )  # fmt: skip

    def finished(self) -> bool:
        """Whether `max_steps` is reached, or the call was told to stop."""
        if self._stopped:
            return True
        return self._last_step is not None and self._trainer.global_step >= self._last_step

    def unsaved(self) -> bool:
        """Whether something was trained since the last checkpoint of this call."""
        return self._saved_step != self._trainer.global_step

    def batches_to_boundary(self) -> int | None:
        """How many batches may be trained before a checkpoint is due or the call ends; None for any number."""
        steps = self.steps_to_boundary()
        return None if steps is None else steps * self._trainer.options.accumulation_steps

    def steps_to_boundary(self) -> int | None:
        """How many steps may be made before a checkpoint or a switch is due or the call ends; None for any number.

        All NN workers call it, and get the same answer.
        """
        places = (self._last_step, self.checkpoints.boundary(), self.snapshots.boundary(), self.next_switch)
        bounds = [b for b in places if b is not None]
        return min(bounds) - self._trainer.global_step if bounds else None

    def saved(self, whether: bool = True) -> None:
        """A checkpoint of this step was begun, or has failed."""
        self._saved_step = self._trainer.global_step if whether else None

    def trained(self, step: int, batch: PreparedBatch, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Counts a batch that took part in global step `step`, scores it, shows progress when it is time to.

        On a GPU it is the batch before that is scored, as this one may still be computing.

        Raises:
            DivergedError: logits or loss of the batch that is scored are not finite.
        """
        if batch.dummy:
            return
        trainer = self._trainer
        connection = trainer.embeddings.connection
        self._rows += len(batch)
        self._batches += 1
        self.score_rest()
        number = trainer.position - connection.nn_workers + connection.rank
        arrays = self._staging.to_host({"logits": logits, "labels": batch.labels, "loss": loss.float()})
        self._unscored = _Unscored(arrays, batch.day, step, trainer.epoch, number)
        if logits.device.type == "cpu":
            self.score_rest()
        if self._batches % LOG_EVERY == 1 and self._writer is not None:
            self._write(self._writer, self._snapshot())
        if self.line.due():
            self.line.show(self._snapshot())

    def score_rest(self) -> None:
        """Counts the logits that are left."""
        if self._unscored is None:
            return
        done, self._unscored = self._unscored, None
        arrays = done.arrays()
        self._loss = float(arrays["loss"])
        self._trainer.watch.trained(len(arrays["labels"]), self._loss)
        where = f"Global step {done.step} (batch {done.number} of epoch {done.epoch}, counted from 0)"
        check_finite(where, arrays["logits"], self._loss, step=done.step, epoch=done.epoch, batch=done.number)
        self._trainer.metrics.update(arrays["logits"], arrays["labels"], done.day)

    @property
    def progress_here(self) -> TrainedRows:
        """Rows that this NN worker has trained in this call so far."""
        return TrainedRows(self._rows, self._seconds or time.monotonic() - self._began)

    def progress(self) -> TrainedRows:
        """Returns the rows of all NN workers, and the longest of their times. Blocks until all have called it."""
        payloads = self._trainer.step.replicas.gather(msgspec.json.encode(self.progress_here))
        trained = [msgspec.json.decode(payload, type=TrainedRows) for payload in payloads]
        return TrainedRows(sum(t.rows for t in trained), max(t.seconds for t in trained))

    def close(self) -> None:
        """Stops the clock."""
        self._seconds = time.monotonic() - self._began
        if self._writer is not None:
            self._write(self._writer, self._snapshot())
            self._writer.close()

    def _snapshot(self) -> Snapshot:
        self.score_rest()
        trainer = self._trainer
        now = time.monotonic()
        before, rows_before = self._shown
        self._shown = (now, self._rows)
        return Snapshot(
            step=trainer.global_step,
            rows=self._rows,
            rows_per_second=(self._rows - rows_before) / max(now - before, 1e-9),
            loss=self._loss,
            auc=trainer.metrics.result().auc,
            stored_rows=sum(t["rows"] for t in trainer.embeddings.statistics().values()),
            staleness=trainer.embeddings.staleness.mean,
        )

    def _write(self, writer: Any, snapshot: Snapshot) -> None:
        for name in ("rows_per_second", "loss", "auc", "stored_rows", "staleness"):
            writer.add_scalar(f"train/{name}", getattr(snapshot, name), snapshot.step)
        # One that communicates says how much.
        statistics: dict[str, Any] = getattr(self._trainer.step.optimizer, "statistics", dict)()
        for name, value in statistics.items():
            number = float(value == "compressed") if name == "phase" else value
            writer.add_scalar(f"optimizer/{name}", number, snapshot.step)

    def result(self, evaluation: MetricsResult | None) -> FitResult:
        """Returns the result of the call."""
        trainer = self._trainer
        replicas = trainer.step.replicas
        rows, seconds = self.progress()
        so_far = trainer.state.totals()
        pushed = so_far.pushed
        tables = trainer.embeddings.statistics().values()
        slots = [server.slots() for server in trainer.embeddings.connection.servers]
        return FitResult(
            rows=rows,
            seconds=seconds,
            rows_per_second=rows / seconds if seconds else 0.0,
            steps=trainer.global_step - self._first_step,
            global_step=trainer.global_step,
            progressive=merged_metrics(trainer.metrics, replicas.gather).result(),
            evaluation=evaluation,
            staleness_mean=so_far.staleness_sum / max(1, so_far.lookups),
            staleness_max=so_far.staleness_max,
            stored_rows=sum(t["rows"] for t in tables),
            stored_bytes=sum(t["bytes"] for t in tables),
            absent_rows=pushed.absent,
            non_finite_rows=pushed.non_finite,
            released_batches=pushed.released,
            lost_batches=pushed.lost_batches,
            lost_gradients=pushed.lost_gradients,
            row_staleness_mean=sum(s.staleness_sum for s in slots) / max(1, sum(s.rows - s.stale for s in slots)),
            row_staleness_max=max(s.staleness_max for s in slots),
            asynchronous=trainer.segments.report(),
            mode_choices=trainer.segments.mode_choices(),
        )


def check_finite(where: str, logits: Floats, loss: float = 0.0, **fields: int) -> None:
    """Raises DivergedError, which begins with `where`, unless all logits and the loss are finite."""
    bad = logits.size - int(np.count_nonzero(np.isfinite(logits)))
    if bad or not math.isfinite(loss):
        what = f"{bad} of {logits.size} logits are not finite" if bad else f"the loss is {loss}, all logits are finite"
        raise DivergedError(
            f"{where}: {what}. The model has diverged: go back to a checkpoint; lower the learning rates, set "
            "clip_norm, or look at what the model computes.",
            **fields,
        )
