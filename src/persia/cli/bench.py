"""The commands of `persia bench`."""

from __future__ import annotations

from typing import Annotated

import typer

from persia.cli.configured_run import Config, Set, read_config
from persia.cli.plan import rates
from persia.errors import ConfigError
from persia.printable import say

__all__ = ["bench_app"]

bench_app = typer.Typer(no_args_is_help=True, help="Measure rates, compare training modes, and rehearse mode choice.")
bench_app.command()(rates)


@bench_app.command()
def modes(
    workers: Annotated[int, typer.Option(help="Number of emulated NN workers.")] = 8,
    slow: Annotated[str, typer.Option(help="Number of slow workers and their slowdown: `2:4x`.")] = "2:4x",
    compute: Annotated[str, typer.Option(help="Emulated compute time per batch.")] = "20ms",
    trace: Annotated[
        str | None,
        typer.Option(
            help="Replay the worker speeds recorded in this file; replaces --workers and --slow.", metavar="FILE"
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Mean number of batches per NN worker.")] = 60,
    json: Annotated[str | None, typer.Option(help="Write the table to this file as JSON.", metavar="FILE")] = None,
) -> None:
    """Compare the speed of all modes while some NN workers are slow.

    Compute time is emulated by sleeping, so one machine can stand for many. Hybrid runs as it does after its warm-up.
    """
    from persia.cli import ui as out
    from persia.testing import emulation

    out.check_writable(json)
    speeds = emulation.compare(emulation.Emulation.parse(workers, slow, compute, trace), steps)
    say(emulation.table(speeds))
    if json is not None:
        out.write_json(json, [emulation.record(line) for line in speeds])


@bench_app.command()
def rehearse(
    evidence: Annotated[str, typer.Argument(help="`auto.json` from the `log_dir` of a run.", metavar="FILE")],
    config: Config,
    overrides: Set = None,
) -> None:
    """Show which modes `auto` would have chosen in a finished run.

    Prints one decision per window of recorded step timings.
    """
    from persia.modes import Auto, load_evidence
    from persia.modes import rehearse as decisions

    mode = read_config(config, overrides).mode
    if not isinstance(mode, Auto):
        raise ConfigError(f"Invalid mode {mode} in {config}; rehearse needs mode.kind = 'auto'.", field="mode")
    for choice in decisions(mode, load_evidence(evidence).steps):
        say(str(choice))
