"""The bucket map of a PS, the rows that leave it for other PSs, and those that come from them.

docs/reference/moves.md specifies it: rules are numbered as there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from persia import batching
from persia.errors import DeadlineError, StaleMapError, StoreError
from persia.ps.background import Background
from persia.ps.options import ServerOptions
from persia.ps.ownership import OwnedRows, Ownership
from persia.ps.regions import Regions
from persia.ps.row_chunks import chunk_rows
from persia.ps.row_move import RowMove
from persia.ps.snapshots import StoreSnapshots
from persia.ps.space import SpaceWait
from persia.ps.state_transfer import check_counts, merge_admission
from persia.ps.table_numbers import TableNumbers
from persia.retry import retry
from persia.services import MovedCounts, MovedRows, MoveStatus, Round, RowChunk
from persia.store import EmbeddingStore, Rows
from persia.telemetry.logs import get_logger
from persia.types import BoolArray, BucketMap, Ids

__all__ = ["RowMoves", "owned_rows"]

LOG = get_logger("persia.ps")

T = TypeVar("T")

STOP_SECONDS = 10.0
"""Maximum wait for the part that a move sends as it ends; a call that ends it then fails, and is repeated."""

SNAPSHOT_SECONDS = 0.1
"""Interval of asking whether a checkpoint still reads the rows."""


class _Copy:
    """A copy of the rows of another PS that is being received."""

    def __init__(self, after: BucketMap, name: str, coming: BoolArray) -> None:
        self.after = after
        self.name = name
        self.coming = coming
        """Whether each bucket comes from this PS, bool `[BUCKETS]`."""
        self.applied = 0
        """Number of the last part that was applied."""
        self.state: list[MovedCounts] = []
        """Admission counts of the donor, until this PS is complete."""
        self.whole = False
        """Whether nothing follows."""
        self.lock = threading.Lock()

    @property
    def finishing(self) -> bool:
        """Whether parts have come that a donor sends only once a round has sealed it."""
        return self.whole or bool(self.state)


def owned_rows(options: ServerOptions, regions: Regions | None) -> OwnedRows:
    """Returns what a PS owns: as an earlier process has stored it, or by the first map."""
    stored = regions.ownership if regions is not None else None
    return OwnedRows(options.rank, stored or Ownership(options.buckets))


class RowMoves:
    """See `persia.services.MovableRows`. Thread-safe.

    Args:
        store: the store, with all its tables.
        tables: numbers of the tables.
        snapshots: the snapshots of the store.
        space: waits for space.
        options: options of the PS.
        regions: regions of the PS, which keep what it owns; None without.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        tables: TableNumbers,
        snapshots: StoreSnapshots,
        space: SpaceWait,
        options: ServerOptions,
        regions: Regions | None,
    ) -> None:
        self._store = store
        self._tables = tables
        self._snapshots = snapshots
        self._space = space
        self._given_rank = options.rank
        self._peer = options.peer
        self._regions = regions
        self._owned = snapshots.owned
        self._lock = threading.Lock()
        self._move: RowMove | None = None
        self._copies: dict[int, _Copy] = {}
        """Copies that are being received, by donor."""
        self._removal: Background | None = None
        if self._own.others:
            self._remove_foreign()  # The process before may have died meanwhile.

    @property
    def buckets(self) -> BucketMap:
        """The PS of each bucket of ids."""
        return self._own.buckets

    @property
    def _rank(self) -> int:
        """Number of this PS. Raises StoreError if it has not been given."""
        if self._given_rank is None:
            raise StoreError("Rows of this PS cannot move: it was started without `ServerOptions.rank`, its number.")
        return self._given_rank

    @property
    def _own(self) -> Ownership:
        return self._owned.ownership

    def check(self, version: int) -> None:
        """Raises StaleMapError unless ids that were routed by a version of the map are served now."""
        own = self._own
        own.buckets.check(version)
        if own.sealed:
            raise StaleMapError(
                f"PS {self._rank} has sent its rows to other PSs, and serves no requests by bucket map {version} any "
                "more. Nothing was read or changed; the next map follows soon, `EmbeddingPS.buckets`.",
                routed=version,
                current=version,
            )

    # --- rows that leave ----------------------------------------------------------------------------------------

    def begin(self, after: BucketMap) -> MoveStatus:
        """See `MovableRows.begin_move`."""
        with self._lock:
            self._check_next(after)
            if not self._loses(after):
                return MoveStatus()
            if self._donors(after):  # Both at once could wait for each other: no copy begins while a pass reads rows.
                raise StoreError(
                    f"PS {self._rank} would both lose and gain buckets by bucket map {after.version}. Make two moves.",
                    version=after.version,
                )
            move = self._move
            if move is not None and move.after == after and (move.status.complete or not move.ended):
                return move.status
            self._end_move()
            self._await_removal()
            if self._peer is None:
                raise StoreError("Rows of this PS cannot move: it has no way to reach other PSs.")
            self._move = move = RowMove(
                self._store, self._tables.by_name, self._snapshots, self._rank, self.buckets, after, self._peer
            )
            return move.status

    def status(self) -> MoveStatus:
        """See `MovableRows.moving`."""
        move = self._move
        return MoveStatus() if move is None else move.status

    def finish(self, number: Round, after: BucketMap) -> MoveStatus:
        """See `MovableRows.finish_move`. Rules 2, 8 and 9."""
        with self._lock:
            self._check_round(number)
            self._check_next(after)
            move = self._move
            if move is None or move.after != after:
                raise StoreError(
                    f"PS {self._rank} does not move rows for bucket map {after.version}: it has restarted, or the move "
                    "was cancelled. Begin the move again.",
                    version=after.version,
                )
            self._keep(number, sealed=True)
        deadline = self._space.deadline()
        if not move.finish(deadline):
            raise DeadlineError(
                f"PS {self._rank} could not send the rows that leave it within {deadline.seconds:g} s: "
                f"{move.status.error or 'they are still being sent'}. Call again, or give up the move.",
                role="embedding_ps",
                rank=self._rank,
                seconds=deadline.seconds,
            )
        return move.status

    def cancel(self, version: int, wanted: BucketMap | None = None) -> None:
        """See `MovableRows.cancel_move`."""
        with self._lock:
            if version != self.buckets.version + 1 or self._own.sealed or self._own.complete:
                return
            if self._move is not None and self._move.after != wanted:
                self._end_move()
            unwanted = [donor for donor, copy in self._copies.items() if copy.after != wanted]
            self._close_copies(unwanted)
            # Without any there is nothing to remove, and no need to read all rows; with others, theirs would go, too.
            if unwanted and not self._copies:
                self._remove_foreign()

    # --- rows that come -----------------------------------------------------------------------------------------

    def begin_receiving(self, after: BucketMap, donor: int, copy: str) -> None:
        """See `MovableRows.begin_receiving`. Rule 6."""
        with self._lock:
            self._check_next(after)
            known = self._copies.get(donor)
            if known is not None and known.name == copy:
                return
            if self._own.complete is not None:
                raise StoreError(f"PS {self._rank} has all rows for bucket map {after.version}. Adopt a map first.")
            if donor not in self._donors(after) or self._loses(after):
                raise StoreError(
                    f"No rows of PS {donor} come to PS {self._rank} by bucket map {after.version}.", donor=donor
                )
            self._close_copies([donor])
            self._await_removal()
            self._store_own(others=True)
            coming = (self.buckets.owners == donor) & (after.owners == self._rank)
            for _, index, shard in self._shards():
                self._change(functools.partial(self._store.remove_buckets, index, shard, coming))
            self._copies[donor] = _Copy(after, copy, coming)

    def receive(self, part: MovedRows) -> None:
        """See `MovableRows.receive`."""
        copy = self._copies.get(part.donor)
        if copy is None or (copy.after.version, copy.name) != (part.version, part.copy):
            raise self._no_copy(part.donor)
        with copy.lock:
            if self._copies.get(part.donor) is not copy:  # It was closed, for another one or by a map.
                raise self._no_copy(part.donor)
            if part.number <= copy.applied:
                return
            removed = [(self._tables.number(chunk.table), self._coming_ids(chunk, copy)) for chunk in part.removed]
            rows = [(self._tables.number(chunk.table), self._coming_rows(chunk, copy)) for chunk in part.rows]
            for counts in part.state:
                check_counts(self._tables, counts)
            for table, ids in removed:
                self._change(functools.partial(self._store.remove_rows, table, ids))
            for table, values in rows:
                if values.last_step.any():  # This PS may not have begun the mode yet that needs them.
                    self._change(functools.partial(self._store.keep_last_steps, table))
                self._change(functools.partial(self._store.import_rows, table, values))
            copy.state += part.state  # Not merged here: the move may have been given up, and pushes be applied again.
            copy.applied, copy.whole = part.number, part.last

    def complete(self, number: Round, after: BucketMap) -> None:
        """See `MovableRows.complete_move`. Rules 2 and 10."""
        with self._lock:
            self._check_round(number)
            self._check_next(after)
            if self._own.complete == after:
                return
            state: list[MovedCounts] = []
            for donor in self._donors(after):
                copy = self._copies.get(donor)
                if copy is None or copy.after != after or not copy.whole:
                    raise StoreError(
                        f"PS {self._rank} does not have all rows of PS {donor} for bucket map {after.version}: one of "
                        "them has restarted, or the move was not finished there. Begin the move again.",
                        donor=donor,
                    )
                state += copy.state
            for table in self._change(functools.partial(merge_admission, self._store, self._tables, state)):
                LOG.warning(
                    "table %r has another capacity at PSs that give rows to PS %d: "
                    "their counts of ids that have no row yet start again",
                    table, self._rank,
                )  # fmt: skip
            self._keep(number, complete=after)

    def _loses(self, after: BucketMap) -> bool:
        """Returns whether rows leave this PS for a map."""
        return bool(((self.buckets.owners == self._rank) & (after.owners != self._rank)).any())

    def _donors(self, after: BucketMap) -> list[int]:
        """Returns the PSs from which rows come to this one for a map."""
        before = self.buckets.owners
        return [int(donor) for donor in set(before[(after.owners == self._rank) & (before != self._rank)].tolist())]

    def _no_copy(self, donor: int) -> StoreError:
        return StoreError(
            f"PS {self._rank} does not receive this copy of the rows of PS {donor}: it has restarted, another copy has "
            "begun, or the move was cancelled. Send all rows again.",
            donor=donor,
        )

    def _close_copies(self, donors: Sequence[int]) -> None:
        """Ends copies: no part of them is applied from now on. Waits for those that are being applied."""
        for donor in donors:
            if (copy := self._copies.pop(donor, None)) is not None:
                with copy.lock:
                    pass

    def _coming_ids(self, chunk: RowChunk, copy: _Copy) -> Ids:
        """Returns the ids of a chunk. Raises StoreError unless they come from its sender."""
        ids = chunk.arrays.get("ids")
        if ids is None or ids.dtype != np.uint64 or ids.ndim != 1:
            raise StoreError(f"Rows of table {chunk.table!r} need ids uint64 [n].", table=chunk.table)
        if not copy.coming[batching.buckets_of(chunk.table, ids)].all():
            raise StoreError(f"Rows of table {chunk.table!r} have come whose PS does not give them.", table=chunk.table)
        return ids

    def _coming_rows(self, chunk: RowChunk, copy: _Copy) -> Rows:
        self._coming_ids(chunk, copy)
        return chunk_rows(self._store.config(self._tables.number(chunk.table)), chunk)

    def _change(self, change: Callable[[], T]) -> T:
        """Changes rows, once there is space; removes them, once no checkpoint reads them."""
        return retry(
            lambda: self._space.retry(change, "receive"),
            transient=lambda error: isinstance(error, StoreError) and self._snapshots.reading,
            deadline=self._space.deadline(),
        )

    # --- maps ---------------------------------------------------------------------------------------------------

    def adopt(
        self,
        number: Round,
        buckets: BucketMap,
        begin_phase: Callable[[], object],
        changing: Sequence[Callable[[], object]],
    ) -> None:
        """See `MovableRows.adopt`.

        Args:
            number: number of the round.
            buckets: the map.
            begin_phase: called before anything changes, unless the call is a repetition.
            changing: called in order before this PS has another map.
        """
        with self._lock:
            if self._round == number and self._own.ended and buckets == self.buckets:
                return
            self._check_round(number)
            changes = buckets != self.buckets
            if changes:
                self._check_next(buckets)
                if self._own.complete != buckets and (donors := self._donors(buckets)):
                    raise StoreError(
                        f"PS {self._rank} cannot adopt bucket map {buckets.version}: it would own rows of PSs "
                        f"{', '.join(map(str, donors))}, which have not come. Move them first.",
                        version=buckets.version,
                    )
            # In a round without a move, such as a change of mode, rows continue to come and go.
            finishing = self._own.sealed or any(copy.finishing for copy in self._copies.values())
            ends_moves = changes or finishing or self._own.complete is not None
            if ends_moves:  # Before anything changes: a sealed PS serves nothing until its move sends nothing more.
                self._end_move()
            begin_phase()
            for call in changing if changes else ():
                call()
            others = self._own.others or changes
            if ends_moves:
                self._close_copies(list(self._copies))
            self._keep(number, buckets=buckets, ended=True, sealed=False, complete=None, others=others)
            if not ends_moves:
                return
            for index in self._tables.by_name.values() if changes else ():
                self._store.end_import(index)
            if others:
                self._remove_foreign()

    def close(self) -> None:
        """Ends what is done in the background."""
        with self._lock:
            if self._move is not None:
                self._move.stop(STOP_SECONDS)
                self._move = None
            if self._removal is not None:
                self._removal.stop(10.0)

    @property
    def _round(self) -> Round:
        return Round(self._own.generation, self._own.number)

    def _keep(self, number: Round, **changes: Any) -> None:
        """Stores what a round changes, with its number."""
        self._store_own(**{"generation": number.generation, "number": number.number, "ended": False} | changes)

    def _store_own(self, **changes: Any) -> None:
        """Changes what is stored in the regions, and then what this process has."""
        own = msgspec.structs.replace(self._own, **changes)
        if own == self._own:
            return
        if (regions := self._regions) is not None:
            self._space.retry(lambda: regions.remember_ownership(own), "move")
        self._owned.ownership = own

    def _check_round(self, number: Round) -> None:
        """Rule 2."""
        if number < self._round or (number == self._round and self._own.ended):
            raise StoreError(
                f"PS {self._rank} is in round {tuple(self._round)} of moves, and refuses an order of round "
                f"{tuple(number)}, which has ended. Nothing has changed; it was late, or this is not the NN worker "
                "that moves rows.",
                generation=number.generation,
                number=number.number,
            )

    def _check_next(self, after: BucketMap) -> None:
        """Raises StaleMapError unless a map follows the map of this PS."""
        if after.version != self.buckets.version + 1:
            raise StaleMapError(
                f"Bucket map {after.version} does not follow bucket map {self.buckets.version} of PS {self._rank}. "
                "Nothing has changed; make the next map from the current one, `EmbeddingPS.buckets`.",
                routed=after.version,
                current=self.buckets.version,
            )

    def _shards(self) -> Iterator[tuple[str, int, int]]:
        """Yields each shard: name and number of its table, and its number."""
        for name, index in self._tables.by_name.items():
            for shard in range(self._store.config(index).resolved_shards):
                yield name, index, shard

    def _end_move(self) -> None:
        """Ends the rows that leave. Raises DeadlineError if some are still being sent: the caller repeats its call."""
        if (move := self._move) is None:
            return
        if not move.stop(STOP_SECONDS):
            raise DeadlineError(
                f"PS {self._rank} still sends rows for bucket map {move.after.version} to PS {move.sending_to}, which "
                f"has not answered {STOP_SECONDS:g} s after the move ended. Repeat the call; PS {move.sending_to} may "
                "wait for space, or be gone.",
                role="embedding_ps",
                rank=move.sending_to,
                seconds=STOP_SECONDS,
            )
        self._move = None

    def _remove_foreign(self) -> None:
        """Removes the rows that this PS does not own, in the background. Rule 13."""
        foreign = self.buckets.owners != self._rank
        if self._own.complete is not None:
            foreign &= self._own.complete.owners != self._rank
        if (earlier := self._removal) is not None:
            earlier.stop()

        def work(stop: threading.Event) -> None:
            if earlier is not None:  # It may still remove rows of buckets that this PS owns by now.
                earlier.stop(self._space.deadline().seconds)
            for name, index, shard in self._shards():
                while not stop.is_set():
                    try:
                        self._store.remove_buckets(index, shard, foreign)
                        break
                    except StoreError as error:
                        if not self._snapshots.reading:
                            LOG.warning(
                                "rows of table %r that have moved to other PSs take space until this PS restarts: %s",
                                name, error,
                            )  # fmt: skip
                            break
                    stop.wait(SNAPSHOT_SECONDS)

        self._removal = Background("persia-removal", work)

    def _await_removal(self) -> None:
        """Waits until no row of an earlier map is being removed, as it may be one that comes back."""
        deadline = self._space.deadline()
        if self._removal is not None and not self._removal.wait(deadline.left):
            raise DeadlineError(
                f"PS {self._rank} still removes rows that have moved to other PSs, after {deadline.seconds:g} s. Begin "
                "the move later; a checkpoint that reads the rows delays it.",
                role="embedding_ps",
                rank=self._rank,
                seconds=deadline.seconds,
            )
