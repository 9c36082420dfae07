"""`Trainer.fit` on the NN workers of a cluster, from the process that has the Trainer.

Each NN worker gets a Trainer like it, with the same state, and fits; then the state comes back. So in between the
network is here as much as with `Embedded`: to be evaluated, saved, or trained on. When an NN worker dies, all begin
anew: from where the others came to rest without it, or else from the state that was kept here last.
"""

from __future__ import annotations

import io
import logging
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import torch

from persia.batching.batch import Batch
from persia.checkpoint import list_checkpoints
from persia.errors import NNWorkersDiedError, RoleDiedError
from persia.metrics import Metrics
from persia.nn.replicas import SingleReplica
from persia.services import Attempt, ProcessCluster
from persia.trainer import loading
from persia.trainer.progress import FitProgress, FitResult, TrainedRows
from persia.trainer.state import RunTotals

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["fit", "keep"]

LOG = logging.getLogger("persia.cluster")


class _State(NamedTuple):
    """State of a Trainer that training changes, besides rows.

    Attributes:
        model: its tensors and all else that `torch.save` writes, on the CPU.
        training: see `TrainingState.state_dict`.
        finished: whether the last call came to its end; a resumed run goes on where it was in any case.
        trained: in this call, since NN workers began last.
    """

    model: bytes
    training: dict[str, Any]
    finished: bool
    trained: TrainedRows

    @property
    def step(self) -> int:
        return int(self.training["global_step"])


class _Alone(NamedTuple):
    """State of an NN worker that quiesced without the others; its counts are its own."""

    state: _State


class _Work:
    """The work of an NN worker in one call of `fit`. Pickled as a whole, with the cluster in it.

    Args:
        trainer: which one to do it like.
        cluster: that of the trainer.
        eval_data: evaluated at the end.
        state: to begin with.
        bounds: of `Trainer.fit_here`.
    """

    def __init__(
        self,
        trainer: Trainer,
        cluster: ProcessCluster,
        eval_data: Iterable[Batch] | None,
        state: _State,
        bounds: dict[str, Any],
    ) -> None:
        self._class = type(trainer)
        self._arguments: dict[str, Any] = {
            "optimizer": trainer.optimizer_factory,
            "embedding_optimizer": trainer.embedding_optimizer,
            "mode": trainer.declared_mode,
            "cluster": cluster,
            "options": trainer.options,
        }
        self._model = trainer.model
        self._schema = trainer.schema
        self._state = state
        self._eval_data = eval_data
        self._bounds = bounds

    def __call__(self) -> tuple[FitResult, _State] | _Alone | None:
        trainer = self._class(self._model, self._schema, **self._arguments)
        _restore(trainer, self._state)
        first = trainer.embeddings.connection.rank == 0
        try:
            result = trainer.fit_here(None, self._eval_data, **self._bounds)
        except NNWorkersDiedError:
            trainer.step.replicas = SingleReplica(trainer.model)
            if not first:
                trainer.state.earlier = RunTotals()  # As its metrics: what was before is with the first one.
            return _Alone(_state(trainer, trainer.trained_here))
        state = _state(trainer, TrainedRows(result.rows, result.seconds))  # All take part.
        return (result, state) if first else None


def fit(
    trainer: Trainer,
    cluster: ProcessCluster,
    train_data: Iterable[Batch],
    eval_data: Iterable[Batch] | None,
    bounds: dict[str, Any],
) -> FitResult:
    """Does what `Trainer.fit` says, elsewhere.

    Args:
        trainer: of this process.
        cluster: whose data loaders read, and whose NN workers train.
        train_data: see `Trainer.fit`; pickled.
        eval_data: likewise.
        bounds: `epochs` and `max_steps`.

    Raises:
        PersiaError: what an NN worker has raised, or of which a process has died. The network here is as it was.
    """
    trainer.segments.begin(train_data, trainer.finished)
    state = _state(trainer, TrainedRows(0, 0.0))
    story = _Story(trainer.options.max_failures)
    first_step, before = state.step, TrainedRows(0, 0.0)
    while True:
        training = state.training
        epoch, position = (0, 0) if state.finished else (training["epoch"], training["position"])
        cluster.feed(train_data, epoch, position, trainer.options.accumulation_steps)
        left = dict(bounds)
        if left["max_steps"] is not None:
            left["max_steps"] -= state.step - first_step
        attempt = cluster.attempt(_Work(trainer, cluster, eval_data, state, left), lambda: trainer.stopping)
        if not attempt.deaths:
            break
        state, how = _go_on(attempt, state, trainer.schema.labels)
        story.add(attempt.deaths, how)
        lost = [d for d in attempt.deaths if d.fields["role"] == "embedding_ps" and "returns" not in d.fields]
        if lost:
            _reload(trainer, cluster, lost)
        before = _sum(before, state.trained)
    result: FitResult
    last: _State
    result, last = attempt.results[0]
    _restore(trainer, last)
    trained = _sum(before, last.trained)
    return msgspec.structs.replace(
        result,
        rows=trained.rows,
        seconds=trained.seconds,
        rows_per_second=trained.rows / trained.seconds if trained.seconds else 0.0,
        steps=result.global_step - first_step,
        failures=story.failures,
    )


def _reload(trainer: Trainer, cluster: ProcessCluster, deaths: list[RoleDiedError]) -> None:
    """Starts embedding PSs that have died for good elsewhere, with the rows of the last checkpoint."""
    fields = [f for death in deaths for f in (death.fields, *death.fields.get("later", []))]
    ranks = sorted({f["rank"] for f in fields if f["role"] == "embedding_ps"})
    directory = trainer.options.checkpoint_dir
    if directory is None or not list_checkpoints(directory):
        raise deaths[0]
    cluster.restart_servers(ranks)
    path = loading.load_partitions(trainer, directory, ranks)
    LOG.warning("Embedding PSs %s have the rows of %s.", ", ".join(map(str, ranks)), path)


def keep(trainer: Trainer, run: FitProgress) -> None:
    """Keeps the state of NN workers at rest in the process that has the Trainer. All of them call it."""
    save = trainer.embeddings.connection.save_recovery_point
    assert save is not None
    trainer.step.replicas.settle()
    state = _state(trainer, run.progress())
    if trainer.embeddings.connection.rank == 0:
        save(state)


class _Story:
    """Log of the failures of NN workers in one call of `fit`.

    Args:
        most: maximum number of restarts.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lines: list[str] = []
        self.failures = 0

    def add(self, deaths: list[RoleDiedError], how: str) -> None:
        """These have died, and training can go on like this.

        Raises:
            RoleDiedError: that were too many.
        """
        self.failures += 1
        when = time.strftime("%H:%M:%S")
        names = ", ".join(f"{d.fields['role'].replace('_', ' ')} {d.fields['rank']}" for d in deaths)
        if self.failures > self._most:
            first = deaths[0]
            lines = "".join(f"\n  {line}" for line in self._lines)
            raise RoleDiedError(
                f"{first.message}\nTraining does not go on at {when}: this is failure {self.failures} of this call of "
                f"`fit`, and {self._most} are made good (TrainerOptions.max_failures). See why processes die, and go "
                f"on from the last checkpoint.{' Before:' if lines else ''}{lines}",
                **{**first.fields, "deaths": [death.fields for death in deaths], "failures": self.failures},
            )
        self._lines.append(f"{when}: {names} died; {how}")
        LOG.warning("%s\nTraining goes on: %s", "\n".join(death.message for death in deaths), how)


def _go_on(attempt: Attempt, state: _State, labels: Sequence[str]) -> tuple[_State, str]:
    """Returns the state to restart with, and a message that says where it is from."""
    rests = {rank: result.state for rank, result in attempt.results.items() if isinstance(result, _Alone)}
    if rests:
        merged = _merged(state, rests, labels)
        return merged, f"NN workers {', '.join(map(str, rests))} went on to step {merged.step}, from where all begin."
    kept: _State = attempt.recovery_point or state._replace(trained=TrainedRows(0, 0.0))
    return kept, f"all NN workers begin again at step {kept.step}, from the last snapshot; rows stay as they are."


def _merged(base: _State, rests: dict[int, _State], labels: Sequence[str]) -> _State:
    """One state of NN workers that are at rest without the others.

    What the dead had counted since all began from `base` is lost.
    """
    first = rests[min(rests)]
    metrics = Metrics(labels)
    generators = list(base.training["random"])
    counts = msgspec.convert(base.training["counts"], RunTotals)
    parts = [state.training for state in rests.values()]
    if 0 in rests:  # It has counted on from there.
        counts = RunTotals()
    else:
        parts.append(base.training)
    for part in parts:
        loaded = Metrics(labels)
        loaded.load_state_dict(part["metrics"])
        metrics.merge(loaded)
    for rank, state in rests.items():
        counts += msgspec.convert(state.training["counts"], RunTotals)
        if rank < len(generators):  # Else all of these begin with the seed of their rank.
            generators[rank : rank + 1] = state.training["random"]
    training = {
        **first.training,
        "local_batch": max(part["local_batch"] for part in parts),
        "metrics": metrics.state_dict(),
        "counts": msgspec.to_builtins(counts),
        "random": generators,
    }
    trained = [state.trained for state in rests.values()]
    total = TrainedRows(sum(t.rows for t in trained), max(t.seconds for t in trained))
    return first._replace(training=training, trained=total)


def _sum(a: TrainedRows, b: TrainedRows) -> TrainedRows:
    return TrainedRows(a.rows + b.rows, a.seconds + b.seconds)


def _state(trainer: Trainer, trained: TrainedRows) -> _State:
    model = io.BytesIO()
    torch.save(trainer.model.state_dict(), model)
    return _State(model.getvalue(), trainer.state.state_dict(), trainer.finished, trained)


def _restore(trainer: Trainer, state: _State) -> None:
    model = torch.load(io.BytesIO(state.model), map_location="cpu", weights_only=True)
    trainer.model.load_state_dict(model)
    trainer.state.load_state_dict(state.training, elsewhere=isinstance(trainer.cluster, ProcessCluster))
    trainer.state.finished = state.finished
