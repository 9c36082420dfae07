"""Writes one checkpoint, part by part. It becomes valid with `commit`.

The order of writes is: parts, each synced; their directories; `manifest.json`; `BEST`; `LATEST`. Older checkpoints are
removed last. A crash between any two leaves the previous checkpoint valid.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.best import Score, best_of, read_manifest, write_best
from persia.checkpoint.format import (
    FORMAT,
    LATEST,
    MANIFEST,
    MAX_STEP,
    MOST_SHARDS,
    VERSION,
    Base,
    Manifest,
    Part,
    RemovedPart,
    RowsPart,
    StatePart,
    TableRecord,
    TensorsPart,
    checksum_text,
    encode_manifest,
    step_name,
)
from persia.checkpoint.listing import complete_steps
from persia.checkpoint.packing import pack
from persia.checkpoint.retention import Retention
from persia.checkpoint.row_files import RowFiles, WrittenFile, base_of, check_layout, segment, write_file
from persia.checkpoint.storage import Storage, crc32
from persia.checkpoint.tensors import TensorView, Value, view
from persia.errors import CheckpointError
from persia.schema import EmbeddingOptimizer, Schema
from persia.telemetry.logs import get_logger
from persia.types import BucketMap, RowsToWrite, WrittenPart, WrittenState

__all__ = ["MARK_BYTES", "CheckpointWriter"]

_log = get_logger("persia.checkpoint")
_T = TypeVar("_T")

MARK_BYTES = 16
"""Size of the file by which other processes know the place of a checkpoint; see `CheckpointWriter.mark`."""


class CheckpointWriter:
    """Writes the checkpoint of one step into `url/step-N/`.

    As a context manager, it aborts unless `commit` has been called. Only one process may write to a directory at a
    time. A writer is not thread-safe. Calls block until their data are on disk (local) or uploaded.

    Args:
        url: directory of checkpoints: a path, or any URL that fsspec supports.
        step: global step; names the directory. An existing checkpoint of the step stays valid until `commit` replaces
            it. Incomplete files of an interrupted writer are removed.
        keep_last: number of newest checkpoints to keep at `commit`, with the checkpoints that they build on; None keeps
            all.
        keep_best: point `BEST` to the checkpoint with the highest score, and keep it.

    Attributes:
        content: random identifier of the contents, for checkpoints that build on this one.

    Raises:
        CheckpointError: the step or the URL is invalid, or the directory cannot be used.
    """

    def __init__(
        self, url: str | os.PathLike[str], step: int, *, keep_last: int | None = None, keep_best: bool = False
    ) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step < MAX_STEP:
            raise CheckpointError(f"Invalid step = {step!r}; expected a whole number up to {MAX_STEP - 1}.", step=step)
        if keep_last is not None and (not isinstance(keep_last, int) or keep_last < 1):
            raise CheckpointError(
                f"Invalid keep_last = {keep_last!r}; expected 1 or more, or None to keep all.", field="keep_last"
            )
        self._storage = Storage(url)
        self._step = step
        self._retention = Retention(keep_last, keep_best)
        self.content = secrets.token_hex(16)
        self._name = step_name(step)
        self._parts: list[Part] = []
        self._tables: dict[str, tuple[int, int, str]] = {}  # dim, state_width, dtype
        self._files = RowFiles(self._write)
        self._adopted: dict[str, tuple[int, int]] = {}  # Size and PS of each path that another process has written.
        self._open = True
        self._rewrite = self._claim()
        self._base = base_of(self._rewrite)

    def rest(self, between: Callable[[], object]) -> None:
        """Sets the function to call after each written MiB; it may sleep to throttle the writer."""
        self._storage.between = between

    @property
    def path(self) -> str:
        """Path of the step directory."""
        return self._storage.full(self._name)

    def add_rows(self, table: str, shard: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Appends rows of a shard as one part, best about 64 MiB.

        Args:
            table: name of the table.
            shard: number of the shard, unique within the table over all parameter servers.
            arrays: `ids` uint64 `[n]`, `embeddings` `[n, dim]`: float32, or in all parts float16, or the bits of
                bfloat16 as uint16; `state` float32 `[n, width]` (width may be 0), `update_count`, `last_step` and
                `stamp` uint32 `[n]`. The caller may reuse them after the call.

        Raises:
            CheckpointError: an array is missing or has the wrong shape or dtype; or the part cannot be written, which
                aborts the checkpoint.
        """
        self._check_open()
        self._add(self._files.rows(table, shard, arrays))

    def add_removed(self, table: str, shard: int, ids: NDArray[np.uint64]) -> None:
        """Marks rows of the base as removed, unless `add_rows` adds them again.

        Args:
            table: name of the table.
            shard: number of the shard as for `add_rows`; one call per shard.
            ids: uint64 `[n]`, in any order; ids without a row in the base are allowed.

        Raises:
            CheckpointError: an argument is invalid; or the part cannot be written, which aborts the checkpoint.
        """
        self._check_open()
        self._add(self._files.removed(table, shard, ids))

    def order(self, server: int, share: float) -> RowsToWrite:
        """Returns the order to a PS to write its part of this checkpoint; see `add_part` and `add_server_state`."""
        return RowsToWrite(self._storage.address, self._step, self._rewrite, self.content[:8], server, share)

    def add_part(self, part: WrittenPart) -> None:
        """Adds a part that another process has written by an `order`, synced by now.

        Raises:
            CheckpointError: its rows do not match other parts of the table.
        """
        self._check_open()
        self._add(part)
        self._adopted[part.path] = part.bytes, part.shard // MOST_SHARDS

    def add_server_state(self, server: int, state: WrittenState) -> None:
        """Adds state that a PS has written by an `order`, synced by now.

        Raises:
            CheckpointError: the name is taken.
        """
        self._check_open()
        self._check_name(state.name, StatePart)
        self._parts.append(StatePart(**state._asdict()))
        self._adopted[state.path] = state.bytes, server

    @contextmanager
    def mark(self) -> Iterator[tuple[str, str]]:
        """Writes a file with random contents, by which other processes know that they see the same place.

        Yields:
            Its path relative to the directory of checkpoints, and its checksum. It is removed afterwards.

        Raises:
            CheckpointError: it cannot be written, which aborts the checkpoint.
        """
        self._check_open()
        path = f"{self._name}/{self._base}mark-{secrets.token_hex(8)}"
        contents = memoryview(secrets.token_bytes(MARK_BYTES))
        self._abort_on_error(lambda: self._storage.put(path, bytes(contents), durable=False))
        try:
            yield path, checksum_text(crc32(contents))
        finally:
            with suppress(CheckpointError):  # The manifest does not name it, so readers ignore it.
                self._storage.remove(path)

    def add_tensors(self, name: str, tensors: Mapping[str, Value]) -> None:
        """Adds named tensors (numpy, or torch of any dense dtype and device), for example a module's state dict.

        Raises:
            CheckpointError: the name is taken, a tensor is not supported, or the part cannot be written.
        """
        self._check_open()
        self._check_name(name, TensorsPart)
        views: dict[str, TensorView] = {}
        for key, tensor in tensors.items():
            if not isinstance(key, str) or key == "__metadata__":
                raise CheckpointError(f"{name}: a tensor cannot be named {key!r}; give it another text.", name=name)
            views[key] = view(tensor, f"{name}.{key}")
        written = self._write(f"dense/{segment(name)}.safetensors", views)
        self._parts.append(TensorsPart(name=name, **written._asdict()))

    def add_state(self, name: str, state: Any) -> None:
        """Adds a nested value of the types listed at `packing.pack`. Reading returns an equal value.

        Raises:
            CheckpointError: the name is taken, a nested value is not supported, or the part cannot be written.
        """
        self._check_open()
        self._check_name(name, StatePart)
        written = self._write(f"state/{segment(name)}.safetensors", pack(state, name))
        self._parts.append(StatePart(name=name, **written._asdict()))

    def copy(self, part: TensorsPart | StatePart, views: Mapping[str, TensorView]) -> None:
        """Adds a part of another checkpoint, as returned by `CheckpointReader.views`.

        Raises:
            CheckpointError: the name is taken, or the part cannot be written.
        """
        self._check_open()
        self._check_name(part.name, type(part))
        folder = "dense" if isinstance(part, TensorsPart) else "state"
        written = self._write(f"{folder}/{segment(part.name)}.safetensors", views)
        self._parts.append(type(part)(name=part.name, **written._asdict()))

    def commit(
        self,
        *,
        schema: Schema,
        config: Any = None,
        global_step: int | None = None,
        extra: Mapping[str, Any] | None = None,
        optimizer: EmbeddingOptimizer | None = None,
        span: tuple[int, int] | None = None,
        base: Base | None = None,
        buckets: BucketMap | None = None,
        score: Score | None = None,
        content: str | None = None,
    ) -> str:
        """Completes the checkpoint and makes it the latest.

        Args:
            schema: schema of the model. All its tables are recorded, including those without rows.
            config: configuration as a dict of JSON values or a msgspec record.
            global_step: global step; defaults to the step that names the directory.
            extra: further small data, as JSON values.
            optimizer: optimizer of tables that declare none.
            span: first and last global step at which rows were captured; defaults to `global_step` for both.
            base: checkpoint of this directory that this one builds on.
            buckets: the PS of each bucket of ids, if shards are numbered by PS (`MOST_SHARDS`); None if they are not.
            score: held-out metric that `keep_best` compares. Stored as `score`, `metric` and `value` of `extra`.
            content: identifier of the checkpoint of this step that this one replaces with equal contents; LATEST does
                not change. None for a new identifier.

        Returns:
            Path of the step directory.

        Raises:
            CheckpointError: rows do not match the schema, a value is not JSON, or writing failed. The previous
                checkpoint then stays valid.
        """
        self._check_open()
        step = self._step if global_step is None else global_step
        manifest = Manifest[dict[str, Any]](
            format=FORMAT,
            version=VERSION,
            persia=_version(),
            created=datetime.now(UTC),
            global_step=step,
            span=(step, step) if span is None else span,
            base=self._checked_base(base),
            tables=self._table_records(schema, optimizer),
            buckets=buckets,
            parts=self._parts,
            schema=_builtins(schema, "schema"),
            config=_builtins({} if config is None else config, "config"),
            extra=_builtins({} if extra is None else extra, "extra") | _score_fields(score),
            content=content or self.content,
        )
        self.content = manifest.content
        data = encode_manifest(manifest)
        self._abort_on_error(self._storage.sync)
        self._abort_on_error(self._check_adopted)
        try:
            self._storage.put(f"{self._name}/{MANIFEST}", data)
        except CheckpointError:
            if self._manifest_is_not(data):
                self.abort()
            raise
        finally:
            self._open = False  # From here on the files stay, as a failed call may have taken effect.
        if score is not None and self._retention.best:
            self._mark_best()
        if content is None:  # Otherwise the contents are not newer.
            self._storage.put(LATEST, f"{self._name}\n".encode())
        self._prune()
        return self.path

    def _mark_best(self) -> None:
        """Points `BEST` to the best checkpoint up to this one.

        Manifests decide, so a crash before this call leaves `BEST` at an older, complete checkpoint, and the next
        checkpoint corrects it.
        """
        steps = [step for step in complete_steps(self._storage) if step <= self._step]
        best = best_of({step: read_manifest(self._storage, step) for step in steps})
        if best is not None:
            write_best(self._storage, best)

    def abort(self) -> None:
        """Removes the files written so far, unless committed. Does not raise."""
        if not self._open:
            return
        self._open = False
        try:
            self._storage.remove(f"{self._name}/{self._base}".rstrip("/"))
        except CheckpointError as error:
            _log.warning("Cannot remove an unfinished checkpoint; readers ignore it: %s", error)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _claim(self) -> int:
        """Removes files of an interrupted writer of this step; returns the number of the `rewrite-N` to write, or 0."""
        names = self._storage.names(self._name)
        if MANIFEST not in names:
            if names:
                self._storage.remove(self._name)
            return 0
        rewrites = [int(name[8:]) for name in names if name.startswith("rewrite-") and name[8:].isdecimal()]
        return max(rewrites, default=0) + 1

    def _add(self, part: WrittenPart) -> None:
        file: dict[str, Any] = {"path": part.path, "bytes": part.bytes, "checksum": part.checksum}
        if part.layout is None:
            self._parts.append(RemovedPart(table=part.table, shard=part.shard, ids=part.entries, **file))
            return
        check_layout(part.table, part.layout, self._tables.setdefault(part.table, part.layout))
        self._parts.append(RowsPart(table=part.table, shard=part.shard, rows=part.entries, steps=part.steps, **file))

    def _check_adopted(self) -> None:
        """Checks that this process sees all parts that others have written: they may have lost the place meanwhile."""
        sizes: dict[str, dict[str, int]] = {}
        self._storage.refresh()
        for path, (size, server) in self._adopted.items():
            directory, _, name = f"{self._name}/{path}".rpartition("/")
            if directory not in sizes:
                sizes[directory] = self._storage.sizes(directory)
            found = sizes[directory].get(name)
            if found is None:  # Not all file systems list sizes, or know them at all.
                found = self._storage.size(f"{directory}/{name}")
            if found != size and not (found is None and self._storage.exists(f"{directory}/{name}")):
                raise CheckpointError(
                    f"{self._storage.full(directory)}/{name} is missing or does not have the {size} bytes that "
                    f"embedding PS {server} wrote. Check that its host still has the same storage there, then save "
                    "again.",
                    path=f"{self._storage.full(directory)}/{name}",
                )

    def _write(self, path: str, views: Mapping[str, TensorView]) -> WrittenFile:
        """Writes a file, given its path relative to the base of this writer."""
        return self._abort_on_error(lambda: write_file(self._storage, self._name, self._base + path, views))

    def _abort_on_error(self, call: Callable[[], _T]) -> _T:
        """Aborts the checkpoint if a write fails."""
        try:
            return call()
        except CheckpointError:
            self.abort()
            raise

    def _manifest_is_not(self, data: bytes) -> bool:
        """Whether the step's manifest is certainly not `data`."""
        path = f"{self._name}/{MANIFEST}"
        try:
            return self._storage.size(path) != len(data) or self._storage.head(path, 0, len(data)) != data
        except CheckpointError:
            return False

    def _check_open(self) -> None:
        if not self._open:
            raise CheckpointError(f"The writer of {self.path} is closed; make a new one.", path=self.path)

    def _checked_base(self, base: Base | None) -> Base | None:
        if base is not None and base.step >= self._step:
            raise CheckpointError(f"{self.path} cannot add to the later step {base.step}.", path=self.path)
        return base

    def _check_name(self, name: str, kind: type[TensorsPart | StatePart]) -> None:
        if any(isinstance(part, kind) and part.name == name for part in self._parts):
            raise CheckpointError(f"{name!r} has been added already; use another name.", name=name)

    def _table_records(self, schema: Schema, optimizer: EmbeddingOptimizer | None) -> dict[str, TableRecord]:
        tables = schema.resolved_tables()
        for name, (dim, _, _) in self._tables.items():
            if name not in tables or tables[name].dim != dim:
                actual = f"has dim {tables[name].dim}" if name in tables else "does not exist"
                raise CheckpointError(f"Rows of table {name!r} have dim {dim}; in the schema it {actual}.", table=name)
        records: dict[str, TableRecord] = {}
        for name, table in tables.items():
            parts = [part for part in self._parts if isinstance(part, RowsPart) and part.table == name]
            _, width, dtype = self._tables.get(name, (0, 0, table.dtype))
            records[name] = TableRecord(
                dim=table.dim,
                optimizer=table.optimizer_or(optimizer),
                state_width=width,
                dtype=dtype,  # type: ignore[arg-type]
                rows=sum(part.rows for part in parts),
                shards=len({part.shard for part in parts}),
            )
        return records

    def _prune(self) -> None:
        """Removes files that are no longer needed. Only logs a failure, as the checkpoint is complete."""
        try:
            if self._base:
                for name in self._storage.names(self._name):
                    if name not in (MANIFEST, self._base.rstrip("/")):
                        self._storage.remove(f"{self._name}/{name}")
            self._retention.apply(self._storage, self._step)
        except CheckpointError as error:
            _log.warning("Cannot remove older checkpoints: %s", error)


def _builtins(value: Any, field: str) -> dict[str, Any]:
    try:
        result = msgspec.to_builtins(value)
    except (TypeError, RecursionError) as error:
        raise CheckpointError(f"{field} has a value that is not JSON: {error}. Use add_state.", field=field) from None
    if not isinstance(result, dict):
        raise CheckpointError(f"{field} is a {type(value).__name__}; give a dict or a record.", field=field)
    return result


def _score_fields(score: Score | None) -> dict[str, Any]:
    return {} if score is None else {"score": score.score, "metric": score.metric, "value": score.value}


def _version() -> str:
    try:
        return metadata.version("persia-recsys")
    except metadata.PackageNotFoundError:
        return "unknown"
