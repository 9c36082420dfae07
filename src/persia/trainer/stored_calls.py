"""Recovery points on storage: where the calls of `fit` of a program go on after the death of its driver.

A program that is started again makes the same calls of `fit` in the same order. Those that had ended train nothing and
return their counts, the one in which the driver died goes on from the last recovery point, and later ones are as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from persia.checkpoint.packing import pack, unpack
from persia.checkpoint.tensors import decode, encode
from persia.errors import CheckpointError, PersiaError
from persia.metrics import Metrics
from persia.nn.dense_step import DenseStep
from persia.schema import Label
from persia.services import RecoveryPoints
from persia.telemetry.logs import get_logger
from persia.trainer.progress import FitResult, TrainedRows
from persia.trainer.run_state import RunState, restore
from persia.trainer.state import TrainingState
from persia.types import TokenReport

__all__ = ["StoredCalls", "StoredPoint"]

LOG = get_logger("persia.cluster")

FORMAT = 1

NUMBERS = (int, float, str)
REQUIRED = (
    *("rows", "seconds", "rows_per_second", "steps", "global_step", "staleness_mean", "staleness_max", "stored_rows"),
    *("stored_bytes", "absent_rows", "non_finite_rows", "released_batches"),
)
"""Numbers of `FitResult` without a default."""


class StoredPoint(NamedTuple):
    """A recovery point on storage.

    Attributes:
        calls: number of calls of `fit` that had begun.
        running: whether the last of them had not ended.
        first_step: global step at which it had begun.
        state: state of the run; its `trained` are the rows of the last call so far.
        ended: numbers of the results of the calls that had ended; None for one that had failed.
    """

    calls: int
    running: bool
    first_step: int
    state: RunState
    ended: list[dict[str, Any] | None]


class StoredCalls:
    """The calls of `fit` of one trainer on a cluster that keeps recovery points on storage.

    Args:
        points: the recovery points of the cluster.
        labels: the labels, for the metrics.

    Raises:
        PersiaError: the recovery point that was left cannot be read.
    """

    def __init__(self, points: RecoveryPoints, labels: Sequence[str | Label]) -> None:
        self._points = points
        self._labels = labels
        self._left = _decoded(points) if points.left is not None else None
        self._calls = 0
        self._ended: list[dict[str, Any] | None] = list(self._left.ended) if self._left is not None else []

    @property
    def left(self) -> StoredPoint | None:
        """The recovery point from which this program goes on; None once it has, and in a new run."""
        return self._left

    def restore(self, network: DenseStep, state: TrainingState) -> None:
        """Gives a trainer the network and state of the recovery point that was left, if there is one.

        Raises:
            PersiaError: it is of another network or optimizer.
        """
        if self._left is None:
            return
        try:
            restore(network, state, self._left.state, trains_in_other_processes=True)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            why = " ".join(str(error).split())
            raise PersiaError(
                f"The recovery point in {self._points.place} does not fit the network or the optimizer of this "
                f"program: {why}. Run the same program as before; or choose another directory for RayOptions.run.",
                path=self._points.place,
            ) from error

    def begin(self, network: DenseStep, state: TrainingState) -> StoredPoint | None:
        """Begins a call of `fit`; restores and returns the point from which it goes on, or None.

        Raises:
            ConfigError: another trainer has called `fit` on the cluster.
        """
        self._points.claim(self)
        self._calls += 1
        left = self._left
        if left is None or self._calls < left.calls or not left.running:
            return None
        self.restore(network, state)
        self._left = None
        LOG.warning(
            "Training continues at step %d, from the recovery point in %s.", left.state.step, self._points.place
        )
        return left

    def ended(self, network: DenseStep, state: TrainingState) -> FitResult | None:
        """Returns the result of the call that has begun if it had already ended under an earlier driver.

        Its counts are those of before. Metrics of training are only known of the last call that had ended.
        """
        left = self._left
        if left is None:
            return None
        self.restore(network, state)  # A call begins by forgetting the metrics of the one before.
        last = self._calls == left.calls
        if last:
            self._points.take()
            self._left = None
        none = Metrics(self._labels).result()
        numbers = dict(self._ended[self._calls - 1] or dict.fromkeys(REQUIRED, 0))
        report = numbers.pop("asynchronous", None)
        LOG.warning(
            "Call %d of `fit` had already ended, at step %d, under a driver that has died.",
            self._calls,
            numbers["global_step"],
        )
        return FitResult(
            progressive=state.scores.progressive.result() if last else none,
            training=state.scores.training.result() if last else none,
            history=state.scores.history().result(),
            evaluation=None,
            asynchronous=msgspec.convert(report, TokenReport) if report is not None else None,
            **numbers,
        )

    def keep(self, first_step: int, state: RunState, trained: TrainedRows) -> None:
        """Stores a recovery point of the call that runs. Blocks until it is on storage.

        Args:
            first_step: global step at which the call began.
            state: of all NN workers.
            trained: rows of this call so far.

        Raises:
            PersiaError: it cannot be written.
        """
        self._write(StoredPoint(self._calls, True, first_step, state._replace(trained=trained), self._earlier()))

    def end(self, first_step: int, state: RunState, result: FitResult) -> None:
        """Stores the end of the call that runs.

        Args:
            first_step: global step at which the call began.
            state: of all NN workers.
            result: what the call returns.
        """
        fields = ((name, getattr(result, name)) for name in FitResult.__struct_fields__)
        numbers: dict[str, Any] = {name: value for name, value in fields if isinstance(value, NUMBERS)}
        if result.asynchronous is not None:
            numbers["asynchronous"] = msgspec.to_builtins(result.asynchronous)
        self._ended = [*self._earlier(), numbers]
        self._write(StoredPoint(self._calls, False, first_step, state, self._ended))

    def _earlier(self) -> list[dict[str, Any] | None]:
        """Returns the results of the calls before the last one."""
        known = self._ended[: self._calls - 1]
        return known + [None] * (self._calls - 1 - len(known))

    def _write(self, point: StoredPoint) -> None:
        state = point.state
        packed = {
            **point._asdict(),
            "format": FORMAT,
            "state": {**state._asdict(), "scores": dict(state.scores), "trained": tuple(state.trained)},
        }
        self._points.keep(encode(pack(packed, "the recovery point")))


def _decoded(points: RecoveryPoints) -> StoredPoint:
    assert points.left is not None
    try:
        packed = unpack(decode(points.left, points.place), points.place)
        if packed.pop("format") != FORMAT:
            raise ValueError("it is of another version of persia")
        state = packed["state"]
        state["trained"] = TrainedRows(*state["trained"])
        return StoredPoint(**{**packed, "state": RunState(**state)})
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise PersiaError(
            f"The recovery point in {points.place} cannot be read: {error}. Start the version of persia that wrote it; "
            "or start over, from the last checkpoint if there is one: remove that directory, and the rows on each host "
            "with `persia cluster regions --clean`.",
            path=points.place,
        ) from error
