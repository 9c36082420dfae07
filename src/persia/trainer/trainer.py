"""`Trainer`: the wiring of a training run, top to bottom."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from types import NoneType

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.dense import AllReduce, AllReduceOptions
from persia.dense.torch_threads import choose_torch_threads
from persia.errors import ConfigError, DataError
from persia.metrics import Metrics, MetricsResult, merged_metrics
from persia.modes import Auto, Hybrid, Mode, Sync
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep, OptimizerFactory, StepOptions
from persia.nn.options import CollectionOptions
from persia.nn.prepared import PreparedBatch
from persia.nn.transfer import staging_for
from persia.optim import APMSqueeze
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Cluster, ProcessCluster
from persia.trainer import checkpointing, driver, loading, signals
from persia.trainer.monitor import Monitor
from persia.trainer.options import TrainerOptions
from persia.trainer.phases import ModeSwitch, Phases, check_mode
from persia.trainer.progress import FitProgress, FitResult, TrainedRows, check_finite
from persia.trainer.sources import BatchSource, source_of
from persia.trainer.state import TrainingState

__all__ = ["FitResult", "Trainer", "TrainerOptions"]


class Trainer:
    """Trains, evaluates, saves and resumes a recommender. Not thread-safe; calls block.

    With several NN workers each has a Trainer of its own, in a process where torch.distributed is initialised; all make
    the same calls. They train one network: batches go to them in turn, gradients are averaged by rows, and results are
    the same on each.

    Args:
        model: an `nn.Module`; `model(dense, embeddings)` returns logits `[batch, labels]`. A method
            `loss(logits, labels)` replaces the default, binary cross-entropy.
        schema: the model's input.
        optimizer: makes the dense optimizer: `lambda params: torch.optim.Adam(params, 1e-3)`.
        embedding_optimizer: for tables that declare none.
        mode: `persia.modes.Hybrid("auto")` by default; `persia.modes.Auto` to go to and fro between two.
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
        mode: Mode | Auto | None = None,
        cluster: Cluster | None = None,
        options: TrainerOptions | None = None,
    ) -> None:
        self.schema = schema
        self.embedding_optimizer = embedding_optimizer
        self.optimizer_factory = optimizer
        self.declared_mode: Mode | Auto = mode or Hybrid()
        self.auto = mode if isinstance(mode, Auto) else None
        first_mode: Mode = mode.sync if isinstance(mode, Auto) else mode or Hybrid()
        self.cluster = cluster
        self.options = options or TrainerOptions()
        for name in ("checkpoint_every_steps", "checkpoint_every_seconds", "keep_best"):
            if getattr(self.options, name) is not None and self.options.checkpoint_dir is None:
                raise ConfigError(f"{name} needs checkpoint_dir.", field="checkpoint_dir")
        self._staging = staging_for(self._device_name())
        device = self._staging.device
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
            mode=first_mode,
            cluster=cluster,
            grad_scaler=self.step.scaler,
            options=CollectionOptions(
                str(device), self.options.seed, self.options.accumulation_steps, self.options.timeout
            ),
        )
        connection = self.embeddings.connection
        if device.type == "cpu":
            choose_torch_threads(connection.nn_workers if connection.replicas is not None else 1)
        if connection.replicas is not None:
            self.step.replicas = connection.replicas(self.model, self.options.timeout)
        elif connection.nn_workers > 1:
            average = not isinstance(self.step.optimizer, APMSqueeze)  # It does by itself.
            self.step.replicas = AllReduce(
                self.model, connection.nn_workers, AllReduceOptions(self.options.timeout, average=average)
            )
        self.state = TrainingState(self.step, self.embeddings, schema.labels, first_mode, self.options.seed)
        self.segments = Phases(self)
        self.source: BatchSource
        if self.auto is not None and self.options.mode_schedule:
            raise ConfigError("mode_schedule and the mode Auto cannot both say when to switch.", field="mode_schedule")
        either = [self.auto.asynchronous] if self.auto is not None else []
        for candidate in (self.mode, *either, *(m for _, m in self.options.mode_schedule)):
            check_mode(self, candidate, 0)
        self.trained_here = TrainedRows(0, 0.0)
        """By this NN worker in the last call of `fit`."""
        self.resume_line: Callable[[str, int], str] = self._resume_line
        """Code that resumes from a directory at a step, printed after a signal; the command line has its own."""
        self.saving = checkpointing.Checkpointing()
        self.watch = Monitor(self.state, self.step, self.embeddings, self.saving)
        if connection.observe is not None:
            connection.observe(self.watch.observe)
        self._loaded = False
        self._stopping = False

    @property
    def global_step(self) -> int:
        """Updates so far."""
        return self.embeddings.global_step

    @property
    def epoch(self) -> int:
        """Epochs that are done."""
        return self.state.epoch

    @property
    def position(self) -> int:
        """Batches of the current epoch that are trained, by all NN workers together."""
        return self.state.position

    @property
    def mode(self) -> Mode:
        """The mode at present."""
        return self.state.mode

    @property
    def metrics(self) -> Metrics:
        """Progressive metrics of this NN worker."""
        return self.state.metrics

    @property
    def finished(self) -> bool:
        """Whether the last call of `fit` came to the end of its epochs."""
        return self.state.finished

    @property
    def switches(self) -> list[ModeSwitch]:
        """Changes of mode so far."""
        return self.segments.switches

    # --- training ---------------------------------------------------------------------------------------------

    def switch(self, mode: Mode) -> None:
        """Another mode from the next step boundary on; hyper-parameters, rows and optimizer state stay.

        Returns at once, and may be called from any thread, also while `fit` runs; with several NN workers, on one of
        them. Before or between calls of `fit`, the next one begins with it. It ends the rule of an `Auto`.

        Raises:
            ConfigError: the cluster, or this trainer's options, cannot run the mode; training goes on as before.
            PersiaError: another switch is under way.
        """
        check_mode(self, mode, self.state.local_batch)
        tokens = self.embeddings.connection.tokens
        if tokens is None:
            raise ConfigError("This cluster cannot change its mode.", field="mode")
        tokens.request(mode)
        self.step.replicas.stop = True

    def stop(self) -> None:
        """Lets the call of `fit` that is under way end after its step, as `max_steps` does: it saves and returns.

        Returns at once, and may be called from any thread, or from a signal handler; with several NN workers, on one of
        them. The next call of `fit` goes on.
        """
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether the present or last call of `fit` was told to stop."""
        halted = self.embeddings.connection.halted
        return self._stopping or (halted is not None and halted())

    def fit(
        self,
        train_data: Iterable[Batch] | None,
        eval_data: Iterable[Batch] | None = None,
        *,
        epochs: int = 1,
        max_steps: int | None = None,
    ) -> FitResult:
        """Trains until `epochs` epochs, or `max_steps` steps of this call, are done.

        A call that was stopped by `max_steps` or an error, or that a checkpoint is from, is continued by the next one,
        where it was; after a call that came to its end the next one begins anew, with other data perhaps.

        Signals: the first SIGINT (Ctrl-C) or SIGTERM ends the call after its step. It saves if there is a
        `checkpoint_dir`, prints which step is kept and how to resume, and raises KeyboardInterrupt, or SystemExit(143)
        for SIGTERM; a later call goes on. A second signal raises at once. Handlers are installed in the main thread
        only, for the time of the call, and not in place of a program's own ones, which may call `stop`.

        Args:
            train_data: a reader of `persia.data`, or any iterable of `persia.Batch` (not a one-shot iterator when
                there are several epochs, or several NN workers). None where the cluster has data loaders, which read.
            eval_data: evaluated once, at the end.
            epochs: passes over the data; those before a resume count.
            max_steps: most global steps of this call.

        Raises:
            ConfigError: an argument is not valid.
            DataError: a batch does not fit the schema; earlier batches are trained. Or there is no batch at all (see
                `TrainerOptions.allow_empty`).
            DivergedError: logits or loss are not finite. The network has had that batch's gradient, on a GPU that of
                one more; no checkpoint has been written since.
            CheckpointError: a checkpoint could not be written; training state is unharmed.
            DeadlineError: another role or NN worker was late; it says which.
            RoleDiedError: processes of the cluster have died, more than are made good (`TrainerOptions.max_failures`):
                the message tells which, when, and what was tried. The network here is as it was before the call.
        """
        connection = self.embeddings.connection
        if (epochs > 1 or connection.nn_workers > 1) and isinstance(train_data, Iterator):
            raise ConfigError(
                "train_data is an iterator and cannot be read twice; give a reader or a list.", field="train_data"
            )
        if train_data is None and connection.loader is None:
            raise ConfigError("train_data is None, and the cluster has no data loaders.", field="train_data")
        for name, value in (("epochs", epochs), ("max_steps", max_steps)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ConfigError(f"{name} = {value!r}; give a whole number >= 1.", field=name)
        self._stopping = False
        if isinstance(self.cluster, ProcessCluster) and train_data is not None:
            cluster, data, bounds = self.cluster, train_data, {"epochs": epochs, "max_steps": max_steps}
            return self._stoppable(lambda: driver.fit(self, cluster, data, eval_data, bounds))
        return self._stoppable(lambda: self.fit_here(train_data, eval_data, epochs, max_steps))

    def fit_here(
        self, train_data: Iterable[Batch] | None, eval_data: Iterable[Batch] | None, epochs: int, max_steps: int | None
    ) -> FitResult:
        """Trains on this NN worker; the arguments of `fit` have been checked."""
        connection = self.embeddings.connection
        self.segments.begin(train_data, self.finished)
        if self.finished:
            self.state.epoch = self.state.position = 0
        self.state.finished = False
        if self.options.keep_best is not None and eval_data is None:
            raise ConfigError("keep_best needs eval_data.", field="eval_data")
        run = FitProgress(self, self._staging, max_steps)
        self.segments.begin_auto()
        self.model.train()
        self.embeddings.train()

        def evaluate() -> MetricsResult | None:
            return self._evaluated(run, eval_data)

        try:
            with run.line:
                while self.epoch < epochs and not run.finished():
                    self.source = source_of(train_data, self.state, connection, self.step.replicas, loaded=self._loaded)
                    self._loaded = False
                    while not run.finished():
                        if self.segments.follow(run):
                            if run.keeps:
                                driver.keep(self, run)  # A death must not bring the mode of before back.
                            self.segments.followed()
                        if ended := self.segments.train(run):
                            run.check_pass()
                            self.state.epoch, self.state.position = self.epoch + 1, 0
                        self.segments.check_others()
                        if run.told_to_stop() or ended:
                            break
                        if run.checkpoints.due() and checkpointing.begin_periodic(self, evaluate):
                            run.saved()
                        if run.snapshots.due():
                            driver.keep(self, run)
        except Exception:
            with contextlib.suppress(Exception):  # What is raised says more than a checkpoint that failed as well.
                self.saving.wait()
            raise
        finally:
            run.close()
            self.trained_here = run.progress_here
        run.check_trained(epochs)
        if self.step.replicas.run_on_rank0(lambda: checkpointing.await_periodic(self), bool):
            run.saved(False)
        evaluation = None
        try:
            if self.options.keep_best is not None:
                evaluation = evaluate()
        finally:  # Also if it cannot be evaluated.
            if self.options.checkpoint_dir is not None and run.unsaved():
                last, moment = self.options.checkpoint_dir, self._moment(checkpointing.score_of(self, evaluation))
                self.step.replicas.run_on_rank0(lambda: self.saving.save_last(self, last, moment), str)
        self.state.finished = (
            self.epoch >= epochs
        )  # Not before it is saved: else the next call would train the epoch again.
        self.step.replicas.settle()
        return run.result(evaluation or evaluate())

    def evaluate(self, data: Iterable[Batch]) -> MetricsResult:
        """Metrics on data, read-only: the store and the model stay as they are.

        Several NN workers score the batches in turn, and all return the metrics of all.

        Raises:
            DataError: a batch does not fit the schema, or has no labels.
            DivergedError: logits are not finite.
        """
        metrics = Metrics(list(self.schema.labels))
        rank, nn_workers = self.embeddings.connection.rank, self.embeddings.connection.nn_workers
        mine = itertools.islice(iter(data), rank, None, nn_workers) if nn_workers > 1 else data
        for number, (batch, logits) in enumerate(self._scored(mine)):
            number = rank + number * nn_workers
            if not batch.labels.shape[1]:
                raise DataError(
                    f"Batch {number} of the data to evaluate has no labels. Use `predict` for data without labels; or, "
                    "if the source has some, leave `require_labels=False` out.",
                    batch=number,
                )
            check_finite(f"Batch {number} of the data to evaluate", logits, batch=number)
            metrics.update(logits, batch.labels.cpu().numpy(), batch.day)
        return merged_metrics(metrics, self.step.replicas.gather).result()

    def predict(self, data: Iterable[Batch]) -> Iterator[NDArray[np.float32]]:
        """Yields probabilities float32 `[batch, labels]`, batch by batch; read-only. The data need no labels.

        They come in the order of the data: a reader with `shuffle_rows` gives its rows shuffled.
        """
        for _, logits in self._scored(data):
            yield (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> str:
        """Writes a checkpoint `directory/step-N` and points `directory/LATEST` to it. Blocks.

        Call it between two calls of `fit`, never while a `prefetch` loop is under way. With several NN workers all call
        it, and the first one writes.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: it could not be written; older checkpoints are intact.
        """
        path, moment = os.fspath(directory), self._moment(None)
        return self.step.replicas.run_on_rank0(lambda: self.saving.save(self, path, moment), str)

    def load(self, directory: str, *, step: int | None = None, new_optimizer: bool = False) -> None:
        """Takes everything from a checkpoint of `directory`; all is checked before anything is changed.

        The number of embedding PSs, their capacities and their admission may be others than those that wrote it.

        Args:
            directory: where `save` wrote.
            step: the step to load instead of the latest.
            new_optimizer: let the optimizer of the network, or of tables, be another one than in the checkpoint; its
                state begins anew, and a warning says so.

        Raises:
            CheckpointError: it is damaged, or of another schema, model or optimizer.
        """
        replicas = self.step.replicas
        options = loading.LoadOptions(step, new_optimizer)
        replicas.run_on_rank0(lambda: loading.load(self, directory, options), NoneType)
        if self.embeddings.connection.rank > 0:
            loading.load(self, directory, options, first=False)
        replicas.gather(b"")
        self._loaded = True

    def load_rows(
        self, directory: str, tables: Iterable[str] | None = None, *, step: int | None = None, state: bool = True
    ) -> dict[str, loading.LoadedTable]:
        """Takes embedding rows from a checkpoint, to begin with those of another model; nothing else changes.

        Rows that are there already are replaced where the checkpoint has the same ids. With several NN workers only
        the first one calls it.

        Args:
            directory: where a checkpoint is.
            tables: which tables; None for those that both the checkpoint and this model have.
            step: the step to load instead of the latest.
            state: also take the optimizer's state, where the table has the same optimizer in the checkpoint; otherwise
                it begins anew.

        Returns:
            By table, how many rows, and whether with the optimizer's state.

        Raises:
            CheckpointError: it is damaged, or a table is missing or has another dim.
        """
        return loading.load_rows(self, directory, tables, step, state)

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
        recorded = loading.recorded(directory)
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

    def _evaluated(self, run: FitProgress, data: Iterable[Batch] | None) -> MetricsResult | None:
        """An evaluation in `fit`; None if there are no data, or it is told to stop."""
        if data is None or run.told_to_stop():
            return None
        result = self.evaluate(itertools.takewhile(lambda _: not self.stopping, data))
        return None if run.told_to_stop() else result

    def _stoppable(self, fit: Callable[[], FitResult]) -> FitResult:
        directory, line = self.options.checkpoint_dir, self.resume_line
        return signals.stoppable(
            fit, stop=self.stop, step=lambda: self.global_step, directory=directory, resume_line=line
        )

    def _resume_line(self, directory: str, step: int) -> str:
        cluster = ", cluster=cluster" if self.cluster is not None else ""
        return f"trainer = persia.Trainer.resume({directory!r}, model, optimizer=optimizer{cluster})"

    def _moment(self, score: float | None) -> checkpointing.CheckpointState:
        self.step.replicas.settle()
        consistent = self.options.checkpoint_consistent or isinstance(self.mode, Sync)
        return checkpointing.CheckpointState(self.state.state_dict(), score, consistent)

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
