"""Small collectives among all NN workers, in host memory, with deadlines and errors that name the late ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from persia.errors import DeadlineError, PersiaError
from persia.membership.silent_ranks import FailureReports, named_ranks

__all__ = ["Group"]

NO_TIMEOUT = timedelta(days=1)
"""Timeout of the torch collectives themselves; `Group` waits for them with its own deadlines."""

GRACE_SECONDS = 5.0
"""Seconds to wait for the failure reports of other ranks: all that wait in a collective fail at about the same time."""


class Group:
    """A control group of all NN workers, ordered by rank.

    Not thread-safe: all NN workers must make the same calls in the same order. Messages are sent with gloo, regardless
    of the backend of the gradients, because they are used in host memory.

    Args:
        timeout: maximum seconds of a wait for the others.

    Raises:
        PersiaError: torch.distributed is not initialised here.
    """

    def __init__(self, timeout: float) -> None:
        if not dist.is_initialized():
            raise PersiaError(
                "Several NN workers train one network, but torch.distributed is not initialised in this process. "
                "Call torch.distributed.init_process_group first, or let a cluster start the NN workers."
            )
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._timeout = timeout
        self._group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
        self._store = dist.distributed_c10d._get_default_store()  # There is no public function for it.
        self._number = 0

    def start_sum(self, numbers: list[int]) -> Callable[[], list[int]]:
        """Starts to sum numbers over all ranks; the returned function waits for the sums.

        Raises:
            DeadlineError: from the returned function: ranks were late; the message names them.
        """
        self._number += 1
        values = torch.tensor(numbers, dtype=torch.int64)
        what = f"batch count {self._number}"
        with self._named(what):
            work = dist.all_reduce(values, group=self._group, async_op=True)

        def wait() -> list[int]:
            with self._named(what):
                _wait(work, self._timeout)
            return [int(value) for value in values]

        return wait

    def gather(self, payload: bytes, timeout: float | None = None) -> list[bytes]:
        """Returns the payloads of all ranks. Blocks until all ranks have called it.

        Args:
            payload: bytes of this rank, of any length.
            timeout: maximum seconds of the wait for the others; None for that of the group.

        Raises:
            DeadlineError: ranks were late; the message names them.
        """
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        seconds = self._timeout if timeout is None else timeout
        with self._named("a meeting of all NN workers"):
            own_size = torch.tensor([len(payload)])
            _wait(dist.all_gather(sizes, own_size, group=self._group, async_op=True), seconds)
            longest = max(1, *(int(size) for size in sizes))
            buffer = torch.zeros(longest, dtype=torch.uint8)
            if payload:
                buffer[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            buffers = [torch.empty_like(buffer) for _ in range(self.size)]
            _wait(dist.all_gather(buffers, buffer, group=self._group, async_op=True), self._timeout)
        return [bytes(b[: int(n)].numpy()) for b, n in zip(buffers, sizes, strict=True)]

    def failed(self, what: str, error: Exception) -> DeadlineError:
        """Returns the error to raise instead of one of torch.distributed; it names the ranks that have not failed."""
        late = FailureReports(self._store, f"persia/failed/{what}", self.rank, self.size).silent(GRACE_SECONDS)
        names = named_ranks(late) if late else "the connection, as all NN workers are there"
        return DeadlineError(
            f"NN worker {self.rank}, {what}: not all NN workers took part within {self._timeout:g} s. Late: {names}. "
            f"Check why they are late, or raise `timeout`. ({error})",
            operation=what,
            late=late,
            timeout=self._timeout,
        )

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self.failed(what, error) from error


def _wait(work: dist.Work | None, seconds: float) -> None:
    assert work is not None
    work.wait(timedelta(seconds=seconds))
