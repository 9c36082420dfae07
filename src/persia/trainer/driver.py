"""`Trainer.fit` on the NN workers of a cluster, from the process that holds the user's trainer.

Each NN worker makes a trainer like the user's, loads its state, and trains; then the state comes back. Between two
calls this process has the network, as with `Embedded`, and can evaluate, save, or train on. When an NN worker dies, all
restart: from where the others quiesced without it, or else from the last recovery point.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, Protocol

import msgspec

from persia.batching.batch import Batch
from persia.checkpoint import list_checkpoints
from persia.errors import (
    ConfigError,
    DeadlineError,
    NNWorkersChangeError,
    NNWorkersDiedError,
    PersiaError,
    RoleDiedError,
    StalePushError,
    UnequalStepsError,
)
from persia.metrics import Metrics
from persia.modes import Dense, Mode
from persia.nn.dense_step import DenseStep
from persia.nn.push_log import PushCounts
from persia.nn.replicas import SingleReplica
from persia.schema import Label
from persia.services import Attempt, Connection, EmbeddingPS, ProcessCluster, StreamPosition
from persia.telemetry.logs import get_logger
from persia.trainer import loading
from persia.trainer.data_progress import DataProgress
from persia.trainer.fit_checks import check_outputs
from persia.trainer.options import Declared, TrainerOptions
from persia.trainer.progress import FitProgress, FitResult, TrainedRows
from persia.trainer.run_state import RunState, captured, restore, total_of
from persia.trainer.scores import PARTS
from persia.trainer.sources import scheduled, set_input_rules, set_local_batch
from persia.trainer.state import RunTotals, TrainingState
from persia.trainer.stored_calls import StoredCalls
from persia.types import StreamStart

__all__ = ["Driver", "LocalTrainer", "save_recovery_point"]

LOG = get_logger("persia.cluster")


class LocalTrainer(Protocol):
    """The trainer of one NN worker: `persia.Trainer`, which stands above this module."""

    state: TrainingState
    step: DenseStep
    trained_here: TrainedRows

    @property
    def survives(self) -> bool:
        """See `persia.services.Connection`."""

    def fit_here(
        self, train_data: Iterable[Batch] | None, eval_data: Iterable[Batch] | None, epochs: int, max_steps: int | None
    ) -> FitResult:
        """Trains on this NN worker."""


class _Survived(NamedTuple):
    """State of an NN worker that quiesced, or stopped, without the others; its counts are its own.

    Attributes:
        state: the state.
        error: why it stopped after its last step, if that may not have been a death; None if it was one.
    """

    state: RunState
    error: Exception | None = None


class _Changed(NamedTuple):
    """Result of an NN worker that has stopped for another number of NN workers; the recovery point is the state."""

    step: int


class _Work:
    """The work of an NN worker in one call of `fit`. Pickled as a whole, with the cluster in it.

    Args:
        make: makes a trainer like the driver's.
        eval_data: evaluated at the end.
        state: to begin with.
        bounds: `epochs` and `max_steps`.
        outputs: options whose outputs are checked before training; None after a restart.
    """

    def __init__(
        self,
        make: Callable[[], LocalTrainer],
        eval_data: Iterable[Batch] | None,
        state: RunState,
        bounds: dict[str, Any],
        outputs: TrainerOptions | None = None,
    ) -> None:
        self._make = make
        self._outputs = outputs
        self._eval_data = eval_data
        self._state = state
        self._bounds = bounds

    def __call__(self) -> tuple[FitResult, RunState] | _Survived | _Changed | None:
        trainer = self._make()
        network, state = trainer.step, trainer.state
        restore(network, state, self._state, trains_in_other_processes=False)
        if (options := self._outputs) is not None:
            network.replicas.run_on_rank0(lambda: check_outputs(options), NoneType)
        try:
            result = trainer.fit_here(None, self._eval_data, **self._bounds)
        except NNWorkersChangeError as error:
            return _Changed(error.fields["step"])
        except NNWorkersDiedError as error:
            network.replicas = SingleReplica(network.trained)
            if state.rank > 0:
                state.earlier = RunTotals()  # NN worker 0 has the counts from before, and the metrics; see `_merged`.
            state.earlier += RunTotals(pushed=PushCounts.of(error.fields["lost"]))
            return _Survived(captured(network, state, trainer.trained_here))
        except PersiaError as error:
            if not _continues_without_others(error, trainer):
                raise
            assert state.failed_after is not None
            network.replicas = SingleReplica(network.trained)
            state.global_step, state.position = state.failed_after
            if state.rank > 0:
                state.earlier = RunTotals()
            return _Survived(captured(network, state, trainer.trained_here), error)
        last = captured(network, state, TrainedRows(result.rows, result.seconds))  # A collective.
        return (result, last) if state.rank == 0 else None


def _continues_without_others(error: Exception, trainer: LocalTrainer) -> bool:
    """Returns whether an error may follow from the death of another NN worker, and the state here belongs to a step.

    Not with an optimizer that is spread over NN workers: an error in its step leaves it in between. Nor in a mode that
    applies the gradients of each NN worker as they come: rows have updates of steps that would be trained again.
    """
    caused = isinstance(error, (DeadlineError, StalePushError, UnequalStepsError)) or type(error) is PersiaError
    whole = not hasattr(trainer.step.optimizer, "consolidate")
    combined = trainer.state.mode.group(trainer.step.replicas.nn_workers, 1) > 1
    return caused and whole and combined and trainer.survives and trainer.state.failed_after is not None


class Driver:
    """Runs calls of `fit` on the NN workers of a cluster, and restarts them when one has died.

    Args:
        cluster: its data loaders read, and its NN workers train.
        make: makes a trainer like this process's; pickled. It takes other `options`.
        network: the dense network of this process.
        state: the state of this process's trainer.
        servers: the embedding PSs.
        declared: the declarations of the run.
        calls: recovery points on storage; None if the cluster keeps none.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        make: Callable[..., LocalTrainer],
        network: DenseStep,
        state: TrainingState,
        servers: Sequence[EmbeddingPS],
        declared: Declared,
        calls: StoredCalls | None = None,
    ) -> None:
        self._stored_calls = calls
        self.repeats = False
        """Whether the last call had already ended under an earlier driver, so that nothing was trained or evaluated."""
        self._cluster = cluster
        self._make = make
        self._network = network
        self._state = state
        self._servers = servers
        self._declared = declared

    def fit(
        self,
        train_data: Iterable[Batch],
        eval_data: Iterable[Batch] | None,
        bounds: dict[str, Any],
        should_stop: Callable[[], bool],
        again: bool = False,
        restart_data: bool = False,
    ) -> FitResult:
        """Trains on the NN workers; see `Trainer.fit`. A call in which an earlier driver has died goes on.

        Args:
            train_data: see `Trainer.fit`; pickled.
            eval_data: see `Trainer.fit`.
            bounds: `epochs` and `max_steps`.
            should_stop: polled meanwhile; whether the call is to end after its step.
            again: see `Trainer.fit`.
            restart_data: see `Trainer.fit`.

        Raises:
            ConfigError: the position in the data has no meaning any more.
            PersiaError: an NN worker has raised it, or a process has died for good. The network here is as it was.
        """
        with self._cluster.fitting():
            return self._fit(train_data, eval_data, bounds, should_stop, again, restart_data)

    def _fit(
        self,
        train_data: Iterable[Batch],
        eval_data: Iterable[Batch] | None,
        bounds: dict[str, Any],
        should_stop: Callable[[], bool],
        again: bool,
        restart_data: bool,
    ) -> FitResult:
        """See `fit`."""
        options, calls = self._declared.options, self._stored_calls
        stream = isinstance(train_data, StreamPosition)
        point = calls.begin(self._network, self._state) if calls is not None else None
        if calls is not None and point is None and (ended := calls.ended(self._network, self._state)) is not None:
            self.repeats = True
            return ended
        if point is not None:
            self._state.adopt_source(train_data, stream=stream)
            again = restart_data = False  # What they ask for was done before the recovery point.
        self._state.begin_source(
            train_data, stream=stream, again=again, restart=restart_data, patience=options.patience
        )
        self._state.loaded = False
        set_local_batch(train_data, self._state)
        set_input_rules(train_data, self._state)
        state = captured(self._network, self._state, TrainedRows(0, 0.0))
        log = _FailureLog(options.max_failures)
        first_step, before, restarted = state.step, TrainedRows(0, 0.0), False
        if point is not None:
            first_step, before, restarted = point.first_step, point.state.trained, True

        stored = point is not None
        """Whether the state is still the one on storage: the run is ours once NN workers have sent a later one."""

        def keep(state: RunState) -> None:
            nonlocal stored
            stored = False
            if calls is not None:
                calls.keep(first_step, state, total_of(before, state.trained))

        changed = False
        while True:
            if not stored and not changed:  # Otherwise the state has just been kept.
                keep(state)
            training, position = state.training, state.training["position"]
            progress = msgspec.convert(training["data"], DataProgress).at_rest(position)
            number = progress.number if progress.current is None else progress.current.number
            record = StreamStart(training["offsets"], fresh=not restarted)
            source = scheduled(train_data, progress)
            self._cluster.feed(source, number, position, options.accumulation_steps, record)
            left = dict(bounds)
            if left["max_steps"] is not None:
                left["max_steps"] -= state.step - first_step
            make = self._make  # A mode with dense PSs decides itself how many gradients make a step.
            if not _uses_dense_servers(self._declared, self._state.mode):
                make = functools.partial(_made, self._make, self._cluster, options)
            work = _Work(make, eval_data, state, left, None if restarted else options)
            attempt = self._cluster.attempt(work, should_stop, keep)
            changed = any(isinstance(result, _Changed) for result in attempt.results.values())
            if not attempt.deaths:
                _raise_first_error(attempt)
            if not attempt.deaths and not changed:
                break
            restarted = True
            changed = changed and not attempt.deaths
            if changed:
                state = attempt.recovery_point
            else:
                stored = stored and not any(isinstance(result, _Survived) for result in attempt.results.values())
                state, how = _after_deaths(attempt, state, self._declared.schema.labels)
                log.add(attempt.deaths, how)
                self._reload_servers(attempt.deaths)
            before, state = total_of(before, state.trained), state._replace(trained=TrainedRows(0, 0.0))
        result: FitResult
        last: RunState
        result, last = attempt.results[0]
        restore(self._network, self._state, last, trains_in_other_processes=True)
        trained = total_of(before, last.trained)
        result = msgspec.structs.replace(
            result,
            rows=trained.rows,
            seconds=trained.seconds,
            rows_per_second=trained.rows / trained.seconds if trained.seconds else 0.0,
            steps=result.global_step - first_step,
            failures=log.failures,
        )
        if calls is not None:
            calls.end(first_step, last, result)
        return result

    def _reload_servers(self, deaths: list[RoleDiedError]) -> None:
        """Replaces embedding PSs that have died for good, with the rows of the last checkpoint."""
        # "returns" marks a PS that restarts by itself, with its rows.
        lost = [d for d in deaths if d.fields["role"] == "embedding_ps" and "returns" not in d.fields]
        if not lost:
            return
        fields = [f for death in lost for f in (death.fields, *death.fields.get("later", []))]
        ranks = sorted({f["rank"] for f in fields if f["role"] == "embedding_ps"})
        directory = self._declared.options.checkpoint_dir
        owning = self._cluster.owning_servers(ranks)  # The rows of one that leaves have moved.
        if owning and (directory is None or not list_checkpoints(directory)):
            raise lost[0]
        self._cluster.restart_servers(ranks)
        if owning and directory is not None:
            path = loading.load_partitions(self._servers, self._declared.schema, directory, owning)
            LOG.warning("Embedding PSs %s have the rows of %s.", ", ".join(map(str, owning)), path)


def _made(make: Callable[..., LocalTrainer], cluster: ProcessCluster, options: TrainerOptions) -> LocalTrainer:
    """Returns the trainer of an NN worker, whose updates have as many batches as the global batch needs.

    Raises:
        ConfigError: the NN workers cannot share the batches of a step equally.
    """
    if cluster.share == 1:
        return make()
    batches = options.accumulation_steps * cluster.share
    if batches.denominator > 1:
        raise ConfigError(
            f"The NN workers cannot keep the global batch: accumulation_steps would be {batches}. Scale to a number of "
            "NN workers that divides the batches of a step, or let the global batch change with their number.",
            field="cluster.nn_workers",
        )
    return make(options=msgspec.structs.replace(options, accumulation_steps=int(batches)))


def _uses_dense_servers(declared: Declared, mode: Mode) -> bool:
    """Returns whether a mode of the run, now or later, keeps the network on dense PSs."""
    modes = [mode, *(later for _, later in declared.options.mode_schedule)]
    if declared.auto is not None:
        modes += [declared.auto.sync, declared.auto.asynchronous]
    return any(each.dense() is Dense.SERVER for each in modes)


def save_recovery_point(
    network: DenseStep, state: TrainingState, connection: Connection, progress: FitProgress
) -> None:
    """Sends the state of the run to the driver, between two phases. All NN workers call it."""
    assert connection.save_recovery_point is not None
    network.replicas.settle()
    recovery_point = captured(network, state, progress.trained_by_all())
    if connection.rank == 0:
        connection.save_recovery_point(recovery_point)
        state.covered("recovery point", recovery_point.training["position"])


class _FailureLog:
    """Log of the failures in one call of `fit`.

    Args:
        most: maximum number of restarts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: list[str] = []
        self.failures = 0

    def add(self, deaths: list[RoleDiedError], how: str) -> None:
        """Adds a failure, after which training can continue.

        Args:
            deaths: processes that have died.
            how: from where all NN workers restart.

        Raises:
            RoleDiedError: there are more failures than restarts.
        """
        self.failures += 1
        when = time.strftime("%H:%M:%S")
        names = ", ".join(f"{d.fields['role'].replace('_', ' ')} {d.fields['rank']}" for d in deaths)
        if self.failures > self._most:
            first = deaths[0]
            lines = "".join(f"\n  {line}" for line in self._lines)
            raise RoleDiedError(
                f"{first.message}\nTraining ends at {when}: this is failure {self.failures} of this call of `fit`, and "
                f"TrainerOptions.max_failures = {self._most}. See why processes die, and resume from the last "
                f"checkpoint.{' Before:' if lines else ''}{lines}",
                **{**first.fields, "deaths": [death.fields for death in deaths], "failures": self.failures},
            )
        self._lines.append(f"{when}: {names} died; {how}")
        LOG.warning("%s\nTraining continues: %s", "\n".join(death.message for death in deaths), how)


def _after_deaths(attempt: Attempt, state: RunState, labels: Sequence[str | Label]) -> tuple[RunState, str]:
    """Returns the state to restart with, and a message that says where it is from."""
    survived = {rank: result.state for rank, result in attempt.results.items() if isinstance(result, _Survived)}
    if survived:
        merged = _merged(state, survived, labels)
        return merged, f"NN workers {', '.join(map(str, survived))} continued to step {merged.step}, where all restart."
    last: RunState = attempt.recovery_point or state._replace(trained=TrainedRows(0, 0.0))
    return last, f"all NN workers restart at step {last.step}, from the last recovery point; rows stay as they are."


def _raise_first_error(attempt: Attempt) -> None:
    """Raises the error for which NN workers stopped, as none has died."""
    for result in attempt.results.values():
        if isinstance(result, _Survived) and result.error is not None:
            raise result.error


def _merged(base: RunState, survived: dict[int, RunState], labels: Sequence[str | Label]) -> RunState:
    """Merges the states of NN workers that quiesced without the others.

    Of the counts of the dead since all started from `base` only their losses are kept, by one of the survivors.
    """
    first = max(survived.values(), key=lambda state: state.step)  # The first one, if all came as far.
    generators = list(base.training["random"])
    counts = msgspec.convert(base.training["counts"], RunTotals)
    parts = list(survived.values())
    if 0 in survived:  # Its counts and metrics contain `base`'s.
        counts = RunTotals()
    else:
        parts.append(base)
    scores = {name: _merged_metrics([part.scores[name] for part in parts], labels) for name in PARTS}
    for rank, state in survived.items():
        counts += msgspec.convert(state.training["counts"], RunTotals)
        if rank < len(generators):  # Else `base` has no random states of these ranks: each starts with its own seed.
            generators[rank : rank + 1] = state.training["random"]
    training = {
        **first.training,
        "local_batch": max(part.training["local_batch"] for part in parts),
        "counts": msgspec.to_builtins(counts),
        "random": generators,
    }
    trained = [state.trained for state in survived.values()]
    total = TrainedRows(sum(t.rows for t in trained), max(t.seconds for t in trained))
    return first._replace(training=training, scores={**first.scores, **scores}, trained=total)


def _merged_metrics(states: Sequence[Mapping[str, Any]], labels: Sequence[str | Label]) -> dict[str, Any]:
    """Merges states of metrics."""
    total = Metrics(labels)
    for state in states:
        part = Metrics(labels)
        part.load_state_dict(state)
        total.merge(part)
    return total.state_dict()
