"""A PS whose rows can move."""

from __future__ import annotations

from abc import abstractmethod

from persia.modes import Mode
from persia.ps.recent_changes import RecentChanges
from persia.ps.regions import Regions
from persia.ps.row_moves import RowMoves
from persia.ps.row_publishing import RowPublishing
from persia.ps.space import SpaceWait
from persia.pushes.journal import JournaledServer
from persia.pushes.sequencer import PushSequencer
from persia.pushes.step_barrier import StepBarrier
from persia.services import MovedRows, MoveStatus, Round
from persia.types import BucketMap, UpdateCounts

__all__ = ["MovableServer"]


class MovableServer(JournaledServer):
    """See `persia.services.MovableRows`."""

    _moves: RowMoves
    _changes: RecentChanges
    _publishing: RowPublishing
    _regions: Regions | None
    _space: SpaceWait
    _mode: Mode
    _barriers: list[StepBarrier]
    _sequencer: PushSequencer[dict[str, UpdateCounts]]
    _nn_workers: int
    """Number of NN workers that push."""

    @abstractmethod
    def _adopt(self, mode: Mode, before: tuple[int, int] | None = None) -> None:
        """Starts a mode."""

    def _expect(self, nn_workers: int) -> None:
        """Sets the number of NN workers that push, from the next `_adopt` on, also for the next process."""
        if (regions := self._regions) is not None:
            self._space.retry(lambda: regions.remember_nn_workers(nn_workers), "switch")
        self._nn_workers = nn_workers

    @abstractmethod
    def switch(self, mode: Mode, generation: int, step: int, nn_workers: int = 0) -> None:
        """Switches to another mode from `step` on; see `persia.services.EmbeddingPS`."""

    def buckets(self) -> BucketMap:
        """Returns the PS of each bucket of ids, by which callers route ids."""
        return self._moves.buckets

    def begin_move(self, after: BucketMap) -> MoveStatus:
        """Begins to send rows to the PSs that will own them; see `persia.services.MovableRows`."""
        return self._moves.begin(after)

    def moving(self) -> MoveStatus:
        """Returns the progress of the rows that leave this PS."""
        return self._moves.status()

    def finish_move(self, number: Round, after: BucketMap) -> MoveStatus:
        """Seals this PS, and sends what has changed until now; see `persia.services.MovableRows`."""
        return self._moves.finish(number, after)

    def complete_move(self, number: Round, after: BucketMap) -> None:
        """Keeps the rows that have come; see `persia.services.MovableRows`."""
        self._moves.complete(number, after)

    def cancel_move(self, version: int, wanted: BucketMap | None = None) -> None:
        """Ends moves, and removes the rows that have come for them; see `persia.services.MovableRows`."""
        self._moves.cancel(version, wanted)

    def begin_receiving(self, after: BucketMap, donor: int, copy: str) -> None:
        """Prepares for a copy of the rows of another PS; see `persia.services.MovableRows`."""
        self._moves.begin_receiving(after, donor, copy)

    def receive(self, part: MovedRows) -> None:
        """Applies a part of the rows of another PS; see `persia.services.MovableRows`."""
        self._moves.receive(part)

    def adopt(
        self, number: Round, buckets: BucketMap, mode: Mode | None = None, step: int = 0, nn_workers: int = 0
    ) -> None:
        """Ends a round of moves with a bucket map and a mode; see `persia.services.MovableRows`."""

        def begin_phase() -> None:  # First: pushes of earlier generations are refused before the map changes.
            if mode is not None:
                self.switch(mode, number.generation, step, nn_workers)
            elif nn_workers:  # Between two runs: the first push of the next one says at which step it begins.
                self._sequencer.begin(number.generation, 0)
                for barrier in self._barriers:
                    barrier.renew(number.generation, 0)  # Pushes that wait for a dead NN worker fail.
                self._expect(nn_workers)
                self._adopt(self._mode, (number.generation, -1))

        changing = [lambda: self._publishing.end(last=False), self._changes.forget]
        self._moves.adopt(number, buckets, begin_phase, changing)
