"""How rows move from one embedding PS to another while a run trains (docs/decisions/0026-buckets.md)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from persia import rpc
from persia.modes import Mode
from persia.services.embedding import RowChunk
from persia.telemetry.metrics import Readings
from persia.types import BucketMap

__all__ = [
    "BucketMaps",
    "MapRoundsOfRun",
    "MapState",
    "MovableRows",
    "MoveProgress",
    "MoveStatus",
    "MovedCounts",
    "MovedRows",
    "Round",
    "ScaleRequest",
]


class Round(NamedTuple):
    """Number of a try to move rows, in order; see docs/reference/moves.md.

    Attributes:
        generation: generation of the NN workers.
        number: number of rounds that NN worker 0 has begun in this generation, this one included.
    """

    generation: int
    number: int


class MoveStatus(NamedTuple):
    """Progress of the rows that leave a PS.

    Attributes:
        version: version of the bucket map for which they move; -1 if none do.
        passes: number of complete passes. The first one sends all rows, each later one what has changed since.
        rows: number of rows sent in all passes, and in the current one so far.
        last_rows: number of rows sent in the last complete pass.
        seconds: duration of that pass; infinite if it had to send all rows again, as after a checkpoint.
        complete: whether the last difference, after `finish_move`, has been sent.
        error: why the rows could not be sent the last time; empty if they could.
    """

    version: int = -1
    passes: int = 0
    rows: int = 0
    last_rows: int = 0
    seconds: float = 0.0
    complete: bool = False
    error: str = ""


class MovedCounts(NamedTuple):
    """The counts of a shard's admission sketch, without blocks of counters that are all 0.

    Attributes:
        table: name of the table.
        shard: shard of the PS that sends them.
        shards: number of its shards, on which the shard of an id depends.
        counters: number of counters of the sketch.
        blocks: numbers of the blocks, uint32 `[n]`.
        counts: their counters, uint16 `[n, counters in a block]`.
    """

    table: str
    shard: int
    shards: int
    counters: int
    blocks: np.ndarray
    counts: np.ndarray


class MovedRows(NamedTuple):
    """A part of the rows that one PS sends to another, which applies the parts in order, each once.

    Attributes:
        version: version of the bucket map by which the other PS will own them.
        donor: number of the PS that sends them.
        copy: identifier of this copy of the donor's rows, from `MovableRows.begin_receiving`.
        number: number of this part within the copy, from 1 on.
        removed: ids that no longer have a row, as chunks with only `ids`. They come first.
        rows: whole rows.
        state: admission counts of the donor's shards, which the other PS merges once it is complete.
        last: whether nothing follows, as the donor refuses requests by now.
    """

    version: int
    donor: int
    copy: str
    number: int
    removed: list[RowChunk]
    rows: list[RowChunk]
    state: list[MovedCounts]
    last: bool = False


class MovableRows(Protocol):
    """An embedding PS whose rows can move to another bucket map. docs/reference/moves.md has the order of the calls.

    A PS refuses the order of a round if it knows of a later one, or if this one has ended there: `StoreError`. It
    stores the number of the round, and what the order changes, in its regions before it answers.
    """

    def begin_move(self, after: BucketMap) -> MoveStatus:
        """Begins to send the rows of the buckets that this PS loses to the PSs that gain them, in the background.

        A repeated call has no effect, nor one to a PS that loses none. A move for another map ends. While a checkpoint
        reads the rows, the move waits.

        Args:
            after: the next map.

        Raises:
            StaleMapError: it does not follow the map of this PS.
            DeadlineError: rows of an earlier map are still being removed, or of an earlier move still being sent.
            StoreError: by the next map this PS gains buckets, too.
        """

    def moving(self) -> MoveStatus:
        """Returns the progress; the version is -1 after a restart of this PS: begin the move again."""

    def cancel_move(self, version: int, wanted: BucketMap | None = None) -> None:
        """Ends the copies for maps that are not wanted any more, and removes what has come. No-op without any.

        Not in a round that has finished the move: `adopt` the map before instead.

        Args:
            version: version of these maps, the next one; no-op for another one.
            wanted: the next map that is ordered; None if none is. Its copies go on. As long as some come here, nothing
                is removed: `adopt` does it.

        Raises:
            DeadlineError: rows of the move are still being sent. Call again.
        """

    @rpc.waits
    def finish_move(self, number: Round, after: BucketMap) -> MoveStatus:
        """Seals this PS, sends what has changed until now, and ends the move. Call it while no push is in flight.

        From now on this PS refuses requests with ids, also after a restart, until it adopts a map.

        Args:
            number: number of this round.
            after: the next map.

        Returns:
            The progress; `complete` is set.

        Raises:
            StoreError: this PS does not move rows for this map, as it has restarted: begin again.
            DeadlineError: the rows could not be sent in time; the error has the reason. Call again, or give up.
        """

    def complete_move(self, number: Round, after: BucketMap) -> None:
        """Keeps the rows that have come for a map, also after a restart, until this PS adopts a map.

        Also merges the admission counts that have come. Call it once all donors have finished the move. A PS that
        gains no buckets only notes the map.

        Raises:
            StoreError: rows of a donor are missing; the error names it. Begin again.
        """

    def adopt(
        self, number: Round, buckets: BucketMap, mode: Mode | None = None, step: int = 0, nn_workers: int = 0
    ) -> None:
        """Ends a round: continues with a map, the next one or the one before, also after a restart.

        Rows that this PS does not own by the map are removed in the background. Another map ends publishing. A
        repeated call has no effect.

        Args:
            number: number of this round.
            buckets: the map.
            mode: the mode from `step` on, as for `EmbeddingPS.switch`; None between runs.
            step: the next global step.
            nn_workers: as for `EmbeddingPS.switch`, also without a mode.

        Raises:
            PersiaError: gradients are pending; drain first.
            DeadlineError: rows of a move that ends are still being sent; this PS stays sealed. Call again.
            StaleMapError: it is neither the map of this PS nor the next one.
            StoreError: this PS would own rows that have not come.
        """

    def begin_receiving(self, after: BucketMap, donor: int, copy: str) -> None:
        """Prepares for a copy of the rows of another PS: removes what has come from it before.

        Args:
            after: the next map.
            donor: number of the other PS.
            copy: random identifier of the copy. A repeated call has no effect.

        Raises:
            StaleMapError: the map does not follow the map of this PS.
            StoreError: the rows of this PS are complete.
        """

    def receive(self, part: MovedRows) -> None:
        """Applies a part of the rows of another PS. Parts that were applied before have no effect.

        Raises:
            StoreError: this PS does not receive this copy, as it has restarted; send all rows again.
        """


class MoveProgress(NamedTuple):
    """Progress of a move, as NN worker 0 sees it.

    Attributes:
        version: version of the bucket map for which rows move; -1 if none do.
        passes: number of complete passes of all donors.
        rows: number of rows that they have sent in all passes, also in those that are not complete yet.
        pause_seconds: time for which training was paused until all PSs had adopted the map; 0 before.
        problem: why the move waits or was given up; empty if it does not.
        gave_up: how many times NN worker 0 has given it up in this generation; it tries again.
    """

    version: int = -1
    passes: int = 0
    rows: int = 0
    pause_seconds: float = 0.0
    problem: str = ""
    gave_up: int = 0


class MapState(NamedTuple):
    """The bucket map of a run, as the coordinator has it.

    Attributes:
        buckets: the map.
        ordered: the next map, if it is wanted and not committed; None otherwise.
        adopted: version of the last map that all PSs have adopted.
        progress: progress of the current or last move.
    """

    buckets: BucketMap
    ordered: BucketMap | None
    adopted: int
    progress: MoveProgress

    def has_left(self, server: int) -> bool:
        """Returns whether the run does not need a PS any more: all PSs have adopted a map that does not have it."""
        return self.adopted >= self.buckets.version and server >= self.buckets.servers


class ScaleRequest(NamedTuple):
    """A request to change the numbers of processes of a run.

    Attributes:
        ticket: random identifier.
        counts: numbers of processes by argument of `Ray.scale`.
        answered: whether the driver has answered.
        error: why the numbers were not changed; empty if they were.
        keep_global_batch: see `Ray.scale`.
    """

    ticket: str
    counts: dict[str, int]
    answered: bool = False
    error: str = ""
    keep_global_batch: bool = False


class BucketMaps(Protocol):
    """The bucket map of a run at the coordinator, which decides whether a move is made (docs/reference/moves.md)."""

    def map_state(self) -> MapState:
        """Returns the map, and the next one if it is ordered."""

    def order_map(self, after: BucketMap) -> None:
        """Orders the next map: NN worker 0 moves the rows and commits it. A repeated call has no effect.

        Raises:
            StaleMapError: it does not follow the map.
            PersiaError: another map is ordered.
        """

    def withdraw_map(self, after: BucketMap) -> bool:
        """Withdraws an order. Returns False if the map was committed: then the move is completed."""

    def commit_map(self, number: Round, after: BucketMap) -> bool:
        """Makes the ordered map the map of the run, and logs it before it answers; see rule 11.

        Args:
            number: number of the round.
            after: the map.

        Returns:
            Whether it is the map. False for another generation than the current one, and for a map that is not
            ordered (any more). A repeated call has the same result.
        """

    def map_adopted(self, generation: int, version: int) -> None:
        """Notes that all PSs have adopted a map. No-op for another generation than the current one."""

    def report_move(self, progress: MoveProgress) -> None:
        """Notes the progress of a move, for those who watch."""

    def request_scale(self, ticket: str, counts: Mapping[str, int], keep_global_batch: bool = False) -> ScaleRequest:
        """Requests other numbers of processes, which the driver of the run starts or ends.

        Repeat the call until it is answered; requests do not outlive the coordinator's process.

        Args:
            ticket: random identifier of the request.
            counts: numbers of processes by argument of `Ray.scale`.
            keep_global_batch: see `Ray.scale`.

        Raises:
            PersiaError: another request is not answered yet.
        """

    @rpc.waits
    def scale_request(self, timeout: float = 0.0) -> ScaleRequest | None:
        """Returns the request that is not answered, for the driver. Waits up to `timeout` seconds for one."""

    def answer_scale(self, ticket: str, error: str = "") -> None:
        """Answers a request. No-op if it is unknown.

        Args:
            ticket: identifier of the request.
            error: why the numbers were not changed; empty if they were.
        """

    def report_scaler(self, report: Readings) -> None:
        """Replaces what the coordinator shows of the scaler: its metrics, and its last decisions as notes."""


class MapRoundsOfRun(Protocol):
    """The rounds of moves and of changes of mode that NN worker 0 makes; see `persia.membership.map_rounds`."""

    busy: Callable[[], bool]
    """Returns whether a checkpoint reads the rows, so that no move can be finished."""

    @property
    def ready(self) -> bool:
        """Whether a move needs training to quiesce now. Returns immediately."""

    def make(self, mode: Mode | None, step: int, nn_workers: int = 0) -> int:
        """Makes a round while training is quiesced: finishes a move that is ready, and has all PSs adopt map and mode.

        Args:
            mode: the mode from `step` on; None between runs.
            step: the next global step.
            nn_workers: as for `EmbeddingPS.switch`.

        Returns:
            The number of PSs from now on; pass it to `follow` on all NN workers.
        """

    def follow(self, servers: int) -> None:
        """Continues with this number of PSs, on any NN worker."""
