"""Embedding PSs that join and leave, and rows that move between them, while a run trains (docs/reference/moves.md).

NN worker 0 moves the rows. The driver starts and ends processes, and orders bucket maps. Between two runs it also
does the part of NN worker 0, except within one `fit`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Sequence

from persia import rpc
from persia.cluster.ray.connection import WorkerConnection
from persia.cluster.ray.processes import Process
from persia.cluster.ray.roles import Roles
from persia.errors import ClosedError, ConfigError, DeadlineError, PersiaError
from persia.membership.map_rounds import MOST_PASSES, MapRounds
from persia.retry import Deadline
from persia.services import BucketMaps, MapState, MoveProgress
from persia.telemetry.logs import get_logger
from persia.types import BucketMap

__all__ = ["answer_requests", "bucket_map", "move_rows", "scale_servers"]

LOG = get_logger("persia.cluster")

POLL_SECONDS = 0.1

MOST_TRIES = 5
"""Number of times that a move may be given up, or copies of all rows begin again, before the order is withdrawn."""

REQUEST_SECONDS = 2.0
"""Maximum time that a call for the next request waits at the coordinator."""

PAUSE_SECONDS = 1.0
"""Pause after a failed call, as the coordinator may be restarting."""


def bucket_map(roles: Roles) -> BucketMap:
    """Returns the bucket map of the run."""
    return _maps(roles).map_state().buckets


def scale_servers(roles: Roles, count: int, follow: Callable[[], object], expected: int | None = None) -> bool:
    """Starts or retires embedding PSs. Blocks until each owns an equal part of the rows, and retired ones have ended.

    Args:
        roles: the processes of the cluster.
        count: number of PSs.
        follow: called once rows have moved, before PSs end.
        expected: number of PSs without which nothing is changed, as somebody else has changed it; None for any.

    Returns:
        Whether there were as many PSs as expected.

    Raises:
        ConfigError: a PS cannot be placed, or tables have a declared capacity and PSs were to leave.
        DeadlineError: the move has not advanced for `RayOptions.timeout`, or was given up 5 times; it is withdrawn.
        RoleDiedError: a new PS could not start, or died.
    """
    with roles.moving:
        with roles.lock:
            if expected not in (None, roles.counts["embedding_ps"]):
                return False
            if roles.plan is None:  # Nothing has started yet.
                roles.counts["embedding_ps"] = count
                return True
            if roles.service is None:
                raise ConfigError(
                    "The number of embedding PSs cannot change between the start of the cluster and its first run. "
                    "Scale before or after it.",
                    field="cluster.ps",
                )
        maps = _maps(roles)
        _settle(roles, maps)
        _end_missing(roles, maps)
        before = roles.counts["embedding_ps"]
        if count < before:
            _check_leaving(roles)
        added = roles.add_servers(count) if count > before else []
        after: BucketMap | None = None
        try:
            after = bucket_map(roles).moved(count)
            servers = roles.started(check=False)[0].of("embedding_ps")  # Also those that a failed call has left.
            _move(roles, maps, after, [each for each in servers if each.expendable and each.rank < count])
        except BaseException:
            with contextlib.suppress(PersiaError):
                if after is None or maps.withdraw_map(after):
                    if added:
                        roles.note_servers(before, now=True)  # The next driver does not look for those that leave.
                        roles.remove_servers(before)
                else:
                    _need_servers(roles, after)
            raise
        _need_servers(roles, after)
        for process in roles.started(check=False)[0].of("embedding_ps"):
            if process.rank >= count:
                process.expendable = True  # It owns no rows any more.
        follow()
        roles.note_servers(count, now=True)
        if count <= before:  # If it is equal, those that an earlier call may not have ended.
            roles.remove_servers(count)
        return True


def move_rows(roles: Roles, after: BucketMap) -> None:
    """Moves rows between the PSs of a run, to a next bucket map for as many PSs. Blocks until they have moved.

    Raises:
        ConfigError: the map is for another number of PSs, or tables have a declared capacity.
        StaleMapError: the map does not follow the current one.
        DeadlineError: the move has not advanced for `RayOptions.timeout`, or was given up 5 times; it is withdrawn.
    """
    with roles.moving:
        if roles.service is None:
            raise ConfigError("There are no rows yet: nothing has been trained on this cluster.", field="cluster")
        maps = _maps(roles)
        _settle(roles, maps)
        current = bucket_map(roles)
        if after.servers != current.servers:
            raise ConfigError(
                f"A bucket map for {after.servers} embedding PSs cannot be moved to: there are {current.servers}. Call "
                f"scale(ps={after.servers}) first.",
                field="buckets",
            )
        _check_leaving(roles)
        _move(roles, maps, after, [])
        roles.note_servers(now=True)


def answer_requests(roles: Roles, scale: Callable[..., object]) -> None:
    """Calls `scale` with the numbers that commands request at the coordinator, until the cluster is closed. A thread.

    Args:
        roles: the processes of the cluster.
        scale: `Ray.scale`.
    """

    def work() -> None:
        while not roles.closed:
            try:
                maps = _maps(roles)
                request = maps.scale_request(REQUEST_SECONDS)
                if request is None:
                    continue
                error = ""
                try:
                    scale(**request.counts, keep_global_batch=request.keep_global_batch)
                except Exception as failure:
                    error = str(failure) or type(failure).__name__
                    LOG.warning("The numbers of processes were not changed as requested: %s", error)
                maps.answer_scale(request.ticket, error)
            except ClosedError:
                return
            except PersiaError:
                time.sleep(PAUSE_SECONDS)

    threading.Thread(target=work, name="persia-scale-requests", daemon=True).start()


def _maps(roles: Roles) -> BucketMaps:
    return rpc.cast_to(BucketMaps, roles.started(check=False)[2])


def _check_leaving(roles: Roles) -> None:
    """Raises ConfigError if the PSs that stay could not hold the rows of others."""
    assert roles.service is not None
    tables = roles.service.schema.resolved_tables()
    bounded = [name for name, table in tables.items() if table.capacity is not None]
    if bounded:
        raise ConfigError(
            f"Rows of table {bounded[0]!r} cannot leave an embedding PS: it has a declared capacity, which was divided "
            "among the PSs when they started, so that others may have no space. Stop, reshard a checkpoint, and resume "
            "with another number of PSs.",
            field="capacity",
        )


def _settle(roles: Roles, maps: BucketMaps) -> None:
    """Waits until an earlier move is over: until all PSs have adopted the map, and no order is left."""
    state = maps.map_state()
    _need_servers(roles, state.buckets)
    if state.ordered is not None:
        maps.withdraw_map(state.ordered)
    if (state := maps.map_state()).adopted < state.buckets.version:
        _Watch(roles, maps, state.buckets, []).wait()
    _need_servers(roles, state.buckets)


def _end_missing(roles: Roles, maps: BucketMaps) -> None:
    """Ends all PSs without rows if one of them has died since an earlier call failed, so that others can start."""
    processes, _, _ = roles.started(check=False)
    owning, present = maps.map_state().buckets.servers, {process.rank for process in processes.of("embedding_ps")}
    if not present.issuperset(range(owning, roles.counts["embedding_ps"])):
        roles.remove_servers(owning)


def _need_servers(roles: Roles, buckets: BucketMap) -> None:
    """Notes that training needs the PSs of a map: those that have joined own rows."""
    processes, _, _ = roles.started(check=False)
    processes.need([process for process in processes.of("embedding_ps") if process.rank < buckets.servers])


def _move(roles: Roles, maps: BucketMaps, after: BucketMap, added: Sequence[Process]) -> None:
    """Orders a map, and waits until all PSs have adopted it."""
    if after == maps.map_state().buckets:
        return
    maps.order_map(after)
    _Watch(roles, maps, after, added).wait()
    LOG.info("rows have moved to bucket map %d, of %d embedding PSs", after.version, after.servers)


class _Watch:
    """Waits for a move.

    Args:
        roles: the processes of the cluster.
        maps: the coordinator.
        after: the map that is ordered.
        added: PSs that have joined for it.
    """

    def __init__(self, roles: Roles, maps: BucketMaps, after: BucketMap, added: Collection[Process]) -> None:
        self._roles = roles
        self._maps = maps
        self._after = after
        self._added = added
        self._progress: MoveProgress | None = None
        self._step: tuple[BucketMap, int] | None = None
        self._rows = self._gave_up = self._repeated = 0
        self._problem = ""
        self._rounds: MapRounds | None = None
        self._connection: WorkerConnection | None = None

    def wait(self) -> None:
        """Blocks until all PSs have adopted the map.

        Raises:
            DeadlineError: the move has not advanced for `RayOptions.timeout`, or was given up 5 times; it is withdrawn.
            RoleDiedError: a PS that has joined has died permanently; the order is withdrawn. Or a process that training
                needs has died.
        """
        try:
            deadline = Deadline(self._roles.options.timeout)
            while (state := self._maps.map_state()).adopted < self._after.version:
                pauses = self._pauses
                if self._advances(state) or pauses:
                    deadline = Deadline(self._roles.options.timeout)
                if not pauses:  # It could wait for PSs that start, and then find that the deadline has passed.
                    self._check(state, deadline)
                self._make_round()
                time.sleep(POLL_SECONDS)
        finally:
            self._end_rounds()

    def _advances(self, state: MapState) -> bool:
        """Returns whether the move is nearer to its end, or has begun again, than when it was last asked for."""
        progress = state.progress
        if progress.version != self._after.version:  # Of the move before.
            progress = MoveProgress(self._after.version)
        before, self._progress = self._progress, progress
        self._problem = progress.problem or self._problem
        again = before is not None and progress.gave_up > before.gave_up
        if again:
            self._gave_up += 1
        # Passes never end if enough rows change; the rows of the first one are counted.
        step = state.buckets, min(progress.passes, MOST_PASSES + 1)
        if again or step != self._step:
            self._step, self._rows = step, progress.rows
            return True
        if progress.passes > 0 or progress.rows == self._rows:
            return False
        if progress.rows < self._rows:  # A donor sends all its rows again.
            self._repeated += 1
        self._rows = progress.rows
        return self._repeated < MOST_TRIES

    def _check(self, state: MapState, deadline: Deadline) -> None:
        processes, _, _ = self._roles.started(check=False)
        if state.buckets == self._after:
            processes.need(self._added)
        else:
            died = processes.expended(self._added)
            given_up = self._gave_up >= MOST_TRIES
            if (died or given_up or deadline.passed) and self._maps.withdraw_map(self._after):
                if died:
                    raise died[0]
                why = f" The last problem: {self._problem}." if self._problem else ""
                what = f"has not advanced for {deadline.seconds:g} s"
                if given_up:
                    what = f"was given up {MOST_TRIES} times"
                raise DeadlineError(
                    f"The move of rows to bucket map {self._after.version} {what}; the order is withdrawn.{why} Check "
                    "that training makes progress, and that it is a Trainer's.",
                    seconds=deadline.seconds,
                )
        if deadline.passed:
            raise DeadlineError(
                f"Bucket map {self._after.version} was not adopted by all embedding PSs within {deadline.seconds:g} s. "
                "The next run completes the move.",
                seconds=deadline.seconds,
            )

    # --- between two runs -----------------------------------------------------------------------------------------

    @property
    def _pauses(self) -> bool:
        """Whether rows are saved or loaded by the map of now, or may be, as it is between two runs of one `fit`."""
        return self._roles.fits > 0 and not self._roles.running.locked()

    def _make_round(self) -> None:
        """Does the part of NN worker 0 if no function runs, and none will soon."""
        roles = self._roles
        if roles.running.locked() or roles.fits:
            self._end_rounds()
            return
        with roles.resting:
            if roles.running.locked() or roles.fits:
                return
            if self._rounds is None:
                self._begin_rounds()
            elif self._rounds.ready:
                self._rounds.make(None, 0)

    def _begin_rounds(self) -> None:
        _, plan, coordinator = self._roles.started()
        generation = coordinator.regenerate(self._roles.counts["nn_worker"])
        if self._roles.attachment is not None:
            self._roles.attachment.began(generation)
        self._connection = WorkerConnection(coordinator, plan, generation=generation, begin_rounds=True)
        rounds = self._connection.connection.rounds
        assert isinstance(rounds, MapRounds)
        rounds.ended = lambda: self._roles.closed
        self._rounds = rounds
        rounds.make(None, 0)

    def _end_rounds(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._rounds = None
