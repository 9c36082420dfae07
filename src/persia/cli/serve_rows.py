"""The command `persia serve-rows`: one part of all rows, for prediction servers on other hosts."""

from __future__ import annotations

import logging
import re
import signal
from typing import Annotated

import typer

from persia.errors import ConfigError
from persia.telemetry.logs import get_logger, log_to_stderr

__all__ = ["serve_rows"]

SIGNALS = {signal.SIGINT, signal.SIGTERM}


def serve_rows(
    url: Annotated[
        str, typer.Argument(help="Log of changes, as in `trainer.publish.url`: a directory or a URL.", metavar="URL")
    ],
    part: Annotated[str, typer.Option(help="Which part of the rows to serve: 0/2 and 1/2 for two.", metavar="I/N")],
    address: Annotated[
        str, typer.Option(help="Address to listen on: tcp://host:port; port * for any free one.", metavar="ADDRESS")
    ] = "tcp://127.0.0.1:*",
    cache_dir: Annotated[
        str | None,
        typer.Option(help="Local directory for rows of snapshots, with which it restarts faster.", metavar="DIR"),
    ] = None,
    poll_seconds: Annotated[float, typer.Option(help="Seconds between two looks at the log.")] = 1.0,
    grace_seconds: Annotated[
        float, typer.Option(help="Seconds for which the rows of an epoch are kept once the next one is complete.")
    ] = 300.0,
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Let other hosts in without CURVE keys, where only trusted ones can reach ADDRESS."
        ),
    ] = False,
) -> None:
    """Serve one part of the rows of a log of changes, for tables that do not fit one host.

        persia serve-rows runs/changes --part 0/2 --address tcp://127.0.0.1:7000
        persia serve-rows runs/changes --part 1/2 --address tcp://127.0.0.1:7001
        persia serve runs/changes --rows tcp://127.0.0.1:7000 --rows tcp://127.0.0.1:7001

    Set PERSIA_CURVE_KEYS, here and for `persia serve`, to listen on other interfaces than loopback. SIGTERM ends it.
    """
    log_to_stderr(logging.INFO)
    from persia import rpc
    from persia.serve import RowServer, RowServerOptions
    from persia.services import ServedRows

    log = get_logger("persia.serve")
    found = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    if found is None:
        raise ConfigError(f"Invalid --part {part}; expected I/N, such as 0/2 for the first of two parts.", field="part")
    options = RowServerOptions(poll_seconds=poll_seconds, grace_seconds=grace_seconds, cache_dir=cache_dir)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # All threads inherit it, so that sigwait gets them.
    try:
        with (
            RowServer(url, int(found[1]), int(found[2]), options) as server,
            rpc.serve(server, address, protocol=ServedRows, insecure=insecure) as listening,
        ):
            log.info("%s serves part %s of %s", listening.address, part, url)
            log.info("%s: it ends", signal.Signals(signal.sigwait(SIGNALS)).name)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
