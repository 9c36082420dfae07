"""The commands `persia checkpoint ...`, which need no cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, cast

import typer

from persia.cli.configured_run import Step, step_choice
from persia.errors import ConfigError
from persia.printable import say
from persia.types.half_floats import DTYPES, Dtype

if TYPE_CHECKING:
    from persia.checkpoint import CheckpointReader
    from persia.types import PublishDtype

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(no_args_is_help=True, help="Inspect, verify, convert and compare checkpoints.")

Directory = Annotated[str, typer.Argument(help="Checkpoint directory, or one step-N inside it.", metavar="DIR")]
Target = Annotated[str, typer.Argument(help="Directory to write to.", metavar="TARGET")]
Tables = Annotated[
    list[str] | None, typer.Option("--table", help="Table to include. Repeatable. Defaults to all.", metavar="NAME")
]


@checkpoint_app.command()
def inspect(directory: Directory, step: Step = None) -> None:
    """Show the step, tables, rows, sizes and parts of a checkpoint.

    For an incremental checkpoint, also shows its base.
    """
    from persia.checkpoint import format_inspection
    from persia.checkpoint import inspect as inspect_checkpoint
    from persia.cli import ui as out

    out.CONSOLE.print(format_inspection(inspect_checkpoint(directory, step_choice(step))))


@checkpoint_app.command()
def verify(directory: Directory, step: Step = None) -> None:
    """Check length, checksum and content of every part of a checkpoint.

    Includes the checkpoints that an incremental checkpoint builds on.
    """
    from persia.checkpoint import CheckpointReader

    reader = CheckpointReader(directory, step_choice(step))
    with _bar("verifying", sum(part.bytes for _, part in reader.all_parts())) as progress:
        checked = reader.verify(progress)
    say(f"{reader.path} is intact: {len(reader.all_parts()):,} parts, {checked:,} bytes")


@checkpoint_app.command()
def reshard(
    directory: Directory,
    target: Target,
    ps: Annotated[int, typer.Option(help="Number of embedding PSs to write parts for.")] = 1,
    step: Step = None,
    table: Tables = None,
    dtype: Annotated[
        str, typer.Option(help="Type of the embeddings: float32, bfloat16, float16, or table for each table's own.")
    ] = "table",
    rows_only: Annotated[bool, typer.Option("--rows-only", help="Omit the optimizer state of rows.")] = False,
) -> None:
    """Rewrite a checkpoint as a full one, partitioned for a number of PSs.

    Loading does not need this: any number of PSs can load any checkpoint. Use it to write a smaller checkpoint for
    prediction (some tables, float16, no optimizer state), or to let each PS read only its own parts.
    """
    from persia.checkpoint import CheckpointReader, ReshardOptions
    from persia.checkpoint import reshard as reshard_checkpoint

    if dtype != "table" and dtype not in DTYPES:
        raise ConfigError(f"Invalid --dtype {dtype}; expected one of: table, {', '.join(DTYPES)}.", field="dtype")
    kind = None if dtype == "table" else cast("Dtype", dtype)
    options = ReshardOptions(ps, tuple(table) if table else None, kind, not rows_only)
    with _bar("resharding", _rows(CheckpointReader(directory, step_choice(step)), table)) as progress:
        path = reshard_checkpoint(directory, target, options, step=step_choice(step), progress=progress)
    say(path)


@checkpoint_app.command()
def compact(directory: Directory, step: Step = None) -> None:
    """Turn an incremental checkpoint into a full one, in place."""
    from persia.checkpoint import CheckpointReader
    from persia.checkpoint import compact as compact_checkpoint

    with _bar("compacting", _rows(CheckpointReader(directory, step_choice(step)), None)) as progress:
        path = compact_checkpoint(directory, step_choice(step), progress=progress)
    say(path)


@checkpoint_app.command()
def diff(
    first: Annotated[str, typer.Argument(help="Checkpoint directory, or one step-N inside it.", metavar="FIRST")],
    second: Annotated[str, typer.Argument(help="Checkpoint to compare with; may be FIRST.", metavar="SECOND")],
    step: Annotated[str | None, typer.Option(help="Checkpoint of FIRST.", metavar="N|best|latest")] = None,
    second_step: Annotated[str | None, typer.Option(help="Checkpoint of SECOND.", metavar="N|best|latest")] = None,
) -> None:
    """Compare the embeddings of two checkpoints.

    To compare two steps of one run: `persia checkpoint diff DIR DIR --step 1000 --second-step 2000`.
    """
    from persia.checkpoint import CheckpointReader
    from persia.checkpoint import diff as diff_checkpoints
    from persia.cli import ui as out
    from persia.telemetry.terminal import Grid

    one, two = step_choice(step), step_choice(second_step, "--second-step")
    total = _rows(CheckpointReader(first, one), None) + _rows(CheckpointReader(second, two), None)
    with _bar("comparing", total) as progress:
        differences = diff_checkpoints(first, second, steps=(one, two), progress=progress)
    columns = ("only first", "only second", "same", "changed", "largest", "mean distance")
    table = Grid("table", *columns, text=["table"], title="Embeddings")
    for t in differences:
        counts = (f"{count:,}" for count in (t.only_first, t.only_second, t.same, t.changed))
        table.add_row(t.name, *counts, f"{t.largest:.3g}", f"{t.mean:.3g}")
    out.CONSOLE.print(table)


@checkpoint_app.command()
def export(
    directory: Directory,
    target: Target,
    kind: Annotated[str, typer.Option("--format", help="File format: parquet, npy, safetensors or dcp.")] = "parquet",
    step: Step = None,
    table: Tables = None,
    state: Annotated[bool, typer.Option("--state", help="Also write the optimizer state of rows.")] = False,
) -> None:
    """Export the rows of each table to a Parquet or safetensors file, or to .npy files.

    The npy format writes one file per column, dcp one checkpoint of torch.distributed.checkpoint for all tables.
    """
    from persia.checkpoint import CheckpointReader
    from persia.checkpoint import export as export_checkpoint
    from persia.checkpoint.exporting import EXPORT_FORMATS

    if kind not in EXPORT_FORMATS:
        raise ConfigError(f"Invalid --format {kind}; expected {', '.join(EXPORT_FORMATS)}.", field="format")
    with _bar("exporting", _rows(CheckpointReader(directory, step_choice(step)), table)) as progress:
        files = export_checkpoint(
            directory,
            target,
            kind,
            tables=table,
            step=step_choice(step),
            state=state,
            progress=progress,
        )
    for file in files:
        say(file)


@checkpoint_app.command()
def publish(
    directory: Directory,
    output: Annotated[str, typer.Option(help="Log of changes to write: a directory or URL.", metavar="URL")],
    step: Step = None,
    dtype: Annotated[str, typer.Option(help="Type of the values: float32, float16 or int8.")] = "float32",
    config: Annotated[
        str | None,
        typer.Option(help="Configuration with the [model], if the checkpoint does not say.", metavar="TOML"),
    ] = None,
) -> None:
    """Publish a checkpoint to a log of changes, for prediction servers.

    The servers replace everything that they serve with the checkpoint. Nothing else may publish to the same log.
    """
    from persia.checkpoint import CheckpointReader
    from persia.config import convert, load
    from persia.publish import ModelDescription, publish_checkpoint

    model = None if config is None else load(config, []).get("model", {})
    description = None if model is None else convert(model, ModelDescription, config or "")
    with _bar("publishing", _rows(CheckpointReader(directory, step_choice(step)), None)) as progress:
        epoch = publish_checkpoint(
            directory,
            output,
            step=step_choice(step),
            dtype=cast("PublishDtype", dtype),
            model=description,
            progress=progress,
        )
    say(f"published to {output} as epoch {epoch}")


def _rows(reader: CheckpointReader, tables: list[str] | None) -> int:
    """Number of rows to read, including rows that a later increment replaces."""
    return sum(
        link.manifest.tables[name].rows
        for link in reader.links
        for name in link.manifest.tables
        if tables is None or name in tables
    )


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Shows a progress bar on stderr if it is a terminal; yields the function that advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda count: bar.advance(task, count)
