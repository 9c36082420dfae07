"""Detects that an NN worker has run out of batches while others have not (docs/guide/cluster.md, "Your own loop").

NN workers whose gradients DistributedDataParallel averages must make the same number of steps: one that makes a step
more waits in a collective for the others. All of them count the batches that they read in the store of the process
group, ahead of the step, so that the count is known when the step begins.
"""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Any, NoReturn

import torch.distributed as dist

from persia.errors import DeadlineError, UnequalStepsError
from persia.membership.silent_ranks import named_ranks, silent_ranks
from persia.services import Connection

__all__ = ["BatchCounts", "batch_counts"]

ENDED = 1 << 32
"""Added to a batch's counter by an NN worker that does not have this batch; one that has it adds 1."""

AHEAD = 8
"""Batches by which a check looks ahead: it needs one request in this many steps."""

KEPT = 256
"""Batches whose counters are kept after all have read them: more than an NN worker reads ahead of its step."""

FIRST_WAIT, LONGEST_WAIT = 1e-4, 2e-3
"""Seconds between two requests while waiting for a batch of another NN worker."""

GRACE_SECONDS = 2.0
"""Seconds that the others have to report a batch of their own before the error names those that have one."""

REMEDY = (
    "Pass `equal_steps=persia.dense.AllReduce(net)` to `prefetch`, so that all NN workers make the same number of "
    "steps, or give them the same number of batches; see docs/guide/cluster.md, 'Your own loop'."
)


def batch_counts(connection: Connection, timeout: float) -> BatchCounts | None:
    """Returns the counts of a new training pass; None unless torch.distributed connects several NN workers."""
    nn_workers = connection.nn_workers
    if nn_workers == 1 or connection.replicas is not None:
        return None
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() != nn_workers:
        return None
    store = dist.distributed_c10d._get_default_store()  # There is no public way to it.
    return BatchCounts(store, dist.get_rank(), nn_workers, timeout)


class BatchCounts:
    """The batch counts of one training pass of one NN worker. The reading thread counts, the training thread checks.

    Args:
        store: the store of the process group, which all NN workers share.
        rank: of this NN worker.
        nn_workers: number of NN workers.
        timeout: seconds that a check waits for NN workers that are slow to read.
    """

    def __init__(self, store: Any, rank: int, nn_workers: int, timeout: float) -> None:
        self._store, self._rank, self._nn_workers, self._timeout = store, rank, nn_workers, timeout
        # All make the same passes, in the same order.
        self._prefix = f"persia/steps/{store.add(f'persia/steps/{rank}', 1)}"
        self._lock = threading.Lock()
        self._read = 0
        self._ended = False
        self._checked = 0
        """Batches that all NN workers are known to have."""

    def add(self) -> None:
        """Counts a batch that was read."""
        with self._lock, contextlib.suppress(RuntimeError):  # A store that is gone is found by `check`.
            if self._ended:
                return
            number, self._read = self._read, self._read + 1
            if self._store.add(f"{self._prefix}/{number}", 1) == self._nn_workers and number >= KEPT:
                self._store.delete_key(f"{self._prefix}/{number - KEPT}")

    def end(self, reason: str = "") -> None:
        """Ends the counts: other NN workers need not wait for batches that this one has not read. Idempotent.

        Args:
            reason: for the error of NN workers that have more batches; empty if the data have ended.
        """
        with self._lock, contextlib.suppress(RuntimeError):
            if self._ended:
                return
            self._ended = True
            self._store.set(f"{self._prefix}/end/{self._rank}", f"{self._read} {reason}")
            self._store.add(f"{self._prefix}/{self._read}", ENDED)

    def check(self, number: int) -> None:
        """Waits until all NN workers are known to have batch `number` of the pass; in training this is known ahead.

        Raises:
            UnequalStepsError: an NN worker has run out before it, or has left its loop.
            DeadlineError: an NN worker did not read it in time.
        """
        if number < self._checked:
            return
        began, wait = time.monotonic(), FIRST_WAIT
        try:
            if self._found(number + AHEAD) == self._nn_workers:
                self._checked = number + AHEAD + 1
                return
            while (count := self._found(number)) != self._nn_workers:
                if count >= ENDED:
                    self._fail(number)
                if time.monotonic() - began > self._timeout:
                    self._late(number)
                time.sleep(wait)
                wait = min(LONGEST_WAIT, 1.1 * wait)
        except RuntimeError as error:  # Of torch.distributed.
            raise UnequalStepsError(
                f"NN worker {self._rank} has batch {number} of this training pass, but the store of the process group "
                f"does not answer: NN worker 0, which serves it, has left its loop. {REMEDY} ({error})",
                batch=number,
                ended=[],
                left=[0],
                having=[self._rank],
            ) from error
        self._checked = number + 1

    def _found(self, number: int) -> int:
        return int(self._store.add(f"{self._prefix}/{number}", 0))

    def _fail(self, number: int) -> NoReturn:
        ended, having, _ = self._others(number)
        left = {rank: reason for rank, reason in ended.items() if reason}
        run_out = [rank for rank in ended if rank not in left]
        facts = [f"{named_ranks(run_out)} ran out of batches after {number}."] if run_out else []
        facts += [f"NN worker {rank} {reason}." for rank, reason in left.items()]
        raise UnequalStepsError(
            f"Batch {number} of this training pass: {' '.join(facts)} {named_ranks(having)} still had batches, and "
            f"would wait forever in the all-reduce of gradients. {REMEDY}",
            batch=number,
            ended=run_out,
            left=list(left),
            having=having,
        )

    def _late(self, number: int) -> NoReturn:
        *_, silent = self._others(number)
        who = named_ranks(silent) if silent else "another NN worker"
        raise DeadlineError(
            f"Batch {number} of this training pass: {who} did not read it within {self._timeout:g} s. Check what "
            "delays its data, or raise `timeout`.",
            batch=number,
            late=silent,
            timeout=self._timeout,
        )

    def _others(self, number: int) -> tuple[dict[int, str], list[int], list[int]]:
        """Returns the reasons of ranks that ended before batch `number`, the ranks that have it, and silent ones."""
        self._store.set(f"{self._prefix}/has/{self._rank}", "")
        ended: dict[int, str] = {}
        having: list[int] = []

        def reported(rank: int) -> bool:
            if self._store.check([f"{self._prefix}/has/{rank}"]):
                having.append(rank)
            elif self._store.check([f"{self._prefix}/end/{rank}"]):
                read, _, reason = self._store.get(f"{self._prefix}/end/{rank}").decode().partition(" ")
                if int(read) > number:
                    having.append(rank)
                else:
                    ended[rank] = reason
            else:
                return False
            return True

        silent = silent_ranks(range(self._nn_workers), reported, GRACE_SECONDS)
        return dict(sorted(ended.items())), sorted(having), silent
