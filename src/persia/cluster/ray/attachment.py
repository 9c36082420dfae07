"""Attaches another driver to what a dead one has left: the regions of its PSs, and the state of its coordinator."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import ray

from persia.cluster.ray.driver_folder import FORMAT, Buffer, DriverFolder, PlacedServer, RunLayout
from persia.cluster.ray.options import RayOptions
from persia.cluster.ray.process_plan import Plan, ProcessInfo, Service
from persia.cluster.ray.processes import run_on_all
from persia.errors import ConfigError, DeadlineError, PersiaError, StoreError
from persia.ps.regions import Regions, leftovers, remove_leftovers
from persia.ps.shares import Shares
from persia.retry import Deadline
from persia.telemetry.logs import get_logger
from persia.types import BucketMap

__all__ = ["RunAttachment"]

LOG = get_logger("persia.cluster")

POLL_SECONDS = 0.2
REMOVE_SECONDS = 10.0
"""Maximum seconds to remove rows at the end of a run."""


class _Left(NamedTuple):
    """Directories of a run on a host.

    Attributes:
        complete: names of the directories to which a PS can attach.
        in_use: paths of what a process still has open.
        maps: bucket maps of PSs whose rows have moved, by name of the directory.
    """

    complete: list[str]
    in_use: list[str]
    maps: Mapping[str, BucketMap] = {}


def _left_here(root: str, name: str) -> _Left:
    """Returns what this host has of a run."""
    found = leftovers(root, f"{name}/*")
    complete: list[str] = []
    maps: dict[str, BucketMap] = {}
    for one in found:
        directory, regions = one.path.rpartition("/")[2], Regions(one.path)
        if regions.complete:
            complete.append(directory)
            with contextlib.suppress(msgspec.MsgspecError):  # The PS names the damaged file.
                if (own := regions.ownership) is not None:
                    maps[directory] = own.buckets
    return _Left(complete, [one.path for one in found if one.in_use], maps)


class RunAttachment:
    """A run with a directory: what its last driver has left, and what this one leaves.

    `placed`, `began` and `keep` are thread-safe; the other methods are for the thread that starts or closes the
    cluster.

    A driver that ends in order leaves nothing; one that dies leaves its rows, if it has kept a recovery point. So does
    one that has attached to rows and ends before it has taken over the run, or fails as storage does.
    Implements `persia.services.RecoveryPoints`.

    Args:
        options: options of the cluster, with `run` and `regions`.
        servers: number of embedding PSs for which the program asks.
    """

    def __init__(self, options: RayOptions, servers: int) -> None:
        assert options.run is not None
        self._options = options
        self._servers = servers
        self._lock = threading.RLock()
        """Held while the layout changes."""
        self._folder: DriverFolder | None = None
        self._layout: RunLayout | None = None
        self._placed: dict[str, Any] = {}
        """Fields of the layout that are not stored yet."""
        self._has_point = False
        """Whether there is a recovery point on storage."""
        self._path = options.run
        self.nodes: dict[int, str] = {}
        """Ray node that has the rows of a PS, by rank; empty in a new run."""
        self.taken = True
        """Whether `close` ends the run: it is new, or the trainer has taken over the one that was left.

        False once a file could not be written, until a recovery point is: the same command may go on from the last one.
        """

    # --- for the roles ------------------------------------------------------------------------------------------

    def attach(self, plan: Plan) -> Plan:
        """Takes the run over from a driver that has died, or begins it. Returns the plan of the run.

        Blocks for at most `RayOptions.timeout` while processes of the dead driver end, or hosts with rows are missing.

        Raises:
            ConfigError: the program asks for other PSs, or another directory of regions, than the run has.
            DeadlineError: processes of the dead driver still run.
            PersiaError: another driver of the run lives, or a file of the run is damaged.
            StoreError: rows are missing.
        """
        self.close()  # Of an attempt that has failed.
        folder = self._folder = DriverFolder(self._path)
        before = folder.layout
        self._has_point = folder.left is not None
        if before is not None:
            if folder.left is not None:
                self._check_options(before)
                self.taken = False
                found = self._await(before, needs_rows=True)
                self.nodes = {rank: self._node(found, rank, one) or "" for rank, one in enumerate(before.servers)}
                self._write(msgspec.structs.replace(before, incarnation=before.incarnation + 1))
                LOG.warning(
                    "The driver of the run in %s has died. This one attaches to the rows of %s, and continues from the "
                    "last recovery point.",
                    folder.path,
                    f"{before.regions}/{before.name}",
                )
                return plan._replace(
                    name=before.name,
                    servers=len(before.servers) or plan.servers,
                    buckets=self._newest_map(before, found),
                    incarnation=before.incarnation + 1,
                    generation=before.generation,
                )
            self._await(before, needs_rows=False)
            self._remove_regions(
                before, self._options.timeout
            )  # It died before anything was trained from which another could go on.
        self._write(RunLayout(FORMAT, plan.name, self._options.regions, self._servers))
        return plan

    def check(self, service: Service) -> None:
        """Raises ConfigError unless the rows of the run are those of this service."""
        layout, given = self._layout, _described(service)
        assert layout is not None
        if layout.service and layout.service != given:
            old, new = (msgspec.json.decode(text) for text in (layout.service, given))
            changed = [name for name in new if new[name] != old[name]]
            raise ConfigError(
                f"The run in {self._path} has rows of another {' and '.join(changed)} than this program. Run the same "
                f"program as before, or choose another directory for RayOptions.run. To start over, remove {self._path}"
                f" and, on each host, {layout.regions}/{layout.name} with `persia cluster regions --clean`.",
                field="cluster",
                changed=changed,
            )

    @property
    def shares(self) -> list[Shares]:
        """Capacities of the PSs, by rank; empty until they have started."""
        servers = self._layout.servers if self._layout is not None else ()
        return [Shares(one.capacities, one.memory_rows) for one in servers]

    @property
    def losses(self) -> dict[int, int]:
        """Number in the name of the directory of each PS, by rank."""
        servers = self._layout.servers if self._layout is not None else ()
        return {rank: one.losses for rank, one in enumerate(servers)}

    def placed(
        self,
        service: Service,
        shares: Sequence[Shares],
        places: Sequence[ProcessInfo],
        losses: Mapping[int, int],
        buckets: BucketMap,
        now: bool = False,
    ) -> None:
        """Notes where the PSs have their rows, once they have started.

        Args:
            service: the service of the PSs.
            shares: their capacities, by rank.
            places: their hosts, by rank.
            losses: see `server_directory`, by rank.
            buckets: the bucket map of the run.
            now: whether to store it at once: PSs have attached to their rows, rows are about to move to PSs that join,
                or PSs end whose rows have moved. Otherwise, and while a PS has replaced a lost one, it is stored with
                the next recovery point: before, that PS may not have its rows yet.
        """
        servers = tuple(
            PlacedServer(place.node, place.host, losses.get(rank, 0), *shares[rank])
            for rank, place in enumerate(places)
        )
        with self._lock:
            assert self._layout is not None
            replaced = any(new.losses != old.losses for new, old in zip(servers, self._layout.servers, strict=False))
            self._placed = {"service": _described(service), "servers": servers, "buckets": buckets}
            if now and not replaced:
                self._store_placed()

    def began(self, generation: int) -> None:
        """Stores the generation before its NN workers begin: the next driver's are later ones."""
        with self._lock:
            assert self._layout is not None
            self._write(msgspec.structs.replace(self._layout, generation=generation))

    def remove_regions(self) -> None:
        """Removes what is left of the run on all hosts, after its processes have ended; logs where it could not.

        Blocks for at most `REMOVE_SECONDS`.
        """
        run = self._layout
        if run is None:
            return
        try:
            self._remove_regions(run, REMOVE_SECONDS)
        except PersiaError as error:
            LOG.warning(
                "%s\nRows of the run may be left on a host. Remove %s/%s there with `persia cluster regions --clean`.",
                error.message,
                run.regions,
                run.name,
            )

    def end(self) -> None:
        """Removes the files of the run: no other driver goes on with it. Idempotent."""
        if self._folder is not None:
            self._folder.end()
            self._folder = None

    def close(self) -> None:
        """Lets go of the directory. Idempotent."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None

    # --- for the trainer ----------------------------------------------------------------------------------------

    @property
    def left(self) -> memoryview | None:
        """See `persia.services.RecoveryPoints`."""
        return self._folder.left if self._folder is not None else None

    @property
    def place(self) -> str:
        """See `persia.services.RecoveryPoints`."""
        return self._path

    def claim(self, owner: object) -> None:
        """See `persia.services.RecoveryPoints`."""
        assert self._folder is not None
        self._folder.claim(owner)

    def take(self) -> None:
        """See `persia.services.RecoveryPoints`."""
        self.taken = True

    def keep(self, point: Sequence[Buffer]) -> None:
        """See `persia.services.RecoveryPoints`."""
        assert self._folder is not None
        assert self._layout is not None
        self._store_placed()
        with self._left_if_it_fails():
            self._folder.keep(point)
        self.taken = self._has_point = True

    def forget(self) -> None:
        """Removes the recovery point, before rows are removed: nobody attaches to a part of them."""
        self._has_point = False
        if self._folder is not None:
            self._folder.forget()

    # --- inside -------------------------------------------------------------------------------------------------

    def _store_placed(self) -> None:
        with self._lock:
            if self._placed:
                assert self._layout is not None
                self._write(msgspec.structs.replace(self._layout, **self._placed))
                self._placed = {}

    def _write(self, layout: RunLayout) -> None:
        assert self._folder is not None
        with self._left_if_it_fails():
            self._folder.write_layout(layout)
        self._layout = layout

    @contextlib.contextmanager
    def _left_if_it_fails(self) -> Iterator[None]:
        """Leaves the run to another driver if a file of it cannot be written, as its last recovery point is intact."""
        try:
            yield
        except PersiaError:
            if self._has_point:
                self.taken = False
            raise

    def _check_options(self, before: RunLayout) -> None:
        given = {"ps": (self._servers, before.asked), "regions": (self._options.regions, before.regions)}
        changed = [f"{name} = {new!r} instead of {old!r}" for name, (new, old) in given.items() if new != old]
        if changed:
            raise ConfigError(
                f"The driver of the run in {self._path} has died, and this program has {' and '.join(changed)}. Run "
                f"the same program as before, or choose another directory for RayOptions.run. To start over, remove "
                f"{self._path} and, on each host, {before.regions}/{before.name} with `persia cluster regions "
                "--clean`.",
                field="cluster",
            )

    def _await(self, run: RunLayout, *, needs_rows: bool) -> dict[str, _Left]:
        """Waits until nothing of a run is in use, and all its rows are there if needed; returns what each node has."""
        deadline, warned = Deadline(self._options.timeout), False
        while True:
            try:
                found = self._look(run, max(deadline.left, POLL_SECONDS))
            except PersiaError:  # A host that has just died may still be in Ray's list.
                if deadline.passed:
                    raise
                time.sleep(POLL_SECONDS)
                continue
            in_use = {path: node for node, left in found.items() for path in left.in_use}
            lost = {
                rank: server.host
                for rank, server in enumerate(run.servers)
                if needs_rows and self._node(found, rank, server) is None
            }
            if not in_use and not lost:
                return found
            if deadline.passed:
                raise self._late(run, in_use, lost)
            if not warned and lost:
                LOG.warning("%s\nWaiting %.0f s for it.", self._late(run, {}, lost).message, deadline.left)
                warned = True
            time.sleep(POLL_SECONDS)

    def _look(self, run: RunLayout, timeout: float) -> dict[str, _Left]:
        """Returns what each living host has of a run, by node."""
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        return run_on_all(nodes, partial(_left_here, run.regions, run.name), timeout)

    def _node(self, found: Mapping[str, _Left], rank: int, server: PlacedServer) -> str | None:
        """Returns the node that has the rows of a PS: the one of before, if it is still the same Ray."""
        having = sorted(node for node, left in found.items() if server.directory(rank) in left.complete)
        if server.node in having:
            return server.node
        return having[rank % len(having)] if having else None  # Several only if they are nodes of one host.

    def _newest_map(self, run: RunLayout, found: Mapping[str, _Left]) -> BucketMap | None:
        """Returns the newest map of a run, for a coordinator whose file is lost.

        PSs may have a later one than was noted, but none that was not committed.
        """
        maps = [run.buckets] if run.buckets is not None else []
        for rank, server in enumerate(run.servers):
            name = server.directory(rank)
            maps += [left.maps[name] for left in found.values() if name in left.maps]
        return max(maps, key=lambda one: one.version, default=None)

    def _late(self, run: RunLayout, in_use: Mapping[str, str], lost: Mapping[int, str]) -> PersiaError:
        if in_use:
            return DeadlineError(
                f"Processes of the dead driver of the run in {self._path} still have {', '.join(sorted(in_use))} open "
                f"after {self._options.timeout:g} s. End them, and start again.",
                seconds=self._options.timeout,
            )
        ranks = ", ".join(f"{rank} (it was on {host})" for rank, host in lost.items())
        return StoreError(
            f"The run in {self._path} cannot continue: no host of Ray has the rows of embedding PS {ranks}. Start that "
            f"host again, and `ray start` on it. If its memory is lost, start over from the last checkpoint: remove "
            f"{self._path} and, on each host, {run.regions}/{run.name} with `persia cluster regions --clean`.",
            ranks=list(lost),
        )

    def _remove_regions(self, run: RunLayout, timeout: float) -> None:
        nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        run_on_all(nodes, partial(remove_leftovers, run.regions, f"{run.name}/*"), timeout)


def _described(service: Service) -> str:
    """Returns what the rows of a service depend on, as JSON. A mode can be switched, so it is not part of it."""
    named = {"schema": service.schema, "embedding optimizer": service.optimizer, "seed": service.seed}
    return msgspec.json.encode(named, enc_hook=lambda value: type(value).__qualname__, order="sorted").decode()
