"""The command `persia report`: one HTML file about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from persia.printable import say

__all__ = ["report"]


def report(
    directory: Annotated[
        str, typer.Argument(help="`trainer.log_dir` of a run, or its checkpoint directory.", metavar="DIR")
    ],
    output: Annotated[
        str | None, typer.Option(help="File for the report; DIR/report.html by default.", metavar="FILE")
    ] = None,
) -> None:
    """Write an HTML report of a run: curves, calibration, hit rates, staleness, tables and slowest features.

    The file loads nothing, so it can be sent to others. A run that is under way is reported after its call of `fit`.
    """
    from persia.dashboard.report import report as html
    from persia.telemetry.run_record import read_run

    path = Path(output) if output is not None else Path(directory) / "report.html"
    path.write_text(html(read_run(directory), Path(directory).resolve().name), encoding="utf-8")
    say(f"Wrote {path}")
