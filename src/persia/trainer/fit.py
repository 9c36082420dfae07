"""`FitCall`: one call of `Trainer.fit` on an NN worker, phase after phase, with checkpoints in between."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from persia.batching.batch import Batch
from persia.errors import ConfigError, DivergedError, NNWorkersChangeError
from persia.services import StreamPosition
from persia.trainer.components import Components
from persia.trainer.driver import save_recovery_point
from persia.trainer.intervals import Bounds
from persia.trainer.loop import TrainingLoop
from persia.trainer.progress import FitProgress, FitResult, TrainedRows
from persia.trainer.sources import set_input_rules, set_local_batch, source_of
from persia.trainer.steering import Steering

__all__ = ["FitCall"]


class FitCall:
    """One call of `fit` on this NN worker. All NN workers make it with the same arguments.

    Args:
        components: of the run.
        train_data: see `Trainer.fit`, which has checked it.
        eval_data: see `Trainer.fit`.
        epochs: passes over the data.
        max_steps: most global steps of this call; None for no bound.
        should_stop: whether this NN worker was asked to stop.
        again: see `Trainer.fit`.
        restart_data: see `Trainer.fit`.

    Raises:
        ConfigError: an option evaluates, and there are no data to evaluate; or the position in the data has no meaning
            any more.
    """

    def __init__(
        self,
        components: Components,
        train_data: Iterable[Batch] | None,
        eval_data: Iterable[Batch] | None,
        epochs: int,
        max_steps: int | None,
        should_stop: Callable[[], bool],
        again: bool = False,
        restart_data: bool = False,
    ) -> None:
        network, embeddings, state = components.network, components.embeddings, components.state
        connection, options, publishing = embeddings.connection, components.declared.options, components.publishing
        self._components = components
        self._connection = connection
        self._directory = options.checkpoint_dir
        self._train_data = train_data
        self._epochs = epochs
        self._max_steps = max_steps
        callbacks = components.callbacks

        def stopping() -> bool:
            return should_stop() or callbacks.failed

        self._raises = options.nonfinite == "raise"
        self._saved_step: int | None = None
        """Step of the last checkpoint of this call that needs no other one of the same step."""
        for name in ("keep_best", "eval_every_steps", "eval_every_epochs"):
            if getattr(options, name) is not None and eval_data is None:
                raise ConfigError(f"{name} needs eval_data.", field="eval_data")
        self._loader_stream = connection.stream(train_data) if connection.stream is not None else None
        stream = train_data if self._loader_stream is None else self._loader_stream.stream
        position = stream if isinstance(stream, StreamPosition) else None
        state.begin_source(
            train_data, stream=position is not None, again=again, restart=restart_data, patience=options.patience
        )
        set_local_batch(train_data, state)
        set_input_rules(train_data, state)
        state.begin_data(position, stopping)
        self._keeps_recovery_points = connection.save_recovery_point is not None
        if self._keeps_recovery_points:
            state.record_covered_by = "recovery point"
        else:
            state.record_covered_by = "checkpoint" if self._directory else "training"
        self._bounds = Bounds(state, network, options, max_steps, self._keeps_recovery_points, stopping)
        self._progress = FitProgress(
            state,
            network,
            embeddings,
            components.monitor,
            components.finite,
            components.staging,
            options,
            components.trackers,
            callbacks,
        )
        self._steering = Steering(components, eval_data, self._bounds, self._progress, stopping)
        if publishing.drift is not None:
            self._progress.on_scored = publishing.drift.scored

        progress, raises = self._progress, self._raises

        def ends() -> bool:  # Without `self`: no cycle keeps the rows of a Trainer that is dropped.
            return stopping() or (raises and progress.has_non_finite)

        self._loop = TrainingLoop(state, network, embeddings, self._progress, ends, publishing)

    @property
    def trained_here(self) -> TrainedRows:
        """Rows that this NN worker has trained in this call, and the seconds that it took."""
        return self._progress.trained_here

    def run(self) -> FitResult:
        """Trains, writes the last checkpoint, and evaluates; see `Trainer.fit`."""
        components = self._components
        components.phases.begin()
        components.network.model.train()
        components.embeddings.train()
        with self._progress.tracked(components.declared):
            with self._publishing():
                self._train()
            self._progress.data_checks.check_trained(self._epochs, self._max_steps, self._steering.stopped_early)
            return self._finish()

    def _train(self) -> None:
        """Trains one pass over the data after the other, and in a pass one phase after the other.

        A phase ends with the pass, at a checkpoint, or at a switch of mode.
        """
        components, state, bounds = self._components, self._components.state, self._bounds
        phases, steering = components.phases, self._steering
        if state.data.left(self._epochs) and not bounds.reached() and steering.missed() and steering.evaluate_now():
            self._saved_step = state.global_step
        while state.data.left(self._epochs) and not bounds.reached():
            state.data = state.data.begin_pass()
            source = source_of(
                self._train_data,
                state,
                self._connection,
                components.network.replicas,
                loader_stream=self._loader_stream,
            )
            state.loaded = False
            while not bounds.reached():
                self._stop_for_other_nn_workers()
                if phases.adopt_next_mode():
                    if self._keeps_recovery_points:  # Else a restart after a death would bring back the mode before.
                        self._save_recovery_point()
                    phases.confirm_mode()
                ended = phases.train(self._loop, source, bounds.steps_left(phases.next_switch))
                ended = ended and not state.interrupted
                if ended:
                    self._progress.data_checks.check_pass()
                    state.end_pass()
                phases.raise_if_nn_workers_died()
                if self._raises:
                    self._progress.check_gradients()
                stopped = bounds.stop_requested()
                if not stopped and steering.after_phase(pass_ended=ended):
                    self._saved_step = state.global_step
                components.callbacks.deliver(state.global_step)
                if stopped or ended:
                    break
                saved = self._saved_step == state.global_step
                if bounds.checkpoints.due() and not saved:
                    steering.before_checkpoint()
                    if (
                        components.checkpointing.begin_periodic() and steering.scored
                    ):  # Else the last one may be better.
                        self._saved_step = state.global_step
                if bounds.recovery_points.due():
                    self._save_recovery_point()

    @contextlib.contextmanager
    def _publishing(self) -> Iterator[None]:
        """Publishes while the block trains, and shows progress. The first NN worker publishes for all."""
        components, publishing = self._components, self._components.publishing
        rank = self._connection.rank
        if rank == 0:
            publishing.begin()
            components.embeddings.idle = publishing.idle if publishing.active else None
        trained = False
        try:
            with self._progress.line:
                yield
            if publishing.active:
                components.finite.check()
            if publishing.drift is not None:
                publishing.drift.merge(components.network.replicas.gather, keep=rank == 0)
            trained = True
        except Exception as error:
            if isinstance(error, DivergedError):
                components.checkpointing.give_up_live()
            with contextlib.suppress(Exception):  # The first error says more than a checkpoint's error.
                components.checkpointing.wait()
            raise
        finally:
            self._progress.close()
            if rank == 0:
                publishing.end(last=trained)

    def _stop_for_other_nn_workers(self) -> None:
        """Ends training here, between two phases, if another number of NN workers is to continue it.

        The recovery point is what they begin with: newcomers have nothing else.
        """
        if self._components.phases.change_requested():
            self._save_recovery_point()
            step = self._components.state.global_step
            raise NNWorkersChangeError(f"Another number of NN workers continues from step {step}.", step=step)

    def _save_recovery_point(self) -> None:
        components = self._components
        save_recovery_point(components.network, components.state, self._connection, self._progress)

    def _finish(self) -> FitResult:
        """Writes the last checkpoint, unless one of the same step was begun, and evaluates."""
        state, phases, checkpointing = self._components.state, self._components.phases, self._components.checkpointing
        steering = self._steering
        if checkpointing.await_periodic():
            self._saved_step = None
        try:
            if steering.scores_checkpoints:
                steering.evaluate()
        finally:  # Also if the evaluation has failed.
            if self._directory is not None and self._saved_step != state.global_step:
                checkpointing.save_last()
        # Set only after the save: if that fails, the next call saves again, rather than train from epoch 0.
        state.finished = not state.data.left(self._epochs)
        self._components.network.replicas.settle()
        evaluation, early = steering.evaluate(), steering.stopped_early
        return self._progress.result(evaluation, phases.report(), phases.mode_choices(), early)
