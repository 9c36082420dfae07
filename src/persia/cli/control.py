"""The commands of `persia control`, for a running job."""

from __future__ import annotations

import json as jsonlib
import secrets
import time
from typing import Annotated, Any

import typer

from persia.errors import ConfigError
from persia.printable import say

__all__ = ["control_app"]

CONTROL_SECONDS = 10.0
"""Deadline of a request to the job."""

POLL_SECONDS = 0.5
"""Interval of asking whether a request has been executed."""

control_app = typer.Typer(no_args_is_help=True, help="Control a running job.")


@control_app.command()
def switch(
    address: Annotated[str, typer.Argument(help="`cluster.control_address` of the run: tcp://host:port.")],
    kind: Annotated[
        str,
        typer.Argument(help="sync, hybrid, async, bsp, hop_bs, hop_bw, gba, or one of --import.", metavar="MODE"),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", help="Set an argument of the mode: `--set global_batch_size=4096`. Repeatable."),
    ] = None,
    modules: Annotated[
        list[str] | None,
        typer.Option(
            "--import",
            help="Import a module with a mode of your own; the job must import it too. Repeatable.",
            metavar="MODULE",
        ),
    ] = None,
) -> None:
    """Switch a running job to another mode at its next step boundary.

    Rows, hyper-parameters and optimizer state are kept. If the cluster uses CURVE keys, set PERSIA_CURVE_KEYS as the
    cluster does.
    """
    from persia import rpc
    from persia.cli.imports import import_modules
    from persia.modes import decode
    from persia.services import TokenService

    arguments: dict[str, Any] = {"kind": kind}
    for override in overrides or []:
        name, equals, value = override.partition("=")
        if not equals:
            raise ConfigError(f"Invalid --set {override}; expected NAME=VALUE.", field="set")
        try:
            arguments[name] = jsonlib.loads(value)
        except jsonlib.JSONDecodeError:
            arguments[name] = value
    import_modules(modules or [])
    mode = decode(jsonlib.dumps(arguments))
    tokens = rpc.connect(address, TokenService, peer="the run", timeout=CONTROL_SECONDS)
    try:
        tokens.request(mode)
    finally:
        rpc.close(tokens)
    say(f"The run at {address} switches to {mode} at its next step boundary.")


@control_app.command()
def scale(
    address: Annotated[str, typer.Argument(help="`cluster.control_address` of the run: tcp://host:port.")],
    counts: Annotated[
        list[str],
        typer.Argument(help="ps=N, embedding_workers=N, data_loaders=N, nn_workers=N; one or more.", metavar="ROLE=N"),
    ],
    keep_global_batch: Annotated[
        bool,
        typer.Option(
            "--keep-global-batch",
            help="Keep the batches of a step if the number of NN workers changes: each trains more or fewer of them.",
        ),
    ] = False,
) -> None:
    """Change the numbers of processes of a running job.

    Waits until new processes serve or train, retired ones have ended, and each embedding PS owns an equal part of the
    rows; Ctrl-C ends only the waiting. If the cluster uses CURVE keys, set PERSIA_CURVE_KEYS as the cluster does.
    """
    from persia import rpc
    from persia.errors import PersiaError
    from persia.services import BucketMaps

    numbers: dict[str, int] = {}
    for count in counts:
        name, _, number = count.partition("=")
        if not number.isdecimal():
            raise ConfigError(f"Invalid {count!r}; expected ROLE=N, such as ps=4.", field="counts")
        numbers[name] = int(number)
    run = rpc.connect(address, BucketMaps, peer="the run", timeout=CONTROL_SECONDS)
    ticket = secrets.token_hex(8)
    began, told = time.monotonic(), False
    try:
        last = run.map_state().progress  # Perhaps of the move before.
        while not (request := run.request_scale(ticket, numbers, keep_global_batch)).answered:
            state = run.map_state()
            if state.ordered is not None and state.progress.version == state.ordered.version:
                if state.progress != last and state.progress.rows != last.rows:
                    say(f"{state.progress.rows:,} rows are copied to other embedding PSs.")
                last = state.progress
            if not told and state.ordered is None and time.monotonic() - began > CONTROL_SECONDS:
                told = True
                say(
                    f"The driver of the run at {address} has not answered for {CONTROL_SECONDS:g} s. It may be "
                    "starting processes; check that it is alive. Ctrl-C ends only the waiting."
                )
            time.sleep(POLL_SECONDS)
    finally:
        rpc.close(run)
    if request.error:
        raise PersiaError(
            f"The run at {address} does not have all these numbers of processes; those before the one that failed may "
            f"have changed: {request.error}"
        )
    say(f"The run at {address} has {', '.join(f'{name}={number}' for name, number in numbers.items())}.")
