"""`Trainer`: the parts of a training run, and `Trainer.fit_here`, which runs its phases one after the other."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.batching.validation import check_data
from persia.checks import MAX_STEPS, check_integer, plain
from persia.dense import AllReduce, AllReduceOptions
from persia.dense.torch_threads import choose_torch_threads
from persia.errors import ConfigError
from persia.metrics import Metrics, MetricsResult
from persia.modes import Auto, Hybrid, Mode
from persia.nn.arguments import (
    CLUSTER,
    DENSE_OPTIMIZER,
    EMBEDDING_OPTIMIZER,
    MODE_OR_AUTO,
    MODEL,
    SCHEMA,
    check_arguments,
    options_of,
)
from persia.nn.collection import EmbeddingCollection
from persia.nn.dense_step import DenseStep, OptimizerFactory, StepOptions
from persia.nn.options import CollectionOptions, check_gpus
from persia.nn.output import probabilities_of
from persia.nn.transfer import staging_for
from persia.optim import APMSqueeze
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Cluster, ProcessCluster
from persia.telemetry.trace_events import tracing_to
from persia.trainer import driver, loading, signals
from persia.trainer.checkpointing import Checkpointing
from persia.trainer.evaluation import Evaluator
from persia.trainer.intervals import Bounds
from persia.trainer.loop import TrainingLoop
from persia.trainer.monitor import Monitor
from persia.trainer.options import Declared, TrainerOptions
from persia.trainer.phases import ModeSwitch, Phases
from persia.trainer.progress import FitProgress, FitResult, TrainedRows
from persia.trainer.publishing import Publishing
from persia.trainer.sources import check_stream, set_local_batch, source_of
from persia.trainer.state import TrainingState

__all__ = ["FitResult", "Trainer", "TrainerOptions"]


class Trainer:
    """Trains, evaluates, saves and resumes a recommender. Not thread-safe; calls block.

    With several NN workers each has a Trainer of its own, in a process where torch.distributed is initialised; all make
    the same calls. They train one network: batches go to them in turn, gradients are averaged by rows, and results are
    the same on each.

    Args:
        model: an `nn.Module`; `model(dense, embeddings)` returns logits `[batch, labels]`. A method
            `loss(logits, labels)` replaces the default, binary cross-entropy. A model whose loss needs more than
            logits returns a `persia.nn.ModelOutput`.
        schema: the model's input.
        optimizer: makes the dense optimizer: `lambda params: torch.optim.Adam(params, 1e-3)`.
        embedding_optimizer: for tables that declare none.
        mode: `persia.modes.Hybrid("auto")` by default, which is `Sync` in its warm-up of 500 global steps;
            `persia.modes.Auto` to switch between two.
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
        check_arguments(
            model=(model, MODEL),
            schema=(schema, SCHEMA),
            optimizer=(optimizer, DENSE_OPTIMIZER),
            embedding_optimizer=(embedding_optimizer, EMBEDDING_OPTIMIZER),
            mode=(mode, MODE_OR_AUTO),
            cluster=(cluster, CLUSTER),
            options=(options, options_of(TrainerOptions)),
        )
        self.schema = schema
        self.cluster = cluster
        self.options = options = options or TrainerOptions()
        self.declared = Declared(schema, embedding_optimizer, mode or Hybrid(), options)
        for name in ("checkpoint_every_steps", "checkpoint_every_seconds", "keep_best"):
            if getattr(options, name) is not None and options.checkpoint_dir is None:
                raise ConfigError(f"{name} needs checkpoint_dir.", field="checkpoint_dir")
        self._trains_in_other_processes = isinstance(cluster, ProcessCluster)
        if isinstance(cluster, ProcessCluster):
            check_gpus(options.device, cluster.gpus)  # Before processes are started.
        # NN workers resolve the device where they run; this process may have others.
        self._staging = staging_for("cpu" if self._trains_in_other_processes else options.device)
        device = self._staging.device
        self.step = DenseStep(
            model,
            optimizer,
            device,
            StepOptions(options.schedule, options.precision, options.accumulation_steps, options.clip_norm),
        )
        self.model = self.step.model
        self.embeddings = EmbeddingCollection(
            schema,
            optimizer=embedding_optimizer,
            mode=self.declared.first_mode,
            cluster=cluster,
            grad_scaler=self.step.scaler,
            options=CollectionOptions(str(device), options.seed, options.accumulation_steps, options.timeout),
        )
        connection = self.embeddings.connection
        self.step.tracer = self.embeddings.tracer
        if device.type == "cpu":
            choose_torch_threads(connection.nn_workers if connection.replicas is not None else 1)
        if connection.replicas is not None:
            self.step.replicas = connection.replicas(self.model, options.timeout)
        elif connection.nn_workers > 1:
            average = not isinstance(self.step.optimizer, APMSqueeze)  # APMSqueeze averages gradients itself.
            replicas = AllReduce(self.model, connection.nn_workers, AllReduceOptions(options.timeout, average=average))
            replicas.tracer = self.embeddings.tracer
            self.step.replicas = replicas
        self.state = TrainingState(self.step, self.embeddings, schema.labels, self.declared.first_mode, options.seed)
        self.phases = Phases(
            self.state,
            self.step,
            self.embeddings,
            self.declared,
            trains_in_other_processes=self._trains_in_other_processes,
        )
        self.checkpointing = Checkpointing(self.step, self.state, connection.servers, self.declared)
        self._publishing = Publishing(self.declared, self.step, self.state, connection.servers)
        self.monitor = Monitor(self.state, self.step, self.embeddings, self.checkpointing, self._publishing)
        if connection.observe is not None:
            connection.observe(self.monitor.observe)
        self._evaluator = Evaluator(self.step, self.embeddings)
        self.trained_here = TrainedRows(0, 0.0)
        """Rows that this NN worker trained in the last call of `fit`, and the seconds that it took."""
        self.resume_line: Callable[[str, int], str] = self._resume_line
        """Code that resumes from a directory at a step, printed after a signal; the command line has its own."""
        self._trackers = options.make_trackers()
        self._loaded = False
        """Whether a checkpoint was loaded since the last call of `fit`."""
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
        return self.phases.switches

    # --- training ---------------------------------------------------------------------------------------------

    def switch(self, mode: Mode) -> None:
        """Trains in another mode from the next step boundary on; hyper-parameters, rows and optimizer state stay.

        Returns at once, and may be called from any thread, also while `fit` runs; with several NN workers, on one of
        them. Before or between calls of `fit`, the next one begins with it. It ends the rule of an `Auto`.

        Raises:
            ConfigError: the cluster, or this trainer's options, cannot run the mode; training continues as before.
            PersiaError: another switch is under way.
        """
        self.phases.check(mode)
        tokens = self.embeddings.connection.tokens
        if tokens is None:
            raise ConfigError("This cluster cannot change its mode.", field="mode")
        tokens.request(mode)
        self.step.replicas.request_stop()

    def stop(self) -> None:
        """Ends the current call of `fit` after its step, as `max_steps` does: it saves and returns.

        Returns at once, and may be called from any thread, or from a signal handler; with several NN workers, on one of
        them. The next call of `fit` continues.
        """
        self._stopping = True

    @property
    def stopping(self) -> bool:
        """Whether the current or last call of `fit` was asked to stop."""
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

        The next call continues where this one was stopped by `max_steps` or an error, or where a checkpoint was
        written. After a call that finished its epochs, the next one starts at epoch 0, perhaps with other data; a
        stream goes on at its offsets, which are part of checkpoints. A stream without an end trains until `max_steps`,
        `stop` or a signal.

        Signals: the first SIGINT (Ctrl-C) or SIGTERM ends the call after its step. It saves if there is a
        `checkpoint_dir`, prints which step was saved and how to resume, and raises KeyboardInterrupt, or
        SystemExit(143) for SIGTERM; a later call continues. A second signal raises at once. Handlers are installed in
        the main thread only, during the call, and do not replace a program's own handlers, which may call `stop`.

        Args:
            train_data: a reader of `persia.data`, or any iterable of `persia.Batch` (not a one-shot iterator when
                there are several epochs, or several NN workers). None where the cluster has data loaders, which read.
            eval_data: evaluated once, at the end.
            epochs: passes over the data; those before a resume count.
            max_steps: most global steps of this call.

        Raises:
            ConfigError: an argument is not valid.
            DataError: the data do not yield batches, or one does not fit the schema; earlier ones are trained. Or there
                is no batch at all (see `TrainerOptions.allow_empty`).
            DivergedError: logits or loss are not finite. The network has had that batch's gradient, on a GPU that of
                one more; no checkpoint has been written since.
            CheckpointError: a checkpoint could not be written; training state is unharmed.
            DeadlineError: another role or NN worker was late; it says which.
            RoleDiedError: processes of the cluster died more often than `TrainerOptions.max_failures`. The message says
                which, when, and what was tried. The network here is as it was before the call.
        """
        epochs, max_steps = plain(epochs), plain(max_steps)
        check_integer("epochs", epochs, 1, MAX_STEPS)
        if max_steps is not None:
            check_integer("max_steps", max_steps, 1, MAX_STEPS)
        connection = self.embeddings.connection
        for name, data in (("train_data", train_data), ("eval_data", eval_data)):
            if data is not None:
                check_data(name, data)
        if (epochs > 1 or connection.nn_workers > 1) and isinstance(train_data, Iterator):
            raise ConfigError(
                "train_data is an iterator and cannot be read twice; give a reader or a list.", field="train_data"
            )
        check_stream(train_data, epochs, connection, in_other_processes=self._trains_in_other_processes)
        if train_data is None and connection.loader is None:
            raise ConfigError("train_data is None, and the cluster has no data loaders.", field="train_data")
        self._stopping = False
        if isinstance(self.cluster, ProcessCluster) and train_data is not None:
            remote, data, bounds = self._driver(self.cluster), train_data, {"epochs": epochs, "max_steps": max_steps}
            return self._stoppable(lambda: remote.fit(data, eval_data, bounds, lambda: self.stopping))
        return self._stoppable(lambda: self.fit_here(train_data, eval_data, epochs, max_steps))

    def fit_here(
        self, train_data: Iterable[Batch] | None, eval_data: Iterable[Batch] | None, epochs: int, max_steps: int | None
    ) -> FitResult:
        """Trains on this NN worker; the arguments of `fit` have been checked."""
        state, connection, replicas = self.state, self.embeddings.connection, self.step.replicas
        directory, keep_best = self.options.checkpoint_dir, self.options.keep_best
        set_local_batch(train_data, state)
        fed = connection.stream(train_data) if connection.stream is not None else None
        state.begin_data(train_data if fed is None else fed.stream, lambda: self.stopping)
        if keep_best is not None and eval_data is None:
            raise ConfigError("keep_best needs eval_data.", field="eval_data")
        recovery = connection.save_recovery_point is not None
        state.record_covered_by = "recovery point" if recovery else "checkpoint" if directory else "training"
        bounds = Bounds(state, self.step, self.options, max_steps, recovery, lambda: self.stopping)
        progress = FitProgress(
            state, self.step, self.embeddings, self.monitor, self._staging, self.options, self._trackers
        )
        publishing = self._publishing if connection.rank == 0 else None
        drift = self._publishing.drift
        if drift is not None:
            progress.on_scored = drift.scored
        loop = TrainingLoop(state, self.step, self.embeddings, progress, lambda: self.stopping, self._publishing)
        saved_step: int | None = None  # Of the last checkpoint of this call.
        self.phases.begin()
        self.model.train()
        self.embeddings.train()

        def evaluate() -> MetricsResult | None:
            return self._evaluated(bounds, eval_data)

        with progress.tracked(self.declared):
            if publishing is not None:
                publishing.begin()
            trained = False
            try:
                with progress.line:
                    while state.epoch < epochs and not bounds.reached():
                        source = source_of(train_data, state, connection, replicas, loaded=self._loaded, fed=fed)
                        self._loaded = False
                        while not bounds.reached():
                            if self.phases.adopt_next_mode():
                                if recovery:  # Else a restart after a death would bring back the mode before.
                                    driver.save_recovery_point(self.step, state, connection, progress)
                                self.phases.confirm_mode()
                            steps = bounds.steps_left(self.phases.next_switch)
                            ended = self.phases.train(loop, source, steps) and not state.interrupted
                            if ended:
                                progress.check_pass()
                                state.end_pass()
                            self.phases.raise_if_nn_workers_died()
                            if bounds.stop_requested() or ended:
                                break
                            if bounds.checkpoints.due() and self.checkpointing.begin_periodic(evaluate):
                                saved_step = state.global_step
                            if bounds.recovery_points.due():
                                driver.save_recovery_point(self.step, state, connection, progress)
                if drift is not None:
                    drift.merge(replicas.gather, keep=connection.rank == 0)
                trained = True
            except Exception:
                with contextlib.suppress(Exception):  # The first error says more than that of a checkpoint.
                    self.checkpointing.wait()
                raise
            finally:
                progress.close()
                self.trained_here = progress.trained_here
                if publishing is not None:
                    publishing.end(last=trained)
            progress.check_trained(epochs)
            if self.checkpointing.await_periodic():
                saved_step = None
            evaluation = None
            try:
                if keep_best is not None:
                    evaluation = evaluate()
            finally:  # Also if the evaluation has failed.
                if directory is not None and saved_step != state.global_step:
                    self.checkpointing.save_last(evaluation)
            # Set only after the save: if that fails, the next call saves again, rather than train from epoch 0.
            state.finished = state.epoch >= epochs
            replicas.settle()
            evaluation = evaluation or evaluate()
            return progress.result(evaluation, self.phases.report(), self.phases.mode_choices())

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[None]:
        """Traces what `fit` does within the block, from lookup to push, and writes it for https://ui.perfetto.dev.

            with trainer.trace("trace.json"):
                trainer.fit(data, max_steps=20)

        Args:
            path: of the file, Chrome's Trace Event Format. It has the first 100,000 spans, some 10,000 steps.

        Raises:
            ConfigError: training runs in other processes; use `persia trace ADDRESS` there.
            OSError: the file cannot be written.
        """
        if self._trains_in_other_processes:
            raise ConfigError(
                "This trainer trains in other processes, so there is nothing to trace here. Run "
                "`persia trace ADDRESS` with the cluster's control_address.",
                field="cluster",
            )
        with tracing_to(path, self.embeddings.tracer, self.state.rank):
            yield

    def evaluate(
        self, data: Iterable[Batch], *, group_by: str | None = None, at: Sequence[int] = (10,)
    ) -> MetricsResult:
        """Returns metrics on data. Read-only: the store and the model stay as they are.

        Several NN workers score the batches in turn, and all return the metrics of all.

        Args:
            data: batches with labels.
            group_by: an ID-type feature with one id for each sample, such as the user: `grouped` of the result then has
                GAUC, recall@k and NDCG@k. They need 16 bytes per sample and label.
            at: values of k.

        Raises:
            ConfigError: there is no such feature, or `at` is invalid.
            DataError: a batch does not fit the schema, has no labels, or has no groups.
            DivergedError: logits are not finite.
        """
        return self._evaluator.evaluate(data, group_by, at)

    def predict(self, data: Iterable[Batch]) -> Iterator[NDArray[np.float32]]:
        """Yields probabilities float32 `[batch, labels]`, batch by batch; read-only. The data need no labels.

        They come in the order of the data: a reader with `shuffle_rows` gives its rows shuffled.
        """
        for _, logits in self._evaluator.scored(data):
            yield probabilities_of(logits)

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
        return self.checkpointing.save(os.fspath(directory))

    def load(self, directory: str, *, step: int | None = None, new_optimizer: bool = False) -> None:
        """Loads everything from a checkpoint of `directory`, its mode included; all is checked before anything changes.

        The number of embedding PSs, their capacities and their admission may be others than those that wrote it. So may
        the dtypes of tables: values are rounded to the nearest, and a warning says so.

        Args:
            directory: where `save` wrote.
            step: the step to load instead of the latest.
            new_optimizer: let the optimizer of the network, or of tables, differ from that of the checkpoint; its state
                is reset, and a warning says so.

        Raises:
            CheckpointError: it is damaged, or of another schema, model or optimizer, or has values beyond the dtype of
                a table.
        """
        replicas = self.step.replicas
        options = loading.LoadOptions(step, new_optimizer, self._trains_in_other_processes)

        def load() -> None:
            loading.load(directory, options, self.declared, self.step, self.state, self.embeddings)

        replicas.run_on_rank0(load, NoneType)  # First, as it loads the rows.
        if self.embeddings.connection.rank > 0:
            load()
        replicas.gather(b"")
        self._loaded = True

    def load_rows(
        self, directory: str, tables: Iterable[str] | None = None, *, step: int | None = None, state: bool = True
    ) -> dict[str, loading.LoadedTable]:
        """Loads embedding rows from a checkpoint, to begin with those of another model; nothing else changes.

        Rows that are there already are replaced where the checkpoint has the same ids. With several NN workers only
        the first one calls it.

        Args:
            directory: where a checkpoint is.
            tables: which tables; None for those that both the checkpoint and this model have.
            step: the step to load instead of the latest.
            state: also load the optimizer's state, where the table has the same optimizer in the checkpoint; otherwise
                it is reset.

        Returns:
            By table, the number of rows, and whether the optimizer's state was loaded.

        Raises:
            CheckpointError: it is damaged, or a table is missing or has another dim.
        """
        return loading.load_rows(self.embeddings.connection.servers, directory, tables, step, state)

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
        """Returns a trainer that continues from a checkpoint, which has schema, mode, embedding optimizer and options.

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

    def _driver(self, cluster: ProcessCluster) -> driver.Driver:
        """Returns the driver of calls of `fit` on the NN workers of a cluster."""
        make = functools.partial(
            type(self),
            self.model,
            self.schema,
            optimizer=self.step.make_optimizer,
            embedding_optimizer=self.declared.embedding_optimizer,
            mode=self.declared.mode,
            cluster=cluster,
            options=self.options,
        )
        servers = self.embeddings.connection.servers
        return driver.Driver(cluster, make, self.step, self.state, servers, self.declared)

    def _evaluated(self, bounds: Bounds, data: Iterable[Batch] | None) -> MetricsResult | None:
        """Evaluates within `fit`; returns None if there are no data, or the call was asked to stop."""
        if data is None or bounds.stop_requested():
            return None
        result = self.evaluate(itertools.takewhile(lambda _: not self.stopping, data))
        return None if bounds.stop_requested() else result

    def _stoppable(self, fit: Callable[[], FitResult]) -> FitResult:
        directory, line = self.options.checkpoint_dir, self.resume_line
        return signals.stoppable(
            fit, stop=self.stop, step=lambda: self.global_step, directory=directory, resume_line=line
        )

    def _resume_line(self, directory: str, step: int) -> str:
        cluster = ", cluster=cluster" if self.cluster is not None else ""
        return f"trainer = persia.Trainer.resume({directory!r}, model, optimizer=optimizer{cluster})"
