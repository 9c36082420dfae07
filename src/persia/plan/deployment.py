"""Plans a deployment: bytes by table, processes and hosts by role, traffic, rate and bottleneck, checkpoint times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from persia.errors import ConfigError
from persia.plan.cache import missing_share
from persia.plan.hosts import ROLES, HostKind, host_of
from persia.plan.load import RoleLoad, Topology, role_loads
from persia.plan.memory import PlacedTables, hosts_for, place_tables, whole_bytes
from persia.plan.rates import DiskRate, Rates, WorkloadRate
from persia.plan.tables import LIVE_SHARE, PlannedTable, TableBytes, disk_row_bytes
from persia.units import format_bytes

__all__ = ["DeploymentPlan", "HostPlan", "Limit", "PlanRequest", "RolePlan", "missed_rows", "plan_deployment"]

UTILISATION = 0.8
"""Share of a resource that a plan for a rate uses: more queues up."""
STORE_THREADS = 8
"""Threads of a PS or an embedding worker that has no setting, at most."""
WRITE_AMPLIFICATION = 3.0
"""Writes of the SSD tier for each record, as compaction rewrites two live ones for each dead one."""
ATTEMPTS = 20


class PlanRequest(NamedTuple):
    """The input of a plan.

    Attributes:
        tables: with their rows.
        hosts: kinds of hosts.
        rates: measured.
        workload: rates of the configuration.
        topology: processes by role; a plan for a rate chooses their numbers.
        depth: own steps of an NN worker between a lookup and its gradient, at most; None for as many as are needed.
        samples_per_second: the wanted rate; None for that of the processes that `topology` has.
        threads: of a PS or an embedding worker; None for one per core, at most 8.
        zipf: exponent of the popularity of ids, for rows on SSD; 0 is uniform, where most rows miss.
        memory_rows: by table, rows in memory; others have those that they declare. The rest are all in memory if they
            fit, and share it if they do not, as PSs divide it.
    """

    tables: Sequence[PlannedTable]
    hosts: Sequence[HostKind]
    rates: Rates
    workload: WorkloadRate
    topology: Topology
    depth: int | None = None
    samples_per_second: float | None = None
    threads: int | None = None
    zipf: float = 0.0
    memory_rows: Mapping[str, int] = {}


class RolePlan(NamedTuple):
    """The processes of a role.

    Attributes:
        role: its name.
        processes: number of them.
        host: the kind of host that they run on.
        load: of a batch, all processes together.
        received: bytes/s in, of each process.
        sent: bytes/s out, of each process.
        cores: busy cores, all processes together.
    """

    role: str
    processes: int
    host: str
    load: RoleLoad
    received: float
    sent: float
    cores: float


class HostPlan(NamedTuple):
    """The hosts of a kind.

    Attributes:
        kind: of the hosts.
        number: of hosts.
        roles: processes by role on all of them.
        memory: bytes of rows on each.
        disk: bytes of SSD for rows on each.
        needed_for: the resource that decides on their number.
        reserved: bytes of memory that each embedding PS on them reserves for rows; 0 if there is none.
    """

    kind: HostKind
    number: int
    roles: dict[str, int]
    memory: float
    disk: float
    needed_for: str
    reserved: int = 0


class Limit(NamedTuple):
    """A resource, and the rate that it permits.

    Attributes:
        resource: what is limited.
        samples_per_second: at most.
    """

    resource: str
    samples_per_second: float


class DeploymentPlan(NamedTuple):
    """The result.

    Attributes:
        tables: bytes by table.
        roles: processes by role.
        hosts: by kind.
        limits: by resource, the bottleneck first.
        samples_per_second: that the plan permits: of the bottleneck.
        checkpoint_seconds: to write a whole checkpoint, without throttling: one process writes it.
        restore_seconds: to load it.
        restart_seconds: until a restarted PS answers, whose host still has its rows.
        added: tables that need `spill`, which they do not have in their configuration, and this capacity.
    """

    tables: list[TableBytes]
    roles: list[RolePlan]
    hosts: list[HostPlan]
    limits: list[Limit]
    samples_per_second: float
    checkpoint_seconds: float
    restore_seconds: float
    restart_seconds: float
    added: Mapping[str, int] = {}

    @property
    def bottleneck(self) -> Limit:
        """The resource that permits the lowest rate."""
        return self.limits[0]


def plan_deployment(request: PlanRequest) -> DeploymentPlan:
    """Plans a deployment.

    Raises:
        ConfigError: rows or a wanted rate do not fit the hosts, or a rate was not measured.
    """
    if request.rates.checkpoint is None:
        raise request.rates.missing("the speed of checkpoints")
    wanted = request.samples_per_second
    topology = request.topology
    placed = PlacedTables([], 0, 0, {})
    for _ in range(ATTEMPTS):  # Calls and all-reduce depend on the numbers of processes, which depend on them.
        before, loads = placed.tables, _loads(request, topology, placed.tables)
        counts = dict(topology.counts) if wanted is None else _processes(request, loads, wanted)
        hosts, placed = _hosts(request, loads, counts, wanted)
        if counts == topology.counts and placed.tables == before:
            break
        topology = topology._replace(counts=counts)
    loads = _loads(request, topology, placed.tables)
    hosts = [host._replace(roles={role: topology.counts[role] for role in host.roles}) for host in hosts]
    limits = sorted(_limits(request, topology, loads, hosts, placed.tables), key=lambda limit: limit.samples_per_second)
    rate = limits[0].samples_per_second
    if wanted is not None:
        rate = min(rate, wanted)
    batches = rate / request.workload.batch.samples
    roles = [
        RolePlan(
            role,
            topology.counts[role],
            host_of(request.hosts, role).name,
            load,
            load.received * batches / topology.counts[role],
            load.sent * batches / topology.counts[role],
            load.core_seconds * batches,
        )
        for role, load in loads.items()
    ]
    size = sum(table.checkpoint for table in placed.tables)
    speed = request.rates.checkpoint
    restart = (
        speed.restart + speed.attach * sum(table.rows for table in placed.tables) / topology.counts["embedding_ps"]
    )
    return DeploymentPlan(
        placed.tables, roles, hosts, limits, rate, size / speed.write, size / speed.read, restart, placed.added
    )  # fmt: skip


def _loads(request: PlanRequest, topology: Topology, tables: Sequence[TableBytes]) -> dict[str, RoleLoad]:
    """Returns the load of each role, with the rows that PSs read from their disks."""
    loads = role_loads(request.tables, request.rates, request.workload, topology)
    if any(table.disk for table in tables):
        disk, moved = _disk(request), sum(missed_rows(request, tables).values())
        servers = loads["embedding_ps"]
        loads["embedding_ps"] = servers._replace(core_seconds=servers.core_seconds + moved * disk.row)
    return loads


def _disk(request: PlanRequest) -> DiskRate:
    if request.rates.disk is None:
        raise request.rates.missing("the speed of the SSD", " --disk DIR")
    return request.rates.disk


def missed_rows(request: PlanRequest, tables: Sequence[TableBytes]) -> dict[str, float]:
    """Returns the distinct rows of a batch that come from disk, by table.

    Args:
        request: of the plan.
        tables: of the plan.
    """
    batch = request.workload.batch
    return {
        table.name: batch.unique[table.name]
        * missing_share(table.rows, table.memory_rows, request.zipf, batch.ids[table.name])
        for table in tables
    }


def _threads(request: PlanRequest, role: str) -> int:
    """Returns the threads that share the work of a process."""
    if role == "data_loader":
        return 1
    return request.threads or min(STORE_THREADS, host_of(request.hosts, role).cores)


def _processes(request: PlanRequest, loads: Mapping[str, RoleLoad], wanted: float) -> dict[str, int]:
    """Returns the processes of each role for a rate."""
    batches = wanted / request.workload.batch.samples / UTILISATION
    found = {}
    for role, load in loads.items():
        if role == "nn_worker":
            busy = batches * _step_seconds(request, loads)
        else:
            busy = batches * load.core_seconds / _threads(request, role)
        found[role] = max(1, math.ceil(busy))
    return found


def _step_seconds(request: PlanRequest, loads: Mapping[str, RoleLoad]) -> float:
    """Returns the time between two steps of an NN worker: that of a step, or its share of the way of a batch."""
    step = request.workload.step
    seconds = step.seconds * (request.rates.shared if request.topology.apart and step.device == "cpu" else 1.0)
    if request.depth is None:
        return seconds
    other = sum(load.core_seconds for role, load in loads.items() if role in ("embedding_ps", "embedding_worker"))
    return max(seconds, (seconds + other) / (request.depth + 1))


def _hosts(
    request: PlanRequest, loads: Mapping[str, RoleLoad], counts: dict[str, int], wanted: float | None
) -> tuple[list[HostPlan], PlacedTables]:
    """Returns the hosts of each kind that is used, and the tables on them; adds PSs to `counts` for a rate."""
    batches = (wanted or 0.0) / request.workload.batch.samples / UTILISATION
    found, placed = [], PlacedTables([], 0, 0, {})
    for kind in request.hosts:
        roles = [role for role in ROLES if host_of(request.hosts, role) is kind]
        if not roles:
            continue
        needs = {"one host": 1.0, "cores": batches * sum(loads[role].core_seconds for role in roles) / kind.cores}
        if kind.network is not None:
            traffic = max(sum(loads[role].received for role in roles), sum(loads[role].sent for role in roles))
            needs["network"] = batches * traffic / kind.network
        if "nn_worker" in roles and kind.gpus:
            needs["GPUs"] = counts["nn_worker"] / kind.gpus
        if "embedding_ps" not in roles:
            number, reason = _number(kind, needs, [])
            found.append(HostPlan(kind, number, dict.fromkeys(roles, 0), 0.0, 0.0, reason))
            continue
        placed = _placed(request, kind, counts, needs, wanted)
        number, reason = _number(kind, needs, placed.tables)
        memory, disk = (sum(getattr(table, what) for table in placed.tables) / number for what in ("memory", "disk"))
        found.append(HostPlan(kind, number, dict.fromkeys(roles, 0), memory, disk, reason, placed.reserved))
    return found, placed


def _number(kind: HostKind, needs: Mapping[str, float], tables: Sequence[TableBytes]) -> tuple[int, str]:
    """Returns the number of hosts of a kind, and the resource that decides on it.

    Raises:
        ConfigError: there are too few.
    """
    reason = max(needs, key=lambda name: needs[name])
    number = math.ceil(needs[reason] - 1e-9)
    if kind.count is None:
        return number, reason
    if number > kind.count:
        raise ConfigError(
            f"The plan needs {number:,} hosts of kind {kind.name!r} for their {reason}, and there are "
            f"{kind.count:,}. {_remedy(reason, tables)}",
            field="hosts",
            host=kind.name,
        )
    return kind.count, reason


def _placed(
    request: PlanRequest, kind: HostKind, counts: dict[str, int], needs: dict[str, float], wanted: float | None
) -> PlacedTables:
    """Returns the tables in the memory and on the SSDs of their hosts, and adds both to `needs`."""
    if wanted is not None:
        counts["embedding_ps"] = max(counts["embedding_ps"], kind.count or 1)
    number = kind.count
    if number is None:
        needed = whole_bytes(request.tables, request.memory_rows, counts["embedding_ps"])
        number = _number(kind, {**needs, "memory": hosts_for(needed, kind, counts["embedding_ps"])}, [])[0]
        if wanted is not None:
            counts["embedding_ps"] = max(counts["embedding_ps"], number)
    servers = counts["embedding_ps"]
    placed = place_tables(request.tables, request.memory_rows, kind, servers, min(number, servers))
    needs["memory"] = hosts_for(placed.needed, kind, servers)
    if (disk := sum(table.disk for table in placed.tables)) > 0:
        needs["disk"] = disk / kind.disk
    if (least := math.ceil(needs["memory"] - 1e-9)) > servers and (kind.count is None or least <= kind.count):
        raise ConfigError(
            f"Rows need the memory of {least:,} hosts of kind {kind.name!r}, and there are {servers:,} embedding PSs, "
            f"each on one host. Use {least:,} or more (`cluster.ps`), or plan for a rate: --samples-per-second.",
            field="cluster.ps",
        )
    return placed


def _remedy(reason: str, tables: Sequence[TableBytes]) -> str:
    if reason not in ("memory", "disk"):
        return "Add hosts, or lower --samples-per-second."
    sizes = ", ".join(f"{table.name}: {format_bytes(table.memory)}" for table in tables[:4])
    return (
        f"Rows take {sizes} of memory. Add hosts, or `disk` to the hosts of embedding PSs; lower --rows; or choose "
        "dtype = 'bfloat16', a smaller dim, or an optimizer with less state."
    )


def _limits(
    request: PlanRequest,
    topology: Topology,
    loads: Mapping[str, RoleLoad],
    hosts: Sequence[HostPlan],
    tables: Sequence[TableBytes],
) -> list[Limit]:
    """Returns the rates that the resources permit."""
    samples, counts = request.workload.batch.samples, topology.counts
    found = [Limit("steps of NN workers", counts["nn_worker"] * samples / _step_seconds(request, loads))]
    for role in ("data_loader", "embedding_worker", "embedding_ps") if topology.apart else ():
        busy = loads[role].core_seconds / _threads(request, role)
        found.append(Limit(f"threads of {role} processes", counts[role] * samples / busy))
    for host in hosts:
        cores = sum(loads[role].core_seconds for role in host.roles)
        found.append(Limit(f"cores of {host.kind.name}", host.number * host.kind.cores * samples / cores))
        if host.kind.network is not None and topology.apart:
            for direction, text in (("received", "in"), ("sent", "out")):
                moved = sum(getattr(loads[role], direction) for role in host.roles)
                if moved:
                    rate = host.number * host.kind.network * samples / moved
                    found.append(Limit(f"network of {host.kind.name}, {text}", rate))
        if "embedding_ps" in host.roles and any(table.disk for table in tables):
            found += _disk_limits(request, host, tables)
    return found


def _disk_limits(request: PlanRequest, host: HostPlan, tables: Sequence[TableBytes]) -> list[Limit]:
    disk, samples, missed = _disk(request), request.workload.batch.samples, missed_rows(request, tables)
    reads = sum(missed.values())
    written = sum(
        missed[planned.config.name] * disk_row_bytes(planned) * LIVE_SHARE * WRITE_AMPLIFICATION
        for planned in request.tables
    )
    return [
        Limit(f"disk reads of {host.kind.name}", host.number * disk.reads * samples / max(reads, 1e-9)),
        Limit(f"disk writes of {host.kind.name}", host.number * disk.write * samples / max(written, 1e-9)),
    ]
