"""The command `persia cluster regions`: regions and rows on disk of embedding PSs on this host."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from persia.errors import ConfigError
from persia.printable import say

__all__ = ["cluster_app"]

cluster_app = typer.Typer(no_args_is_help=True, help="Manage the hosts of a cluster.")


@cluster_app.callback()
def cluster() -> None:
    """Manage the hosts of a cluster."""


@cluster_app.command()
def regions(
    directory: Annotated[
        str,
        typer.Option(
            help="Directory of regions: `regions` of the cluster; or of rows on disk: `spill` of a table.",
            metavar="DIR",
        ),
    ] = "/dev/shm",
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove regions that no process uses. Their rows are lost.")
    ] = False,
) -> None:
    """List the shared-memory regions of embedding PSs, with their rows on disk; optionally clean up.

    A cluster removes its regions when it ends. They are left over if its driver is killed. Rows on disk are removed
    with the regions that they belong to; if the host has restarted, only they are left, in the directory `spill` of
    their tables. Do not clean while a cluster recovers: a PS that restarts does not use its regions for a moment.

    A PS of this version of persia can continue with regions of the layout that this version has. Of another layout, the
    list says which this version needs.
    """
    from persia.ps.regions import LAYOUT, leftovers
    from persia.telemetry.terminal import DataConsole, Grid

    if not os.path.isdir(directory):
        raise ConfigError(
            f"Invalid --directory {directory}: there is no such directory; give the cluster's `regions`.",
            field="directory",
        )
    entries = leftovers(directory)
    if not entries:
        say(f"There are no regions in {directory}.")
        return
    table = Grid(
        "regions", "tables", "MiB", "MiB on disk", "layout", "started", "", text=("regions", "tables", "started", "")
    )
    for entry in entries:
        state = "in use" if entry.in_use else ("removed" if clean and entry.remove() else "left over")
        tables = ", ".join(entry.tables) or "(never completed)"
        table.add_row(
            entry.path,
            tables,
            f"{entry.memory / (1 << 20):,.1f}",
            f"{entry.disk / (1 << 20):,.1f}",
            "-" if entry.layout is None else f"{entry.layout}{'' if entry.layout == LAYOUT else f', not {LAYOUT}'}",
            f"{entry.seconds / 60:,.0f} min ago",
            state,
        )
    DataConsole().print(table)
