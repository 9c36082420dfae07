"""The command `persia top`: a live table of all processes of a running cluster."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from persia.errors import ConfigError

__all__ = ["top"]


def top(
    address: Annotated[
        str, typer.Argument(help="Control address that `persia train` prints: tcp://host:port.", metavar="ADDRESS")
    ],
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and exit, for scripts.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for each process.")] = 5.0,
) -> None:
    """Watch a running cluster: rates, waits, staleness, loss, AUC, queues and memory of every process.

    Arrows (or j and k) move, Enter shows all metrics of a process, Esc goes back, q leaves. With --once the exit status
    is 1 if a process does not answer. If the cluster uses CURVE keys, set PERSIA_CURVE_KEYS as the cluster does.
    """
    import sys

    from persia.cli import ui as out
    from persia.dashboard.top import Top
    from persia.dashboard.view import Watch
    from persia.membership.observing import ask_members

    if not once and not (sys.stdin.isatty() and out.CONSOLE.is_terminal):
        raise ConfigError("persia top needs a terminal; use --once to print one frame.", field="once")
    watch = Watch(partial(ask_members, address, timeout), interval)
    try:
        table = Top(watch, out.CONSOLE)
        if not once:
            table.run()
            return
        frame = table.once(interval + 4 * timeout)
    finally:
        watch.close()
    if frame is None or frame.problem or any(process.problem for process in frame.processes):
        raise typer.Exit(1)
