"""`persia cluster regions`: what PSs have left in the shared memory of this host."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from persia.errors import ConfigError

__all__ = ["cluster_app"]

cluster_app = typer.Typer(no_args_is_help=True, help="Look after what clusters leave on this host.")


@cluster_app.callback()
def cluster() -> None:
    """Look after what clusters leave on this host."""


@cluster_app.command()
def regions(
    directory: Annotated[
        str, typer.Option(help="Where clusters keep their regions: `regions` of their options.", metavar="DIR")
    ] = "/dev/shm",
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove those that no process has in use. Their rows are gone then.")
    ] = False,
) -> None:
    """List the regions of embedding PSs on this host, and remove those that are left over.

    A cluster that ends removes its own. They stay when its driver is killed, or its host restarted. A PS that is just
    being restarted has none in use for a moment: do not clean while a cluster recovers.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from persia.ps.regions import leftovers

    if not os.path.isdir(directory):
        raise ConfigError(f"--directory {directory}: there is no such directory.", field="directory")
    found = leftovers(directory)
    if not found:
        typer.echo(f"There are no regions in {directory}.")
        return
    table = Table()
    for column in ("regions", "tables", "MiB", "started", ""):
        table.add_column(column, overflow="fold", justify="right" if column == "MiB" else "left")
    for left in found:
        state = "in use" if left.in_use else ("removed" if clean and left.remove() else "left over")
        tables = ", ".join(left.tables) or "(never completed)"
        table.add_row(
            Text(left.path), Text(tables), f"{left.memory / (1 << 20):,.1f}", f"{left.seconds / 60:,.0f} min ago", state
        )
    Console().print(table)
