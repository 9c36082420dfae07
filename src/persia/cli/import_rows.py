"""The command `persia import`: writes a checkpoint with the embeddings of another run or library."""

from __future__ import annotations

import contextlib
import os
from typing import Annotated

import typer

from persia.cli.configured_run import Config, Set, closing_cluster, command_line, read_config
from persia.cli.earlier_run import check_unused
from persia.cli.fitted import fitted_run
from persia.printable import say

__all__ = ["import_"]


def import_(
    config: Config,
    source: Annotated[
        str,
        typer.Argument(
            help="Directory of TABLE.parquet or TABLE.safetensors files, or of torch.distributed.checkpoint.",
            metavar="SOURCE",
        ),
    ],
    output: Annotated[str, typer.Option(help="Directory for the checkpoint. Must not hold a run.", metavar="DIR")],
    overrides: Set = None,
    table: Annotated[
        list[str] | None, typer.Option("--table", help="Table to import. Repeatable. Defaults to all.", metavar="NAME")
    ] = None,
) -> None:
    """Start a run with the embeddings of another one, or of another library.

    Writes a checkpoint with these rows and a new network, which `persia train CONFIG --resume DIR` continues. The files
    are those that `persia export` writes; see `persia.interop.import_rows`. A directory that
    torch.distributed.checkpoint wrote needs tables of TorchRec; read only those that you trust.
    """
    from pathlib import Path

    from persia.checkpoint.storage import Storage
    from persia.interop import import_rows
    from persia.interop.torchrec import import_dcp

    run = read_config(config, overrides, output)
    check_unused(output)
    new = not os.path.exists(output)
    Storage(output).probe()  # Reading the rows may take hours.
    if new:
        with contextlib.suppress(OSError):  # Leaves no directory if the rows do not match. A URL is no path.
            os.rmdir(output)
    read = import_dcp if (Path(source) / ".metadata").exists() else import_rows
    run = fitted_run(run)
    trainer = run.build_trainer(run.reader().schema)
    with closing_cluster(trainer):
        done = read(trainer.embeddings, source, tables=table)
        path = trainer.save(output)
    for name, rows in done.items():
        evicted = f", {rows.evicted:,} of them evicted" if rows.evicted else ""
        say(f"{name}: {rows.inserted + rows.replaced:,} rows{evicted}")
    say(f"Wrote {path}. Next: {command_line(['train', config, '--resume', output], overrides or [], None)}")
