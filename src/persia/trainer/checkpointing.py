"""Checkpoints of a training run: a moment is captured at rest, and written while training goes on."""

from __future__ import annotations

import errno
import logging
import math
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from persia.checkpoint import MOST_SHARDS, Base, CheckpointWriter
from persia.checkpoint.storage import ahead
from persia.config import dump
from persia.errors import CheckpointError, PeerRestartedError, PersiaError, StoreError, WireError
from persia.metrics import MetricsResult
from persia.retry import Backoff, Deadline, retry
from persia.services import EmbeddingPS, SnapshotInfo
from persia.trainer.loading import resolved

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["CheckpointState", "Checkpointing", "await_periodic", "begin_periodic", "score_of", "write_rows"]

LOG = logging.getLogger("persia.checkpoint")

LAST_SECONDS = 60.0
"""Seconds for which the last checkpoint of a `fit` call is retried."""

RETRY_SECONDS = 1.0

HELD_BYTES = 64 << 20
"""Bytes of memory for the state of PSs besides rows, such as counts of ids that are not admitted yet."""

LOST = (StoreError, WireError, PeerRestartedError)
"""Errors of a PS that was restarted while a checkpoint was read from it."""


class CheckpointState(NamedTuple):
    """State of a checkpoint that is captured between two phases, besides the snapshots of the PSs.

    Attributes:
        training: `TrainingState.state_dict`, which all NN workers call.
        score: the highest decides which checkpoint is the best.
        consistent: whether all rows are to be of this moment.
    """

    training: dict[str, Any]
    score: float | None = None
    consistent: bool = True


class _Chain(NamedTuple):
    """The last checkpoint, which the next may add to: its snapshot of each PS, and how many increments it has."""

    directory: str
    base: Base
    epochs: list[dict[str, int]]
    length: int


class _Written(NamedTuple):
    """Completion time of the last checkpoint, its step, and its duration since the state was captured."""

    at: float
    step: int
    seconds: float


class Throttle:
    """Limits the processor time of the thread that makes it to a share of the machine's, until it has to hurry.

    Waiting for a disk or a network does not count, as it takes nothing from training.

    Args:
        share: of all processors; a thread that may use a whole one never pauses.
        hurry: ends all pauses.
    """

    def __init__(self, share: float, hurry: threading.Event) -> None:
        self._factor = max(0.0, 1 / (share * len(os.sched_getaffinity(0))) - 1)
        self._hurry = hurry
        self._begin = time.thread_time()

    def __call__(self) -> None:
        """Pauses in proportion to the work since the last pause."""
        self._hurry.wait((time.thread_time() - self._begin) * self._factor)
        self._begin = time.thread_time()


class Checkpointing:
    """Writes the checkpoints of one trainer, one at a time. Used by its thread, on one NN worker for all."""

    def __init__(self) -> None:
        self._chain: _Chain | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._failures = 0
        self._last: _Written | None = None
        self._failing = False
        self._hurry = threading.Event()  # Somebody waits for what is being written.

    @property
    def busy(self) -> bool:
        """Whether one is being written."""
        return self._thread is not None and self._thread.is_alive()

    def figures(self) -> dict[str, float]:
        """For `persia.trainer.monitor`. Thread-safe."""
        found: dict[str, float] = {"checkpoint_failures": self._failures}
        last = self._last
        if last is not None:
            found["checkpoint_age_seconds"] = time.monotonic() - last.at
            found["checkpoint_step"] = last.step
            found["checkpoint_seconds"] = last.seconds
        return found

    def wait(self) -> None:
        """Blocks until nothing is being written; raises, once, what the last one has failed with."""
        if self._thread is not None:
            self._hurry.set()
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def save(self, trainer: Trainer, directory: str, moment: CheckpointState) -> str:
        """Writes a checkpoint of a trainer at rest; returns its path."""
        self.wait()
        return self._capture(trainer, directory, moment._replace(consistent=False))(None)

    def save_last(self, trainer: Trainer, directory: str, moment: CheckpointState) -> str:
        """The same at the end of `fit`. No later one makes it good, so it waits for room, and for a PS that returns."""

        def passing(error: Exception) -> bool:
            full = isinstance(error, CheckpointError) and error.fields.get("errno") in (errno.ENOSPC, errno.EDQUOT)
            return full or isinstance(error.__cause__, LOST)

        def told(error: Exception) -> None:
            LOG.warning("The last checkpoint has failed, and is tried again for %g s: %s", LAST_SECONDS, error)

        return retry(
            lambda: self.save(trainer, directory, moment),
            transient=passing,
            deadline=Deadline(LAST_SECONDS),
            backoff=Backoff(RETRY_SECONDS),
            on_wait=told,
        )

    def begin(self, trainer: Trainer, directory: str, moment: CheckpointState) -> bool:
        """Captures this moment of a trainer at rest; it is written in the background. `wait` tells how that went.

        Returns:
            Whether it was begun.

        Raises:
            CheckpointError: two in a row have failed. Of one alone a warning tells: the next makes it good.
        """
        awaited = self._thread is not None
        try:
            self.wait()
            self._failing = self._failing and not awaited
        except CheckpointError as error:
            self._bear(error)
        try:
            write = self._capture(trainer, directory, moment)
        except CheckpointError as error:
            self._bear(error)
            return False
        self._hurry.clear()

        def run() -> None:
            try:
                write(Throttle(trainer.options.checkpoint_share, self._hurry))
            except BaseException as error:
                self._failure = error

        self._thread = threading.Thread(target=run, name="persia-checkpoint", daemon=True)
        self._thread.start()
        return True

    def _bear(self, error: CheckpointError) -> None:
        if self._failing:
            raise error
        self._failing = True
        LOG.warning("A checkpoint has failed, and training goes on: %s", error)

    def _capture(self, trainer: Trainer, directory: str, moment: CheckpointState) -> Callable[[Throttle | None], str]:
        """Captures everything that training changes; the function that is returned writes it, with pauses."""
        began = time.monotonic()
        options = trainer.options
        servers = trainer.embeddings.connection.servers
        step = trainer.global_step
        chain = self._chain if self._may_add(directory, step, options.checkpoint_increments) else None
        self._chain = None
        writer = CheckpointWriter(directory, step, keep_last=options.keep_last, keep_best=options.keep_best is not None)
        try:
            with _given_up(step):
                # What PSs have besides rows changes with every batch: so now, before training goes on.
                states = _states(writer, servers)
                model = _held(dict(trainer.model.state_dict()))
                training = _held(moment.training)
                schema = resolved(trainer)
                name, infos = _cut(servers, chain.epochs if chain else None, directory, live=not moment.consistent)
        except BaseException:
            writer.abort()
            raise
        whole = all(info.whole for info in infos)
        config = {
            "schema": dump(trainer.schema),
            "embedding_optimizer": dump(trainer.embedding_optimizer),
            "mode": dump(trainer.auto or trainer.mode),
            "options": dump(options),
        }

        def write(rests: Throttle | None) -> str:
            try:
                with _given_up(step), writer:
                    if rests is not None:
                        writer.rest(rests)
                    for number, server in enumerate(servers):
                        write_rows(writer, number, server, name, at_rest=rests is None)
                    for part, pieces in states:
                        writer.add_state(part, pieces)
                    writer.add_tensors("model", model)
                    writer.add_state("training", training)
                    path = writer.commit(
                        schema=schema,
                        config=config,
                        span=(step, step if moment.consistent else max(step, trainer.global_step)),
                        base=None if whole or chain is None else chain.base,
                        score=moment.score,
                    )
            except BaseException:
                self._failures += 1
                raise
            finally:
                _end(servers, name)
            length = 0 if whole or chain is None else chain.length + 1
            now = time.monotonic()
            self._last = _Written(now, step, now - began)
            self._chain = _Chain(directory, Base(step, writer.content), [info.epochs for info in infos], length)
            return path

        return write

    def _may_add(self, directory: str, step: int, most: int) -> bool:
        chain = self._chain
        return chain is not None and chain.directory == directory and chain.length < most and chain.base.step < step


def begin_periodic(trainer: Trainer, evaluate: Callable[[], MetricsResult | None]) -> bool:
    """Lets a checkpoint be written while training goes on, unless one is under way. All NN workers call it.

    Args:
        trainer: at rest.
        evaluate: called where the best checkpoint is kept.
    """
    directory, replicas = trainer.options.checkpoint_dir, trainer.step.replicas
    assert directory is not None
    if replicas.run_on_rank0(lambda: _still_saving(trainer), bool):
        return False
    evaluation = evaluate() if trainer.options.keep_best is not None else None
    moment = trainer._moment(score_of(trainer, evaluation))
    return replicas.run_on_rank0(lambda: trainer.saving.begin(trainer, directory, moment), bool)


def _still_saving(trainer: Trainer) -> bool:
    if not trainer.saving.busy:
        return False
    LOG.warning(
        "Step %d: no checkpoint, as the one before is still being written. Make them less often, let them take a "
        "larger checkpoint_share, or write to a faster disk.",
        trainer.global_step,
    )
    return True


def await_periodic(trainer: Trainer) -> bool:
    """Waits for the last one that was begun. Returns whether it has failed, so that there should be another."""
    try:
        trainer.saving.wait()
    except PersiaError as error:
        LOG.warning("A checkpoint has failed, another one is written now: %s", error)
        return True
    return False


def score_of(trainer: Trainer, evaluation: MetricsResult | None) -> float | None:
    """Returns the score of a checkpoint, the higher the better; None if no score is kept."""
    if evaluation is None or trainer.options.keep_best is None:
        return None
    score = evaluation.auc if trainer.options.keep_best == "auc" else -evaluation.log_loss
    return score if math.isfinite(score) else None


@contextmanager
def _given_up(step: int) -> Iterator[None]:
    """Raises CheckpointError in place of the error of a restarted PS: its snapshot is gone, training continues."""
    try:
        yield
    except LOST as error:
        raise CheckpointError(
            f"The checkpoint of step {step} is lost, training is unharmed: {error.message} Save again.", step=step
        ) from error


def _cut(
    servers: Iterable[EmbeddingPS], epochs: list[dict[str, int]] | None, directory: str, *, live: bool
) -> tuple[str, list[SnapshotInfo]]:
    """Begins a snapshot on all PSs: of changed rows if all of them know which, else of all rows."""
    place = "" if "://" in directory else os.path.abspath(directory)
    since = epochs or [{} for _ in servers]
    name = secrets.token_hex(8)
    try:
        infos = [server.begin_snapshot(name, known, place, live) for server, known in zip(servers, since, strict=True)]
    except BaseException:
        _end(servers, name)
        raise
    if len({info.whole for info in infos}) == 1:
        return name, infos
    _end(servers, name)
    return _cut(servers, None, directory, live=live)


def _end(servers: Iterable[EmbeddingPS], name: str) -> None:
    for server in servers:
        with suppress(PersiaError):  # A PS that is gone has no snapshot either.
            server.end_snapshot(name)


def _states(writer: CheckpointWriter, servers: Iterable[EmbeddingPS]) -> list[tuple[str, list[dict[str, Any]]]]:
    """State parts of this moment, to be written later; those that would take too much memory are written at once."""
    held: list[tuple[str, list[dict[str, Any]]]] = []
    nbytes = 0
    for number, server in enumerate(servers):
        for part, pieces in enumerate(server.export_state()):
            name, content = f"server-{number}.{part}", [piece._asdict() for piece in pieces]
            nbytes += sum(piece.values.nbytes for piece in pieces)
            if nbytes <= HELD_BYTES:
                held.append((name, content))
            else:
                writer.add_state(name, content)
    return held


def write_rows(writer: CheckpointWriter, number: int, server: EmbeddingPS, name: str, *, at_rest: bool = True) -> None:
    """Writes the rows of a store snapshot of PS `number`; at rest the next chunk is read while one is written."""
    rows = server.snapshot_rows(name)
    with closing(ahead(rows)) if at_rest else nullcontext(rows) as chunks:
        for chunk in chunks:
            writer.add_rows(chunk.table, number * MOST_SHARDS + chunk.shard, chunk.arrays)
    for chunk in server.snapshot_removed(name):
        writer.add_removed(chunk.table, number * MOST_SHARDS + chunk.shard, chunk.arrays["ids"])


def _held(value: Any) -> Any:
    """A copy in CPU memory that training does not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Mapping):
        return type(value)((key, _held(item)) for key, item in value.items())  # type: ignore[call-arg]
    if type(value) in (list, tuple):
        return type(value)(_held(item) for item in value)
    return value
