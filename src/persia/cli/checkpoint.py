"""`persia checkpoint ...`: looks at checkpoints, checks, converts and compares them, without a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from persia.errors import ConfigError

if TYPE_CHECKING:
    from persia.checkpoint import CheckpointReader

__all__ = ["checkpoint_app"]

checkpoint_app = typer.Typer(no_args_is_help=True, help="Look at checkpoints, check, convert and compare them.")

Directory = Annotated[str, typer.Argument(help="Directory with checkpoints, or one step-N of it.", metavar="DIR")]
Target = Annotated[str, typer.Argument(help="Where to write.", metavar="TARGET")]
Step = Annotated[int | None, typer.Option(help="The step to read instead of the latest.", metavar="N")]
Tables = Annotated[list[str] | None, typer.Option("--table", help="Take this table; repeatable. All by default.")]


@checkpoint_app.command()
def inspect(directory: Directory, step: Step = None) -> None:
    """Show what a checkpoint holds: step, tables, rows, sizes, parts, and what it adds to."""
    from persia.checkpoint import format_inspection
    from persia.checkpoint import inspect as inspect_checkpoint
    from persia.cli import ui as out

    out.CONSOLE.print(format_inspection(inspect_checkpoint(directory, step)))


@checkpoint_app.command()
def verify(directory: Directory, step: Step = None) -> None:
    """Read every part, also of the checkpoints that it adds to, and check length, checksum and content."""
    from persia.checkpoint import CheckpointReader

    reader = CheckpointReader(directory, step)
    with _bar("verifying", sum(part.bytes for _, part in reader.all_parts())) as progress:
        checked = reader.verify(progress)
    typer.echo(f"{reader.path} is intact: {len(reader.all_parts()):,} parts, {checked:,} bytes")


@checkpoint_app.command()
def reshard(
    directory: Directory,
    target: Target,
    ps: Annotated[int, typer.Option(help="Number of embedding PSs that will load it.")] = 1,
    step: Step = None,
    table: Tables = None,
    dtype: Annotated[str, typer.Option(help="Of embeddings: float32 or float16.")] = "float32",
    rows_only: Annotated[bool, typer.Option("--rows-only", help="Leave the optimizer's state of rows out.")] = False,
) -> None:
    """Write a checkpoint anew, as a full one, with the rows of each embedding PS apart.

    Any checkpoint can be loaded into any number of PSs. This makes smaller ones: of some tables, as float16, for
    prediction; or one whose parts each PS finds together.
    """
    from persia.checkpoint import CheckpointReader, ReshardOptions
    from persia.checkpoint import reshard as reshard_checkpoint

    if dtype not in ("float32", "float16"):
        raise ConfigError(f"--dtype {dtype}: use float32 or float16.", field="dtype")
    kind: Literal["float32", "float16"] = "float16" if dtype == "float16" else "float32"
    options = ReshardOptions(ps, tuple(table) if table else None, kind, not rows_only)
    with _bar("resharding", _rows(CheckpointReader(directory, step), table)) as progress:
        path = reshard_checkpoint(directory, target, options, step=step, progress=progress)
    typer.echo(path)


@checkpoint_app.command()
def compact(directory: Directory, step: Step = None) -> None:
    """Make an incremental checkpoint a full one, in its place."""
    from persia.checkpoint import CheckpointReader
    from persia.checkpoint import compact as compact_checkpoint

    with _bar("compacting", _rows(CheckpointReader(directory, step), None)) as progress:
        path = compact_checkpoint(directory, step, progress=progress)
    typer.echo(path)


@checkpoint_app.command()
def diff(
    first: Annotated[str, typer.Argument(help="A directory with checkpoints, or one step-N of it.", metavar="FIRST")],
    second: Annotated[str, typer.Argument(help="Another one, or the same.", metavar="SECOND")],
    step: Annotated[int | None, typer.Option(help="The step of FIRST, instead of the latest.", metavar="N")] = None,
    second_step: Annotated[int | None, typer.Option(help="The step of SECOND, likewise.", metavar="N")] = None,
) -> None:
    """Compare the embeddings of two checkpoints.

    Two steps of one run: `persia checkpoint diff DIR DIR --step 1000 --second-step 2000`.
    """
    from rich.table import Table
    from rich.text import Text

    from persia.checkpoint import CheckpointReader
    from persia.checkpoint import diff as diff_checkpoints
    from persia.cli import ui as out

    total = _rows(CheckpointReader(first, step), None) + _rows(CheckpointReader(second, second_step), None)
    with _bar("comparing", total) as progress:
        found = diff_checkpoints(first, second, steps=(step, second_step), progress=progress)
    table = Table("table", title="Embeddings", title_justify="left")
    for heading in ("only first", "only second", "same", "changed", "largest", "mean distance"):
        table.add_column(heading, justify="right")
    for t in found:
        counts = (f"{count:,}" for count in (t.only_first, t.only_second, t.same, t.changed))
        table.add_row(Text(t.name), *counts, f"{t.largest:.3g}", f"{t.mean:.3g}")
    out.CONSOLE.print(table)


@checkpoint_app.command()
def export(
    directory: Directory,
    target: Target,
    kind: Annotated[str, typer.Option("--format", help="parquet or npy.")] = "parquet",
    step: Step = None,
    table: Tables = None,
    state: Annotated[bool, typer.Option("--state", help="Also write the optimizer's state.")] = False,
) -> None:
    """Write the rows of each table to a Parquet file, or to one .npy file per column."""
    from persia.checkpoint import CheckpointReader
    from persia.checkpoint import export as export_checkpoint

    if kind not in ("parquet", "npy"):
        raise ConfigError(f"--format {kind}: use parquet or npy.", field="format")
    with _bar("exporting", _rows(CheckpointReader(directory, step), table)) as progress:
        files = export_checkpoint(
            directory,
            target,
            "npy" if kind == "npy" else "parquet",
            tables=table,
            step=step,
            state=state,
            progress=progress,
        )
    for file in files:
        typer.echo(file)


def _rows(reader: CheckpointReader, tables: list[str] | None) -> int:
    """Rows that will be read, those included that are no longer in force."""
    return sum(
        link.manifest.tables[name].rows
        for link in reader.links
        for name in link.manifest.tables
        if tables is None or name in tables
    )


@contextlib.contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """A progress bar on the terminal's error output; gives what advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total or None)
        yield lambda count: bar.advance(task, count)
