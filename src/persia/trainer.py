"""`Trainer`: the wiring of a training run, top to bottom."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from persia import resume
from persia.batching.batch import Batch
from persia.errors import ConfigError
from persia.metrics import Metrics, MetricsResult
from persia.modes import Hybrid, Mode
from persia.nn.collection import CollectionOptions, EmbeddingCollection
from persia.nn.prepared import PreparedBatch
from persia.nn.staging import staging_for
from persia.nn.step import DenseStep, OptimizerFactory, StepOptions
from persia.observe import LiveLine, Snapshot, summary_writer
from persia.options import TrainerOptions
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Cluster, Seekable
from persia.types import Int32Array

__all__ = ["FitResult", "Trainer", "TrainerOptions"]

LOSS_EVERY = 50
"""Steps between two readings of the loss, which make the host wait for the device."""


class FitResult(msgspec.Struct, frozen=True):
    """What a call of `fit` did.

    Attributes:
        rows: samples trained.
        seconds: of the training loop, checkpoints within it included.
        rows_per_second: rows / seconds.
        steps: global steps of this call.
        global_step: global steps in all.
        progressive: metrics of the training logits themselves, each batch scored before it is trained; they and the
            counts below go on from call to call, and over a resume.
        evaluation: metrics on `eval_data` after training, or None.
        staleness_mean: measured, in own steps.
        staleness_max: measured, in own steps.
        stored_rows: rows in the embedding store at the end.
        stored_bytes: memory of the store at the end.
        absent_rows: gradient rows skipped because their id had no row (not admitted, or evicted).
        non_finite_rows: gradient rows dropped because of a NaN or Inf.
        released_batches: batches without a backward pass.
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


class Trainer:
    """Trains, evaluates, saves and resumes a recommender. Not thread-safe; calls block.

    Args:
        model: an `nn.Module`; `model(dense, embeddings)` returns logits `[batch, labels]`. A method
            `loss(logits, labels)` replaces the default, binary cross-entropy.
        schema: the model's input.
        optimizer: makes the dense optimizer: `lambda params: torch.optim.Adam(params, 1e-3)`.
        embedding_optimizer: for tables that declare none.
        mode: `persia.modes.Hybrid("auto")` by default.
        cluster: where the roles run; this process by default.
        options: the rest.

    Raises:
        ConfigError: an argument is not valid; the message names it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        schema: Schema,
        *,
        optimizer: OptimizerFactory,
        embedding_optimizer: EmbeddingOptimizer,
        mode: Mode | None = None,
        cluster: Cluster | None = None,
        options: TrainerOptions | None = None,
    ) -> None:
        self.schema = schema
        self.embedding_optimizer = embedding_optimizer
        self.mode: Mode = mode or Hybrid()
        self.options = options or TrainerOptions()
        if self.options.checkpoint_every_steps is not None and self.options.checkpoint_dir is None:
            raise ConfigError("checkpoint_every_steps needs checkpoint_dir.", field="checkpoint_dir")
        device = staging_for(self._device_name()).device
        self.step = DenseStep(
            model,
            optimizer,
            device,
            StepOptions(
                self.options.schedule,
                self.options.precision,
                self.options.accumulation_steps,
                self.options.clip_norm,
            ),
        )
        self.model = self.step.model
        self.embeddings = EmbeddingCollection(
            schema,
            optimizer=embedding_optimizer,
            mode=self.mode,
            cluster=cluster,
            grad_scaler=self.step.scaler,
            options=CollectionOptions(
                str(device), self.options.seed, self.options.accumulation_steps, self.options.timeout
            ),
        )
        self.metrics = Metrics(list(schema.labels))
        self._finished = False
        self._loaded = False
        self.epoch = 0
        self.position = 0
        """Batches of the current epoch that are trained."""

    @property
    def global_step(self) -> int:
        """Updates so far."""
        return self.embeddings.global_step

    # --- training ---------------------------------------------------------------------------------------------

    def fit(
        self,
        train_data: Iterable[Batch],
        eval_data: Iterable[Batch] | None = None,
        *,
        epochs: int = 1,
        max_steps: int | None = None,
    ) -> FitResult:
        """Trains until `epochs` epochs, or `max_steps` steps of this call, are done.

        A call that was stopped by `max_steps` or an error, or that a checkpoint is from, is continued by the next one,
        where it was; after a call that came to its end the next one begins anew, with other data perhaps.

        Args:
            train_data: a reader of `persia.data`, or any iterable of `persia.Batch` (not a one-shot iterator when
                there are several epochs).
            eval_data: evaluated once, at the end.
            epochs: passes over the data; those before a resume count.
            max_steps: most global steps of this call.

        Raises:
            ConfigError: an argument is not valid.
            DataError: a batch does not fit the schema; earlier batches are trained.
            CheckpointError: a checkpoint could not be written; training state is unharmed.
        """
        if epochs > 1 and isinstance(train_data, Iterator):
            raise ConfigError("train_data is an iterator and cannot be read twice; give a reader or a list.")
        for name, value in (("epochs", epochs), ("max_steps", max_steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} = {value!r}; give a whole number >= 1.", field=name)
        if self._finished:
            self.epoch = self.position = 0
        self._finished = False
        run = _Run(self, max_steps)
        self.model.train()
        self.embeddings.train()
        try:
            with run.line:
                while self.epoch < epochs and not run.finished():
                    source = self._source(train_data)
                    while not run.finished():
                        if self._train_segment(source, run):
                            self.epoch, self.position = self.epoch + 1, 0
                            break
                        run.checkpoint_if_due()
        finally:
            run.close()
        self._finished = self.epoch >= epochs
        if self.options.checkpoint_dir is not None and run.unsaved():
            self.save(self.options.checkpoint_dir)
        evaluation = self.evaluate(eval_data) if eval_data is not None else None
        return run.result(evaluation)

    def evaluate(self, data: Iterable[Batch]) -> MetricsResult:
        """Metrics on data, read-only: the store and the model stay as they are."""
        metrics = Metrics(list(self.schema.labels))
        for batch, logits in self._scored(data):
            metrics.update(logits, batch.labels.cpu().numpy(), batch.day)
        return metrics.result()

    def predict(self, data: Iterable[Batch]) -> Iterator[NDArray[np.float32]]:
        """Yields probabilities float32 `[batch, labels]`, batch by batch; read-only."""
        for _, logits in self._scored(data):
            yield (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save(self, directory: str) -> str:
        """Writes a checkpoint `directory/step-N` and points `directory/LATEST` to it. Blocks.

        Call it between two calls of `fit`, never while a `prefetch` loop is under way.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: it could not be written; older checkpoints are intact.
        """
        return resume.save(self, directory)

    def load(self, directory: str) -> None:
        """Takes everything from a checkpoint, the latest of `directory`; all is checked before anything is changed.

        Raises:
            CheckpointError: it is damaged, or of another schema, model or optimizer.
        """
        resume.load(self, directory)
        self._loaded = True

    @classmethod
    def resume(
        cls,
        directory: str,
        model: torch.nn.Module,
        *,
        optimizer: OptimizerFactory,
        cluster: Cluster | None = None,
        options: TrainerOptions | None = None,
    ) -> Trainer:
        """A trainer that continues from a checkpoint: schema, mode, embedding optimizer and options are in it.

        Args:
            directory: where `save` wrote.
            model: the same architecture; its parameters are overwritten.
            optimizer: as for the constructor; its state is overwritten.
            cluster: where the roles run.
            options: instead of the saved ones.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer.
        """
        recorded = resume.recorded(directory)
        trainer = cls(
            model,
            recorded.schema,
            optimizer=optimizer,
            embedding_optimizer=recorded.embedding_optimizer,
            mode=recorded.mode,
            cluster=cluster,
            options=options or recorded.options,
        )
        trainer.load(directory)
        return trainer

    # --- inside -----------------------------------------------------------------------------------------------

    def _train_segment(self, source: Iterator[Batch], run: _Run) -> bool:
        """Trains to the next checkpoint or end; nothing is in flight afterwards. Returns whether the source ended."""
        wanted = run.batches_to_boundary()
        drawn = 0
        try:
            with contextlib.closing(self.embeddings.prefetch(itertools.islice(source, wanted))) as batches:  # type: ignore[type-var]
                for batch in batches:
                    logits, loss = self.step.train(batch, self.embeddings(batch))
                    run.score(logits, batch)
                    drawn += 1
                    self.position += 1
                    run.trained(len(batch), loss)
        finally:
            # Also after an error: the embeddings have applied what was computed, the network does likewise.
            self.step.finish()
            run.score_rest()
        return wanted is None or drawn < wanted

    def _source(self, data: Iterable[Batch]) -> Iterator[Batch]:
        """The rest of the current epoch; readers seek, other iterables are read and skipped."""
        loaded, self._loaded = self._loaded, False
        if isinstance(data, Seekable):
            return data.batches(self.epoch, self.position)
        if isinstance(data, Iterator) and not loaded:
            return data  # It is where the call before left it.
        return itertools.islice(iter(data), self.position, None)

    def _scored(self, data: Iterable[Batch]) -> Iterator[tuple[PreparedBatch, NDArray[np.float32]]]:
        """Batches and their logits. Between two of them the caller finds model and collection in the mode they had."""
        with self._reading():
            batches = self.embeddings.prefetch(data)
        with contextlib.closing(batches):  # type: ignore[type-var]
            for batch in batches:
                with self._reading():
                    logits = self.step.logits(batch, self.embeddings(batch)).cpu().numpy()
                yield batch, logits

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """Evaluation mode, for the time of the block."""
        modes = [(module, module.training) for module in (self.model, self.embeddings)]
        self.model.eval()
        self.embeddings.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.train(training)

    def _device_name(self) -> str:
        if self.options.device != "auto":
            return self.options.device
        return "cuda" if torch.cuda.is_available() else "cpu"


class _Run:
    """The bookkeeping of one call of `fit`."""

    def __init__(self, trainer: Trainer, max_steps: int | None) -> None:
        self._trainer = trainer
        self._first_step = trainer.global_step
        self._last_step = None if max_steps is None else trainer.global_step + max_steps
        self._next_checkpoint = self._after(trainer.options.checkpoint_every_steps)
        self._saved_step: int | None = None
        self._began = time.monotonic()
        self._rows = 0
        self._batches = 0
        self._loss = float("nan")
        self._seconds = 0.0
        self._unscored: tuple[torch.Tensor, torch.Tensor, Int32Array | None] | None = None
        self._shown = (self._began, 0)
        self.line = LiveLine(trainer.options.progress)
        self._writer = summary_writer(trainer.options.log_dir) if trainer.options.log_dir else None

    def finished(self) -> bool:
        """Whether `max_steps` is reached."""
        return self._last_step is not None and self._trainer.global_step >= self._last_step

    def unsaved(self) -> bool:
        """Whether something was trained since the last checkpoint of this call."""
        return self._saved_step != self._trainer.global_step

    def batches_to_boundary(self) -> int | None:
        """How many batches may be trained before a checkpoint is due or the call ends; None for any number."""
        bounds = [b for b in (self._last_step, self._next_checkpoint) if b is not None]
        if not bounds:
            return None
        return (min(bounds) - self._trainer.global_step) * self._trainer.options.accumulation_steps

    def checkpoint_if_due(self) -> None:
        trainer = self._trainer
        if self._next_checkpoint is not None and trainer.global_step >= self._next_checkpoint:
            assert trainer.options.checkpoint_dir is not None
            trainer.save(trainer.options.checkpoint_dir)
            self._saved_step = trainer.global_step
            self._next_checkpoint = self._after(trainer.options.checkpoint_every_steps)

    def trained(self, rows: int, loss: torch.Tensor) -> None:
        """Counts a batch and shows progress when it is time to."""
        self._rows += rows
        self._batches += 1
        if self._batches % LOSS_EVERY == 1:
            self._loss = float(loss)
            if self._writer is not None:
                self._write(self._writer, self._snapshot())
        if self.line.due():
            self.line.show(self._snapshot())

    def score(self, logits: torch.Tensor, batch: PreparedBatch) -> None:
        """Counts the logits of the batch before; those of this one may still be computing on the device."""
        self.score_rest()
        self._unscored = (logits, batch.labels, batch.day)

    def score_rest(self) -> None:
        """Counts the logits that are left."""
        if self._unscored is not None:
            logits, labels, day = self._unscored
            self._unscored = None
            self._trainer.metrics.update(logits.cpu().numpy(), labels.cpu().numpy(), day)

    def close(self) -> None:
        """Stops the clock."""
        self._seconds = time.monotonic() - self._began
        if self._writer is not None:
            self._write(self._writer, self._snapshot())
            self._writer.close()

    def _after(self, every: int | None) -> int | None:
        return None if every is None else self._trainer.global_step + every

    def _snapshot(self) -> Snapshot:
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

    @staticmethod
    def _write(writer: Any, snapshot: Snapshot) -> None:
        for name in ("rows_per_second", "loss", "auc", "stored_rows", "staleness"):
            writer.add_scalar(f"train/{name}", getattr(snapshot, name), snapshot.step)

    def result(self, evaluation: MetricsResult | None) -> FitResult:
        trainer = self._trainer
        seconds = self._seconds
        staleness = trainer.embeddings.staleness
        pushed = trainer.embeddings.pushed
        tables = trainer.embeddings.statistics().values()
        return FitResult(
            rows=self._rows,
            seconds=seconds,
            rows_per_second=self._rows / seconds if seconds else 0.0,
            steps=trainer.global_step - self._first_step,
            global_step=trainer.global_step,
            progressive=trainer.metrics.result(),
            evaluation=evaluation,
            staleness_mean=staleness.mean,
            staleness_max=staleness.max,
            stored_rows=sum(t["rows"] for t in tables),
            stored_bytes=sum(t["bytes"] for t in tables),
            absent_rows=pushed.absent,
            non_finite_rows=pushed.non_finite,
            released_batches=pushed.released,
        )
