"""`FiniteState`: whether the state of training gives finite logits, before a checkpoint or a server has it."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from persia.errors import DivergedError
from persia.nn.dense_step import DenseStep
from persia.nn.prepared import PreparedBatch
from persia.trainer.evaluation import Evaluator, check_finite
from persia.trainer.state import TrainingState

__all__ = ["FiniteState"]


class _Trained(NamedTuple):
    """The batch that was trained last, and its epoch."""

    batch: PreparedBatch
    epoch: int


class FiniteState:
    """Finds out whether the state of training gives finite logits. The training thread calls its methods.

    Args:
        network: its replicas agree on the answer.
        state: has the global step.
        evaluator: computes logits without training.

    Attributes:
        since: rows and network as they were until this time, on the monotonic clock of this process, have given finite
            logits. Any thread may read it.
    """

    def __init__(self, network: DenseStep, state: TrainingState, evaluator: Evaluator) -> None:
        self.since = -math.inf
        self._network = network
        self._state = state
        self._evaluator = evaluator
        self._last: _Trained | None = None

    def trained(self, batch: PreparedBatch, epoch: int) -> None:
        """Keeps a batch that was trained, to compute its logits once more when the state is about to be saved."""
        self._last = _Trained(batch, epoch)

    def scored(self, looked_up: float) -> None:
        """Notes that a batch had finite logits; `looked_up` is the time at which its lookup began."""
        self.since = looked_up

    def look(self) -> None:
        """Does what `check` does on this NN worker alone, and raises nothing: the next batch does."""
        began = time.monotonic()
        if not self._problem():
            self.since = began

    def check(self) -> None:
        """Computes the logits of the last batch with rows and network as they are now. All NN workers call it.

        Each takes the batch that it has trained last: its rows are those that the last update has changed. Nothing is
        computed if nothing was trained since the last check.

        Raises:
            DivergedError: on all NN workers: logits are not finite on one of them.
        """
        began = time.monotonic()
        problems = [problem.decode() for problem in self._network.replicas.gather(self._problem().encode())]
        if problem := next(filter(None, problems), ""):
            raise DivergedError(problem)
        self.since = began
        self._last = None

    def _problem(self) -> str:
        """Returns what is wrong with the logits of this NN worker; empty if nothing is."""
        if self._last is None:
            return ""
        batch, epoch = self._last
        step = self._state.global_step
        where = f"After global step {step} (batch {batch.number} of epoch {epoch} again, counted from 0)"
        try:
            check_finite(where, self._evaluator.again(batch))
        except DivergedError as error:
            return error.message
        return ""
