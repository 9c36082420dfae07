"""Replicas of one network in the threads of one process, corresponding to `AllReduce` between processes."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import torch

from persia.dense.all_reduce import unlearned
from persia.errors import DeadlineError, PersiaError

__all__ = ["Meeting", "ThreadReplicas"]

T = TypeVar("T")


class Meeting:
    """An exchange between threads: each contributes a value, and all receive all values by rank.

    Args:
        size: number of threads.
        timeout: maximum wait for the others in seconds.
    """

    def __init__(self, size: int, timeout: float = 600.0) -> None:
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._values: dict[tuple[str, int], dict[int, Any]] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._dead: dict[int, str] = {}

    def contribute(self, kind: str, number: int, rank: int, value: Any) -> None:
        """Contributes a value without waiting."""
        with self._changed:
            self._values.setdefault((kind, number), {})[rank] = value
            self._changed.notify_all()

    def get(self, kind: str, number: int, everyone: bool = False) -> list[Any]:
        """Waits for the values of all living ranks; returns all received values by rank. Call it once per rank.

        Args:
            kind: kind of exchange.
            number: number of the exchange of this kind.
            everyone: whether values of dead ranks are needed, too.

        Raises:
            DeadlineError: a rank was late.
            PersiaError: a rank whose value is needed has died.
        """
        key = kind, number
        with self._changed:
            in_time = self._changed.wait_for(
                lambda: self._complete(key) or (everyone and self._missing(key)), self._timeout
            )
            values = self._values.get(key, {})
            missing = self._missing(key)
            if everyone and missing:
                raise PersiaError(f"{kind} {number}: NN worker {missing[0]} is dead: {self._dead[missing[0]]}")
            if not in_time:
                late = [rank for rank in range(self.size) if rank not in values and rank not in self._dead]
                raise DeadlineError(
                    f"{kind} {number}: NN workers {', '.join(map(str, late))} did not come within {self._timeout:g} s.",
                    late=late,
                    timeout=self._timeout,
                )
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == self.size:
                del self._values[key], self._left[key]
            return [values[rank] for rank in sorted(values)]

    def _complete(self, key: tuple[str, int]) -> bool:
        values = self._values.get(key, {})
        return all(rank in values or rank in self._dead for rank in range(self.size))

    def _missing(self, key: tuple[str, int]) -> list[int]:
        return [rank for rank in self._dead if rank not in self._values.get(key, {})]

    def first(self) -> int:
        """Returns the lowest living rank."""
        with self._changed:
            return min(rank for rank in range(self.size) if rank not in self._dead)

    def leave(self, rank: int, reason: str) -> None:
        """Marks an NN worker as dead, so that the others do not wait for it."""
        with self._changed:
            self._dead[rank] = reason
            self._changed.notify_all()


class ThreadReplicas:
    """The network of one of several NN workers in this process, with gradients averaged over all of them.

    Like :class:`persia.dense.AllReduce`. For one thread; see `persia.nn.replicas.Replicas`.

    Args:
        model: the network. Its parameters and buffers are set to the parameters and buffers of the first NN worker.
        rank: rank of this NN worker.
        meeting: exchange with the others.
    """

    dummy_rows = 1

    def __init__(self, model: torch.nn.Module, rank: int, meeting: Meeting) -> None:
        self.model = model
        self.nn_workers = meeting.size
        self._stop = False
        self._rank = rank
        self._meeting = meeting
        self._numbers: dict[str, int] = {}
        self._pending: list[int] = []
        self._own = self._total = self._having = self._stop_requests = 0
        self._averaged = False
        first = self._exchange("start", [tensor.detach().clone() for tensor in self._tensors()])[0]
        with torch.no_grad():
            for own_tensor, first_tensor in zip(self._tensors(), first, strict=True):
                own_tensor.copy_(first_tensor)

    def start(self, rows: int, has_data: bool) -> None:
        """Starts a batch."""
        if self._averaged:
            self._own, self._total, self._stop_requests, self._averaged = 0, 0, 0, False
        self._own += rows
        number = self._next("count")
        self._meeting.contribute("count", number, self._rank, (rows, int(has_data), int(self._stop)))
        self._pending.append(number)

    def over(self) -> bool:
        """Returns whether all NN workers are out of data."""
        self.rows()
        return self._having == 0

    def request_stop(self) -> None:
        """Requests that all NN workers stop after the same update. Sent with the next batch. Thread-safe."""
        self._stop = True

    def clear_stop_request(self) -> None:
        """Withdraws the request of this NN worker."""
        self._stop = False

    def stop_requested(self) -> bool:
        """Returns, equally on all NN workers, whether one requested a stop after this update."""
        self.rows()
        return self._stop_requests > 0

    def rows(self) -> int:
        """Returns the number of rows of all NN workers in this update."""
        while self._pending:
            counts = self._meeting.get("count", self._pending.pop(0), everyone=True)
            self._total += sum(rows for rows, _, _ in counts)
            self._having = sum(having for _, having, _ in counts)
            self._stop_requests += sum(stop for _, _, stop in counts)
        return self._total

    @contextlib.contextmanager
    def batch(self, dummy: bool, last: bool) -> Iterator[None]:
        """Wraps the forward and backward pass of a batch."""
        with unlearned(self.model) if dummy else contextlib.nullcontext():
            yield
        if last:
            self.reduce_rest(p for p in self.model.parameters() if p.requires_grad)

    def discard(self) -> None:
        """Discards the rows of the current update."""
        self._pending.clear()
        self._averaged = True

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Averages the gradients of parameters over all NN workers."""
        reduced = list(parameters)
        total = self.rows()
        self._averaged = True
        for parameter in reduced:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._own == 0:
                parameter.grad.zero_()
            elif self._own != total:
                parameter.grad.mul_(self._own / total)
        everyone = self._exchange("gradients", [parameter.grad for parameter in reduced], everyone=True)
        sums = [sum(gradients) for gradients in zip(*everyone, strict=True)]
        self._exchange("averaged", None, everyone=True)  # No thread may write to a gradient that others still read.
        for parameter, gradient in zip(reduced, sums, strict=True):
            assert isinstance(gradient, torch.Tensor)
            parameter.grad = gradient

    def settle(self) -> None:
        """Copies the buffers of the first NN worker."""
        first = self._exchange("settle", [buffer.clone() for buffer in self.model.buffers()])[0]
        for own_buffer, first_buffer in zip(self.model.buffers(), first, strict=True):
            own_buffer.copy_(first_buffer)

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all NN workers by rank."""
        return self._exchange("gather", payload)

    def run_on_rank0(self, function: Callable[[], T], kind: object) -> T:
        """Calls a function on the first NN worker that is alive; all return its result, or raise if it failed."""
        outcome: tuple[T | None, Exception | None] | None = None
        if self._rank == self._meeting.first():
            try:
                outcome = function(), None
            except Exception as error:
                outcome = None, error
        result, failure = next(o for o in self._exchange("run_on_rank0", outcome) if o is not None)
        if failure is None:
            return cast("T", result)
        if outcome is not None:
            raise failure
        raise PersiaError(f"The first NN worker failed, so this one cannot continue: {failure}")

    def _tensors(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _next(self, kind: str) -> int:
        self._numbers[kind] = self._numbers.get(kind, 0) + 1
        return self._numbers[kind]

    def _exchange(self, kind: str, value: Any, everyone: bool = False) -> list[Any]:
        number = self._next(kind)
        self._meeting.contribute(kind, number, self._rank, value)
        return self._meeting.get(kind, number, everyone)
