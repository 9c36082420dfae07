"""`Trainer`: trains, evaluates, saves and resumes a recommender."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType

import msgspec
import torch

from persia.batching.batch import Batch
from persia.checkpoint import StepChoice
from persia.checks import MAX_STEPS, check_integer, plain
from persia.errors import ConfigError
from persia.metrics import Metrics, watched_metric
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
from persia.nn.dense_step import OptimizerFactory
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Cluster, ProcessCluster
from persia.telemetry.logs import get_logger
from persia.telemetry.trace_events import tracing_to
from persia.trainer import driver, loading, signals
from persia.trainer.callbacks import Callback, check_callbacks
from persia.trainer.components import assemble
from persia.trainer.fit import FitCall
from persia.trainer.fit_checks import check_begin, check_eval_data, check_outputs, check_train_data
from persia.trainer.options import Declared, TrainerOptions
from persia.trainer.phases import ModeSwitch
from persia.trainer.progress import FitResult, TrainedRows
from persia.trainer.retrieval_evaluation import check_retrieval
from persia.trainer.scoring import Scoring
from persia.trainer.stored_calls import StoredCalls

__all__ = ["FitResult", "Trainer", "TrainerOptions"]

LOG = get_logger("persia.cluster")


class Trainer(Scoring):
    """Trains, evaluates, saves and resumes a recommender. Not thread-safe; calls block.

    With several NN workers each has its own Trainer, in a process where torch.distributed is initialised; all make
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
        callbacks: called at the events of `fit`, on NN worker 0; see `persia.Callback`.

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
        callbacks: Sequence[Callback] = (),
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
        schema.check_fitted()
        self.callbacks = check_callbacks(callbacks)
        self.schema = schema
        self.cluster = cluster
        self.options = options = options or TrainerOptions()
        self.declared = Declared(schema, embedding_optimizer, mode or Hybrid(), options)
        for name in ("checkpoint_every_steps", "checkpoint_every_seconds"):
            if getattr(options, name) not in (None, "auto") and options.checkpoint_dir is None:
                raise ConfigError(f"{name} needs checkpoint_dir.", field="checkpoint_dir")
        if (options.keeps_best or options.evaluates) and watched_metric(schema, options.keep_best).retrieval:
            check_retrieval(model, schema, options.retrieval_leave_out)  # Before anything is started.
        self._trains_in_other_processes = isinstance(cluster, ProcessCluster)
        self._components = components = assemble(model, optimizer, self.declared, cluster, self.callbacks)
        self.step = components.network
        self.model = self.step.model
        self.embeddings = components.embeddings
        self.state = components.state
        self.phases = components.phases
        self.checkpointing = components.checkpointing
        self.monitor = components.monitor
        self.trained_here = TrainedRows(0, 0.0)
        """Rows that this NN worker trained in the last call of `fit`, and the seconds that it took."""
        self.resume_line: Callable[[str, int], str] = functools.partial(_resume_line, self.cluster is not None)
        """Code that resumes from a directory at a step, printed after a signal; the command line has its own."""
        self._stopping = False
        self._outputs_checked = False
        points = cluster.recovery_points if isinstance(cluster, ProcessCluster) else None
        self._stored_calls = StoredCalls(points, schema.labels) if points is not None else None
        if self._stored_calls is not None:
            self._stored_calls.restore(self.step, self.state)

    @property
    def global_step(self) -> int:
        """Updates so far."""
        return self.embeddings.global_step

    @property
    def epoch(self) -> int:
        """Epochs of the data that are done."""
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
        """Progressive metrics of this NN worker, of all calls of `fit` and a resumed run."""
        return self.state.scores.history()

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

        Returns immediately, and may be called from any thread, also while `fit` runs; with several NN workers, on one
        of them. Before or between calls of `fit`, the next one begins with it. It ends the rule of an `Auto`.

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

        Returns immediately, and may be called from any thread, or from a signal handler; with several NN workers, on
        one of them. The next call of `fit` continues.
        """
        self._stopping = True

    @property
    def survives(self) -> bool:
        """Whether this NN worker returns its state if training fails because another one has died."""
        return self.embeddings.connection.survives

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
        again: bool = False,
        restart_data: bool = False,
    ) -> FitResult:
        """Trains until `epochs` passes over the data, or `max_steps` steps of this call, are done.

        The next call continues where this one was stopped by `max_steps` or an error, or where a checkpoint was
        written, if it has the same data: readers are recognised by files (size and time of modification), filter,
        split, batch size and shuffling, other data by their method `fingerprint`, or else as the same object. Other
        data begin at their first batch and at epoch 0. Data with new files next to files that were trained
        continue with the new ones. A log line says so. See docs/guide/continue.md.

        A stream goes on at its offsets, which are part of checkpoints. One without an end trains until `max_steps`,
        `stop` or a signal.

        Signals: the first SIGINT (Ctrl-C) or SIGTERM ends the call after its step. It saves if there is a
        `checkpoint_dir`, prints which step was saved and how to resume, and raises KeyboardInterrupt, or
        SystemExit(143) for SIGTERM; a later call continues. A second signal raises immediately. Handlers are installed
        in the main thread only, during the call, and do not replace a program's own handlers, which may call `stop`.

        Args:
            train_data: a reader of `persia.data`, or any iterable of `persia.Batch` (not a one-shot iterator when
                there are several epochs, or several NN workers). None where the cluster has data loaders, which read.
            eval_data: evaluated at the end, and as often as `eval_every_steps`, `eval_every_epochs` and `keep_best` of
                `TrainerOptions` say: then not a one-shot iterator.
            epochs: passes over these data in all, passes of earlier calls and before a resume included. A call that has
                nothing left to do warns and returns.
            max_steps: most global steps of this call.
            again: train the data as if none of them had been trained.
            restart_data: if a pass over the data is incomplete, begin it again at its first batch.

        Raises:
            ConfigError: an argument is not valid, or an output of the options cannot be written; nothing was trained.
                Or a pass over the data is incomplete, and a change of options or files makes its position meaningless.
            DataError: the data do not yield batches, or one does not fit the schema; earlier ones are trained. Or there
                is no batch at all (see `TrainerOptions.allow_empty`).
            DivergedError: logits or loss are not finite: of a batch, whose gradient, on a GPU one more, is
                applied; or of the state that was to be saved or published, which is not. Or gradients are not
                finite, and `TrainerOptions.nonfinite` is "raise".
            PersiaError: a callback has failed; the last checkpoint is written.
            CheckpointError: a checkpoint could not be written; training state is unharmed.
            DeadlineError: another role or NN worker was late; it says which.
            RoleDiedError: processes of the cluster died more often than `TrainerOptions.max_failures`. The message says
                which, when, and what was tried. The network here is as it was before the call.
        """
        epochs, max_steps = plain(epochs), plain(max_steps)
        check_integer("epochs", epochs, 1, MAX_STEPS)
        if max_steps is not None:
            check_integer("max_steps", max_steps, 1, MAX_STEPS)
        in_other_processes = self._trains_in_other_processes
        check_train_data(train_data, epochs, self.embeddings.connection, in_other_processes=in_other_processes)
        check_begin(train_data, again=again, restart_data=restart_data)
        check_eval_data(eval_data, self.options)
        self._stopping = False
        self.state.scores.begin(train_data)
        bounds = {"epochs": epochs, "max_steps": max_steps}
        remote = None
        if isinstance(self.cluster, ProcessCluster) and train_data is not None:
            remote = self._driver(self.cluster)
        elif not self._outputs_checked:
            self.step.replicas.run_on_rank0(lambda: check_outputs(self.options), NoneType)
            self._outputs_checked = True
        line, directory = self.resume_line, self.options.checkpoint_dir
        with signals.stoppable(stop=self.stop, step=lambda: self.global_step, directory=directory, resume_line=line):
            if remote is not None and train_data is not None:
                result = remote.fit(train_data, eval_data, bounds, lambda: self.stopping, again, restart_data)
                if remote.repeats and eval_data is not None:
                    return msgspec.structs.replace(result, evaluation=self._components.evaluate_watched(eval_data))
                return result
            return self.fit_here(train_data, eval_data, epochs, max_steps, again=again, restart_data=restart_data)

    def fit_here(
        self,
        train_data: Iterable[Batch] | None,
        eval_data: Iterable[Batch] | None,
        epochs: int,
        max_steps: int | None,
        *,
        again: bool = False,
        restart_data: bool = False,
    ) -> FitResult:
        """Trains on this NN worker; the arguments of `fit` have been checked."""
        events, replicas = self._components.callbacks, self.step.replicas
        replicas.run_on_rank0(lambda: events.begin(self, self.global_step), NoneType)
        call = FitCall(
            self._components, train_data, eval_data, epochs, max_steps, lambda: self.stopping, again, restart_data
        )
        try:
            result = call.run()
        finally:
            self.trained_here = call.trained_here
        replicas.run_on_rank0(lambda: events.end(result, self.global_step), NoneType)
        return result

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

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save(self, directory: str | os.PathLike[str]) -> str:
        """Writes a checkpoint `directory/step-N` and points `directory/LATEST` to it. Blocks.

        Call it between two calls of `fit`, never while a `prefetch` loop is under way. With several NN workers all call
        it, and the first one writes.

        Returns:
            The path of the new checkpoint.

        Raises:
            CheckpointError: it could not be written; older checkpoints are intact.
            DivergedError: the model has diverged: its logits for the last batch are not finite. Nothing is written.
        """
        with self._rows_kept():
            return self.checkpointing.save(os.fspath(directory))

    def load(
        self, directory: str, *, step: StepChoice = None, new_optimizer: bool = False, refit: bool = False
    ) -> None:
        """Loads everything from a checkpoint of `directory`, its mode included; all is checked before anything changes.

        The number of embedding PSs, their capacities and their admission may be others than those that wrote it. So may
        the dtypes of tables: values are rounded to the nearest, and a warning says so.

        Hyperparameters of the optimizers that have changed since, such as the learning rate, take effect, and a warning
        names them. State of the optimizers and the position of a schedule stay. See docs/guide/continue.md.

        Args:
            directory: where `save` wrote.
            step: the step to load instead of the latest, or "best" or "latest".
            new_optimizer: let the optimizer of the network, or of tables, differ from the checkpoint's; its state
                is reset, and a warning says so.
            refit: let fitted values of features differ from the checkpoint's: the network goes on with inputs of
                another scale.

        Raises:
            CheckpointError: it is damaged, or of another schema, model or optimizer, or has values beyond the dtype of
                a table.
        """
        if self._goes_on("load"):
            return
        replicas = self.step.replicas
        options = loading.LoadOptions(step, new_optimizer, self._trains_in_other_processes, refit)

        def load() -> None:
            loading.load(directory, options, self.declared, self.step, self.state, self.embeddings)

        with self._rows_kept():
            replicas.run_on_rank0(load, NoneType)  # First, as it loads the rows.
        if self.embeddings.connection.rank > 0:
            load()
        replicas.gather(b"")

    def load_rows(
        self,
        directory: str,
        tables: Iterable[str] | Mapping[str, str] | None = None,
        *,
        step: StepChoice = None,
        state: bool = True,
    ) -> dict[str, loading.LoadedTable]:
        """Loads embedding rows from a checkpoint, to begin with the rows of another model; nothing else changes.

        Rows that are there already are replaced where the checkpoint has the same ids. With several NN workers only
        the first one calls it.

        Args:
            directory: where a checkpoint is.
            tables: which tables; or, where they have other names there, names in the checkpoint by name in this model,
                such as `{"bought_item": "item"}`. None for those that both the checkpoint and this model have.
            step: the step to load instead of the latest, or "best" or "latest".
            state: also load the optimizer's state, where the table has the same optimizer in the checkpoint; otherwise
                it is reset.

        Returns:
            By table, the number of rows, and whether the optimizer's state was loaded.

        Raises:
            CheckpointError: it is damaged, or a table is missing, has another dim, or is read by features that make
                other ids of the same values.
        """
        if self._goes_on("load_rows"):
            return {}
        with self._rows_kept():
            return loading.load_rows(self.embeddings.connection.servers, self.schema, directory, tables, step, state)

    @classmethod
    def resume(
        cls,
        directory: str,
        model: torch.nn.Module,
        *,
        optimizer: OptimizerFactory,
        cluster: Cluster | None = None,
        options: TrainerOptions | None = None,
        callbacks: Sequence[Callback] = (),
        step: StepChoice = None,
        new_optimizer: bool = False,
    ) -> Trainer:
        """Returns a trainer that continues from a checkpoint, which has schema, mode, embedding optimizer and options.

        Args:
            directory: where `save` wrote.
            model: the same architecture; its parameters are overwritten.
            optimizer: as for the constructor; it gets the saved state. Arguments that have changed since take effect.
            cluster: where the roles run.
            options: instead of the saved ones, of which `checkpoint_dir`, if it is set, becomes `directory`.
            callbacks: as for the constructor; checkpoints do not have them.
            step: see `load`.
            new_optimizer: see `load`.

        Raises:
            CheckpointError: it is damaged, or of another model or optimizer.
        """
        recorded = loading.recorded(directory, step)
        if options is None:
            options = recorded.options
            if options.checkpoint_dir is not None:  # The saved one may be relative, or a copied run's.
                options = msgspec.structs.replace(options, checkpoint_dir=directory)
        trainer = cls(
            model,
            recorded.schema,
            optimizer=optimizer,
            embedding_optimizer=recorded.embedding_optimizer,
            mode=recorded.mode,
            cluster=cluster,
            options=options,
            callbacks=callbacks,
        )
        trainer.load(directory, step=step, new_optimizer=new_optimizer)
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
            callbacks=self.callbacks,
        )
        servers = self.embeddings.connection.servers
        return driver.Driver(cluster, make, self.step, self.state, servers, self.declared, self._stored_calls)

    def _goes_on(self, method: str) -> bool:
        """Returns whether the run goes on after the death of a driver, with rows newer than those of a checkpoint."""
        left = self._stored_calls.left if self._stored_calls is not None else None
        if left is not None:
            LOG.warning(
                "%s() does nothing, as this run continues at step %d, with the rows and the network of a driver that "
                "has died.",
                method,
                left.state.step,
            )
        return left is not None


def _resume_line(with_cluster: bool, directory: str, step: int) -> str:
    cluster = ", cluster=cluster" if with_cluster else ""
    return f"trainer = persia.Trainer.resume({directory!r}, model, optimizer=optimizer{cluster})"
