"""The command `persia health`: state and load of every process in a running cluster."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from persia.membership.observing import Answer
    from persia.telemetry.metrics import Health

__all__ = ["health"]


def health(
    address: Annotated[
        str,
        typer.Argument(
            help="Control address that `persia train` prints: tcp://host:port. Or http://host:port of `persia serve`.",
            metavar="ADDRESS",
        ),
    ],
    json: Annotated[str | None, typer.Option(help="Write all metrics to this file as JSON.", metavar="FILE")] = None,
    targets: Annotated[
        str | None,
        typer.Option(help="Write the Prometheus endpoints to this file, for `file_sd_configs`.", metavar="FILE"),
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each process.")] = 5.0,
) -> None:
    """Show the health of every process of a cluster, or of a server.

    Exits with status 1 if a process is dead and not replaced, or does not answer, so it can serve as a liveness probe.
    An embedding PS that waits for its disk answers, with its last metrics.
    If the cluster uses CURVE keys, set PERSIA_CURVE_KEYS as the cluster does. For a server with keys, set
    PERSIA_SERVE_KEYS.
    """
    from persia.cli import ui as out
    from persia.membership.observing import ask_members

    out.check_writable(json, targets)
    if address.startswith(("http://", "https://")):
        _show_server(address, json, timeout)
        return
    answers = ask_members(address, timeout)
    out.CONSOLE.print(_table(answers))
    if json is not None:
        out.write_json(json, [_record(answer) for answer in answers])
    if targets is not None:
        endpoints = [a.health.metrics_url for a in answers if a.health is not None and a.health.metrics_url]
        names = [url.removeprefix("http://").removesuffix("/metrics") for url in endpoints]
        out.write_json(targets, [{"targets": names, "labels": {"job": "persia"}}])
    if any(answer.health is None for answer in answers):
        raise typer.Exit(1)


def _show_server(url: str, json: str | None, timeout: float) -> None:
    """Prints what a prediction server serves, and what arrives unlike in training.

    Raises:
        typer.Exit: the server is not ready.
    """
    from persia.cli import ui as out
    from persia.serve.client import Client

    keys = os.environ.get("PERSIA_SERVE_KEYS", "").replace(",", " ").split()
    with Client(url, keys[0] if keys else None, timeout=timeout) as client:
        state = client.health()
    if json is not None:
        out.write_json(json, state)
    out.CONSOLE.print(_server_table(state))
    if state["status"] != "ready":
        raise typer.Exit(1)


def _server_table(state: dict[str, Any]) -> Any:
    """Returns the state of a server by name, then its inputs by column."""
    from persia.telemetry.terminal import Grid, plain

    table = Grid("what", "value", text=("what", "value"))
    for name, value in state.items():
        if isinstance(value, dict):
            continue
        table.add_row(name.replace("_", " "), plain(f"{value:,.1f}" if isinstance(value, float) else str(value)))
    for name, index in state.get("psi", {}).items():
        table.add_row(plain(f"drift of {name}"), f"PSI {index:.2f}")
    for column, shares in state.get("inputs", {}).items():
        described = [f"{what.replace('_', ' ')} {share:.1%}" for what, share in shares.items()]
        table.add_row(plain(f"column {column}"), ", ".join(described))
    return table


def _table(answers: list[Answer]) -> Any:
    from persia.telemetry.terminal import Grid, plain

    columns = ("process", "up", "where", "calls", "p50 / p99", "queue", "what it does")
    table = Grid(*columns, text=("process", "where", "what it does"))
    for member, health, problem in answers:
        name = f"{member.role} {member.rank}"
        if health is None:
            table.add_row(name, "-", member.address, "-", "-", "-", plain(problem, "red"))
            continue
        state = "" if member.state == "alive" else f" ({member.state})"
        again = f", incarnation {health.incarnation}" if health.incarnation > 1 else ""
        table.add_row(
            name + state,
            f"{health.uptime:,.0f} s{again}",
            f"{health.host} {health.pid}",
            f"{health.total('rpc_calls'):,.0f}",
            _times(health),
            f"{health.total('rpc_requests_held'):,.0f}",
            plain(_doing(health)),
        )
    return table


def _times(health: Health) -> str:
    """Formats the latency of the method or stage that took most time. Ignores long polls for membership."""
    timed = [t for t in health.latencies if sum(t.counts) and t.labels.get("method") not in ("membership", "health")]
    if not timed:
        return "-"
    most = max(timed, key=lambda latency: latency.seconds)
    name = most.labels.get("method", most.name.removesuffix("_seconds").removeprefix("nn_"))
    return f"{name} {_seconds(most.quantile(0.5))} / {_seconds(most.quantile(0.99))}"


def _seconds(bound: float) -> str:
    if math.isinf(bound):
        return "> 100 s"
    return f"≤ {bound:g} s" if bound >= 1 else f"≤ {bound * 1000:g} ms"


def _doing(health: Health) -> str:
    """Formats the main metrics of a role."""
    total = health.total
    match health.role:
        case "embedding_ps":
            hits = total("ps_hits") / max(1.0, total("ps_lookups"))
            return (
                f"{_waiting(health)}"
                f"{total('ps_rows'):,.0f} rows, {total('ps_bytes') / 2**20:,.0f} MiB, {hits:.1%} hits, "
                f"{total('ps_evicted'):,.0f} evicted, {total('ps_nonfinite'):,.0f} non-finite"
                f"{_disk(health)}{_published(health)}"
            )
        case "dense_ps":
            return f"version {total('dense_version'):,.0f}"
        case "embedding_worker":
            return f"{total('worker_buffered'):,.0f} batches buffered, {total('worker_pushed'):,.0f} pushed"
        case "data_loader":
            return f"{total('loader_ready'):,.0f} batches ready, {total('loader_read'):,.0f} read{_stream(health)}"
        case "nn_worker":
            staleness = total("nn_staleness_sum") / max(1.0, total("nn_staleness_lookups"))
            dropped = total("nn_dropped_rows") + total("nn_dropped_batches")
            names = {metric.name for metric in health.metrics}
            threads = total("nn_torch_threads")
            age = f", checkpoint {total('nn_checkpoint_age_seconds'):,.0f} s ago"
            return (
                f"step {total('nn_step'):,.0f}, staleness {staleness:.2f}, {dropped:,.0f} dropped"
                f"{f', {threads:.0f} torch threads' if threads else ''}"
                f"{age if 'nn_checkpoint_age_seconds' in names else ''}{_stream(health)}"
            )
        case _:
            return health.notes[-1] if health.notes else ""


def _waiting(health: Health) -> str:
    """Formats how old the metrics of a blocked PS are; empty if they are current."""
    late = health.total("ps_metrics_late_seconds")
    return f"waiting for its disk or a lock for {late:,.0f} s; until then " if late else ""


def _disk(health: Health) -> str:
    """Formats the metrics of rows on disk; empty for a PS without a disk."""
    total = health.total
    if not any(metric.name == "ps_disk_rows" for metric in health.metrics):
        return ""
    in_memory = 1 - total("ps_promoted") / max(1.0, total("ps_hits"))
    written = (total("ps_spilled") + total("ps_compacted")) / max(1.0, total("ps_spilled"))
    return (
        f"; on disk {total('ps_disk_rows'):,.0f} rows, {total('ps_disk_bytes') / 2**30:,.1f} GiB, "
        f"{max(0.0, in_memory):.1%} of hits in memory, {total('ps_disk_reads'):,.0f} read, "
        f"write amplification {max(1.0, written):.2f}"
    )


def _stream(health: Health) -> str:
    """Formats how far the process is behind a stream; empty if it reads no stream."""
    total = health.total
    if not any(metric.name == "stream_rows_per_second" for metric in health.metrics):
        return ""
    counts = {name: total(f"stream_{name}") + total(f"join_clicks_{name}") for name in ("late", "poison")}
    counted = "".join(f", {count:,.0f} {name}" for name, count in counts.items() if count)
    behind, rate = total("stream_lag"), total("stream_rows_per_second")
    return f"; stream: {behind:,.0f} messages behind, {rate:,.0f} rows/s{counted}"


def _published(health: Health) -> str:
    """Formats how old published rows are; empty for a PS that does not publish."""
    total = health.total
    if not any(metric.name == "ps_publish_age_seconds" for metric in health.metrics):
        return ""
    failing = ", cannot publish" if total("ps_publish_failing") else ""
    return f"; published {total('ps_publish_age_seconds'):,.0f} s ago{failing}"


def _record(answer: Answer) -> dict[str, Any]:
    member, health, problem = answer
    if health is None:
        return {**member._asdict(), "healthy": False, "problem": problem}
    metrics = [metric._asdict() for metric in health.metrics]
    latencies = [latency._asdict() for latency in health.latencies]
    return {**member._asdict(), **health._asdict(), "healthy": True, "metrics": metrics, "latencies": latencies}
