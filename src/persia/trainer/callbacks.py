"""`Callback`: the user's own code at the events of `Trainer.fit`, such as a tracker."""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from persia.errors import ConfigError, PersiaError
from persia.metrics import MetricsResult
from persia.telemetry.logs import get_logger

__all__ = ["Callback", "Callbacks", "check_callbacks"]

LOG = get_logger("persia.trainer")


class Callback:
    """Base class of callbacks of `Trainer`; its methods do nothing. Override those that you need.

    NN worker 0 calls them, in its training thread, so training waits for them. On clusters of processes, that is
    another process: callbacks are pickled, in their state before `fit`, and changes that they make to themselves stay
    there. Write results to a file or a server. After an NN worker has died, `on_fit_begin` is called again.

    An exception ends `fit` after the current step: it writes its last checkpoint, if it has a `checkpoint_dir`, and
    raises a PersiaError that names the callback. An exception of `on_fit_begin` ends it before anything is trained.
    """

    def on_fit_begin(self, trainer: Any) -> None:
        """A call of `Trainer.fit` begins.

        Args:
            trainer: the `persia.Trainer`. Its method `stop` ends the call.
        """

    def on_progress(self, step: int, values: Mapping[str, float]) -> None:
        """Training has come to a global step: every 50 batches of NN worker 0, more often at the start, and at the end.

        Args:
            step: global step.
            values: metrics by name, as trackers receive them: "train/loss", "train/rows_per_second", ...
        """

    def on_evaluation(self, step: int, result: MetricsResult) -> None:
        """The data for evaluation were scored at a global step."""

    def on_checkpoint(self, path: str) -> None:
        """A checkpoint of this call is complete; called soon after that."""

    def on_fit_end(self, result: Any) -> None:
        """The call is done, its last checkpoint is written, and `result`, a FitResult, is going to be returned."""


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Returns the callbacks of a trainer as a list.

    Raises:
        ConfigError: one of them is no Callback.
    """
    given = list(callbacks) if isinstance(callbacks, Iterable) else [callbacks]
    for callback in given:
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"Invalid callbacks with {callback!r}; expected a list of instances of persia.Callback.",
                field="callbacks",
            )
    return given


class Callbacks:
    """The callbacks of a trainer. The first failure is kept, and ends the calls.

    Args:
        callbacks: of the user; none on other NN workers than the first.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self._failure: PersiaError | None = None
        self.written: deque[str] = deque()
        """Paths of complete checkpoints that `deliver` has not reported yet. Any thread may add to it."""

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    @property
    def failed(self) -> bool:
        """Whether a callback has failed since the last `raise_failure`."""
        return self._failure is not None

    def begin(self, trainer: object, step: int) -> None:
        """Begins a call of `fit`.

        Raises:
            PersiaError: a callback has failed.
        """
        self.written.clear()
        self.call(operator.methodcaller("on_fit_begin", trainer), "on_fit_begin", step=step)
        self.raise_failure()

    def end(self, result: object, step: int) -> None:
        """Ends a call of `fit`, whose last checkpoint is written.

        Raises:
            PersiaError: a callback has failed, now or before.
        """
        self.deliver(step)
        self.call(operator.methodcaller("on_fit_end", result), "on_fit_end", step=step)
        self.raise_failure()

    def call(self, call: Callable[[Callback], None], event: str, *, step: int) -> None:
        """Calls each callback. An exception is kept, and `fit` is going to end.

        Args:
            call: calls a method of a callback.
            event: name of the method.
            step: global step, for the message.
        """
        for callback in self._callbacks:
            if self._failure is not None:
                return
            try:
                call(callback)
            except Exception as error:
                name = type(callback).__name__
                self._failure = PersiaError(
                    f"{name}.{event} has failed at global step {step}: {type(error).__name__}: {error}. `fit` ended "
                    "after the step, and wrote its checkpoint if it has a checkpoint_dir. Correct the callback, or "
                    "leave it out, and continue.",
                    callback=name,
                    step=step,
                )
                self._failure.__cause__ = error
                LOG.warning("%s.%s has failed; training ends after this step.", name, event)

    def deliver(self, step: int) -> None:
        """Calls `on_checkpoint` for the checkpoints that were completed since the last call."""
        while self.written:
            path = self.written.popleft()
            self.call(operator.methodcaller("on_checkpoint", path), "on_checkpoint", step=step)

    def raise_failure(self) -> None:
        """Raises, once, the failure of a callback, if there is one.

        Raises:
            PersiaError: a callback has failed; its cause is the exception.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
