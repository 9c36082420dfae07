"""`Replicas`: the interface between a training loop and the replicas of its network on several NN workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch

__all__ = ["EqualSteps", "Replicas", "SingleReplica"]

T = TypeVar("T")


class EqualSteps(Protocol):
    """Lets all NN workers make the same number of steps, whatever data each of them has."""

    dummy_rows: int
    """Rows of the dummy batch with which this NN worker takes part in a step for which it has no data."""

    def start(self, rows: int, has_data: bool) -> None:
        """Begins a batch.

        Args:
            rows: of this NN worker in the batch; 0 if it was lost, or is a dummy.
            has_data: False once the data of this NN worker are used up.
        """

    def over(self) -> bool:
        """Whether no NN worker has data any more. Blocks until all have begun the batch."""


class Replicas(EqualSteps, Protocol):
    """The dense network of one NN worker among its replicas: :class:`persia.dense.AllReduce`, or `SingleReplica`."""

    nn_workers: int
    model: torch.nn.Module
    """The module to call in training; it has the parameters of the network itself."""

    def batch(self, dummy: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds forward and backward of a batch; gradients are averaged in the last one of an update."""

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Averages the gradients of an update that ended before its last batch."""

    def discard(self) -> None:
        """Forgets the rows of the current update, whose gradients are dropped, so that the next batch begins one."""

    def rows(self) -> int:
        """Returns the rows of all NN workers in this update. Blocks."""

    def request_stop(self) -> None:
        """Asks all NN workers to stop after the same update. The request is sent with the next batch. Thread-safe."""

    def clear_stop_request(self) -> None:
        """Withdraws the request of this NN worker, between two phases."""

    def stop_requested(self) -> bool:
        """Returns whether a batch of this update came with a request to stop, of any NN worker. Blocks."""

    def settle(self) -> None:
        """Copies from the first NN worker what is not averaged, such as statistics of BatchNorm, between two phases."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all NN workers, by rank. Blocks until all have called it."""

    def run_on_rank0(self, function: Callable[[], T], kind: object) -> T:
        """Calls a function on the first NN worker only. Blocks until all have called `run_on_rank0`.

        Args:
            function: the function; what it captures on the other NN workers is not used.
            kind: the annotation of its result, such as `int` or `Mode | None`.

        Returns:
            The result, the same on each NN worker.

        Raises:
            PersiaError: the function failed on the first NN worker, which raises its error itself.
        """


class SingleReplica:
    """The replica of a single NN worker, which has no peers.

    Args:
        model: the network.
    """

    dummy_rows = 1
    nn_workers = 1

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._stop = False

    def start(self, rows: int, has_data: bool) -> None:
        """No-op: there are no peers."""

    def over(self) -> bool:
        """Returns True: its data are used up."""
        return True

    def batch(self, dummy: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """No-op: there is nothing to average."""
        return contextlib.nullcontext()

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """No-op: there is nothing to average."""

    def discard(self) -> None:
        """No-op: it counts no rows."""

    def rows(self) -> int:
        """Returns 0: there are no other rows than its own."""
        return 0

    def request_stop(self) -> None:
        """Makes `stop_requested` return True."""
        self._stop = True

    def clear_stop_request(self) -> None:
        """Makes `stop_requested` return False."""
        self._stop = False

    def stop_requested(self) -> bool:
        """Returns whether a stop was requested."""
        return self._stop

    def settle(self) -> None:
        """No-op: there are no peers."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns its own payload."""
        return [payload]

    def run_on_rank0(self, function: Callable[[], T], kind: object) -> T:
        """Calls the function: this NN worker is the first."""
        return function()
