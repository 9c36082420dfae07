"""The rounds in which embedding PSs get another bucket map or mode: the part of NN worker 0.

docs/reference/moves.md specifies it: rules are numbered as there.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from persia import rpc
from persia.errors import ClosedError, PersiaError
from persia.membership.directory import UNREACHABLE
from persia.membership.reached_servers import ReachedServers
from persia.modes import Mode
from persia.retry import Backoff, Deadline, retry
from persia.rpc.fan_out import call_all, try_all
from persia.services import BucketMaps, EmbeddingWorker, MovableRows, MoveProgress, MoveStatus, Round
from persia.telemetry.logs import get_logger
from persia.types import BucketMap

__all__ = ["MapRounds"]

LOG = get_logger("persia.cluster")

T = TypeVar("T")

WATCH_SECONDS = 0.25
"""Interval of asking for an order, and for the progress of donors."""

SHORT_SECONDS = 0.5
"""Duration of a donor's pass after which its last difference is short enough to pause training for it."""

MOST_PASSES = 5
"""Passes after which a move is finished even if so many rows change that no pass is short."""

FINISH_SECONDS = 60.0
"""Maximum duration of the pause for the last differences; then the move is given up, and tried again."""

AGAIN_SECONDS = 2.0
"""Pause after a move that was given up; twice as long each time, up to `LONGEST_SECONDS`."""

LONGEST_SECONDS = 64.0


class MapRounds:
    """Watches for orders of another bucket map, and makes the rounds of moves; see `persia.services.MapRoundsOfRun`.

    One thread watches: it lets donors begin to send their rows, and asks for their progress. `make` is called by the
    training thread.

    Args:
        coordinator: decides on the map.
        servers: the embedding PSs, with those that join and leave.
        workers: the embedding workers as one.
        generation: generation of the NN workers.
        timeout: seconds after which a call that must succeed is given up, which ends the run.

    Attributes:
        busy: returns whether a checkpoint reads the rows; a move is not finished meanwhile, nor before each donor has
            made a pass after it.
        ended: returns whether nobody waits for the rounds any more: then calls are not repeated.
    """

    def __init__(
        self,
        coordinator: BucketMaps,
        servers: ReachedServers,
        workers: EmbeddingWorker,
        generation: int,
        timeout: float,
    ) -> None:
        self._coordinator = coordinator
        self._servers = servers
        self._workers = workers
        self._generation = generation
        self._timeout = timeout
        self.busy: Callable[[], bool] = lambda: False
        self.ended: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        """Held while donors are watched, and while a round is made."""
        self._number = 0
        self._map: BucketMap | None = None
        """The map of all PSs; None before the first round."""
        self._begun: BucketMap | None = None
        """The next map, for which donors have begun to send their rows."""
        self._ready: BucketMap | None = None
        """The next map, once little is left to send."""
        self._passes: dict[int, int] = {}
        """By donor, the passes after which another one is needed, as a checkpoint has read the rows."""
        self._disturbed = False
        """Whether a checkpoint has been seen since donors were last asked."""
        self._tried = False
        """Whether checkpoints follow each other so fast that no donor's pass is awaited between them any more."""
        self._cancels = True
        """Whether PSs may still make copies for a map that is not wanted any more.

        At first they may: copies that an earlier generation began.
        """
        self._not_before = 0.0
        self._given_up = 0
        """Number of times that moves to the next map were given up."""
        self._problem = ""
        self._progress = MoveProgress()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def ready(self) -> bool:
        """Whether a move needs training to quiesce now."""
        if busy := self.busy():  # Afterwards donors send all rows again: not while training is quiesced.
            self._disturbed = True
        return self._ready is not None and not busy and (not self._disturbed or self._tried)

    def follow(self, servers: int) -> None:
        """Continues with this number of PSs."""
        self._servers.resize(servers)

    def close(self) -> None:
        """Ends the watching. Donors continue to send their rows, until another generation goes on."""
        self._closed.set()

    # --- while training goes on -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._closed.wait(WATCH_SECONDS):
            try:
                with self._lock:
                    if not self._closed.is_set():
                        self.watch_once()
            except ClosedError as error:
                if self._closed.is_set():
                    return
                self._note(error)
            except PersiaError as error:
                self._note(error)
            except Exception:
                LOG.exception("Rows cannot be moved to another bucket map; it is tried again.")

    def _note(self, error: PersiaError) -> None:
        self._ready = None
        if error.message != self._problem:
            LOG.warning("Rows do not move to another bucket map yet; it is tried again: %s", error.message)
            self._problem = error.message

    def watch_once(self) -> None:
        """Asks for an order, lets donors begin, and asks for their progress. Not while a round is made."""
        if self._map is None:  # The first round may change it.
            return
        after = self._coordinator.map_state().ordered
        if after is not None and after.version != self._map.version + 1:
            after = None
        if after != self._begun:
            self._cancels = self._cancels or self._begun is not None
            self._begun = self._ready = None
            self._given_up, self._not_before = 0, 0.0
        if self._cancels:
            self._cancel(self._map.version + 1, after)
        if after is None:
            return
        if self._cancels:  # A later one would end the copies for this map.
            self._report(MoveProgress(after.version, problem=self._problem))
            return
        if time.monotonic() < self._not_before:
            self._report(self._progress._replace(problem=self._problem, gave_up=self._given_up))
            return
        members = self._servers.members()
        unknown = [number for number in range(max(after.servers, self._map.servers)) if number not in members]
        if unknown:  # They have joined, as the order comes after that, but this process does not know it yet.
            self._problem = f"NN worker 0 does not know yet that embedding PS {unknown[0]} has joined"
            self._report(MoveProgress(after.version, problem=self._problem, gave_up=self._given_up))
            return
        if after != self._begun and self.busy():
            return  # Donors would wait until rows of an earlier map are removed, and so would the next round.
        if after != self._begun:
            self._passes = {}
        self._begun = after
        donors = _donors(self._map, after)
        statuses = call_all([functools.partial(_movable(members[donor]).begin_move, after) for donor in donors])
        self._problem = next((status.error for status in statuses if status.error), "")
        passes = {donor: status.passes for donor, status in zip(donors, statuses, strict=True)}
        if self.busy() or self._disturbed:
            self._passes, self._disturbed = passes, False
        else:  # One that has restarted counts from 0.
            self._passes = {donor: min(count, passes[donor]) for donor, count in self._passes.items()}
        self._tried = min(passes.values(), default=0) >= 2 * MOST_PASSES
        passed = self._tried or all(passes[donor] > count for donor, count in self._passes.items())
        self._ready = after if passed and all(map(_nearly_done, statuses)) else None
        self._report(
            MoveProgress(
                after.version,
                min((status.passes for status in statuses), default=0),
                sum(status.rows for status in statuses),
                problem=self._problem,
                gave_up=self._given_up,
            )
        )

    def _cancel(self, version: int, wanted: BucketMap | None) -> None:
        """Ends the copies for maps that are not wanted any more; it is repeated until all PSs have answered."""
        members = self._servers.members()
        cancels = [functools.partial(_movable(server).cancel_move, version, wanted) for server in members.values()]
        answers = try_all(cancels, UNREACHABLE)
        silent = [number for number, answer in zip(members, answers, strict=True) if isinstance(answer, Exception)]
        self._cancels = bool(silent)
        if silent:
            self._problem = f"embedding PS {silent[0]} has not answered the request to end the previous move"

    def _report(self, progress: MoveProgress) -> None:
        if progress != self._progress:
            self._coordinator.report_move(progress)
            self._progress = progress

    # --- while training is quiesced -------------------------------------------------------------------------------

    def make(self, mode: Mode | None, step: int, nn_workers: int = 0) -> int:
        """Makes a round: finishes a move that is ready, and has all PSs adopt the map, and the mode from `step` on.

        The first round of a generation completes or undoes what the generation before has left (rule 3).

        Args:
            mode: the mode; None between runs.
            step: the next global step.
            nn_workers: as for `EmbeddingPS.switch`.

        Returns:
            The number of PSs of the map.

        Raises:
            PersiaError: a PS or the coordinator did not answer in time. The run has to end; the next generation makes
                the round.
        """
        began = time.monotonic()
        with self._lock:
            if self._map is None:
                self._map = self._coordinator.map_state().buckets
            self._number += 1
            after, before = self._ready if self.ready else None, self._map
            number = Round(self._generation, self._number)
            if after is not None and self._finish(number, before, after):
                self._map = after
            self._adopt(number, self._map, mode, step, nn_workers)
            self._servers.resize(self._map.servers)
            if self._map != before or self._number == 1:
                # Before training continues: NN workers with copies of all rows of a batch look none up.
                self._workers.follow_map(self._map.version)
                self._begun = self._ready = None
                self._given_up = 0
                self._coordinator.map_adopted(self._generation, self._map.version)
            if self._map != before:
                pause = time.monotonic() - began
                with contextlib.suppress(PersiaError):  # It only informs: the map is adopted.
                    self._report(self._progress._replace(pause_seconds=pause, problem=""))
                LOG.info(
                    "Step %d: all embedding PSs have bucket map %d, of %d PSs, after a pause of %.3f s.",
                    step, self._map.version, self._map.servers, pause,
                )  # fmt: skip
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="persia-map-rounds", daemon=True)
            self._thread.start()
        return self._map.servers

    def _finish(self, number: Round, before: BucketMap, after: BucketMap) -> bool:
        """Sends the last differences, and commits the map. Returns whether it is committed; else it is given up."""
        members = self._servers.members()
        try:
            donors, receivers = _donors(before, after), _donors(after, before)
            seconds = min(FINISH_SECONDS, self._timeout)
            sending = [rpc.within(_movable(members[one]), seconds) for one in donors]
            call_all([functools.partial(donor.finish_move, number, after) for donor in sending])
            keeping = [rpc.within(_movable(members[one]), seconds) for one in receivers]
            call_all([functools.partial(receiver.complete_move, number, after) for receiver in keeping])
        except (PersiaError, KeyError) as error:  # Rule 12: nothing is committed, so it can be given up.
            self._give_up(f"{error}")
            return False
        # From here on it cannot: the answer is awaited.
        commit = functools.partial(self._coordinator.commit_map, number, after)
        # A closed connection to the coordinator does not come back, other than that to a PS.
        if self._until_answered(commit, tuple(kind for kind in UNREACHABLE if kind is not ClosedError)):
            return True
        self._give_up("the coordinator does not want it any more")
        return False

    def _give_up(self, reason: str) -> None:
        LOG.warning("The move to another bucket map is given up for now: %s", reason)
        self._ready = None
        self._not_before = time.monotonic() + min(AGAIN_SECONDS * 2**self._given_up, LONGEST_SECONDS)
        self._given_up += 1
        self._problem = reason

    def _adopt(self, number: Round, buckets: BucketMap, mode: Mode | None, step: int, nn_workers: int) -> None:
        """Has all PSs adopt a map, also those that join or leave; returns once all have answered."""

        def adopt() -> None:  # Of the members at this moment: one that has left meanwhile is not asked again.
            arguments = number, buckets, mode, step, nn_workers
            call_all([functools.partial(server.adopt, *arguments) for server in self._members()])

        self._until_answered(adopt)

    def _until_answered(self, call: Callable[[], T], errors: tuple[type[Exception], ...] = UNREACHABLE) -> T:
        return retry(
            call,
            transient=lambda error: isinstance(error, errors) and not self._closed.is_set() and not self.ended(),
            deadline=Deadline(self._timeout),
            backoff=Backoff(0.1, 1.0),
        )

    def _members(self) -> Iterable[MovableRows]:
        return map(_movable, self._servers.members().values())


def _movable(server: object) -> MovableRows:
    return rpc.cast_to(MovableRows, server)


def _donors(before: BucketMap, after: BucketMap) -> list[int]:
    """Returns the PSs that lose buckets."""
    return [int(server) for server in np.unique(before.owners[before.owners != after.owners])]


def _nearly_done(status: MoveStatus) -> bool:
    """Returns whether a donor has little left to send, or does not get nearer to its end."""
    return status.passes > 0 and not status.error and (status.seconds <= SHORT_SECONDS or status.passes >= MOST_PASSES)
