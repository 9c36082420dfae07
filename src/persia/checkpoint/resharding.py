"""Checkpoints made from checkpoints, without a cluster: for another number of PSs, of some tables, or in one piece."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.checkpoint.format import RemovedPart, RowsPart, StatePart
from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.servers import MOST_SHARDS, clock_gaps
from persia.checkpoint.storage import ahead
from persia.checkpoint.writer import CheckpointWriter
from persia.errors import CheckpointError
from persia.schema import Schema

__all__ = ["ReshardOptions", "compact", "reshard"]

PART_BYTES = 32 << 20
Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int], object]


class ReshardOptions(NamedTuple):
    """What becomes of a checkpoint.

    Attributes:
        servers: how many embedding PSs it is for.
        tables: those to take; None for all. With some only, the result is for `Trainer.load_rows` and for reading.
        dtype: of embeddings; "float16" takes half the room, and is exact to 3 digits.
        state: whether the optimizer's state of rows is taken; without it rows are for prediction, or to begin with.
    """

    servers: int = 1
    tables: tuple[str, ...] | None = None
    dtype: Literal["float32", "float16"] = "float32"
    state: bool = True


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ReshardOptions,
    *,
    step: int | None = None,
    progress: Progress = lambda _: None,
) -> str:
    """Writes a checkpoint anew, as a full one, with the rows of each embedding PS apart.

    Rows are read and written part by part. The recency of rows is kept; occurrences of ids that are not admitted, and
    the counters of the PSs, are not: they begin anew.

    Args:
        source: directory of checkpoints, or a step's own.
        target: another directory of checkpoints, to which it is added.
        options: what becomes of it.
        step: the step to read instead of the latest.
        progress: told the number of rows after each part.

    Returns:
        Path of the new checkpoint.

    Raises:
        CheckpointError: an argument does not fit, a part is damaged, a value does not fit float16, or writing failed.
    """
    if options.servers < 1:
        raise CheckpointError(f"servers = {options.servers}; give 1 or more.", field="servers")
    reader = CheckpointReader(source, step)
    with CheckpointWriter(target, reader.manifest.global_step) as writer:
        if reader.path == writer.path:
            raise CheckpointError(f"{writer.path} is read from; choose another target.", path=writer.path)
        schema = _schema(reader, options.tables)
        all_gaps = clock_gaps(reader)
        for table in schema.resolved_tables():
            gaps = all_gaps.get(table, {})
            moved = (_moved(reader, arrays, gaps.get(shard, 0), options) for shard, arrays in reader.rows(table))
            with closing(ahead(_by_owner(table, moved, options.servers, progress))) as parts:
                for owner, arrays in parts:
                    writer.add_rows(table, owner * MOST_SHARDS, arrays)
        for part in reader.manifest.parts if options.tables is None else []:
            if not isinstance(part, RowsPart | RemovedPart) and not _of_servers(part):
                writer.copy(part, reader.views(part))
        return writer.commit(
            schema=schema,
            config=reader.config,
            global_step=reader.manifest.global_step,
            extra=reader.extra,
            span=reader.manifest.span,
        )


def compact(url: str | os.PathLike[str], step: int | None = None, *, progress: Progress = lambda _: None) -> str:
    """Makes an incremental checkpoint a full one, in its place; those that add to it still do.

    Args:
        url: directory of checkpoints.
        step: which one; None for the latest.
        progress: told the number of rows after each part.

    Returns:
        Path of the checkpoint. One that is full already stays as it is.

    Raises:
        CheckpointError: a part is damaged, or writing failed; the checkpoint is then as it was.
    """
    reader = CheckpointReader(url, step)
    if reader.manifest.base is None:
        return reader.path
    manifest = reader.manifest
    with CheckpointWriter(reader.root, reader.base.step) as writer:
        for table in manifest.tables:
            for shard, arrays in reader.rows(table):
                writer.add_rows(table, shard, arrays)
                progress(len(arrays["ids"]))
        for part in manifest.parts:
            if not isinstance(part, RowsPart | RemovedPart):
                writer.copy(part, reader.views(part))
        return writer.commit(
            schema=reader.schema,
            config=reader.config,
            global_step=manifest.global_step,
            extra=reader.extra,
            span=manifest.span,
            content=manifest.content,
        )


def _schema(reader: CheckpointReader, tables: Iterable[str] | None) -> Schema:
    """The schema with the tables that are taken, each declared."""
    known = reader.schema.resolved_tables()
    if tables is None:
        return reader.schema
    for name in tables:
        if name not in known:
            raise CheckpointError(
                f"{reader.path} has no table {name!r}; it has {', '.join(known)}.", path=reader.path, table=name
            )
    features = [feature for feature in reader.schema.id_features if feature.table_name in tables]
    return msgspec.structs.replace(
        reader.schema, id_features=features, tables=[table for name, table in known.items() if name in tables]
    )


def _of_servers(part: object) -> bool:
    return isinstance(part, StatePart) and part.name.startswith("server-")


def _moved(reader: CheckpointReader, arrays: Arrays, gap: int, options: ReshardOptions) -> Arrays:
    """Rows with comparable stamps, in the dtype and with the state that are wanted."""
    if gap:
        arrays["stamp"] = arrays["stamp"] + np.uint32(gap)
    if not options.state:
        arrays["state"] = arrays["state"][:, :0]
    if options.dtype == "float16":
        with np.errstate(over="ignore"):
            arrays["embeddings"] = arrays["embeddings"].astype(np.float16)
        if not np.isfinite(arrays["embeddings"]).all():
            raise CheckpointError(
                f"{reader.path}: values beyond 65504 do not fit float16; take float32.", path=reader.path
            )
    return arrays


def _by_owner(table: str, chunks: Iterator[Arrays], servers: int, progress: Progress) -> Iterator[tuple[int, Arrays]]:
    """The same rows, sorted by PS, in parts of a good size."""
    waiting: list[list[Arrays]] = [[] for _ in range(servers)]
    sizes = [0] * servers
    for arrays in chunks:
        rows = len(arrays["ids"])
        for owner, mine in _split(table, arrays, servers):
            waiting[owner].append(mine)
            sizes[owner] += sum(array.nbytes for array in mine.values())
            if sizes[owner] >= PART_BYTES:
                yield owner, _joined(waiting[owner])
                waiting[owner], sizes[owner] = [], 0
        progress(rows)
    for owner, parts in enumerate(waiting):
        if parts:
            yield owner, _joined(parts)


def _split(table: str, arrays: Arrays, servers: int) -> Iterator[tuple[int, Arrays]]:
    if servers == 1:
        yield 0, arrays
        return
    owners = batching.owners(table, arrays["ids"], servers)
    order = np.argsort(owners.astype(np.uint16), kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=servers))
    grouped = {name: np.take(array, order, axis=0) for name, array in arrays.items()}
    for owner, end in enumerate(ends):
        begin = ends[owner - 1] if owner else 0
        if end > begin:
            yield owner, {name: array[begin:end] for name, array in grouped.items()}


def _joined(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
