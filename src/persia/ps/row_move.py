"""Sends rows from a PS to those that will own them, while the PS goes on."""

from __future__ import annotations

import math
import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.errors import StoreError
from persia.ps.background import Background
from persia.ps.snapshots import StoreSnapshots
from persia.ps.state_transfer import admission_counts
from persia.retry import Backoff, Deadline
from persia.services import MovableRows, MovedCounts, MovedRows, MoveStatus, RowChunk
from persia.store import EmbeddingStore
from persia.telemetry.logs import get_logger
from persia.types import BucketMap

__all__ = ["RowMove"]

LOG = get_logger("persia.ps")

PAUSE_SECONDS = 0.5
"""Pause after a pass with changes, so that a move costs little until it is finished. None follows the copy of all
rows, during which many have changed."""

BACKOFF = Backoff(0.1, 5.0)
"""Pauses after failures."""

CHECKPOINT_SECONDS = 0.1
"""Interval of asking whether a checkpoint still reads the rows."""


class RowMove:
    """The rows that leave one PS for another map: a copy of all, then passes with what has changed. Thread-safe.

    Args:
        store: the store, with all its tables.
        tables: numbers of the tables, by name.
        snapshots: the snapshots of the store.
        rank: number of this PS.
        before: the map of this PS.
        after: the next map.
        peer: returns a PS by number.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        tables: Mapping[str, int],
        snapshots: StoreSnapshots,
        rank: int,
        before: BucketMap,
        after: BucketMap,
        peer: Callable[[int], MovableRows],
    ) -> None:
        self._store = store
        self._tables = tables
        self._snapshots = snapshots
        self._rank = rank
        self.after = after
        self._peer = peer
        self._owners = np.where(before.owners == rank, after.owners, rank)
        """The PS of each bucket after the move, uint16 `[BUCKETS]`; this PS for those that do not leave it."""
        self._recipients = [int(server) for server in np.unique(self._owners) if server != rank]
        self._copy = ""
        self._numbers: dict[str, int] = {}
        """Numbers of the snapshot that the recipients have, by table; empty if they have none."""
        self._part = 0
        self._sending_to = -1
        self._status = MoveStatus(after.version)
        self._finish = threading.Event()
        """Set once nothing changes any more."""
        self._thread = Background("persia-move", self._run)

    @property
    def status(self) -> MoveStatus:
        """Current progress."""
        return self._status

    @property
    def sending_to(self) -> int:
        """Number of the PS that was last called; -1 if none was."""
        return self._sending_to

    @property
    def ended(self) -> bool:
        """Whether it sends nothing any more, or at most the part on its way."""
        return self._thread.stopping or self._thread.wait(0)

    def finish(self, deadline: Deadline) -> bool:
        """Sends what has changed until now, and waits for the end; returns whether all rows were sent."""
        self._finish.set()
        self._thread.wait(deadline.left)
        return self._status.complete

    def stop(self, seconds: float) -> bool:
        """Ends it: no other part is sent. Waits for the one that is being sent; returns whether it has ended."""
        return self._thread.stop(seconds)

    # --- the thread ---------------------------------------------------------------------------------------------

    def _run(self, stop: threading.Event) -> None:
        pause = BACKOFF.first
        while not stop.is_set():
            last = self._finish.is_set()
            try:
                whole = self._pass(stop, last)
            except Exception as error:  # Whatever it is, the next pass sends all rows.
                if not self._status.error and not stop.is_set():
                    LOG.warning("PS %d cannot move its rows; it tries again: %s", self._rank, str(error))
                self._status = self._status._replace(error=str(error) or type(error).__name__)
                stop.wait(pause)
                pause = min(2 * pause, BACKOFF.longest)
                continue
            pause = BACKOFF.first
            if last:
                self._status = self._status._replace(complete=not stop.is_set())
                return
            if not whole and not stop.is_set():
                self._finish.wait(PAUSE_SECONDS)

    def _pass(self, stop: threading.Event, last: bool) -> bool:
        """Sends what has changed since the last pass, or all rows; returns whether it has sent all rows."""
        began = time.monotonic()
        name = f"move-{self.after.version}-{secrets.token_hex(8)}"
        leaving, place = self._owners != self._rank, tempfile.gettempdir()
        while (info := self._snapshots.begin_after_others(name, self._numbers, place, leaving)) is None:
            if stop.wait(CHECKPOINT_SECONDS):
                return False
        before, sent = self._status, 0
        try:
            if info.whole:  # Also after a pass that failed, or a checkpoint.
                self._begin_copy(stop)
            for chunk in self._snapshots.removed(name):
                for server, part in self._by_recipient(chunk):
                    self._send(stop, server, removed=[part])
            for chunk in self._snapshots.rows(name):
                if stop.is_set():
                    return False
                for server, part in self._by_recipient(chunk):
                    self._send(stop, server, rows=[part])
                    sent += len(part.arrays["ids"])
                    self._status = before._replace(rows=before.rows + sent)
            if last:
                self._send_last(stop)
        except BaseException:
            self._status = before
            raise
        finally:
            self._snapshots.end(name)
        self._numbers = dict(info.numbers)
        again = info.whole and before.passes > 0  # The next pass is of another size.
        self._status = before._replace(
            passes=before.passes + 1,
            rows=before.rows + sent,
            last_rows=sent,
            seconds=math.inf if again else time.monotonic() - began,
            error="",
        )
        return info.whole

    def _begin_copy(self, stop: threading.Event) -> None:
        self._copy, self._part = secrets.token_hex(16), 0
        for server in self._recipients:
            self._recipient(stop, server).begin_receiving(self.after, self._rank, self._copy)

    def _recipient(self, stop: threading.Event, server: int) -> MovableRows:
        """Returns a PS for the next call. Raises StoreError if there must be none, as this PS may train again."""
        if stop.is_set():
            raise StoreError(f"The rows of PS {self._rank} do not move any more.", rank=self._rank)
        self._sending_to = server
        return self._peer(server)

    def _by_recipient(self, chunk: RowChunk) -> Iterator[tuple[int, RowChunk]]:
        """Yields the part of a chunk of rows that leave for each PS that will own any of it."""
        if len(self._recipients) == 1:
            yield self._recipients[0], chunk
            return
        owners: NDArray[np.uint16] = self._owners[batching.buckets_of(chunk.table, chunk.arrays["ids"])]
        for server in self._recipients:
            chosen = np.flatnonzero(owners == server)
            if len(chosen):
                yield server, chunk._replace(arrays={name: array[chosen] for name, array in chunk.arrays.items()})

    def _send_last(self, stop: threading.Event) -> None:
        """Sends what is not rows, and that nothing follows."""
        for piece in admission_counts(self._store, self._tables):
            for server in self._recipients:
                self._send(stop, server, state=[piece])
        for server in self._recipients:
            self._send(stop, server, last=True)

    def _send(
        self,
        stop: threading.Event,
        server: int,
        removed: list[RowChunk] | None = None,
        rows: list[RowChunk] | None = None,
        state: list[MovedCounts] | None = None,
        *,
        last: bool = False,
    ) -> None:
        self._part += 1
        part = MovedRows(
            self.after.version, self._rank, self._copy, self._part, removed or [], rows or [], state or [], last
        )
        self._recipient(stop, server).receive(part)
