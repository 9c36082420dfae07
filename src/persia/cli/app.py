"""The commands of `persia`. Each imports its dependencies when it runs, so that `--help` is fast."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any

import typer

from persia import __version__
from persia.cli.bench import bench_app
from persia.cli.checkpoint import checkpoint_app, export
from persia.cli.control import control_app
from persia.cli.evaluate import evaluate, predict
from persia.cli.export_onnx import export_onnx
from persia.cli.health import health
from persia.cli.import_rows import import_
from persia.cli.importance import importance
from persia.cli.init import init
from persia.cli.keys import keys_app
from persia.cli.plan import plan
from persia.cli.regions import cluster_app
from persia.cli.report import report
from persia.cli.semantic_ids import semantic_ids
from persia.cli.serve import serve
from persia.cli.serve_rows import serve_rows
from persia.cli.top import top
from persia.cli.trace import trace
from persia.cli.train import train
from persia.cli.train_days import continual
from persia.cli.waiting import wait_end, wait_hosts
from persia.errors import PersiaError
from persia.openmp import limit_spinning
from persia.printable import say
from persia.telemetry.logs import LogFormatter

__all__ = ["app", "main"]

app = typer.Typer(
    name="persia",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    help="Train recommenders with unbounded embedding tables in plain PyTorch.",
    epilog="Start with `persia init YOUR_FILE.csv`, which writes files that train as they are.",
)
app.add_typer(checkpoint_app, name="checkpoint")
cluster_app.command("wait-hosts")(wait_hosts)
cluster_app.command("wait-end")(wait_end)
app.add_typer(cluster_app, name="cluster")
app.command()(init)
app.command()(export)  # Also `persia checkpoint export`.
app.command("export-onnx")(export_onnx)
app.command()(health)
app.command()(plan)
app.command()(top)
app.command()(trace)
app.command()(report)
app.command()(serve)
app.command("serve-rows")(serve_rows)
app.command()(train)
app.command()(continual)
app.command("import")(import_)
app.command()(evaluate)
app.command()(predict)
app.command()(importance)
app.command("semantic-ids")(semantic_ids)
app.add_typer(control_app, name="control")
app.add_typer(keys_app, name="keys")
app.add_typer(bench_app, name="bench")


def _print_version(requested: bool) -> None:
    if requested:
        say(f"persia {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Holds the options of `persia` itself; every other option belongs to a command."""


def main() -> Any:
    """Runs the command line. Prints a PersiaError or OSError as one line, without a traceback."""
    limit_spinning()  # Before a command loads torch.
    if logging.lastResort is not None:  # Writes the warnings of commands that set up no log.
        logging.lastResort.setFormatter(LogFormatter())
    try:
        return app()
    except (PersiaError, OSError) as error:
        say(f"persia: {error}", error=True)
        return sys.exit(1)
