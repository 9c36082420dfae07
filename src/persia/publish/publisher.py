"""The publisher of one embedding PS: a thread that writes the changes of the store to the log of changes."""

from __future__ import annotations

import atexit
import functools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.checks import without_userinfo
from persia.errors import CheckpointError, PersiaError, PublishError
from persia.publish.format import TableChanges, stream_of
from persia.publish.log_storage import open_storage
from persia.publish.stream import StreamWriter
from persia.publish.values import encode_values
from persia.retry import Backoff, Deadline, retry
from persia.store import EmbeddingStore, RowChanges
from persia.telemetry.logs import get_logger
from persia.types.publishing import PublishOrder, PublishStatus

__all__ = ["Publisher", "reason"]

LOG = get_logger("persia.publish")

PART_BYTES = 32 << 20
"""Approximate size of the rows of a part as float32. It bounds the memory of a publisher."""

REMOVED_BYTES = 16 << 20
"""Memory for ids of removed rows between two increments, for all shards together."""

MAX_INCREMENTS = 1000
"""Maximum number of increments between two snapshots; it bounds how much a new reader reads."""

POLL_SECONDS = 0.1
"""Interval of polling the number of applied gradients."""

LAST_SECONDS = 30.0
"""Time that the last entry may take when a publisher stops, with retries."""

LAST_RETRY_SECONDS = 1.0
"""Maximum pause between two attempts to write the last entry."""

BACKOFF = Backoff(0.5, 30.0)


class _StoppedError(PersiaError):
    """The publisher must not write anymore."""


class Publisher:
    """Publishes the rows of a store: a snapshot, then increments. Thread-safe.

    Training never waits for it: while it cannot write, the store marks changed rows, in bounded memory, and the next
    entry has all changes.

    Args:
        store: store with all its tables.
        tables: numbers of the tables, by name.
        order: URL, interval, and number of the PS.
        step: returns the number of global steps whose gradients are applied.

    Raises:
        CheckpointError: the URL does not name a file system.
        ConfigError: the URL does not name a topic.
        MissingExtraError: a package for the URL is not installed.
    """

    def __init__(
        self, store: EmbeddingStore, tables: Mapping[str, int], order: PublishOrder, step: Callable[[], int]
    ) -> None:
        options = order.options
        self._store = store
        self._tables = {name: tables[name] for name in sorted(tables)}
        self._order = order
        self._step = step
        self._place = without_userinfo(options.url)
        self._writer = StreamWriter(
            open_storage(options.url), order.epoch, order.run, stream_of(order.server), options.dtype, options.keep
        )
        shards = sum(store.config(index).resolved_shards for index in self._tables.values())
        self._removed_limit = max(1024, REMOVED_BYTES // 8 // shards)
        self._stop = threading.Event()
        """Set to end publishing, perhaps with a last entry."""
        self._ended = threading.Event()
        """Set once nothing more may be written."""
        self._approval = threading.Condition()
        self._approved = self._ticket = 0
        """The last approved ticket, and the last ticket. Unlike the number of an entry, a ticket is never reused."""
        self._incomplete = False
        """Whether changes were taken from the store but are not in any entry."""
        self._status = PublishStatus(order.epoch)
        self._applied_before = 0
        """Number of gradients that were applied before the last published entry began: it certainly has these."""
        self._published_at: float | None = None
        """Time of the rows in the last entry, by the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="persia-publish", daemon=True)

    def start(self) -> None:
        """Starts the thread, which publishes a snapshot first."""
        atexit.register(self._end_thread, 1.0)  # A thread in the core at interpreter exit would abort the process.
        self._thread.start()

    def stop(self, *, last: bool) -> None:
        """Ends publishing, and the marking of changes. Blocks for at max_rows 30 s.

        Args:
            last: first publish all changes until now, and retry for 30 s. `status.complete` shows whether this has
                succeeded.
        """
        self._end_thread(LAST_SECONDS if last else 1.0, last=last)
        atexit.unregister(self._end_thread)
        if last and self._thread.is_alive():
            error = self._status.error or f"no answer within {LAST_SECONDS:g} s"
            self._status = self._status._replace(error=error)
            LOG.warning(
                "PS %d could not publish its last rows to %s within %g s; readers keep the rows of step %d: %s",
                self._order.server,
                self._place,
                LAST_SECONDS,
                self._status.step,
                error,
            )
        for index in self._tables.values():
            self._store.end_changes(index)

    def _end_thread(self, seconds: float, *, last: bool = False) -> None:
        if not last:
            self._ended.set()
        self._stop.set()
        with self._approval:
            self._approval.notify_all()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        self._ended.set()  # If it hangs in the file system, it must not take changes from the next publisher.

    def approve(self, ticket: int) -> None:
        """Makes the waiting entry visible to readers; `status.waiting` is its ticket."""
        with self._approval:
            self._approved = ticket
            self._approval.notify_all()

    @property
    def status(self) -> PublishStatus:
        """Current status."""
        age = 0.0 if self._published_at is None else time.monotonic() - self._published_at
        return self._status._replace(age=age)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._retry(self._check_stream)
            if self._status.epoch < 0:
                return
            self._publish_or_warn()
            while self._wait():
                self._publish_or_warn()
            while not self._ended.is_set():
                if self._publish_or_warn():
                    self._status = self._status._replace(complete=True)
                    return
                self._ended.wait(LAST_RETRY_SECONDS)
        except _StoppedError:
            pass

    def _check_stream(self) -> None:
        """Ends the epoch if this PS published in it before a restart, as its sequence would start again."""
        if self._writer.has_entries():
            self._status = PublishStatus()

    def _wait(self) -> bool:
        """Waits until the next entry is due. Returns whether to continue."""
        options = self._order.options
        if options.rows is None:
            return not self._stop.wait(options.seconds)
        due = time.monotonic() + options.seconds
        if self._status.error and self._stop.wait(min(options.seconds, BACKOFF.longest)):  # Its rows are still due.
            return False
        while (left := due - time.monotonic()) > 0 and self._applied() - self._applied_before < options.rows:
            if self._stop.wait(min(left, POLL_SECONDS)):
                return False
        return not self._stop.is_set()

    def _applied(self) -> int:
        return sum(self._store.statistics(index)["applied"] for index in self._tables.values())

    def _publish_or_warn(self) -> bool:
        """Publishes one entry; returns whether it succeeded. An error here must not stop training."""
        try:
            self._publish()
            return True
        except _StoppedError:
            raise
        except Exception as error:
            self._writer.discard()
            if not self._ended.is_set():
                self._failed(error)
            return False

    def _publish(self) -> None:
        """Writes a snapshot, or the changes since the last entry."""
        started, step, writer = time.monotonic(), self._step(), self._writer
        applied = self._applied()
        grown = writer.increment_bytes > writer.snapshot_bytes or writer.increments >= MAX_INCREMENTS
        whole = self._incomplete or writer.sequence < 0 or grown or not self._begin(whole=False)
        if whole:
            self._begin(whole=True)
        self._incomplete = True  # The store forgets taken changes: if this fails, only a snapshot has them.
        totals = [[0, 0] for _ in self._tables]
        parts = 0
        for part in self._parts():
            self._retry(functools.partial(writer.add_part, self._tensors(part, totals)))
            parts += 1
        if parts or whole or step != self._status.step:
            tables = [
                TableChanges(name=name, dim=self._store.config(index).dim, rows=rows, removed=removed)
                for (name, index), (rows, removed) in zip(self._tables.items(), totals, strict=True)
            ]
            self._await_approval()
            if self._ended.is_set():
                raise _StoppedError("stopped")
            self._retry(lambda: writer.commit("snapshot" if whole else "increment", step, started, tables))
        self._incomplete = False
        self._applied_before, self._published_at = applied, started
        rows = self._status.rows + sum(rows for rows, _ in totals)
        self._status = self._status._replace(sequence=writer.sequence, step=step, rows=rows)
        self._succeeded()
        self._retry(self._remove_old)

    def _await_approval(self) -> None:
        """Waits until the entry in progress may become visible. `stop` with `last` approves it."""
        if not self._order.approval:
            return
        self._ticket += 1
        self._status = self._status._replace(waiting=self._ticket)
        with self._approval:
            self._approval.wait_for(lambda: self._approved == self._ticket or self._stop.is_set())
        self._status = self._status._replace(waiting=0)

    def _remove_old(self) -> None:
        """Removes old entries. Ignores a failure while stopping: the entries are removed with the epoch."""
        try:
            self._writer.remove_old()
        except Exception:
            if not self._stop.is_set():
                raise

    def _begin(self, *, whole: bool) -> bool:
        """Begins a pass over all tables. Returns whether the changes of all tables are known."""
        return all(self._store.begin_changes(index, whole, self._removed_limit) for index in self._tables.values())

    def _parts(self) -> Iterator[list[tuple[int, RowChanges]]]:
        """Yields the changes of a pass in parts: changes with the position of their table in the manifest."""
        part: list[tuple[int, RowChanges]] = []
        nbytes = 0
        for place, index in enumerate(self._tables.values()):
            config = self._store.config(index)
            max_rows = max(1, PART_BYTES // 4 // (8 + 4 * config.dim))
            for shard in range(config.resolved_shards):
                more = True
                while more:
                    if self._ended.is_set():
                        raise _StoppedError("stopped")
                    changes, more = self._store.take_changes(index, shard, max_rows)
                    if not len(changes.ids) and not len(changes.removed):
                        continue
                    part.append((place, changes))
                    nbytes += changes.removed.nbytes + changes.ids.nbytes + changes.embeddings.nbytes
                    if nbytes >= PART_BYTES:
                        yield part
                        part, nbytes = [], 0
        if part:
            yield part

    def _tensors(self, part: list[tuple[int, RowChanges]], totals: list[list[int]]) -> dict[str, NDArray[Any]]:
        """Returns the tensors of a part by name; adds their numbers of rows and removed ids to `totals`."""
        tensors: dict[str, NDArray[Any]] = {}
        for place in sorted({place for place, _ in part}):
            table_changes = [changes for at, changes in part if at == place]
            removed = np.unique(np.concatenate([changes.removed for changes in table_changes]))
            ids = np.concatenate([changes.ids for changes in table_changes])
            values, scales = encode_values(
                np.concatenate([changes.embeddings for changes in table_changes]), self._order.options.dtype
            )
            if len(removed):
                tensors[f"{place}.removed"] = removed
            if len(ids):
                tensors[f"{place}.ids"], tensors[f"{place}.values"] = ids, values
                if scales is not None:
                    tensors[f"{place}.scales"] = scales
            totals[place][0] += len(ids)
            totals[place][1] += len(removed)
        return tensors

    # --- failures -----------------------------------------------------------------------------------------------

    def _retry(self, write: Callable[[], None]) -> None:
        """Retries a write until it succeeds, or nothing more may be written."""

        def pause(seconds: float) -> None:
            if self._stop.is_set():
                self._ended.wait(min(seconds, LAST_RETRY_SECONDS))
            else:
                self._stop.wait(seconds)
            if self._ended.is_set():
                raise _StoppedError("stopped")

        retry(
            write,
            transient=lambda error: isinstance(error, CheckpointError | PublishError),
            deadline=Deadline(math.inf),
            backoff=BACKOFF,
            on_wait=self._failed,
            wait=pause,
        )

    def _failed(self, error: Exception) -> None:
        if not self._status.error:
            LOG.warning(
                "PS %d cannot publish to %s; training continues, and readers get no new rows until it can: %s",
                self._order.server,
                self._place,
                reason(error),
            )
        self._status = self._status._replace(error=reason(error))

    def _succeeded(self) -> None:
        if self._status.error:
            LOG.warning("PS %d publishes to %s again.", self._order.server, self._place)
            self._status = self._status._replace(error="")


def reason(error: Exception) -> str:
    """Returns the cause of a failure of the file system or the topic."""
    if isinstance(error, CheckpointError):
        return str(error.__cause__ or error)
    return error.message if isinstance(error, PublishError) else f"{type(error).__name__}: {error}"
