"""Collectives of a compressed step between all workers of a torch process group, with deadlines on every wait."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from persia.errors import DeadlineError
from persia.membership.silent_ranks import FailureReports

__all__ = ["Exchange"]

PATIENCE = timedelta(days=1)
"""Timeout of a torch collective itself; waits have deadlines of their own."""

LOOK_SECONDS = 1.0
"""Seconds between two checks for failures of other workers, which a worker's own connections may not show."""

GRACE_SECONDS = 5.0
"""Seconds that a failed worker waits for reports of the others, to find out who is silent."""

Wait = Callable[[], None]


class Exchange:
    """The workers that train one network. Not thread-safe: all make the same calls in the same order.

    Numbers travel over gloo on the host; tensors on a CUDA device over NCCL where the process group has it, else
    through the host. Of one worker, or where torch.distributed is not initialised, nothing travels at all.

    Args:
        process_group: process group of torch.distributed; None for all processes.
        timeout: seconds that a wait for the others may take.
        device: device of the tensors.

    Attributes:
        rank: rank of this worker in the group.
        size: number of workers in the group.
        sent: total bytes that this worker has sent, without headers, assuming ring algorithms.
    """

    def __init__(self, process_group: Any, timeout: float, device: torch.device) -> None:
        self.sent = 0
        self.rank, self.size = 0, 1
        self._timeout = timeout
        self._began = 0.0
        self._unsettled: dist.Work | None = None
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.size == 1:
            return
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        # Separate groups keep the user's collectives and timeout apart.
        local = process_group is not None
        self._control = dist.new_group(ranks, backend="gloo", timeout=PATIENCE, use_local_synchronization=local)
        self._data = self._control
        self._direct, self._queued = device.type == "cpu", False
        if device.type == "cuda" and "nccl" in dist.get_backend(process_group):
            self._data = dist.new_group(
                ranks, backend="nccl", timeout=timedelta(seconds=timeout), use_local_synchronization=local
            )
            self._direct = self._queued = True
        store = dist.distributed_c10d._get_default_store()  # There is no public way to it.
        key = f"persia/apmsqueeze/{self._control.group_name}/failed"
        self._failures = FailureReports(store, key, self.rank, self.size)

    # --- numbers ----------------------------------------------------------------------------------------------

    def sum(self, numbers: torch.Tensor, what: str) -> torch.Tensor:
        """Sums float64 numbers in host memory over all workers, in place. Blocks.

        Raises:
            DeadlineError: a worker was late or died; the message names the ranks.
        """
        if self.size > 1:
            self._count(2 * (self.size - 1) * numbers.numel() * numbers.element_size() // self.size)
            self._settle(what)
            self._start(what, lambda: dist.all_reduce(numbers, group=self._control, async_op=True))()
        return numbers

    def gather(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """Gathers values in host memory, of equal shape on all workers, as `[n, ...]` by rank. Blocks."""
        if self.size == 1:
            return values[None].clone()
        everything = values.new_empty((self.size, *values.shape))
        rows = list(everything.unbind(0))
        self._start(what, lambda: dist.all_gather(rows, values.contiguous(), group=self._control, async_op=True))()
        return everything

    def broadcast(self, values: torch.Tensor, what: str) -> None:
        """Replaces the values by those of the first worker. Blocks."""
        if self.size == 1:
            return
        host = values.detach().to("cpu", copy=True).contiguous()
        first = dist.get_global_rank(self._control, 0)
        self._start(what, lambda: dist.broadcast(host, src=first, group=self._control, async_op=True))()
        if self.rank:
            values.copy_(host)

    # --- tensors ----------------------------------------------------------------------------------------------

    def start_sum(self, values: torch.Tensor, what: str) -> Wait:
        """Starts to sum over all workers, in place; the result waits for it."""
        if self.size == 1:
            return _nothing
        self._count(2 * (self.size - 1) * values.numel() * values.element_size() // self.size)
        own = self._near(values)
        wait = self._start(what, lambda: dist.all_reduce(own, group=self._data, async_op=True), self._queued)
        return wait if own is values else lambda: _then(wait, lambda: values.copy_(own))

    def start_all_to_all(self, rows: torch.Tensor, received: torch.Tensor, what: str) -> Wait:
        """Starts to send row k of `rows` to worker k; row k of `received` comes from worker k. uint8 `[n, bytes]`."""
        if self.size == 1:
            received.copy_(rows)
            return _nothing
        self._count((self.size - 1) * rows.shape[1])
        ours, theirs = self._near(rows), self._near(received)
        wait = self._start(
            what, lambda: dist.all_to_all_single(theirs, ours, group=self._data, async_op=True), self._queued
        )
        return wait if theirs is received else lambda: _then(wait, lambda: received.copy_(theirs))

    def start_all_gather(self, row: torch.Tensor, everything: torch.Tensor, what: str) -> Wait:
        """Starts to send `row` to all; row k of `everything` comes from worker k. uint8 `[bytes]` and `[n, bytes]`."""
        if self.size == 1:
            everything[0].copy_(row)
            return _nothing
        self._count((self.size - 1) * row.shape[0])
        own, all_rows = self._near(row), self._near(everything)
        rows = list(all_rows.unbind(0))
        wait = self._start(what, lambda: dist.all_gather(rows, own, group=self._data, async_op=True), self._queued)
        return wait if all_rows is everything else lambda: _then(wait, lambda: everything.copy_(all_rows))

    # --- inside -----------------------------------------------------------------------------------------------

    def _near(self, values: torch.Tensor) -> torch.Tensor:
        """Copies a tensor to host memory if the process group cannot use its device."""
        return values if self._direct else values.cpu()

    def _count(self, sent: int) -> None:
        self.sent += sent

    def _start(self, what: str, start: Callable[[], dist.Work | None], queued: bool = False) -> Wait:
        began = time.monotonic()
        with self._named(what):
            work = start()
        assert work is not None

        def wait() -> None:
            with self._named(what):
                if queued:  # What follows on the stream waits, the host need not. `_settle` finds out how it ended.
                    work.wait()
                    self._unsettled = work
                else:
                    self._wait(work, began + self._timeout)

        return wait

    def _wait(self, work: dist.Work, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(left, LOOK_SECONDS))))
                return
            except RuntimeError:
                if work.is_completed() or left <= LOOK_SECONDS:
                    raise
            if self._failures.others_failed():
                raise RuntimeError("another worker has reported a failure")

    def _settle(self, what: str) -> None:
        """Waits until the collectives of the previous step have ended on CUDA, or the deadline is over."""
        work, self._unsettled = self._unsettled, None
        if work is None:
            return
        deadline = time.monotonic() + self._timeout
        with self._named(f"{what}, of the step before"):
            while not work.is_completed():
                if time.monotonic() > deadline or self._failures.others_failed():
                    raise RuntimeError("a collective on the device has not ended")
                time.sleep(0.001)

    @contextlib.contextmanager
    def _named(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise self._failed(what, error) from error

    def _failed(self, what: str, error: Exception) -> DeadlineError:
        silent = self._failures.silent(min(GRACE_SECONDS, self._timeout / 2))
        who = f"rank {', '.join(map(str, silent))}" if silent else "none, so a connection was lost"
        return DeadlineError(
            f"APMSqueeze, rank {self.rank}, {what}: not all {self.size} workers took part within {self._timeout:g} s. "
            f"Silent: {who}. Check that process, or raise `timeout`. This optimizer is unusable now; restart the "
            f"workers from a checkpoint. ({str(error)[:200]})",
            operation=what,
            rank=self.rank,
            late=silent,
            timeout=self._timeout,
        )


def _nothing() -> None:
    """No-op: there are no other workers."""


def _then(wait: Wait, copy: Callable[[], Any]) -> None:
    wait()
    copy()
