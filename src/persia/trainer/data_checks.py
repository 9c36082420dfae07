"""`DataChecks`: whether a call of `fit` has found data to train."""

from __future__ import annotations

from persia.errors import DataError
from persia.telemetry.logs import get_logger
from persia.trainer.state import TrainingState

__all__ = ["DataChecks"]

LOG = get_logger("persia.data")


class DataChecks:
    """Checks, during a call of `fit`, that passes have batches, and at its end that there was something to train.

    Args:
        state: has the position in the data.
        allow_empty: whether a pass without any batch is a warning.
    """

    def __init__(self, state: TrainingState, *, allow_empty: bool) -> None:
        self._state = state
        self._allow_empty = allow_empty
        self._first_step = state.global_step
        self._resumed = state.loaded
        self._goes_on = state.goes_on
        """Whether a stream was read before, so that there may be nothing new."""
        self._empty = False
        """Whether a pass had no batch, which `allow_empty` permits."""
        self.nothing_left = ""
        """See `FitResult`."""

    def check_pass(self) -> None:
        """Checks that a pass that has ended had any batch.

        Raises:
            DataError: it had none, and that was not expected.
        """
        epoch, current = self._state.epoch, self._state.data.current
        if self._state.position or self._empty:
            return
        if (current is not None and current.read is not None) or self._goes_on:
            return  # New files without rows, or a stream in which nothing has come.
        what = f"train_data are empty: epoch {epoch} has no batch, so nothing was trained."
        if not self._allow_empty:
            raise DataError(
                f"{what} Check the path, the filter and `drop_last` of the reader. If there may be no data, set "
                "TrainerOptions(allow_empty=True).",
                epoch=epoch,
            )
        self._empty = True
        LOG.warning("%s", what)

    def check_trained(self, epochs: int, max_steps: int | None, stopped_early: str) -> None:
        """Warns if the call has ended its data, or its patience, and had nothing left to train.

        A loop of calls with `max_steps` cannot know beforehand that one of them ended at the end of the data.

        Args:
            epochs: see `Trainer.fit`.
            max_steps: see `Trainer.fit`.
            stopped_early: see `FitResult`.
        """
        state = self._state
        left = state.data.left(epochs) and not stopped_early
        if state.global_step != self._first_step or left or self._empty:
            return
        if stopped_early:
            self.nothing_left = (
                f"Nothing was left to train. {stopped_early} To train on, raise `patience` (`trainer.patience`), or "
                "leave it out."
            )
        elif self._goes_on:
            self.nothing_left = (
                f"Nothing was left to train: at step {state.global_step} the stream has nothing behind its offsets. "
                "The next call goes on with what has come until then."
            )
        else:
            self.nothing_left = (
                f"Nothing was left to train: at step {state.global_step}, {state.epoch} of {epochs} passes over these "
                "data are done. To train on, raise `epochs` (`train.epochs`), which counts all of them; or begin again "
                "with again=True (`persia train --again`)."
            )
        if state.rank == 0 and (max_steps is None or self._resumed):
            LOG.warning("%s", self.nothing_left)
