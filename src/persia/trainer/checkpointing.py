"""Checkpoints of a training run: its state is captured between two phases, and written while training continues."""

from __future__ import annotations

import errno
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from persia.checkpoint import Base, CheckpointWriter, Score
from persia.checkpoint.row_writing import write_rows, write_states
from persia.checkpoint.throttle import Throttle
from persia.config import dump
from persia.errors import (
    CheckpointError,
    DeadlineError,
    PeerRestartedError,
    PersiaError,
    RemoteError,
    StoreError,
    WireError,
)
from persia.modes import Sync
from persia.nn.dense_step import DenseStep
from persia.nn.models.registry import description_of
from persia.retry import Backoff, Deadline, retry
from persia.rpc.fan_out import try_all
from persia.services import EmbeddingPS
from persia.telemetry.logs import get_logger
from persia.trainer.finite_state import FiniteState
from persia.trainer.loading import resolved
from persia.trainer.options import Declared
from persia.trainer.ps_snapshots import begin_snapshots, end_snapshots, held_states
from persia.trainer.state import TrainingState
from persia.types import BucketMap

__all__ = ["CheckpointState", "Checkpointing"]

LOG = get_logger("persia.checkpoint")

LAST_SECONDS = 60.0
"""Seconds for which the last checkpoint of a `fit` call is retried."""

RETRY_SECONDS = 1.0

MOST_TIME = 0.1
"""Maximum share of the time in which checkpoints are written, if nothing says how often."""

PS_RESTARTED = (StoreError, WireError, PeerRestartedError)
"""Errors of a PS that was restarted while it wrote its part of a checkpoint."""


class CheckpointState(NamedTuple):
    """State of a checkpoint that is captured between two phases, besides the snapshots of the PSs.

    Attributes:
        training: `TrainingState.state_dict`, which all NN workers call.
        score: held-out metric of the state, if it was evaluated; decides which checkpoint is the best.
        consistent: whether rows are written as they were at the time of capture, though training continues.
    """

    training: dict[str, Any]
    score: Score | None = None
    consistent: bool = True


class _Chain(NamedTuple):
    """The last checkpoint, which the next may add to.

    Attributes:
        directory: where it is.
        base: identifies it.
        snapshots: `SnapshotInfo.numbers` of each PS.
        buckets: the map of the PSs. After another one, they do not know what has changed.
        increments: number of checkpoints since the last full one.
    """

    directory: str
    base: Base
    snapshots: list[dict[str, int]]
    buckets: BucketMap
    increments: int


class _Written(NamedTuple):
    """Time at which writing a checkpoint ended, its step, and its duration since the state was captured."""

    at: float
    step: int
    seconds: float


class Checkpointing:
    """Writes the checkpoints of a run, one at a time. Used by the training thread; NN worker 0 writes for all.

    All NN workers call `save`, `save_last`, `begin_periodic`, `begin_best` and `await_periodic`, between two phases.

    Args:
        network: the dense network, whose replicas run functions on NN worker 0.
        state: what training changes, besides rows and the network's tensors.
        finite: finds out whether the state gives finite logits; no other is saved.
        servers: the embedding PSs.
        declared: the declarations of the run, which each checkpoint records.
    """

    def __init__(
        self,
        network: DenseStep,
        state: TrainingState,
        finite: FiniteState,
        servers: Sequence[EmbeddingPS],
        declared: Declared,
    ) -> None:
        self._network = network
        self._state = state
        self._finite = finite
        self._servers = servers
        self._declared = declared
        self._options = declared.options
        self._chain: _Chain | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failures = 0
        self._last: _Written | None = None
        self._attempt: _Written | None = None
        """The last attempt, even if it has failed."""
        self._failed_in_a_row = {True: 0, False: 0}
        """Checkpoints in the background that have failed since one was written, by whether they were asked for."""
        self._asked_for = True
        """Whether the checkpoint that is being written in the background was asked for."""
        self._warned_of_skips = False
        self._diverged = False
        """Whether the model has diverged since the last checkpoint was begun."""
        self.on_written: Callable[[str], object] = lambda _: None
        """Receives the path of each complete checkpoint, on NN worker 0, in whichever thread has written it."""
        self._hurry = threading.Event()  # Set while the training thread waits for what is being written.
        self._snapshot = ""  # Name of the snapshot of the PSs that is being written.

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def metrics(self) -> dict[str, float]:
        """Returns the age, duration and failures of checkpoints. Thread-safe."""
        metrics: dict[str, float] = {"checkpoint_failures": self._failures}
        last = self._last
        if last is not None:
            metrics["checkpoint_age_seconds"] = time.monotonic() - last.at
            metrics["checkpoint_step"] = last.step
            metrics["checkpoint_seconds"] = last.seconds
        return metrics

    def wait(self) -> None:
        """Blocks until nothing is being written. Raises, once, the error of the last checkpoint."""
        if self._thread is not None:
            self._hurry.set()
            if self.busy:
                try_all([functools.partial(ps.hurry_snapshot, self._snapshot) for ps in self._servers], PersiaError)
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, directory: str) -> str:
        """Writes a checkpoint and returns its path. Blocks."""
        captured = self.capture()
        return self._network.replicas.run_on_rank0(lambda: self.write(directory, captured), str)

    def save_last(self) -> str:
        """Writes the checkpoint at the end of `fit`. As none comes after it, transient failures are retried."""
        captured, directory = self.capture(), self._directory

        def transient(error: Exception) -> bool:
            full = isinstance(error, CheckpointError) and error.fields.get("errno") in (errno.ENOSPC, errno.EDQUOT)
            return full or isinstance(error.__cause__, PS_RESTARTED)

        def warn(error: Exception) -> None:
            LOG.warning("The last checkpoint has failed; retrying for %g s: %s", LAST_SECONDS, error)

        def write() -> str:
            return retry(
                lambda: self.write(directory, captured),
                transient=transient,
                deadline=Deadline(LAST_SECONDS),
                backoff=Backoff(RETRY_SECONDS),
                on_wait=warn,
            )

        return self._network.replicas.run_on_rank0(write, str)

    def begin_periodic(self) -> bool:
        """Begins a checkpoint that is written while training continues, unless one is still being written.

        Without an interval in the options, it is also left out if the last one took too long; see `MOST_TIME`.

        Returns:
            Whether it was begun.

        Raises:
            CheckpointError: two in a row have failed. A single one is logged as a warning, as the next replaces it;
                without an interval in the options, any number is.
        """
        replicas, asked_for = self._network.replicas, not self._options.checkpoints_by_default
        if replicas.run_on_rank0(lambda: self._too_soon() or self._still_writing(), bool):
            return False
        captured = self.capture()
        return replicas.run_on_rank0(lambda: self.begin(self._directory, captured, asked_for=asked_for), bool)

    def begin_best(self) -> bool:
        """Begins a checkpoint of a state that is the best so far; see `begin_periodic`.

        Waits for a checkpoint that is still being written, as this one must not be left out.
        """
        captured = self.capture()
        return self._network.replicas.run_on_rank0(lambda: self.begin(self._directory, captured), bool)

    def await_periodic(self) -> bool:
        """Waits for the last checkpoint that was begun. Returns whether it has failed, so that another is needed."""

        def failed() -> bool:
            try:
                self.wait()
            except PersiaError as error:
                LOG.warning("A checkpoint has failed; writing another one now: %s", error)
                return True
            return False

        return self._network.replicas.run_on_rank0(failed, bool)

    def capture(self) -> CheckpointState:
        """Captures the state of training. All NN workers call it.

        Raises:
            DivergedError: the state does not give finite logits.
        """
        self._finite.check()
        self._network.replicas.settle()
        consistent = self._options.checkpoint_consistent or isinstance(self._state.mode, Sync)
        return CheckpointState(self._state.state_dict(), self._score(), consistent)

    def give_up_live(self) -> None:
        """Gives up a checkpoint that is being written, if its rows are the current ones: the model has diverged."""
        self._diverged = True

    @property
    def _directory(self) -> str:
        directory = self._options.checkpoint_dir
        assert directory is not None  # `Trainer` checks it.
        return directory

    # --- on NN worker 0 -----------------------------------------------------------------------------------------

    def write(self, directory: str, captured: CheckpointState) -> str:
        """Writes a checkpoint of the captured state while nothing trains. Returns its path."""
        self.wait()
        # Nothing trains, so no row changes before it is read.
        return self._prepare(directory, captured, live=True)(1.0)

    def begin(self, directory: str, captured: CheckpointState, *, asked_for: bool = True) -> bool:
        """Begins to write a checkpoint of the captured state in the background; see `begin_periodic`.

        Args:
            directory: where to write.
            captured: the state.
            asked_for: whether the options ask for it; otherwise its failure does not end training.
        """
        was_begun = self._thread is not None
        try:
            self.wait()
            if was_begun:
                self._failed_in_a_row = {True: 0, False: 0}
        except CheckpointError as error:
            self._tolerate(error, asked_for=self._asked_for)
        try:
            write = self._prepare(directory, captured, live=not captured.consistent)
        except CheckpointError as error:
            self._tolerate(error, asked_for=asked_for)
            return False
        self._asked_for = asked_for
        self._hurry.clear()

        def run() -> None:
            try:
                write(self._options.checkpoint_share)
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="persia-checkpoint", daemon=True)
        self._warned_of_skips = False
        self._thread.start()
        return True

    def _too_soon(self) -> bool:
        """Whether a checkpoint that nobody asked for would take too much of the time."""
        if not self._options.checkpoints_by_default:
            return False
        last = self._attempt
        if self.busy or last is None:
            return self.busy
        return last.seconds > MOST_TIME * (last.seconds + time.monotonic() - last.at)

    def _still_writing(self) -> bool:
        if not self.busy:
            return False
        LOG.log(  # Once for each checkpoint that takes too long: a dozen may be due meanwhile.
            logging.DEBUG if self._warned_of_skips else logging.WARNING,
            "Step %d: checkpoint skipped, as the one before is still being written. Save less often, set a larger "
            "checkpoint_share, or write to a faster disk.",
            self._state.global_step,
        )
        self._warned_of_skips = True
        return True

    def _score(self) -> Score | None:
        """Returns the score of the state, if it was evaluated and the best checkpoint is kept."""
        seen = self._state.evaluations
        if not self._options.keeps_best or seen.last is None or seen.last_step != self._state.global_step:
            return None
        watched = self._declared.watched
        return Score(watched.name, seen.last, watched.score(seen.last)) if watched.name == seen.metric else None

    def _tolerate(self, error: CheckpointError, *, asked_for: bool) -> None:
        """Logs the error of a checkpoint; raises it if it was asked for and is the second one in a row."""
        failed = self._failed_in_a_row[asked_for] = self._failed_in_a_row[asked_for] + 1
        if asked_for and failed > 1:
            raise error
        rare = failed & (failed - 1) == 0  # The 1st, 2nd, 4th, 8th, ...
        LOG.log(
            logging.WARNING if rare else logging.DEBUG,
            "A checkpoint has failed (%d in a row); training continues: %s",
            failed,
            error,
        )

    def _prepare(self, directory: str, captured: CheckpointState, *, live: bool) -> Callable[[float], str]:
        """Copies the network and the captured state, and begins snapshots of all PSs, before training continues.

        Args:
            directory: where to write.
            captured: the state.
            live: write rows as they are when they are read; PSs then keep none aside.

        Returns:
            A function that writes the checkpoint with a share of the processors of each host, and returns its path.
        """
        began = time.monotonic()
        options, servers, state = self._options, self._servers, self._state
        step = state.global_step
        chain = self._chain if self._may_add_increment(directory, step, options.checkpoint_increments) else None
        self._chain = None
        self._diverged = False

        def attempted() -> _Written:
            now = time.monotonic()
            self._attempt = _Written(now, step, now - began)
            return self._attempt

        writer: CheckpointWriter | None = None
        try:
            writer = CheckpointWriter(directory, step, keep_last=options.keep_last, keep_best=options.keeps_best)
            with _as_checkpoint_error(step):
                # The state of PSs besides rows changes with every batch: read it before training continues.
                if (states := held_states(servers)) is None:
                    states = []
                    write_states(writer, servers)
                model = _copied(dict(self._network.model.state_dict()))
                training = _copied(captured.training)
                schema = resolved(self._declared.schema, servers)
                if chain is not None and chain.buckets != servers[0].buckets():
                    chain = None
                since = chain.snapshots if chain else None
                name, infos, buckets = begin_snapshots(servers, since, directory, live=live)
                self._snapshot = name
        except BaseException:
            self._failures += 1
            attempted()
            if writer is not None:
                writer.abort()
            raise
        stream = state.stream
        whole = all(info.whole for info in infos)
        config = {
            "schema": dump(self._declared.schema),
            "embedding_optimizer": dump(self._declared.embedding_optimizer),
            "mode": dump(self._declared.auto or state.mode),
            "options": dump(options),
            "input_rules": dump(state.input_rules),
        }
        description = description_of(self._network.model)
        if description is not None:
            config["model"] = dump(description)

        def write(share: float) -> str:
            try:
                with _as_checkpoint_error(step), writer:
                    try:
                        write_rows(writer, servers, name, share=share, hurry=self._hurry)
                    finally:  # Before the files of a failed checkpoint are removed: PSs then write no more.
                        end_snapshots(servers, name)
                    if share < 1:
                        writer.rest(Throttle(share, self._hurry))
                    for part, pieces in states:
                        writer.add_state(part, pieces)
                    writer.add_tensors("model", model)
                    writer.add_state("training", training)
                    if live and self._diverged:
                        raise CheckpointError(
                            f"The checkpoint of step {step} is given up: the model has diverged while its rows were "
                            "written. The checkpoint before stays the latest.",
                            step=step,
                        )
                    path = writer.commit(
                        schema=schema,
                        config=config,
                        span=(step, max(step, state.global_step) if live else step),
                        base=None if whole or chain is None else chain.base,
                        buckets=buckets,
                        score=captured.score,
                    )
            except BaseException:
                self._failures += 1
                attempted()
                raise
            if stream is not None:  # Only now: nobody goes back to before these offsets.
                stream.commit(training["offsets"])
                state.covered("checkpoint", training["position"])
            increments = 0 if whole or chain is None else chain.increments + 1
            self._last = attempted()
            self._chain = _Chain(
                directory, Base(step, writer.content), [info.numbers for info in infos], buckets, increments
            )
            self.on_written(path)
            return path

        return write

    def _may_add_increment(self, directory: str, step: int, most: int) -> bool:
        """Returns whether a checkpoint of this step may hold only the rows that changed since the last one."""
        chain = self._chain
        return chain is not None and chain.directory == directory and chain.increments < most and chain.base.step < step


@contextmanager
def _as_checkpoint_error(step: int) -> Iterator[None]:
    """Raises CheckpointError in place of the error of a PS that is late, was restarted, or has an error of its own."""
    try:
        yield
    except (*PS_RESTARTED, DeadlineError, RemoteError) as error:
        raise CheckpointError(
            f"The checkpoint of step {step} is lost, training is unharmed: {error.message} Save again.", step=step
        ) from error


def _copied(value: Any) -> Any:
    """Returns a copy in CPU memory that training does not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return type(value)((key, _copied(item)) for key, item in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return value
