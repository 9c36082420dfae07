"""Membership, bucket map, progress of training, and reports of all members.

docs/reference/protocol.md, section 8, specifies the membership, and docs/reference/moves.md changes of the map.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

import msgspec

from persia.coordinator.map_orders import MapOrders
from persia.coordinator.scale_requests import ScaleRequests
from persia.coordinator.store import StateFile
from persia.errors import ConfigError
from persia.services import MapState, MoveProgress, Round, ScaleRequest
from persia.telemetry.metrics import Readings
from persia.types import BucketMap, Member, Membership

__all__ = ["CoordinatorServer"]

ROLES = ("embedding_ps", "dense_ps", "embedding_worker", "data_loader", "nn_worker")
RETIRABLE = ("embedding_worker", "data_loader")


class _State(msgspec.Struct):
    """The state that survives a restart."""

    version: int = 0
    generation: int = 0
    nn_workers: int = 0
    members: list[Member] = []
    maps: MapOrders | None = None
    incarnation: int = 0


class CoordinatorServer:
    """The membership and the bucket map of a cluster, and the last report of each member. No data pass through it.

    Safe to call from several threads; only `membership` and `scale_request` block. It makes no calls.

    Args:
        clock: clock in seconds, for the age of reports.
        path: file to which membership and map are saved, and from which they are restored if the file exists; None for
            no file. Reports are not saved: members send new ones soon.
        buckets: the first bucket map of the run.
        incarnation: number of drivers that the cluster has had, with the present one. Members of an earlier driver are
            dead, and their addresses may belong to others.
        generation: the last generation of NN workers that a driver knows, as the file may be lost with its host.

    Attributes:
        begins: whether this is the first process of its driver.
        scaler: the last report of the scaler.

    Raises:
        PersiaError: the file is damaged.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        path: str | None = None,
        *,
        buckets: BucketMap | None = None,
        incarnation: int = 1,
        generation: int = 0,
    ) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._file = StateFile(path, _State)
        before = self._file.load() or _State()
        self._version = before.version
        self._generation = before.generation
        self._nn_workers = before.nn_workers
        self._members: dict[tuple[str, int], Member] = {(m.role, m.rank): m for m in before.members}
        self._reports: dict[tuple[str, int], tuple[float, dict[str, float]]] = {}
        """Time of the last report of each member, and its counters."""
        self._maps = before.maps or MapOrders(buckets or BucketMap.even(1))
        self._progress = MoveProgress()
        self._requests = ScaleRequests()
        self.scaler = Readings([], [])
        self.begins = incarnation > before.incarnation
        self._incarnation = incarnation
        if self.begins:
            self._generation = max(self._generation, generation)
            for key, member in self._members.items():
                has_left = member.state == "dead" and not member.reason  # It needs no rows: a PS of its rank has none.
                reason = "" if has_left else member.reason or "its driver died"
                self._members[key] = member._replace(state="dead", address="", reason=reason)
            with self._changed:
                self._change()

    def join(self, role: str, rank: int, address: str) -> Member:
        """Adds a process that has started; marks an earlier process of its rank as dead.

        A call with the address of the active member is a repetition and has no effect.

        Raises:
            ConfigError: the role is unknown, or this generation has no NN worker of this rank.
        """
        with self._changed:
            self._check(role)
            if role == "nn_worker" and not 0 <= rank < self._nn_workers:
                raise ConfigError(
                    f"Invalid NN worker {rank}: generation {self._generation} has {self._nn_workers}. "
                    "Call `regenerate` with the number of NN workers before they join.",
                    rank=rank,
                )
            old = self._members.get((role, rank))
            if role == "nn_worker":
                incarnation = self._generation
            else:
                incarnation = old.incarnation + 1 if old is not None else 1
            if old is not None and old.state != "dead" and old.address == address:
                return old
            member = Member(role, rank, incarnation, address)
            self._reports[role, rank] = self._clock(), {}
            self._put(member)
            return member

    def depart(self, role: str, rank: int, incarnation: int, reason: str = "") -> None:
        """Marks a process as dead; without a reason, as one that has left. No-op if its rank has a later incarnation.

        Nor does a reason change what is known of a dead process.
        """
        with self._changed:
            member = self._members.get((role, rank))
            known = member is not None and member.state == "dead" and (reason or not member.reason)
            if member is not None and member.incarnation == incarnation and not known:
                self._put(member._replace(state="dead", reason=reason))

    def retire(self, role: str, rank: int) -> None:
        """Requests an embedding worker or data loader, through the membership, to finish its work and leave.

        Raises:
            ConfigError: members of this role cannot leave during training, or the member is unknown.
        """
        with self._changed:
            if role not in RETIRABLE:
                raise ConfigError(
                    f"Invalid role {role!r}: only members of {' and '.join(RETIRABLE)} can leave during training.",
                    field="role",
                )
            member = self._members.get((role, rank))
            if member is None:
                raise ConfigError(f"{role} {rank} cannot be retired: it is not a member.", rank=rank)
            if member.state == "alive":
                self._put(member._replace(state="leaving"))

    def regenerate(self, nn_workers: int) -> int:
        """Starts a new generation of NN workers and marks the previous one as dead. Returns its number, from 1.

        Raises:
            ConfigError: `nn_workers` is less than 1.
        """
        if nn_workers < 1:
            raise ConfigError(f"nn_workers = {nn_workers}; give a whole number >= 1.", field="nn_workers")
        with self._changed:
            self._generation += 1
            for rank in range(nn_workers, self._nn_workers):
                self._reports.pop(("nn_worker", rank), None)
            self._nn_workers = nn_workers
            for key, member in self._members.items():
                if member.role == "nn_worker" and member.state != "dead":
                    reason = f"replaced by generation {self._generation}"
                    self._members[key] = member._replace(state="dead", reason=reason)
            self._change()
            return self._generation

    def membership(self, newer_than: int = 0, timeout: float = 0.0) -> Membership:
        """Returns all members by role and rank; waits up to `timeout` seconds for a version above `newer_than`."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > newer_than, max(0.0, timeout))
            members = sorted(self._members.values(), key=lambda m: (ROLES.index(m.role), m.rank))
            return Membership(self._version, self._generation, members)

    def report(self, role: str, rank: int, counters: Mapping[str, float]) -> None:
        """Records a heartbeat with counters, which replace the last report.

        Raises:
            ConfigError: the process has not joined.
        """
        with self._changed:
            if (role, rank) not in self._members:
                raise ConfigError(f"{role} {rank} must join before it reports.", rank=rank)
            self._reports[role, rank] = self._clock(), dict(counters)

    def statistics(self) -> dict[str, dict[str, float]]:
        """Returns the last report of every member by "role-rank", with its `age` in seconds.

        Before the first report, the age is the time since the member joined.
        """
        with self._changed:
            now = self._clock()
            return {
                f"{role}-{rank}": {**counters, "age": now - when}
                for (role, rank), (when, counters) in sorted(self._reports.items())
            }

    # --- bucket map ---------------------------------------------------------------------------------------------

    def map_state(self) -> MapState:
        """Returns the map, and the next one if it is ordered."""
        with self._changed:
            return MapState(self._maps.buckets, self._maps.ordered, self._maps.adopted, self._progress)

    def order_map(self, after: BucketMap) -> None:
        """Orders the next map; see `persia.services.BucketMaps`."""
        with self._changed:
            self._put_maps(self._maps.order(after))

    def withdraw_map(self, after: BucketMap) -> bool:
        """Withdraws an order. Returns False if the map was committed."""
        with self._changed:
            self._put_maps(self._maps.withdraw(after))
            return self._maps.buckets != after

    def commit_map(self, number: Round, after: BucketMap) -> bool:
        """Makes the ordered map the map of the run, for the current generation; see `persia.services.BucketMaps`."""
        with self._changed:  # `regenerate` takes the same lock: a generation misses no commit of the one before.
            if number.generation != self._generation:
                return False
            self._put_maps(self._maps.commit((number.generation, number.number), after))
            return self._maps.buckets == after

    def map_adopted(self, generation: int, version: int) -> None:
        """Notes that all PSs have adopted a map; see `persia.services.BucketMaps`."""
        with self._changed:
            if generation == self._generation:
                self._put_maps(self._maps.adopt(version))

    def report_move(self, progress: MoveProgress) -> None:
        """Notes the progress of a move."""
        with self._changed:
            self._progress = progress

    def request_scale(self, ticket: str, counts: Mapping[str, int], keep_global_batch: bool = False) -> ScaleRequest:
        """Requests other numbers of processes; see `persia.services.BucketMaps`."""
        return self._requests.request(ticket, counts, keep_global_batch)

    def scale_request(self, timeout: float = 0.0) -> ScaleRequest | None:
        """Returns the request that is not answered; waits up to `timeout` seconds for one."""
        return self._requests.next(timeout)

    def answer_scale(self, ticket: str, error: str = "") -> None:
        """Answers a request."""
        self._requests.answer(ticket, error)

    def report_scaler(self, report: Readings) -> None:
        """Replaces what is shown of the scaler."""
        self.scaler = report

    def _put_maps(self, maps: MapOrders) -> None:
        """Saves the map before the caller answers. A failed write changes nothing."""
        if maps != self._maps:
            self._save(maps)
            self._maps = maps

    def _check(self, role: str) -> None:
        if role not in ROLES:
            raise ConfigError(f"Invalid role {role!r}; expected one of: {', '.join(ROLES)}.", field="role")

    def _put(self, member: Member) -> None:
        self._members[member.role, member.rank] = member
        self._change()

    def _change(self) -> None:
        self._version += 1
        self._save(self._maps)
        self._changed.notify_all()

    def _save(self, maps: MapOrders) -> None:
        members = list(self._members.values())
        state = _State(self._version, self._generation, self._nn_workers, members, maps, self._incarnation)
        self._file.save(state)
