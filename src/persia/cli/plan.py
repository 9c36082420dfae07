"""The commands `persia plan` and `persia bench rates`."""

from __future__ import annotations

import math
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from persia.cli.configured_run import Set, closing_cluster, read_config
from persia.cli.fitted import fitted_run
from persia.errors import ConfigError
from persia.printable import say

if TYPE_CHECKING:
    from persia.batching.batch import Batch
    from persia.cli.run_config import RunConfig
    from persia.cluster import RayOptions
    from persia.plan import DeploymentPlan, HostKind, PlanRequest, Rates
    from persia.plan.rates import WorkloadRate
    from persia.plan.workload import FakeCluster
    from persia.schema import Schema

__all__ = ["core_seconds_of", "measure_rates", "plan", "rates", "request_of", "run_key"]

SHARED_IDS = 100_000
SHARED_STEPS = 25
SHARED_ROUNDS = 3
SHARED_RUN: dict[str, Any] = {
    "data": {
        "kind": "synthetic",
        "batch_size": 4096,
        "options": {"rows": 1 << 30, "id_features": 26, "ids_per_feature": SHARED_IDS, "zipf": 0.0},
    },
    "model": {"kind": "ffnn", "options": {"hidden": [16]}},
    "optimizer": {"kind": "adam"},
    "embedding_optimizer": {"kind": "adagrad", "lr": 0.05},
    "mode": {"kind": "sync"},
    "cluster": {"kind": "ray"},
    "trainer": {"progress": False, "device": "cpu"},
}
"""The training that `measure_sharing` runs."""


def plan(
    config: Annotated[str, typer.Argument(help="TOML file of the run, as for `persia train`.", metavar="CONFIG")],
    overrides: Set = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Rows that a table will have: `item=1.2e9`. Default: its capacity. Repeatable."),
    ] = None,
    hosts: Annotated[
        str | None, typer.Option(help="TOML file with [[hosts]] sections. Default: this machine.", metavar="FILE")
    ] = None,
    samples_per_second: Annotated[
        str | None, typer.Option(help="Rate to plan for: `200_000`. Default: what the processes in CONFIG reach.")
    ] = None,
    rates: Annotated[
        list[str] | None,
        typer.Option(help="File written by `persia bench rates`. Repeatable: the last one counts.", metavar="FILE"),
    ] = None,
    zipf: Annotated[
        float, typer.Option(help="Zipf exponent of the ids, for rows on SSD. Default: uniform, the worst case.")
    ] = 0.0,
    ray_file: Annotated[str | None, typer.Option(help="Write a cluster file for `ray up`.", metavar="FILE")] = None,
    kubernetes: Annotated[
        str | None, typer.Option(help="Write manifests for `kubectl apply -k` to this directory.", metavar="DIR")
    ] = None,
    json: Annotated[str | None, typer.Option(help="Write the plan to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Plan a deployment: memory, disk, hosts, network, rate and bottleneck.

    No cluster is started. All rates were measured by `persia bench rates CONFIG --save rates.json`; a rate that is
    missing is an error that names the command.
    """
    from persia.cli import ui as out
    from persia.plan import cluster_file, load_hosts, load_rates, plan_deployment
    from persia.units import parse_count

    out.check_writable(json, ray_file)
    table_rows = {}
    for item in rows or []:
        name, equals, count = item.rpartition("=")
        if not equals:
            raise ConfigError(f"Invalid --rows {item}; expected TABLE=N.", field="rows")
        table_rows[name] = parse_count(count, f"--rows {name}")
    run = read_config(config, overrides)
    measured = load_rates(rates or ["rates.json"])
    rate = None if samples_per_second is None else float(parse_count(samples_per_second, "--samples-per-second"))
    kinds = load_hosts(hosts) if hosts else None
    request = request_of(run, measured, table_rows, kinds)._replace(samples_per_second=rate, zipf=zipf)
    deployment = plan_deployment(request)
    _print(deployment, request, measured, run.cluster.ray)
    command = shlex.join(["persia", *sys.argv[1:]])
    if ray_file is not None:
        Path(ray_file).write_text(cluster_file(deployment, command, run.cluster.ray.regions), encoding="utf-8")
    if kubernetes is not None:
        from persia.cli.plan_pods import write_pods

        write_pods(kubernetes, run, config, deployment, request, command)
    if json is not None:
        out.write_json(json, _record(deployment, request, measured))


def rates(
    config: Annotated[str, typer.Argument(help="TOML file of the run.", metavar="CONFIG")],
    save: Annotated[str, typer.Option(help="JSON file that the rates are added to.", metavar="FILE")],
    overrides: Set = None,
    disk: Annotated[
        str | None, typer.Option(help="Directory on the SSD for rows beyond memory, to measure it.", metavar="DIR")
    ] = None,
) -> None:
    """Measure this machine's rates for `persia plan`: rows, calls, steps, checkpoints, disk.

    Takes about half a minute, or a minute if CONFIG runs on Ray, and up to 500 MB of memory. Run it on a machine like
    the planned hosts, with the network of CONFIG on the device that NN workers will have.
    """
    from persia.cli import ui as out
    from persia.plan import save_rates

    out.check_writable(save)
    run = read_config(config, overrides)
    command = shlex.join(["persia", *sys.argv[1:]])
    measured = measure_rates(run, config, command, disk)
    save_rates(save, measured)
    for key, row in measured.rows.items():
        say(f"rows {key}: {1 / row.lookup / 1e6:,.1f} M lookups/s and {1 / row.update / 1e6:,.1f} M updates/s per core")
    for workload in measured.workloads.values():
        step = workload.step
        say(f"steps of {workload.batch.samples:,} samples on {step.device}: {step.seconds * 1e3:,.1f} ms")
    if measured.sharing is not None:
        say(f"roles that share this machine: {measured.sharing:.2f} times the core seconds of each alone")
    say(f"Saved the rates to {save}")


def measure_rates(run: RunConfig, name: str, command: str, disk: str | None = None) -> Rates:
    """Measures all rates that a configuration needs on this machine.

    Args:
        run: the configuration. If its roles are processes, a small training run is measured as well.
        name: name of the configuration's file.
        command: command line, to record with the rates.
        disk: directory on an SSD to measure; None to leave it out.
    """
    import datetime
    import platform

    import msgspec

    from persia import __version__
    from persia.plan import RateSource
    from persia.plan.measure import measure_checkpoint, measure_disk

    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    machine = f"{_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
    return msgspec.structs.replace(
        _rates_of(run, name),
        sources=[RateSource(machine, os.cpu_count() or 1, __version__, now, command)],
        checkpoint=measure_checkpoint(),
        disk=None if disk is None else measure_disk(disk),
        sharing=measure_sharing() if run.cluster.kind == "ray" else None,
    )


def _rates_of(run: RunConfig, name: str) -> Rates:
    """Returns the rates of a configuration's rows, roles and calls, each measured separately."""
    from persia.plan import Rates, planned_tables, row_key
    from persia.plan.measure import measure_rows, measure_wire

    run = fitted_run(run)
    reader = run.reader()
    schema = reader.schema
    tables = planned_tables(schema, run.embedding_optimizer, dict.fromkeys(schema.resolved_tables(), 1), False)
    return Rates(
        1,
        [],
        {
            row_key(table.config): measure_rows(table.config)
            for table in {row_key(t.config): t for t in tables}.values()
        },
        {run_key(run): _workload(run, name, schema, reader)},
        measure_wire(),
    )


def measure_sharing() -> float:
    """Returns the slowdown of roles that share this machine: core seconds together, divided by the separate sum.

    Trains a small model in a cluster of one process for each role, which takes about half a minute.
    """
    from persia.cli.run_config import RunConfig
    from persia.config import convert
    from persia.plan import role_loads

    run = convert(SHARED_RUN, RunConfig, "the training that measures sharing")
    separate_rates = _rates_of(run, "sharing")
    reader = run.reader()
    request = request_of(run, separate_rates, dict.fromkeys(reader.schema.resolved_tables(), SHARED_IDS))
    loads = role_loads(request.tables, separate_rates, request.workload, request.topology)
    trainer = run.build_trainer(reader.schema)

    def core_seconds(steps: int) -> float:
        before = core_seconds_of(trainer.cluster)
        trainer.fit(reader, max_steps=steps)
        return core_seconds_of(trainer.cluster) - before

    with closing_cluster(trainer):
        core_seconds(2 * SHARED_STEPS)  # Starts the processes, and creates the rows.
        # The difference cancels the fixed cost of a call of `fit`.
        pairs = [(core_seconds(SHARED_STEPS), core_seconds(5 * SHARED_STEPS)) for _ in range(SHARED_ROUNDS)]
    together = statistics.median((longer - short) / (4 * SHARED_STEPS) for short, longer in pairs)
    return max(1.0, together / sum(load.core_seconds for load in loads.values()))


def core_seconds_of(cluster: Any) -> float:
    """Returns the processor seconds of all processes of a cluster so far."""
    return sum(float(counters.get("cpu_seconds", 0.0)) for counters in cluster.statistics().values())


def request_of(
    run: RunConfig, measured: Rates, rows: dict[str, int], hosts: Sequence[HostKind] | None = None
) -> PlanRequest:
    """Returns the request for a plan of a configuration's own processes.

    Args:
        run: the configuration.
        measured: rates, including the configuration's.
        rows: number of rows by table.
        hosts: kinds of hosts; None for this machine.
    """
    from persia.modes import Auto, Dense, Hybrid
    from persia.plan import PlanRequest, Topology, planned_tables, share_a_host, this_host

    mode = run.mode.sync if isinstance(run.mode, Auto) else run.mode
    asynchronous = mode.dense() is not Dense.ALL_REDUCE or isinstance(run.mode, Auto)
    cluster = run.cluster
    apart = cluster.kind == "ray"
    counts = {
        "embedding_ps": cluster.ps,
        "embedding_worker": cluster.embedding_workers,
        "data_loader": cluster.data_loaders,
        "nn_worker": cluster.nn_workers,
    }
    hosts = hosts or [this_host(cluster.ray.regions if apart else "")]
    one_host = share_a_host(hosts, "embedding_worker", "nn_worker")
    schema = run.reader().schema
    declared = schema.resolved_tables()
    copies = mode.dense() is Dense.ALL_REDUCE and any(table.cache_rows for table in declared.values())
    if apart:
        pool_at = cluster.ray.feature_pooling(one_host)
        if copies or run.trainer.clip_embedding_norm is not None:  # NN workers need the rows.
            pool_at = "nn_worker"
        topology = Topology(counts, compressed=cluster.ray.row_compression(one_host) == "fp16", pool_at=pool_at)
    else:
        topology = Topology(dict.fromkeys(counts, 1), apart=False)
    if isinstance(mode, Hybrid):
        depth = mode.staleness if isinstance(mode.staleness, int) else None
    else:
        depth = 0
    workload = measured.workload(run_key(run))
    tables = planned_tables(schema, run.embedding_optimizer, rows, asynchronous)
    threads = cluster.ray.threads or cluster.threads
    memory_rows = {name: table.memory_rows for name, table in declared.items() if table.memory_rows is not None}
    return PlanRequest(tables, hosts, measured, workload, topology, depth, threads=threads, memory_rows=memory_rows)


def run_key(run: RunConfig) -> str:
    """Returns the key of a configuration's rates: its data, network, optimizers and size of a batch.

    Fitted values of features are left out: they change no rate, and `persia plan` does not fit.
    """
    from persia.plan import workload_key
    from persia.schema import without_values

    dumped = (run if run.schema is None else run.of_schema(without_values(run.schema))).dump()
    path = dumped["data"]["path"]
    if path is not None and "://" not in path:  # Absolute, so it differs between machines.
        dumped["data"]["path"] = os.path.basename(path)
    return workload_key(*(dumped[name] for name in ("data", "schema", "model", "optimizer", "embedding_optimizer")))


def _workload(run: RunConfig, name: str, schema: Schema, reader: Any) -> WorkloadRate:
    import msgspec
    import torch

    from persia.modes import Hybrid
    from persia.plan.workload import measure_workload
    from persia.trainer import Trainer

    trainers: dict[int, Trainer] = {}
    options = msgspec.structs.replace(
        run.trainer, progress=False, checkpoint_dir=None, checkpoint_every_steps=None, checkpoint_every_seconds=None,
        keep_best=None, eval_every_steps=None, eval_every_epochs=None, patience=None,
        log_dir=None, trackers=[], record_dir=None, mode_schedule=[],
    )  # fmt: skip
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    network = run.model.build(schema)

    def fit(cluster: FakeCluster, batches: Sequence[Batch], steps: int) -> float:
        if id(cluster) not in trainers:
            trainers[id(cluster)] = Trainer(
                network, schema, optimizer=run.optimizer.factory(), embedding_optimizer=run.embedding_optimizer,
                mode=Hybrid(4, warmup=0), cluster=cluster, options=options,
            )  # fmt: skip
        return trainers[id(cluster)].fit(batches, epochs=1 << 30, max_steps=steps).seconds

    parameters = sum(parameter.numel() for parameter in network.parameters())
    return measure_workload(name, schema, run.embedding_optimizer, reader, fit, device, parameters)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        import platform

        return platform.processor() or platform.machine()


def _print(deployment: DeploymentPlan, request: PlanRequest, measured: Rates, options: RayOptions) -> None:
    from persia.cli import ui as out
    from persia.plan import ENLARGE_REGIONS, in_shared_memory
    from persia.telemetry.terminal import Grid
    from persia.units import format_bytes, format_count, format_seconds

    for source in measured.sources:
        say(f"Rates: {source.file}, measured {source.measured} on {source.machine}")
    if request.topology.apart and measured.sharing is None:
        say(
            "The slowdown of roles that share a machine was not measured: rates may be half as high. Measure it where "
            "Ray is installed: persia bench rates CONFIG --save FILE"
        )
    tables = Grid("table", "rows", "in memory", "memory", "SSD", "checkpoint", text=["table"], title="tables")
    for table in deployment.tables:
        sizes = [format_bytes(size) for size in (table.memory, table.disk, table.checkpoint)]
        tables.add_row(table.name, format_count(table.rows), format_count(table.memory_rows), *sizes)
    out.CONSOLE.print(tables)
    columns = ("kind", "hosts", "for", "rows in memory of each", "on its SSD", "processes")
    hosts = Grid(*columns, text=("kind", "for", "processes"), title="hosts")
    for host in deployment.hosts:
        processes = ", ".join(f"{count} {role}" for role, count in host.roles.items())
        sizes = [format_bytes(host.memory), format_bytes(host.disk)]
        hosts.add_row(host.kind.name, f"{host.number:,}", host.needed_for, *sizes, processes)
    out.CONSOLE.print(hosts)
    servers = next((host for host in deployment.hosts if host.reserved), None)
    if request.topology.apart and servers is not None and in_shared_memory(options.regions):
        of_each = math.ceil(servers.roles["embedding_ps"] / servers.number) * servers.reserved
        say(
            f"Embedding PSs need {format_bytes(of_each)} of RayOptions.regions on each host of kind "
            f"{servers.kind.name!r}. Its default /dev/shm is often half of the memory: the file of --ray-file enlarges "
            f"it; elsewhere run {ENLARGE_REGIONS}"
        )
    if request.topology.apart:
        say(_of_messages(request, options))
    title = f"roles at {deployment.samples_per_second:,.0f} samples/s"
    roles = Grid("role", "processes", "busy cores", "in, each", "out, each", text=["role"], title=title)
    for role in deployment.roles:
        moved = [f"{format_bytes(rate)}/s" for rate in (role.received, role.sent)]
        roles.add_row(role.role, f"{role.processes:,}", f"{role.cores:,.1f}", *moved)
    out.CONSOLE.print(roles)
    limits = Grid("resource", "samples/s", text=["resource"], title="what the resources permit")
    for limit in deployment.limits:
        limits.add_row(limit.resource, f"{limit.samples_per_second:,.0f}")
    out.CONSOLE.print(limits)
    say(f"Bottleneck: {deployment.bottleneck.resource}")
    say(
        f"A checkpoint takes {format_seconds(deployment.checkpoint_seconds)} to write and "
        f"{format_seconds(deployment.restore_seconds)} to load; a restarted PS whose host lives answers after "
        f"{format_seconds(deployment.restart_seconds)}."
    )
    if deployment.added:
        capacities = ", ".join(f"{name}: {capacity:_}" for name, capacity in deployment.added.items())
        say(f"Rows do not fit into memory. Set `spill` to a directory on the SSD, and `capacity`: {capacities}")
    if request.depth == 0 and request.tables and request.tables[0].last_steps:
        say("Dense PSs of the asynchronous mode are not counted.")


def _of_messages(request: PlanRequest, options: RayOptions) -> str:
    from persia.plan import share_a_host

    one_host = share_a_host(request.hosts, "embedding_worker", "nn_worker")
    pool_at = {
        "nn_worker": "by NN workers",
        "embedding_worker": "by embedding workers",
        "auto": "where that sends fewer bytes",
    }[request.topology.pool_at]
    return (
        f"Embedding workers and NN workers {'share a host' if one_host else 'are on different hosts'}: rows and "
        f"gradients travel {'as fp16' if request.topology.compressed else 'without compression'} "
        f"(RayOptions.compression={options.compression!r}), and features are pooled {pool_at} "
        f"(RayOptions.pool_at={options.pool_at!r})."
    )


def _record(deployment: DeploymentPlan, request: PlanRequest, measured: Rates) -> dict[str, Any]:
    import msgspec

    from persia.plan import place_of

    return {
        **{name: _plain(getattr(deployment, name)) for name in deployment._fields},
        "compression": "fp16" if request.topology.compressed else "none",
        "pool_at": request.topology.pool_at,
        "place": place_of(deployment),
        "rates": [msgspec.to_builtins(source) for source in measured.sources],
    }


def _plain(value: Any) -> Any:
    import msgspec

    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {name: _plain(getattr(value, name)) for name in value._fields}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return msgspec.to_builtins(value)
