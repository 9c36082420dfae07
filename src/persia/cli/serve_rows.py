"""The command `persia serve-rows`: one part of all rows, for prediction servers on other hosts."""

from __future__ import annotations

import logging
import re
import signal
from typing import Annotated

import typer

from persia.cli.record_options import Fields, Shown, options_from_records
from persia.errors import ConfigError
from persia.serve.options import RowServerOptions
from persia.telemetry.logs import get_logger, log_to_stderr

__all__ = ["serve_rows"]

SIGNALS = {signal.SIGINT, signal.SIGTERM}


@options_from_records
def serve_rows(
    url: Annotated[
        str, typer.Argument(help="Log of changes, as in `trainer.publish.url`: a directory or a URL.", metavar="URL")
    ],
    *,
    part: Annotated[str, typer.Option(help="Which part of the rows to serve: 0/2 and 1/2 for two.", metavar="I/N")],
    address: Annotated[
        str, typer.Option(help="Address to listen on: tcp://host:port; port * for any free one.", metavar="ADDRESS")
    ] = "tcp://127.0.0.1:*",
    insecure: Annotated[
        bool,
        typer.Option(
            "--insecure", help="Accept other hosts without CURVE keys, where only trusted hosts can reach ADDRESS."
        ),
    ] = False,
    options: Annotated[RowServerOptions, Fields(cache_dir=Shown("DIR"))],
) -> None:
    """Serve one part of the rows of a log of changes, for tables that do not fit one host.

        persia serve-rows runs/changes --part 0/2 --address tcp://127.0.0.1:7000
        persia serve-rows runs/changes --part 1/2 --address tcp://127.0.0.1:7001
        persia serve runs/changes --rows tcp://127.0.0.1:7000 --rows tcp://127.0.0.1:7001

    Set PERSIA_CURVE_KEYS, here and for `persia serve`, to listen on other interfaces than loopback. SIGTERM stops it.
    """
    log_to_stderr(logging.INFO)
    from persia import rpc
    from persia.serve import RowServer
    from persia.services import ServedRows

    log = get_logger("persia.serve")
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", part)
    if match is None:
        raise ConfigError(f"Invalid --part {part}; expected I/N, such as 0/2 for the first of two parts.", field="part")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # All threads inherit it, so that sigwait gets them.
    try:
        with (
            RowServer(url, int(match[1]), int(match[2]), options) as server,
            rpc.serve(server, address, protocol=ServedRows, insecure=insecure) as listening,
        ):
            log.info("%s serves part %s of %s", listening.address, part, url)
            log.info("%s: stopping", signal.Signals(signal.sigwait(SIGNALS)).name)
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
