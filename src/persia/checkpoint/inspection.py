"""Summarises the contents of a checkpoint, from its manifest and the headers of dense parts only."""

from __future__ import annotations

import math
import os
from datetime import datetime
from typing import TYPE_CHECKING

import msgspec

from persia.checkpoint.best import BestCheckpoint, read_best
from persia.checkpoint.format import RowsPart, StatePart, StepChoice, TensorsPart
from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["Inspection", "TableInspection", "TensorInspection", "format_inspection", "inspect"]


class TableInspection(msgspec.Struct, frozen=True):
    """Summary of one table; `bytes` covers all its parts."""

    name: str
    rows: int
    dim: int
    dtype: str
    optimizer: str
    state_width: int
    shards: int
    parts: int
    bytes: int


class TensorInspection(msgspec.Struct, frozen=True):
    """Summary of one dense tensor; `part` is the name under which it was added."""

    part: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class Inspection(msgspec.Struct, frozen=True):
    """Contents of a checkpoint.

    `states` lists names and bytes. `span` holds the first and last step at which rows were captured. `adds_to` lists
    the steps that an incremental checkpoint builds on, newest first; `tables` and `bytes` exclude these. `best` is the
    best checkpoint of the directory, and `score` the held-out metric of this one, by name; None where not known.
    """

    path: str
    global_step: int
    span: tuple[int, int]
    created: datetime
    persia: str
    version: int
    adds_to: tuple[int, ...]
    tables: tuple[TableInspection, ...]
    tensors: tuple[TensorInspection, ...]
    states: tuple[tuple[str, int], ...]
    parts: int
    bytes: int
    best: BestCheckpoint | None = None
    score: tuple[str, float] | None = None


def inspect(url: str | os.PathLike[str], step: StepChoice = None) -> Inspection:
    """Summarises a checkpoint without reading its rows.

    Args:
        url: directory of checkpoints, or of one step.
        step: step to inspect, "best" or "latest"; None for the latest.

    Raises:
        CheckpointError: there is no valid checkpoint.
    """
    reader = CheckpointReader(url, step)
    manifest = reader.manifest
    tables: list[TableInspection] = []
    for name, table in manifest.tables.items():
        sizes = [part.bytes for part in manifest.parts if isinstance(part, RowsPart) and part.table == name]
        rule = type(table.optimizer).__name__ if table.optimizer else "-"
        tables.append(
            TableInspection(
                name, table.rows, table.dim, table.dtype, rule, table.state_width, table.shards, len(sizes), sum(sizes)
            )
        )
    metric, value = reader.extra.get("metric"), reader.extra.get("value")
    tensors = [
        TensorInspection(part.name, name, dtype, shape, size)
        for part in manifest.parts
        if isinstance(part, TensorsPart)
        for name, dtype, shape, size in reader.describe(part)
    ]
    return Inspection(
        path=reader.path,
        global_step=manifest.global_step,
        span=manifest.span,
        created=manifest.created,
        persia=manifest.persia,
        version=manifest.version,
        adds_to=tuple(link.base.step for link in reader.links[1:]),
        tables=tuple(tables),
        tensors=tuple(tensors),
        states=tuple((part.name, part.bytes) for part in manifest.parts if isinstance(part, StatePart)),
        parts=len(manifest.parts),
        bytes=sum(part.bytes for part in manifest.parts),
        best=_best(reader),
        score=(metric, value) if isinstance(metric, str) and isinstance(value, float | int) else None,
    )


def _best(reader: CheckpointReader) -> BestCheckpoint | None:
    try:
        return read_best(Storage(reader.root))
    except CheckpointError:  # A damaged BEST does not concern this checkpoint.
        return None


def format_inspection(inspection: Inspection) -> Group:
    """Renders a summary for a `rich` console."""
    from rich.console import Group

    from persia.telemetry.terminal import Grid, plain

    step = f"step {inspection.global_step}"
    if inspection.span[0] != inspection.span[1]:
        step += f" (rows of steps {inspection.span[0]} to {inspection.span[1]})"
    if inspection.adds_to:
        step += f", adds to steps {', '.join(map(str, inspection.adds_to))}"
    about = plain(
        f"{inspection.path}\n{step}, created {inspection.created:%Y-%m-%d %H:%M:%S %Z} by persia {inspection.persia}\n"
        f"{inspection.parts} parts, {_bytes(inspection.bytes)}{_scores(inspection)}"
    )
    text, sizes = ("table", "dtype", "optimizer"), ("rows", "shards", "parts", "size")
    tables = Grid("table", "dim", "dtype", "optimizer", *sizes, text=text, title="Embedding tables")
    for t in inspection.tables:
        cells = (t.name, str(t.dim), t.dtype, t.optimizer, f"{t.rows:,}", str(t.shards), str(t.parts), _bytes(t.bytes))
        tables.add_row(*cells)
    text = ("part", "tensor", "dtype")
    dense = Grid("part", "tensor", "dtype", "shape", "size", text=text, title="Dense tensors and states")
    for d in inspection.tensors:
        dense.add_row(d.part, d.name, d.dtype, "x".join(map(str, d.shape)) or "-", _bytes(d.bytes))
    for name, size in inspection.states:
        dense.add_row(name, "", "", "", _bytes(size))
    return Group(about, tables, dense)


def _scores(inspection: Inspection) -> str:
    """Formats the held-out metric of a checkpoint, and which one of its directory is the best."""
    lines = []
    if inspection.score is not None:
        lines.append(f"held-out {inspection.score[0]} {inspection.score[1]:.6g}")
    if (best := inspection.best) is not None:
        this = ": this one" if best.step == inspection.global_step else ""
        lines.append(f"best: step {best.step}, {best.metric} {best.value:.6g}{this}")
    return "".join(f"\n{line}" for line in lines)


def _bytes(count: int) -> str:
    """Formats 1536 as '1.5 KiB'."""
    power = min(5, int(math.log2(count) // 10)) if count else 0
    return f"{count / 1024**power:.1f} {' KMGTP'[power]}iB" if power else f"{count} B"
