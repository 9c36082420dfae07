"""The command `persia trace`: records some steps of all processes of a running cluster on one time line."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.errors import PersiaError
from persia.printable import say

__all__ = ["trace"]


def trace(
    address: Annotated[
        str, typer.Argument(help="Control address that `persia train` prints: tcp://host:port.", metavar="ADDRESS")
    ],
    steps: Annotated[int, typer.Option(min=1, help="Number of global steps to trace.")] = 20,
    output: Annotated[str, typer.Option(help="File for the trace.", metavar="FILE")] = "trace.json",
    timeout: Annotated[float, typer.Option(help="Seconds to wait for these steps, and for each process.")] = 60.0,
) -> None:
    """Trace some steps of a running cluster: lookup, transfer, forward, backward, all-reduce and push, in all roles.

    Writes Chrome's Trace Event Format; open the file in https://ui.perfetto.dev, which shows it in the browser without
    sending it anywhere. Exits with status 1 if a process is missing in the trace. If the cluster uses CURVE keys, set
    PERSIA_CURVE_KEYS as the cluster does.
    """
    from persia.cli import ui as out
    from persia.membership.observing import record_trace
    from persia.telemetry.trace_events import trace_events, write_trace

    out.check_writable(output)
    recorded = record_trace(address, steps, timeout)
    events = trace_events(recorded.traces, recorded.steps)
    write_trace(output, events)
    if recorded.steps is None:
        say(
            f"NN workers did not report {steps} more steps within {timeout:g} s; {output} has all that was recorded. "
            "Raise --timeout, or trace fewer --steps.",
            error=True,
        )
    if dropped := events["otherData"]["dropped_spans"]:
        say(f"{dropped:,} spans are missing, as processes keep a limited number; trace fewer --steps.", error=True)
    for process, problem in recorded.problems.items():
        say(f"{process} is missing: {problem}", error=True)
    spans = sum(event["ph"] == "X" for event in events["traceEvents"])
    if not spans:
        raise PersiaError(f"Nothing was recorded at {address}: no process has run anything. Trace while it trains.")
    say(f"Wrote {spans:,} spans of {len(recorded.traces)} processes to {output}; open it in ui.perfetto.dev.")
    if recorded.problems:
        raise typer.Exit(1)
