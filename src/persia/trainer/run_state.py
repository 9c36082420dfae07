"""`RunState`: what training changes in a run besides rows, as it travels between NN workers and the driver."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import torch

from persia.nn.dense_step import DenseStep
from persia.trainer.progress import TrainedRows
from persia.trainer.scores import ScoresState
from persia.trainer.state import TrainingState

__all__ = ["RunState", "captured", "restore", "total_of"]


class RunState(NamedTuple):
    """State of a run that training changes, besides rows. A recovery point is one.

    Attributes:
        model: its tensors and all else that `torch.save` writes, on the CPU.
        training: see `TrainingState.state_dict`.
        scores: see `TrainingScores.state_dict`.
        finished: see `TrainingState.finished`.
        trained: rows that were trained in this call since all NN workers last started.
    """

    model: bytes
    training: dict[str, Any]
    scores: ScoresState
    finished: bool
    trained: TrainedRows

    @property
    def step(self) -> int:
        """The global step."""
        return int(self.training["global_step"])


def captured(network: DenseStep, state: TrainingState, trained: TrainedRows) -> RunState:
    """Returns the state of a run. Blocks until all NN workers have called it.

    Args:
        network: the dense network.
        state: the rest of it.
        trained: see `RunState`.
    """
    model = io.BytesIO()
    torch.save(network.model.state_dict(), model)
    scores = state.scores.state_dict(network.replicas.gather)
    return RunState(model.getvalue(), state.state_dict(), scores, state.finished, trained)


def restore(network: DenseStep, state: TrainingState, saved: RunState, *, trains_in_other_processes: bool) -> None:
    """Restores the state of a run.

    Args:
        network: the dense network.
        state: the rest of it.
        saved: a result of `captured`.
        trains_in_other_processes: see `TrainingState.load_state_dict`.
    """
    model = torch.load(io.BytesIO(saved.model), map_location="cpu", weights_only=True)
    network.model.load_state_dict(model)
    state.load_state_dict(saved.training, trains_in_other_processes=trains_in_other_processes)
    state.scores.repeats, state.scores.again = saved.scores["repeats"], saved.scores["again"]
    if state.rank == 0:
        state.scores.load_state_dict(saved.scores)
    state.finished = saved.finished


def total_of(a: TrainedRows, b: TrainedRows) -> TrainedRows:
    """Returns the sum of two counts."""
    return TrainedRows(a.rows + b.rows, a.seconds + b.seconds)
