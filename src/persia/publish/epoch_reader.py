"""Reads the epochs of the log of changes one after another, for predictors, row servers and replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeAlias, TypeVar

from persia.errors import CheckpointError, PublishError
from persia.publish.follower import Change, Follower, NetworkUpdate, RowsUpdate
from persia.publish.format import Description

__all__ = ["EpochReader", "EpochState", "Update"]

Update: TypeAlias = RowsUpdate | NetworkUpdate


class EpochState(Protocol):
    """The state of an epoch in a reader."""

    @property
    def run(self) -> str:
        """Random identifier of the epoch."""

    def apply(self, update: Update) -> list[Change] | None:
        """Applies an update of the epoch.

        Returns:
            The changes of rows; None if all rows of a PS may have changed.

        Raises:
            PublishError: the update is refused, and nothing has changed.
            CheckpointError: a file cannot be read or written, and nothing has changed.
        """


E = TypeVar("E", bound=EpochState)


class EpochReader(Generic[E]):
    """Applies the log of changes to the current epoch, and to a new one until it can replace the current one.

    The next snapshot replaces updates that are refused or damaged. Not thread-safe.

    Args:
        follower: follower of the log.
        begin: creates the state of an epoch from its run, its first update, and its description. PublishError means
            that the epoch cannot be used at all.
        described: whether `begin` needs the description; otherwise it receives None.

    Attributes:
        current: the epoch in use; None before the first.
        next: the epoch that is being read, until it is complete.
        problem: why the last `read` could not apply everything; empty if it could. `Follower.problem` has the rest.
    """

    def __init__(
        self,
        follower: Follower,
        begin: Callable[[str, Update, Description | None], E],
        *,
        described: bool = True,
    ) -> None:
        self._follower = follower
        self._begin = begin
        self._described = described
        self._refused: tuple[str, str] = "", ""
        """The run of an epoch that cannot be used, and the reason."""
        self.current: E | None = None
        self.next: E | None = None
        self.problem = ""

    @property
    def refusal(self) -> str:
        """Why the epoch of the log cannot be used; empty if it can."""
        run, problem = self._refused
        return problem if run and run == self._follower.run else ""

    def read(self) -> Iterator[tuple[E, list[Change] | None]]:
        """Applies new entries of the log; yields the epoch of each update with the result of `EpochState.apply`.

        Call `adopt` once an epoch is complete. Blocks for the file system or the brokers only.
        """
        self.problem = ""
        for update in self._follower.updates():
            try:
                epoch = self._epoch_of(update)
            except (PublishError, CheckpointError) as error:
                self.problem = self.problem or error.message
                break  # The next call reads the update again.
            try:
                changes = epoch.apply(update)
            except (PublishError, CheckpointError) as error:
                self.problem = self.problem or error.message
                if isinstance(update, RowsUpdate):
                    update.changes.reject(error.message)
            else:
                yield epoch, changes

    def adopt(self, epoch: E) -> None:
        """Makes an epoch the current one, if it is the next."""
        if epoch is self.next:
            self.current, self.next = epoch, None

    def clear(self) -> None:
        """Drops both epochs."""
        self.current = self.next = None

    def _epoch_of(self, update: Update) -> E:
        """Returns the epoch of an update; begins a new one if the update is its first.

        Raises:
            PublishError: the epoch cannot be used, or its description cannot be read.
            CheckpointError: the file system has failed.
        """
        run = self._follower.run
        for known in (self.current, self.next):
            if known is not None and known.run == run:
                return known
        if self.refusal:
            raise PublishError(self.refusal)
        self.next = None  # Drops an epoch that was never complete.
        description = self._follower.description() if self._described else None
        try:
            self.next = self._begin(run, update, description)
        except PublishError as error:
            self._refused = run, f"Epoch {update.epoch} is not served: {error.message}"
            raise PublishError(self._refused[1], epoch=update.epoch) from error
        return self.next
