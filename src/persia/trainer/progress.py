"""`FitProgress`: scores, counts and the live line of one `Trainer.fit` call, and its result."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from persia.coordinator import TokenReport
from persia.errors import DivergedError, NNWorkersChangeError
from persia.metrics import Figures, MetricsResult, WatchedMetric, merged_metrics
from persia.metrics.result import known
from persia.modes import ModeChoice
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep
from persia.nn.non_finite import extreme_inputs, merged, named
from persia.nn.prepared import PreparedBatch
from persia.nn.staging import Staging
from persia.telemetry.live import LiveLine, Snapshot
from persia.telemetry.run_record import NonFiniteRows
from persia.telemetry.tracking import Tracker
from persia.trainer.callbacks import Callbacks
from persia.trainer.data_checks import DataChecks
from persia.trainer.evaluation import check_finite
from persia.trainer.finite_state import FiniteState
from persia.trainer.monitor import Monitor
from persia.trainer.options import Declared, TrainerOptions
from persia.trainer.run_recorder import RunRecorder
from persia.trainer.scores import WindowScores
from persia.trainer.state import TrainingState
from persia.types import Floats, Int32Array

__all__ = ["FitProgress", "FitResult", "TrainedRows"]

LOG_EVERY = 50
"""Batches between two points of trackers and of `run.json`; more points at the start of a call."""


class FitResult(msgspec.Struct, frozen=True):
    """Result of one `Trainer.fit` call.

    Attributes:
        rows: samples trained.
        seconds: of the training loop, checkpoints within it included.
        rows_per_second: rows / seconds.
        steps: global steps of this call.
        global_step: global steps in all.
        progressive: metrics of the training logits of this call in the first pass over the data: each row was scored
            before it was trained, so it was new to the model. Of no rows if the call has later passes only.
        training: metrics of the training logits of this call in later passes, on rows that the model has seen. They say
            how well it fits its data, not how well it predicts. Of no rows without such passes.
        history: progressive metrics of all calls so far, calls before a resume included. So are the counts below.
        evaluation: metrics on `eval_data` after training, or None.
        staleness_mean: measured, in own steps; continues like the counts.
        staleness_max: maximum, measured in the same way.
        stored_rows: rows in the embedding store at the end.
        stored_bytes: memory of the store at the end.
        absent_rows: gradient rows skipped because their id had no row (not admitted, or evicted).
        non_finite_rows: rows that stay as they were, as their gradient, or a value after it, was not finite.
        released_batches: batches without a backward pass.
        lost_batches: batches skipped because their embedding worker was gone.
        lost_gradients: batches trained whose embedding gradients were lost with their embedding worker.
        row_staleness_mean: in asynchronous modes, steps by which a row was newer than what its gradient was computed
            with, over all rows of gradients.
        row_staleness_max: maximum of the same.
        asynchronous: report of asynchronous modes, since the cluster began; None if there were none.
        mode_choices: decisions of the mode Auto since the cluster started, one per window.
        nothing_left: why nothing was trained, and what to do, if the call had nothing left to train; else empty.
        failures: restarts of NN workers in this call, after one of them, a dense PS or a host had died. `rows` and
            `steps` count repeated training once; `seconds` do not count what was lost.
        non_finite: the non-finite rows of this call by table, with the features to blame.
        watched: name of the metric of `eval_data` that decides which state is the best; empty without evaluations.
        best: its best value in the run so far; None if there is none.
        best_step: global step of that.
        stopped_early: why training ended before its data, by `TrainerOptions.patience`; empty if it did not.
    """

    rows: int
    seconds: float
    rows_per_second: float
    steps: int
    global_step: int
    progressive: MetricsResult
    training: MetricsResult
    history: MetricsResult
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
    nothing_left: str = ""
    non_finite: list[NonFiniteRows] = []
    watched: str = ""
    best: float | None = None
    best_step: int | None = None
    stopped_early: str = ""

    @property
    def scored(self) -> list[tuple[str, MetricsResult]]:
        """The metrics of the training logits of this call that have rows, by name; `progressive` if there are none."""
        scored = [(name, metrics) for name in ("progressive", "training") if (metrics := getattr(self, name)).rows]
        return scored or [("progressive", self.progressive)]

    def __str__(self) -> str:
        """Returns a summary of three lines, and more if rows were not finite or it stopped early; `repr` has all."""
        lines = [
            f"Trained {self.rows} rows in {self.seconds:.1f} s ({self.rows_per_second:.0f} rows/s), "
            f"{self.steps} steps; global step {self.global_step}",
            "; ".join(f"{name} {metrics.summary()}" for name, metrics in self.scored),
            f"{self.stored_rows} embedding rows stored ({self.stored_bytes / 1e6:.1f} MB)",
        ]
        if self.evaluation is not None:
            lines[1] += f"; evaluation {self.evaluation.summary()}"
        for name in ("non_finite_rows", "released_batches", "lost_batches", "lost_gradients", "failures"):
            if count := getattr(self, name):
                lines[2] += f"; {name} {count}"
        if self.non_finite:
            lines.append(f"not finite in this call: {named(self.non_finite)}")
        if self.stopped_early:
            lines.append(self.stopped_early)
        return "\n".join(lines)


class TrainedRows(NamedTuple):
    """Rows that one NN worker, or all of them, trained in a call, and the seconds it took."""

    rows: int
    seconds: float


class _Unscored(NamedTuple):
    """Logits, labels and loss of a batch on their way to the host, the batch's number, and the time of its lookup."""

    arrays: Callable[[], dict[str, Floats]]
    dense: torch.Tensor
    day: Int32Array | None
    step: int
    epoch: int
    number: int
    looked_up: float


class FitProgress:
    """Counts and scores the batches of one call of `fit`, shows its progress, and makes its result.

    Args:
        state: has the position in the data and the metrics.
        network: its replicas gather counts; its optimizer may count what it sends.
        embeddings: has the counts of lookups and gradients.
        monitor: receives rows and losses.
        finite: receives which batches had finite logits.
        staging: moves logits to the host.
        options: has the live line.
        trackers: receive metrics; the first NN worker has them.
        callbacks: receive events; the first NN worker has them.
    """

    def __init__(
        self,
        state: TrainingState,
        network: DenseStep,
        embeddings: EmbeddingCollection,
        monitor: Monitor,
        finite: FiniteState,
        staging: Staging,
        options: TrainerOptions,
        trackers: Sequence[Tracker] = (),
        callbacks: Callbacks | None = None,
    ) -> None:
        self._state = state
        self._network = network
        self._embeddings = embeddings
        self._monitor = monitor
        self._finite = finite
        self._staging = staging
        self._options = options
        self._first_step = state.global_step
        embeddings.push_log.non_finite.clear()
        self._began = time.monotonic()
        self._rows = 0
        self._batches = 0
        self._loss = float("nan")
        self._seconds = 0.0
        self._unscored: _Unscored | None = None
        self.data_checks = DataChecks(state, allow_empty=options.allow_empty)
        self._shown, self._rate = (self._began, 0), 0.0
        """Time of the last snapshot and the rows trained until then; rows per second, 0 before the first row."""
        self._found = (0, 0)
        """Lookups and hits until the last snapshot."""
        self._auc, self._auc_seen, self._auc_until = math.nan, False, 0.0
        """The last AUC of the call, whether it is of rows seen before, and the time until which it is shown."""
        self._others: Mapping[str, float] = {}
        """The last metrics of labels that are not binary."""
        self._recorder = RunRecorder(options, state, embeddings)
        self._on_rank0 = embeddings.connection.rank == 0
        self._trackers = trackers if self._on_rank0 else ()
        self._callbacks = callbacks or Callbacks(())
        self._records = bool(self._trackers or self._callbacks or self._recorder.active)
        if self._records:
            state.scores.begin_window()
        self._held_out = ""
        """The last evaluation, for the live line."""
        self.line = LiveLine(options.progress and self._on_rank0)
        self.on_scored: Callable[[Floats], None] | None = None
        """Receives the logits of each batch, `[batch, labels]`."""

    @contextlib.contextmanager
    def tracked(self, declared: Declared) -> Iterator[None]:
        """Opens the run in all trackers, and ends it after the block.

        Raises:
            MissingExtraError: a package is not installed.
            ConfigError: a tracker cannot open the run.
        """
        optimizer = self._network.optimizer
        parameters = {
            "model": type(self._network.model).__name__,
            "optimizer": type(optimizer).__name__,
            "lr": str(optimizer.param_groups[0]["lr"]),
            "embedding_optimizer": str(declared.embedding_optimizer),
            "mode": str(declared.mode),
            "seed": str(declared.options.seed),
        }
        failed = True
        started: list[Tracker] = []
        try:
            for tracker in self._trackers:
                tracker.begin(parameters)
                started.append(tracker)
            yield
            failed = False
        except NNWorkersChangeError:
            failed = False  # Training continues, in another run of the tracker.
            raise
        finally:
            for tracker in started:
                tracker.end(failed)

    def trained(self, step: int, batch: PreparedBatch, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Counts a batch of global step `step`, scores it, and shows progress when that is due.

        On a GPU the batch before is scored, as this one may still be computing.

        Raises:
            DivergedError: logits or loss of the batch that is scored are not finite.
        """
        if batch.dummy:
            return
        self._rows += len(batch)
        self._batches += 1
        self._finite.trained(batch, self._state.epoch)
        self.score_rest()
        tensors = {"logits": logits, "labels": batch.labels, "loss": loss.float()}
        if batch.weights is not None:
            tensors["weights"] = batch.weights
        arrays = self._staging.to_host(tensors)
        self._unscored = _Unscored(
            arrays, batch.dense, batch.day, step, self._state.epoch, batch.number, batch.looked_up
        )
        if logits.device.type == "cpu":
            self.score_rest()
        self._recorder.trained(batch)
        recorded = _due(self._batches) and self._records
        shown = self.line.due()
        if recorded or shown:
            snapshot = self._snapshot()  # One for both: its rate is that since the last one.
            if recorded:
                self._record(snapshot)
            if shown:
                self.line.show(snapshot)

    def evaluated(self, result: MetricsResult, watched: WatchedMetric, value: float) -> None:
        """Shows and records an evaluation on held-out data, once `TrainingState.evaluations` has it."""
        step = self._state.global_step
        best = self._state.evaluations.is_best(step)
        self._held_out = f"held-out {watched.title} {value:.4f} at step {step:,}{', best' if best else ''}"
        self._monitor.evaluated(watched.name, value)
        if not self._on_rank0:
            return
        self._log({**_tracked(result), f"eval/{watched.name}": value}, step)
        self._recorder.evaluated(watched.name, value, best=best)
        if self.line.shown:
            self.line.show(self._snapshot())
        self._callbacks.call(lambda callback: callback.on_evaluation(step, result), "on_evaluation", step=step)

    def score_rest(self) -> None:
        """Scores the batch whose logits are still on their way to the host, if there is one."""
        if self._unscored is None:
            return
        done, self._unscored = self._unscored, None
        arrays = done.arrays()
        self._loss = float(arrays["loss"])
        where = f"Global step {done.step} (batch {done.number} of epoch {done.epoch}, counted from 0)"
        fields = {"step": done.step, "epoch": done.epoch, "batch": done.number}
        labels, weights = arrays["labels"], arrays.get("weights")
        explain = functools.partial(extreme_inputs, self._embeddings.schema, done.dense, labels, weights)
        check_finite(where, arrays["logits"], self._loss, explain, **fields)
        self._finite.scored(done.looked_up)
        self._state.scores.update(arrays["logits"], labels, done.day, done.epoch, weights)
        if self.on_scored is not None:
            self.on_scored(arrays["logits"])
        self._monitor.trained(len(labels), self._loss)

    @property
    def has_non_finite(self) -> bool:
        """Whether gradients of this call were not finite, as far as this NN worker knows. See `nonfinite`."""
        return bool(self._embeddings.push_log.non_finite.found())

    def check_gradients(self) -> None:
        """Raises DivergedError if gradients of this call were not finite. Blocks until all NN workers have called it.

        Raises:
            DivergedError: on all NN workers; the message names tables and features.
        """
        non_finite = self._non_finite()
        if non_finite:
            raise DivergedError(
                f"Gradients are not finite, though the logits are: {named(non_finite)}. These rows stay as they were. "
                'Look at how the model uses these features, or lower the learning rates; with nonfinite = "warn" '
                "training goes on without these gradients.",
                tables=[each.table for each in non_finite],
                features=[name for each in non_finite for name in each.features],
                step=non_finite[0].step,
            )

    def _non_finite(self) -> list[NonFiniteRows]:
        """Returns the non-finite rows of this call that all NN workers know of, by table."""
        own_rows = msgspec.json.encode(self._embeddings.push_log.non_finite.found())
        return merged(
            [msgspec.json.decode(part, type=list[NonFiniteRows]) for part in self._network.replicas.gather(own_rows)]
        )

    @property
    def trained_here(self) -> TrainedRows:
        """Rows that this NN worker has trained in this call so far."""
        return TrainedRows(self._rows, self._seconds or time.monotonic() - self._began)

    def trained_by_all(self) -> TrainedRows:
        """Returns the rows of all NN workers, and the longest of their times. Blocks until all have called it."""
        payloads = self._network.replicas.gather(msgspec.json.encode(self.trained_here))
        trained = [msgspec.json.decode(payload, type=TrainedRows) for payload in payloads]
        return TrainedRows(sum(t.rows for t in trained), max(t.seconds for t in trained))

    def close(self) -> None:
        """Stops the clock, tells trackers the last metrics, and writes the record of the run so far."""
        self._seconds = time.monotonic() - self._began
        if self._trackers or self._callbacks:
            self._auc_until = 0.0
            self._record(self._snapshot())
        scores = self._state.scores
        self._recorder.save(scores.of_call, seen=scores.seen)

    def _snapshot(self) -> Snapshot:
        self.score_rest()
        now = time.monotonic()
        before, rows_before = self._shown
        self._shown = (now, self._rows)
        if self._rows > rows_before:  # After an evaluation there may be none.
            self._rate = (self._rows - rows_before) / max(now - before, 1e-9)
        tables = self._embeddings.statistics().values()
        before_lookups, before_hits = self._found
        self._found = lookups, hits = sum(t["lookups"] for t in tables), sum(t["hits"] for t in tables)
        return Snapshot(
            step=self._state.global_step,
            rows=self._rows,
            rows_per_second=self._rate,
            loss=self._loss,
            auc=self._auc_of_call(),
            stored_rows=sum(t["rows"] for t in tables),
            staleness=self._embeddings.staleness.mean,
            hit_rate=(hits - before_hits) / (lookups - before_lookups) if lookups > before_lookups else math.nan,
            seen=self._state.scores.seen,
            others=self._others,
            held_out=self._held_out,
        )

    def _auc_of_call(self) -> float:
        """Returns the AUC of this call so far, at most some seconds old: it takes up to 1 % of the time."""
        began, scores = time.monotonic(), self._state.scores
        if began >= self._auc_until or scores.seen != self._auc_seen:
            self._auc, self._auc_seen = scores.of_call.auc(), scores.seen
            self._others = scores.of_call.headlines()
            now = time.monotonic()
            self._auc_until = now + 100 * (now - began)
        return self._auc

    def _record(self, snapshot: Snapshot) -> None:
        window = self._state.scores.end_window()
        self._recorder.add(snapshot, window)
        if self._trackers or self._callbacks:
            self._track(snapshot, window)

    def _track(self, snapshot: Snapshot, window: WindowScores) -> None:
        names = ("rows_per_second", "loss", "stored_rows", "staleness")
        values = {f"train/{name}": float(getattr(snapshot, name)) for name in names}
        kind = "training" if snapshot.seen else "progressive"
        if not snapshot.others or not math.isnan(snapshot.auc):
            values |= {f"train/{kind}_auc": snapshot.auc, f"train/{kind}_auc_of_window": window.auc}
        for suffix, others in (("", snapshot.others), ("_of_window", window.others)):
            for metric, value in others.items():
                label, _, name = metric.rpartition(":")
                values[f"train/{kind}_{name}{suffix}/{label}"] = value
        # APMSqueeze has statistics of its communication.
        statistics: dict[str, Any] = getattr(self._network.optimizer, "statistics", dict)()
        for name, value in statistics.items():
            values[f"optimizer/{name}"] = float(value == "compressed") if name == "phase" else float(value)
        self._log(values, snapshot.step)
        step = snapshot.step
        self._callbacks.deliver(step)
        self._callbacks.call(lambda callback: callback.on_progress(step, values), "on_progress", step=step)

    def _log(self, values: Mapping[str, float], step: int) -> None:
        for tracker in self._trackers:
            tracker.log(values, step)

    def result(
        self,
        evaluation: MetricsResult | None,
        asynchronous: TokenReport | None,
        mode_choices: list[ModeChoice],
        stopped_early: str = "",
    ) -> FitResult:
        """Returns the result of the call. Blocks until all NN workers have called it."""
        step, seen_by = self._state.global_step, self._state.evaluations
        rows, seconds = self.trained_by_all()
        so_far = self._state.totals()
        pushed = so_far.pushed
        of_tables = self._embeddings.statistics()
        tables = of_tables.values()
        scores, gather = self._state.scores, self._network.replicas.gather
        progressive, training = merged_metrics(scores.progressive, gather), merged_metrics(scores.training, gather)
        history = merged_metrics(scores.history(), gather)
        non_finite = self._non_finite()
        seen = not progressive.rows and training.rows > 0
        self._recorder.complete(training if seen else progressive, seen, of_tables, evaluation, non_finite)
        per_ps = [server.row_staleness() for server in self._embeddings.connection.servers]
        return FitResult(
            rows=rows,
            seconds=seconds,
            rows_per_second=rows / seconds if seconds else 0.0,
            steps=step - self._first_step,
            global_step=step,
            progressive=progressive.result(),
            training=training.result(),
            history=history.result(),
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
            row_staleness_mean=sum(s.staleness_sum for s in per_ps) / max(1, sum(s.rows - s.stale for s in per_ps)),
            row_staleness_max=max(s.staleness_max for s in per_ps),
            asynchronous=asynchronous,
            mode_choices=mode_choices,
            nothing_left=self.data_checks.nothing_left,
            non_finite=non_finite,
            watched=seen_by.metric,
            best=seen_by.best,
            best_step=seen_by.best_step,
            stopped_early=stopped_early,
        )


def _tracked(evaluation: MetricsResult) -> dict[str, float]:
    """Returns the values that trackers get: means over binary labels, and metrics of each other label."""
    labels = evaluation.labels
    names = ("auc", "log_loss", "calibration") if any(isinstance(each, Figures) for each in labels.values()) else ()
    others = {label: known(each) for label, each in labels.items() if not isinstance(each, Figures)}
    return {f"eval/{name}": float(getattr(evaluation, name)) for name in names} | {
        f"eval/{name}/{label}": value for label, of in others.items() for name, value in of.items()
    }


def _due(batches: int) -> bool:
    return batches % LOG_EVERY == 1 or (batches < LOG_EVERY and batches.bit_count() == 1)
