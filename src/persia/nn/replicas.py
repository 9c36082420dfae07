"""What a loop asks of whoever keeps the networks of several NN workers alike; and the answers of an NN worker alone."""

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
    """Rows of a batch that is made up so that this NN worker can take part in a step for which it has none."""

    def start(self, rows: int, has_data: bool) -> None:
        """Begins a batch.

        Args:
            rows: that this NN worker has in it; 0 if it was lost, or made up.
            has_data: False once the data of this NN worker have ended.
        """

    def over(self) -> bool:
        """Whether no NN worker has data any more. Blocks until all have begun the batch."""


class Replicas(EqualSteps, Protocol):
    """The dense network of one NN worker among its replicas: :class:`persia.dense.AllReduce`, or `SingleReplica`."""

    nn_workers: int
    stop: bool
    """Whether this NN worker wishes that all stop after an update; told with the next batch."""
    model: torch.nn.Module
    """What is called to train; it has the parameters of the network itself."""

    def batch(self, dummy: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """Surrounds forward and backward of a batch; gradients are averaged in the last one of an update."""

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Averages gradients of an update whose last batch never came."""

    def rows(self) -> int:
        """Rows of all NN workers in this update. Blocks."""

    def stopping(self) -> bool:
        """Whether an NN worker has wished to stop in this update. Blocks."""

    def settle(self) -> None:
        """At rest: what is not averaged becomes that of the first NN worker, such as statistics of BatchNorm."""

    def gather(self, payload: bytes) -> list[bytes]:
        """The payloads of all NN workers, by rank. Blocks until all have called it."""

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
    """One NN worker: nothing to agree on.

    Args:
        model: the network.
    """

    dummy_rows = 1
    nn_workers = 1

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.stop = False

    def start(self, rows: int, has_data: bool) -> None:
        """No-op: there are no peers."""

    def over(self) -> bool:
        """Asked when its data have ended."""
        return True

    def batch(self, dummy: bool, last: bool) -> contextlib.AbstractContextManager[None]:
        """Nothing to average."""
        return contextlib.nullcontext()

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Nothing to average."""

    def rows(self) -> int:
        """None beside its own."""
        return 0

    def stopping(self) -> bool:
        """Its own wish."""
        return self.stop

    def settle(self) -> None:
        """Nothing differs."""

    def gather(self, payload: bytes) -> list[bytes]:
        """Its own."""
        return [payload]

    def run_on_rank0(self, function: Callable[[], T], kind: object) -> T:
        """Calls the function: this NN worker is the first."""
        return function()
