"""Replicas of one network in the threads of one process, as `AllReduce` makes them in processes."""

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
    """An exchange between threads: each contributes a value, and all receive all values, by rank.

    Args:
        size: number of threads.
        timeout: maximum wait for the others in seconds.
    """

    def __init__(self, size: int, timeout: float = 600.0) -> None:
        self.size = size
        self._timeout = timeout
        self._changed = threading.Condition()
        self._brought: dict[tuple[str, int], dict[int, Any]] = {}
        self._left: dict[tuple[str, int], int] = {}
        self._dead: dict[int, str] = {}

    def bring(self, what: str, number: int, rank: int, thing: Any) -> None:
        """Contributes a value, without waiting."""
        with self._changed:
            self._brought.setdefault((what, number), {})[rank] = thing
            self._changed.notify_all()

    def get(self, what: str, number: int, everyone: bool = False) -> list[Any]:
        """Waits for the values of all living ranks; returns all that came, by rank. Call it once per rank.

        Args:
            what: kind of exchange.
            number: of this kind.
            everyone: whether the values of dead ranks are needed, too.

        Raises:
            DeadlineError: a rank was late.
            PersiaError: a rank has died whose value is needed.
        """
        key = what, number
        with self._changed:
            came = self._changed.wait_for(
                lambda: self._complete(key) or (everyone and self._missing(key)), self._timeout
            )
            found = self._brought.get(key, {})
            missing = self._missing(key)
            if everyone and missing:
                raise PersiaError(f"{what} {number}: NN worker {missing[0]} is dead: {self._dead[missing[0]]}")
            if not came:
                late = [rank for rank in range(self.size) if rank not in found and rank not in self._dead]
                raise DeadlineError(
                    f"{what} {number}: NN workers {', '.join(map(str, late))} did not come within {self._timeout:g} s.",
                    late=late,
                    timeout=self._timeout,
                )
            self._left[key] = self._left.get(key, 0) + 1
            if self._left[key] == self.size:
                del self._brought[key], self._left[key]
            return [found[rank] for rank in sorted(found)]

    def _complete(self, key: tuple[str, int]) -> bool:
        found = self._brought.get(key, {})
        return all(rank in found or rank in self._dead for rank in range(self.size))

    def _missing(self, key: tuple[str, int]) -> list[int]:
        return [rank for rank in self._dead if rank not in self._brought.get(key, {})]

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
    """The network of one of several NN workers in this process, its gradients averaged with those of the others.

    Like :class:`persia.dense.AllReduce`. For one thread; see `persia.nn.replicas.Replicas`.

    Args:
        model: the network. Its parameters and buffers become those of the first NN worker.
        rank: of this NN worker.
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
            for mine, theirs in zip(self._tensors(), first, strict=True):
                mine.copy_(theirs)

    def start(self, rows: int, has_data: bool) -> None:
        """Starts a batch."""
        if self._averaged:
            self._own, self._total, self._stop_requests, self._averaged = 0, 0, 0, False
        self._own += rows
        number = self._next("count")
        self._meeting.bring("count", number, self._rank, (rows, int(has_data), int(self._stop)))
        self._pending.append(number)

    def over(self) -> bool:
        """Returns whether no NN worker has data any more."""
        self.rows()
        return self._having == 0

    def request_stop(self) -> None:
        """Asks all NN workers to stop after the same update. The request is sent with the next batch. Thread-safe."""
        self._stop = True

    def clear_stop_request(self) -> None:
        """Withdraws the request of this NN worker."""
        self._stop = False

    def stop_requested(self) -> bool:
        """Returns on all NN workers whether one requested a stop after this update."""
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
        """Surrounds the forward and backward pass of a batch."""
        with unlearned(self.model) if dummy else contextlib.nullcontext():
            yield
        if last:
            self.reduce_rest(p for p in self.model.parameters() if p.requires_grad)

    def discard(self) -> None:
        """Forgets the rows of the current update."""
        self._pending.clear()
        self._averaged = True

    def reduce_rest(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Averages the gradients of parameters over all NN workers."""
        mine = list(parameters)
        total = self.rows()
        self._averaged = True
        for parameter in mine:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._own == 0:
                parameter.grad.zero_()
            elif self._own != total:
                parameter.grad.mul_(self._own / total)
        everyone = self._exchange("gradients", [parameter.grad for parameter in mine], everyone=True)
        sums = [sum(of_one) for of_one in zip(*everyone, strict=True)]
        self._exchange("averaged", None, everyone=True)  # No thread writes to a gradient that others still read.
        for parameter, gradient in zip(mine, sums, strict=True):
            assert isinstance(gradient, torch.Tensor)
            parameter.grad = gradient

    def settle(self) -> None:
        """Copies the buffers of the first NN worker."""
        first = self._exchange("settle", [buffer.clone() for buffer in self.model.buffers()])[0]
        for mine, theirs in zip(self.model.buffers(), first, strict=True):
            mine.copy_(theirs)

    def gather(self, payload: bytes) -> list[bytes]:
        """Returns the payloads of all, by rank."""
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

    def _next(self, what: str) -> int:
        self._numbers[what] = self._numbers.get(what, 0) + 1
        return self._numbers[what]

    def _exchange(self, what: str, thing: Any, everyone: bool = False) -> list[Any]:
        number = self._next(what)
        self._meeting.bring(what, number, self._rank, thing)
        return self._meeting.get(what, number, everyone)
