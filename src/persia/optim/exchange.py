"""Collectives of a compressed step among the workers of a torch process group, with a deadline on every wait."""

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

NO_TIMEOUT = timedelta(days=1)
"""Timeout of the torch collectives themselves; `Exchange` waits for them with its own deadlines."""

CHECK_SECONDS = 1.0
"""Seconds between two checks for failures of other workers, which this worker's connections may not show."""

GRACE_SECONDS = 5.0
"""Seconds that a failed worker waits for the reports of the others, to find the silent ranks."""

Wait = Callable[[], None]


class Exchange:
    """Collectives among the workers that train one network.

    Not thread-safe: all workers make the same calls in the same order. Numbers are sent with gloo from host memory.
    Tensors on a CUDA device are sent with NCCL if the process group has it, otherwise through host memory. With one
    worker, or if torch.distributed is not initialised, nothing is sent.

    Args:
        process_group: process group of torch.distributed; None for all processes.
        timeout: maximum seconds of a wait for the others.
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
        self._unfinished: dist.Work | None = None
        if not dist.is_initialized():
            return
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        if self.size == 1:
            return
        ranks = None if process_group is None else dist.get_process_group_ranks(process_group)
        # Separate groups, so that the user's collectives and timeout do not interfere.
        local = process_group is not None
        self._control = dist.new_group(ranks, backend="gloo", timeout=NO_TIMEOUT, use_local_synchronization=local)
        self._data = self._control
        self._direct, self._queued = device.type == "cpu", False
        if device.type == "cuda" and "nccl" in dist.get_backend(process_group):
            self._data = dist.new_group(
                ranks, backend="nccl", timeout=timedelta(seconds=timeout), use_local_synchronization=local
            )
            self._direct = self._queued = True
        store = dist.distributed_c10d._get_default_store()  # There is no public function for it.
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
            self._finish_previous(what)
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
        """Replaces the values with those of the first worker. Blocks."""
        if self.size == 1:
            return
        host = values.detach().to("cpu", copy=True).contiguous()
        first = dist.get_global_rank(self._control, 0)
        self._start(what, lambda: dist.broadcast(host, src=first, group=self._control, async_op=True))()
        if self.rank:
            values.copy_(host)

    # --- tensors ----------------------------------------------------------------------------------------------

    def start_sum(self, values: torch.Tensor, what: str) -> Wait:
        """Starts to sum over all workers, in place; the returned function waits for the sum."""
        if self.size == 1:
            return _nothing
        self._count(2 * (self.size - 1) * values.numel() * values.element_size() // self.size)
        own = self._on_group_device(values)
        wait = self._start(what, lambda: dist.all_reduce(own, group=self._data, async_op=True), self._queued)
        return wait if own is values else lambda: _then(wait, lambda: values.copy_(own))

    def start_all_to_all(self, rows: torch.Tensor, received: torch.Tensor, what: str) -> Wait:
        """Starts to send row k of `rows` to worker k, and receive row k of `received` from it; uint8 `[n, bytes]`."""
        if self.size == 1:
            received.copy_(rows)
            return _nothing
        self._count((self.size - 1) * rows.shape[1])
        source, target = self._on_group_device(rows), self._on_group_device(received)
        wait = self._start(
            what, lambda: dist.all_to_all_single(target, source, group=self._data, async_op=True), self._queued
        )
        return wait if target is received else lambda: _then(wait, lambda: received.copy_(target))

    def start_all_gather(self, row: torch.Tensor, everything: torch.Tensor, what: str) -> Wait:
        """Starts to send `row` to all workers, and to receive row k of `everything` from worker k.

        Args:
            row: uint8 `[bytes]`.
            everything: uint8 `[n, bytes]`.
            what: name of the collective, for errors.
        """
        if self.size == 1:
            everything[0].copy_(row)
            return _nothing
        self._count((self.size - 1) * row.shape[0])
        own, all_rows = self._on_group_device(row), self._on_group_device(everything)
        rows = list(all_rows.unbind(0))
        wait = self._start(what, lambda: dist.all_gather(rows, own, group=self._data, async_op=True), self._queued)
        return wait if all_rows is everything else lambda: _then(wait, lambda: everything.copy_(all_rows))

    # --- inside -----------------------------------------------------------------------------------------------

    def _on_group_device(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy in host memory if the process group cannot use its device."""
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
                if queued:  # Later work on the stream waits, not the host. `_finish_previous` raises its errors.
                    work.wait()
                    self._unfinished = work
                else:
                    self._wait(work, began + self._timeout)

        return wait

    def _wait(self, work: dist.Work, deadline: float) -> None:
        while True:
            left = deadline - time.monotonic()
            try:
                work.wait(timedelta(seconds=max(0.001, min(left, CHECK_SECONDS))))
                return
            except RuntimeError:
                if work.is_completed() or left <= CHECK_SECONDS:
                    raise
            if self._failures.others_failed():
                raise RuntimeError("another worker has reported a failure")

    def _finish_previous(self, what: str) -> None:
        """Waits until the last collective of the previous step has ended on CUDA; fails at the deadline."""
        work, self._unfinished = self._unfinished, None
        if work is None:
            return
        deadline = time.monotonic() + self._timeout
        with self._named(f"{what}, of the previous step"):
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
        names = f"rank {', '.join(map(str, silent))}" if silent else "none, so a connection was lost"
        return DeadlineError(
            f"APMSqueeze, rank {self.rank}, {what}: not all {self.size} workers took part within {self._timeout:g} s. "
            f"Silent: {names}. Check that process, or raise `timeout`. This optimizer can no longer be used; restart "
            f"the workers from a checkpoint. ({str(error)[:200]})",
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
