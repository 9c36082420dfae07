"""Plans a deployment: bytes by table, processes and hosts by role, traffic, rate and bottleneck, checkpoint times."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from persia.errors import ConfigError
from persia.plan.distinct_ids import missing_share
from persia.plan.host_kinds import ROLES, HostKind, host_of
from persia.plan.load import RoleLoad, Topology, role_loads
from persia.plan.placed_tables import PlacedTables, hosts_for, place_tables, whole_bytes
from persia.plan.rates import CheckpointRate, DiskRate, Rates, WorkloadRate
from persia.plan.table_bytes import LIVE_SHARE, PlannedTable, TableBytes, disk_row_bytes
from persia.units import format_bytes

__all__ = ["DeploymentPlan", "HostPlan", "Limit", "PlanRequest", "RolePlan", "missed_rows", "plan_deployment"]

UTILISATION = 0.8
"""Share of a resource that a plan for a rate uses; beyond it queues grow."""
STORE_THREADS = 8
"""Maximum number of threads of a PS or an embedding worker without a setting."""
WRITE_AMPLIFICATION = 3.0
"""Writes of the SSD tier per record, as compaction rewrites two live records for each dead one."""
ATTEMPTS = 20


class PlanRequest(NamedTuple):
    """The input of a plan.

    Attributes:
        tables: tables with their numbers of rows.
        hosts: kinds of hosts.
        rates: measured rates.
        workload: rates of the configuration.
        topology: processes by role; a plan for a rate chooses their numbers.
        depth: maximum own steps of an NN worker between a lookup and its gradient; None for as many as needed.
        samples_per_second: target rate; None for the rate of the processes in `topology`.
        threads: threads of a PS or an embedding worker; None for one per core, at most 8.
        zipf: exponent of the popularity of ids, for rows on SSD; 0 is uniform, with the most misses.
        memory_rows: rows in memory by table. Other tables have the rows that they declare. Tables that declare none
            are in memory if they fit, and otherwise share it as PSs divide it.
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
        role: name of the role.
        processes: number of processes.
        host: kind of host that they run on.
        load: load of a batch on all processes together.
        received: bytes/s in per process.
        sent: bytes/s out per process.
        cores: busy cores of all processes together.
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
        kind: kind of the hosts.
        number: number of hosts.
        roles: processes by role on all these hosts.
        memory: bytes of rows in memory per host.
        disk: bytes of SSD for rows per host.
        needed_for: the resource that determines the number of hosts.
        reserved: bytes of memory that each embedding PS on them reserves for rows; 0 without a PS.
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
        resource: name of the resource.
        samples_per_second: maximum rate.
    """

    resource: str
    samples_per_second: float


class DeploymentPlan(NamedTuple):
    """The result of planning.

    Attributes:
        tables: bytes by table.
        roles: processes by role.
        hosts: hosts by kind.
        limits: limits by resource, the bottleneck first.
        samples_per_second: rate that the bottleneck permits.
        checkpoint_seconds: seconds to write a whole checkpoint, without throttling. The hosts of the PSs write at the
            same time, each as fast as one PS, and at most at the rate of its network; what bounds the storage itself is
            unknown.
        restore_seconds: seconds to load it, likewise.
        restart_seconds: seconds until a restarted PS answers, if its host still has its rows.
        added: tables that need `spill`, which their configuration lacks, with their capacity.
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
        ConfigError: rows or the target rate do not fit the hosts, or a rate was not measured.
    """
    if request.rates.checkpoint is None:
        raise request.rates.missing("the speed of checkpoints")
    target = request.samples_per_second
    topology = request.topology
    placed = PlacedTables([], 0, 0, {})
    for _ in range(ATTEMPTS):  # Loads of calls and all-reduce depend on the numbers of processes, and vice versa.
        previous, loads = placed.tables, _loads(request, topology, placed.tables)
        counts = dict(topology.counts) if target is None else _processes(request, loads, target)
        hosts, placed = _hosts(request, loads, counts, target)
        if counts == topology.counts and placed.tables == previous:
            break
        topology = topology._replace(counts=counts)
    loads = _loads(request, topology, placed.tables)
    hosts = [host._replace(roles={role: topology.counts[role] for role in host.roles}) for host in hosts]
    limits = sorted(_limits(request, topology, loads, hosts, placed.tables), key=lambda limit: limit.samples_per_second)
    rate = limits[0].samples_per_second
    if target is not None:
        rate = min(rate, target)
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
    write, read = _storage_rates(hosts, speed)
    return DeploymentPlan(
        placed.tables, roles, hosts, limits, rate, size / write, size / read, restart, placed.added
    )  # fmt: skip


def _storage_rates(hosts: Sequence[HostPlan], speed: CheckpointRate) -> tuple[float, float]:
    """Returns the bytes/s that all PSs together write to a checkpoint, and read; those of a host share its disk."""
    (host,) = (host for host in hosts if "embedding_ps" in host.roles)
    writing, most = min(host.number, host.roles["embedding_ps"]), host.kind.network or math.inf
    return writing * min(speed.write, most), writing * min(speed.read, most)


def _loads(request: PlanRequest, topology: Topology, tables: Sequence[TableBytes]) -> dict[str, RoleLoad]:
    """Returns the load of each role, including the rows that PSs read from their disks."""
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
        request: input of the plan.
        tables: tables of the plan.
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


def _processes(request: PlanRequest, loads: Mapping[str, RoleLoad], target: float) -> dict[str, int]:
    """Returns the number of processes of each role for a rate."""
    batches = target / request.workload.batch.samples / UTILISATION
    processes = {}
    for role, load in loads.items():
        if role == "nn_worker":
            busy = batches * _step_seconds(request, loads)
        else:
            busy = batches * load.core_seconds / _threads(request, role)
        processes[role] = max(1, math.ceil(busy))
    return processes


def _step_seconds(request: PlanRequest, loads: Mapping[str, RoleLoad]) -> float:
    """Returns the time between two steps of an NN worker: the time of a step, or its share of a batch's round trip."""
    step = request.workload.step
    seconds = step.seconds * (request.rates.shared if request.topology.apart and step.device == "cpu" else 1.0)
    if request.depth is None:
        return seconds
    other = sum(load.core_seconds for role, load in loads.items() if role in ("embedding_ps", "embedding_worker"))
    return max(seconds, (seconds + other) / (request.depth + 1))


def _hosts(
    request: PlanRequest, loads: Mapping[str, RoleLoad], counts: dict[str, int], target: float | None
) -> tuple[list[HostPlan], PlacedTables]:
    """Returns the hosts of each kind that is used, and the tables on them; adds PSs to `counts` for a rate."""
    batches = (target or 0.0) / request.workload.batch.samples / UTILISATION
    plans, placed = [], PlacedTables([], 0, 0, {})
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
            plans.append(HostPlan(kind, number, dict.fromkeys(roles, 0), 0.0, 0.0, reason))
            continue
        placed = _placed(request, kind, counts, needs, target)
        number, reason = _number(kind, needs, placed.tables)
        memory, disk = (sum(getattr(table, what) for table in placed.tables) / number for what in ("memory", "disk"))
        plans.append(HostPlan(kind, number, dict.fromkeys(roles, 0), memory, disk, reason, placed.reserved))
    return plans, placed


def _number(kind: HostKind, needs: Mapping[str, float], tables: Sequence[TableBytes]) -> tuple[int, str]:
    """Returns the number of hosts of a kind, and the resource that determines it.

    Raises:
        ConfigError: there are too few hosts.
    """
    reason = max(needs, key=lambda name: needs[name])
    number = math.ceil(needs[reason] - 1e-9)
    if kind.count is None:
        return number, reason
    if number > kind.count:
        raise ConfigError(
            f"The plan needs {number:,} hosts of kind {kind.name!r} for their {reason}, but there are "
            f"{kind.count:,}. {_remedy(reason, tables)}",
            field="hosts",
            host=kind.name,
        )
    return kind.count, reason


def _placed(
    request: PlanRequest, kind: HostKind, counts: dict[str, int], needs: dict[str, float], target: float | None
) -> PlacedTables:
    """Returns the tables in the memory and on the SSDs of their hosts, and adds both to `needs`."""
    if target is not None:
        counts["embedding_ps"] = max(counts["embedding_ps"], kind.count or 1)
    number = kind.count
    if number is None:
        needed = whole_bytes(request.tables, request.memory_rows, counts["embedding_ps"])
        number = _number(kind, {**needs, "memory": hosts_for(needed, kind, counts["embedding_ps"])}, [])[0]
        if target is not None:
            counts["embedding_ps"] = max(counts["embedding_ps"], number)
    servers = counts["embedding_ps"]
    placed = place_tables(request.tables, request.memory_rows, kind, servers, min(number, servers))
    needs["memory"] = hosts_for(placed.needed, kind, servers)
    if (disk := sum(table.disk for table in placed.tables)) > 0:
        needs["disk"] = disk / kind.disk
    if (least := math.ceil(needs["memory"] - 1e-9)) > servers and (kind.count is None or least <= kind.count):
        raise ConfigError(
            f"Rows need the memory of {least:,} hosts of kind {kind.name!r}, but there are {servers:,} embedding PSs, "
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
    limits = [Limit("steps of NN workers", counts["nn_worker"] * samples / _step_seconds(request, loads))]
    for role in ("data_loader", "embedding_worker", "embedding_ps") if topology.apart else ():
        busy = loads[role].core_seconds / _threads(request, role)
        limits.append(Limit(f"threads of {role} processes", counts[role] * samples / busy))
    for host in hosts:
        cores = sum(loads[role].core_seconds for role in host.roles)
        limits.append(Limit(f"cores of {host.kind.name}", host.number * host.kind.cores * samples / cores))
        if host.kind.network is not None and topology.apart:
            for direction, text in (("received", "in"), ("sent", "out")):
                moved = sum(getattr(loads[role], direction) for role in host.roles)
                if moved:
                    rate = host.number * host.kind.network * samples / moved
                    limits.append(Limit(f"network of {host.kind.name}, {text}", rate))
        if "embedding_ps" in host.roles and any(table.disk for table in tables):
            limits += _disk_limits(request, host, tables)
    return limits


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
