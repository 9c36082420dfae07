"""`Trainer.fit` on the NN workers of a cluster, from the process that has the Trainer.

Each NN worker gets a Trainer like it, with the same state, and fits; then the state comes back. So in between the
network is here as much as with `Embedded`: to be evaluated, saved, or trained on.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from persia import resume
from persia.batching.batch import Batch
from persia.fit import FitResult
from persia.services import ProcessCluster

if TYPE_CHECKING:
    from persia.trainer import Trainer

__all__ = ["fit"]


class _State(NamedTuple):
    """What changes in a Trainer by training, beside rows.

    Attributes:
        model: its tensors and all else that `torch.save` writes, on the CPU.
        training: see `resume.training_state`.
        finished: whether the last call came to its end; a resumed run goes on where it was in any case.
    """

    model: bytes
    training: dict[str, Any]
    finished: bool


class _Work:
    """What an NN worker does. Pickled as a whole, with the cluster in it.

    Args:
        trainer: which one to do it like.
        cluster: that of the trainer.
        eval_data: evaluated at the end.
        bounds: epochs and max_steps.
    """

    def __init__(
        self, trainer: Trainer, cluster: ProcessCluster, eval_data: Iterable[Batch] | None, bounds: dict[str, Any]
    ) -> None:
        self._class = type(trainer)
        self._arguments: dict[str, Any] = {
            "optimizer": trainer.optimizer_factory,
            "embedding_optimizer": trainer.embedding_optimizer,
            "mode": trainer.mode,
            "cluster": cluster,
            "options": trainer.options,
        }
        self._model = trainer.model
        self._schema = trainer.schema
        self._state = _state(trainer)
        self._eval_data = eval_data
        self._bounds = bounds

    def __call__(self) -> tuple[FitResult, _State] | None:
        trainer = self._class(self._model, self._schema, **self._arguments)
        _restore(trainer, self._state)
        result = trainer.fit(None, self._eval_data, **self._bounds)
        state = _state(trainer)  # All take part.
        return (result, state) if trainer.embeddings.connection.rank == 0 else None


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
    epoch, position = (0, 0) if trainer.finished else (trainer.epoch, trainer.position)
    cluster.feed(train_data, epoch, position, trainer.options.accumulation_steps)
    done = cluster.run(_Work(trainer, cluster, eval_data, bounds))[0]
    assert done is not None
    result, state = done
    _restore(trainer, state)
    return result


def _state(trainer: Trainer) -> _State:
    model = io.BytesIO()
    torch.save(trainer.model.state_dict(), model)
    return _State(model.getvalue(), resume.training_state(trainer), trainer.finished)


def _restore(trainer: Trainer, state: _State) -> None:
    model = torch.load(io.BytesIO(state.model), map_location="cpu", weights_only=True)
    trainer.model.load_state_dict(model)
    resume.load_training_state(trainer, state.training)
    trainer.finished = state.finished
