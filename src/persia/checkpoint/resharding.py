"""Rewrites checkpoints without a cluster: for another number of PSs, with some tables only, or as a full checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia import batching
from persia.checkpoint.compatibility import check_values
from persia.checkpoint.format import MOST_SHARDS, RemovedPart, RowsPart, StatePart, StepChoice
from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.servers import clock_gaps, server_pieces
from persia.checkpoint.storage import ahead
from persia.checkpoint.writer import CheckpointWriter
from persia.errors import CheckpointError
from persia.schema import Schema
from persia.types import BUCKETS, BucketMap
from persia.types.half_floats import Dtype, to_halves

__all__ = ["ReshardOptions", "compact", "reshard"]

PART_BYTES = 32 << 20
Arrays = dict[str, NDArray[Any]]
Progress = Callable[[int], object]


class ReshardOptions(NamedTuple):
    """Options of `reshard`.

    Attributes:
        servers: number of embedding PSs to write parts for.
        tables: tables to include; None for all. A checkpoint of some tables can be read and given to
            `Trainer.load_rows`, but not resumed.
        dtype: dtype of embeddings; None for each table's own. "float16" halves the size of float32 and preserves 3
            digits, "bfloat16" 2.
        state: whether to include the optimizer state of rows. Prediction and warm starts do not need it.
    """

    servers: int = 1
    tables: tuple[str, ...] | None = None
    dtype: Dtype | None = None
    state: bool = True


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    options: ReshardOptions,
    *,
    step: StepChoice = None,
    progress: Progress = lambda _: None,
) -> str:
    """Rewrites a checkpoint as a full one, with separate parts for each embedding PS.

    Rows are read and written part by part. The recency of rows is kept, and so are counts of ids that are not admitted
    yet. The counters of the PSs are reset.

    Args:
        source: directory of checkpoints, or of one step.
        target: another directory of checkpoints, to add the result to.
        options: properties of the result.
        step: step to read, "best" or "latest"; None for the latest.
        progress: called with the number of rows after each part.

    Returns:
        Path of the new checkpoint.

    Raises:
        CheckpointError: an argument is invalid, a part is damaged, a value exceeds the dtype, or writing failed.
    """
    if not 1 <= options.servers <= BUCKETS:
        raise CheckpointError(f"Invalid servers = {options.servers}; expected 1 to {BUCKETS}.", field="servers")
    buckets = BucketMap.even(options.servers)
    reader = CheckpointReader(source, step)
    with CheckpointWriter(target, reader.manifest.global_step) as writer:
        if reader.path == writer.path:
            raise CheckpointError(f"{writer.path} is also the source; choose another target.", path=writer.path)
        schema = _schema(reader, options.tables)
        all_gaps = clock_gaps(reader)
        for table, declared in schema.resolved_tables().items():
            gaps = all_gaps.get(table, {})
            dtype = options.dtype or declared.dtype
            converted = (
                _converted(reader.path, table, arrays, gaps.get(shard, 0), options.state, dtype)
                for shard, arrays in reader.rows(table)
            )
            with closing(ahead(_by_owner(table, converted, buckets, progress))) as parts:
                for owner, arrays in parts:
                    writer.add_rows(table, owner * MOST_SHARDS, arrays)
        for part in reader.manifest.parts if options.tables is None else []:
            if not isinstance(part, RowsPart | RemovedPart) and not _of_servers(part):
                writer.copy(part, reader.views(part))
        for number, (server, pieces) in enumerate(server_pieces(reader) if options.tables is None else ()):
            # Those who load it merge them for their shards. The clocks are in the stamps of the rows.
            if sketches := [piece for piece in pieces if piece["array"] == "sketch"]:
                writer.add_state(f"server-{server}.{number}", sketches)
        return writer.commit(
            schema=schema,
            config=reader.config,
            buckets=buckets,
            global_step=reader.manifest.global_step,
            extra=reader.extra,
            span=reader.manifest.span,
        )


def compact(url: str | os.PathLike[str], step: StepChoice = None, *, progress: Progress = lambda _: None) -> str:
    """Replaces an incremental checkpoint by a full one. Checkpoints that build on it remain valid.

    Args:
        url: directory of checkpoints.
        step: step to read, "best" or "latest"; None for the latest.
        progress: called with the number of rows after each part.

    Returns:
        Path of the checkpoint. A full checkpoint is not changed.

    Raises:
        CheckpointError: a part is damaged, or writing failed; the checkpoint is then unchanged.
    """
    reader = CheckpointReader(url, step)
    if reader.manifest.base is None:
        return reader.path
    manifest = reader.manifest
    with CheckpointWriter(reader.root, reader.base.step) as writer:
        for table, declared in reader.schema.resolved_tables().items():
            for shard, arrays in reader.rows(table) if table in manifest.tables else ():
                arrays["embeddings"] = to_halves(arrays["embeddings"], declared.dtype)
                writer.add_rows(table, shard, arrays)
                progress(len(arrays["ids"]))
        for part in manifest.parts:
            if not isinstance(part, RowsPart | RemovedPart):
                writer.copy(part, reader.views(part))
        return writer.commit(
            schema=reader.schema,
            config=reader.config,
            buckets=manifest.buckets,
            global_step=manifest.global_step,
            extra=reader.extra,
            span=manifest.span,
            content=manifest.content,
        )


def _schema(reader: CheckpointReader, tables: Iterable[str] | None) -> Schema:
    """Returns the schema with the chosen tables, each declared."""
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


def _converted(path: str, table: str, arrays: Arrays, gap: int, state: bool, dtype: Dtype) -> Arrays:
    """Returns rows with comparable stamps, in the requested dtype, with or without state."""
    if gap:
        arrays["stamp"] = arrays["stamp"] + np.uint32(gap)
    if not state:
        arrays["state"] = arrays["state"][:, :0]
    if dtype != "float32":
        check_values(path, table, arrays, dtype)
    arrays["embeddings"] = to_halves(arrays["embeddings"], dtype)
    return arrays


def _by_owner(
    table: str, chunks: Iterator[Arrays], buckets: BucketMap, progress: Progress
) -> Iterator[tuple[int, Arrays]]:
    """Yields the rows by PS, in parts of about `PART_BYTES`."""
    waiting: list[list[Arrays]] = [[] for _ in range(buckets.servers)]
    sizes = [0] * buckets.servers
    for arrays in chunks:
        rows = len(arrays["ids"])
        for owner, part in _split(table, arrays, buckets):
            waiting[owner].append(part)
            sizes[owner] += sum(array.nbytes for array in part.values())
            if sizes[owner] >= PART_BYTES:
                yield owner, _joined(waiting[owner])
                waiting[owner], sizes[owner] = [], 0
        progress(rows)
    for owner, parts in enumerate(waiting):
        if parts:
            yield owner, _joined(parts)


def _split(table: str, arrays: Arrays, buckets: BucketMap) -> Iterator[tuple[int, Arrays]]:
    if buckets.servers == 1:
        yield 0, arrays
        return
    owners = batching.owners(table, arrays["ids"], buckets)
    order = np.argsort(owners, kind="stable")
    ends = np.cumsum(np.bincount(owners, minlength=buckets.servers))
    grouped = {name: np.take(array, order, axis=0) for name, array in arrays.items()}
    for owner, end in enumerate(ends):
        begin = ends[owner - 1] if owner else 0
        if end > begin:
            yield owner, {name: array[begin:end] for name, array in grouped.items()}


def _joined(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if len(parts) > 1 else parts[0]
