"""Reads checkpoints. The length and the checksum of a part are verified before its data is used."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.best import BEST, read_best
from persia.checkpoint.compatibility import NEW_OPTIMIZER, differences
from persia.checkpoint.format import (
    LATEST,
    MANIFEST,
    MOST_SHARDS,
    Base,
    Part,
    RemovedPart,
    RowsPart,
    StatePart,
    StepChoice,
    TensorsPart,
    parse_step,
    step_name,
)
from persia.checkpoint.listing import complete_steps, latest_step
from persia.checkpoint.owned import Owned
from persia.checkpoint.packing import unpack
from persia.checkpoint.parts import PartReader
from persia.checkpoint.storage import Storage
from persia.checkpoint.tensors import TensorView
from persia.errors import CheckpointError, ConfigError, PersiaError
from persia.schema import NO_RULES, EmbeddingOptimizer, InputRules, Schema, with_declared_rules
from persia.telemetry.logs import get_logger
from persia.types import PartCheck
from persia.types.half_floats import from_halves

__all__ = ["CheckpointReader"]

_log = get_logger("persia.checkpoint")

_P = TypeVar("_P", TensorsPart, StatePart)
_R = TypeVar("_R", RowsPart, RemovedPart)

READERS = 3
"""Maximum number of parts in memory: those being read and verified, and the one in use."""


class CheckpointReader:
    """Reads one checkpoint.

    Methods block while they read. A reader is thread-safe.

    Args:
        url: directory of checkpoints with a LATEST file, or directory of one step.
        step: step to read, or "best", or "latest"; None for the latest.

    Attributes:
        path: directory of the step.
        manifest: the manifest.
        schema: schema of the model.
        links: this checkpoint, followed by those that it builds on, down to a full one.

    Raises:
        CheckpointError: there is no such checkpoint, its manifest is invalid, or a checkpoint that it builds on is
            missing or has been replaced.
    """

    def __init__(self, url: str | os.PathLike[str], step: StepChoice = None) -> None:
        self._storage = Storage(url)
        self._prefix = self._resolve(step)
        self.links: list[CheckpointReader] = [self]
        self.path = self._storage.full(self._prefix.rstrip("/"))
        self._part_reader = PartReader(self._storage, self._prefix)
        self.manifest = self._part_reader.manifest
        try:
            self.schema = msgspec.convert(self.manifest.schema, Schema)
        except (ValueError, TypeError, OverflowError, RecursionError, PersiaError, msgspec.MsgspecError) as error:
            raise CheckpointError(f"{self.path}: the schema is not valid: {error}.", path=self.path) from None
        if self.manifest.base is not None:
            self._follow(self.manifest.base)

    @property
    def address(self) -> tuple[str, int | None]:
        """The URL and the step by which other processes open this checkpoint, whatever their working directory."""
        return self._storage.address, parse_step(self._prefix.rstrip("/"))

    @property
    def base(self) -> Base:
        """Reference to this checkpoint for an incremental one that builds on it.

        Raises:
            CheckpointError: its directory is not named after a step.
        """
        step = parse_step(self.path.rpartition("/")[2])
        if step is None:
            raise CheckpointError(f"Nothing can be added to {self.path}: write a full checkpoint.", path=self.path)
        return Base(step, self.manifest.content)

    @property
    def config(self) -> dict[str, Any]:
        """The saved configuration, as JSON values."""
        return self.manifest.config

    @property
    def extra(self) -> dict[str, Any]:
        """The program's own data that was passed to `commit`, as JSON values."""
        return self.manifest.extra

    def check_schema(
        self,
        schema: Schema,
        optimizer: EmbeddingOptimizer | None = None,
        *,
        new_optimizer: bool = False,
        refit: bool = False,
    ) -> None:
        """Checks that a model can continue from this checkpoint.

        Learning rates, capacities, initialisers and admission may differ. `lists` and `fill` of the reader that trained
        the checkpoint may have become `IdFeature.split` and `DenseFeature.fill`.

        Args:
            schema: schema of the model.
            optimizer: optimizer of tables that declare none.
            new_optimizer: whether tables may change their optimizer, which resets their optimizer state.
            refit: whether fitted values of features may differ.

        Raises:
            CheckpointError: the model cannot continue; the message lists all differences.
        """
        saved = with_declared_rules(self.schema, self._input_rules(), schema)
        reasons = differences(self.manifest, saved, schema, optimizer, new_optimizer=new_optimizer, refit=refit)
        if reasons:
            other_optimizer = not differences(self.manifest, saved, schema, optimizer, new_optimizer=True)
            remedy = NEW_OPTIMIZER if other_optimizer else "start a new run in another directory"
            raise CheckpointError(
                f"{self.path} does not fit this model:\n- "
                + "\n- ".join(reasons)
                + "\nUse the schema and optimizer of the checkpoint (`persia checkpoint inspect` shows them), "
                f"or {remedy}.",
                path=self.path,
                differences=reasons,
            )

    def _input_rules(self) -> InputRules:
        """The rules of the reader that trained the checkpoint; none if they cannot be read."""
        try:
            return msgspec.convert(self.config.get("input_rules", {}), InputRules)
        except (msgspec.ValidationError, ConfigError):
            return NO_RULES

    def rows(self, table: str, owned: Owned | None = None) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Iterates over the rows of a table, part by part, ordered by shard and then as written.

        An incremental checkpoint yields its own rows first, then the rows of the checkpoints that it builds on, without
        replaced and removed ones. This keeps the ids of all incremental checkpoints of the chain in memory (8 bytes
        each).

        Args:
            table: name of the table.
            owned: only yield these rows, and only read the parts that may have them; None for all.

        Yields:
            The number of the shard, and the arrays of `CheckpointWriter.add_rows` with embeddings as float32. The
            caller owns the arrays.

        Raises:
            CheckpointError: the table does not exist, or a part is missing or damaged.
        """
        if table not in self.manifest.tables:
            known = ", ".join(self.manifest.tables) or "none"
            raise CheckpointError(f"{self.path} has no table {table!r}; it has {known}.", path=self.path, table=table)
        return self._own_rows(table, owned) if len(self.links) == 1 else self._chained_rows(table, owned)

    def parts(self, table: str, owned: Owned | None = None) -> list[RowsPart]:
        """Returns the row parts of a table in this checkpoint, without its base, in the order of `rows`.

        Args:
            table: name of the table.
            owned: only return parts that may have these rows; None for all.
        """
        return sorted(self._parts_of(RowsPart, table, owned), key=lambda part: part.shard)

    def _parts_of(self, kind: type[_R], table: str, owned: Owned | None) -> list[_R]:
        """Returns the parts of a kind and a table that may have some rows, in the manifest's order."""
        writers = None if owned is None else owned.writers(table, self.manifest.buckets)
        return [
            part
            for part in self.manifest.parts
            if isinstance(part, kind)
            and part.table == table
            and (writers is None or part.shard // MOST_SHARDS in writers)
        ]

    def read_part(self, part: RowsPart) -> dict[str, NDArray[Any]]:
        """Reads the rows of one part, embeddings as float32.

        Raises:
            CheckpointError: the part is missing or damaged.
        """
        arrays = self._part_reader.rows(part)
        arrays["embeddings"] = from_halves(arrays["embeddings"])
        return arrays

    def _own_rows(self, table: str, owned: Owned | None) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        def read(part: RowsPart) -> dict[str, NDArray[Any]]:
            arrays = self.read_part(part)
            return arrays if owned is None else owned.of(arrays)

        pending: deque[tuple[int, Future[dict[str, NDArray[Any]]]]] = deque()
        with ThreadPoolExecutor(READERS, "persia-checkpoint-read") as pool:
            for part in self.parts(table, owned):
                pending.append((part.shard, pool.submit(read, part)))
                if len(pending) == READERS:
                    shard, arrays = pending.popleft()
                    yield shard, arrays.result()
                    del arrays
            while pending:
                shard, arrays = pending.popleft()
                yield shard, arrays.result()
                del arrays

    def _chained_rows(self, table: str, owned: Owned | None) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        outdated = np.empty(0, np.uint64)  # Sorted ids that newer links replace or remove.
        for link in self.links:
            changed = [outdated]
            for shard, arrays in link._own_rows(table, owned):
                if link is not self.links[-1]:
                    changed.append(arrays["ids"])
                if len(outdated):
                    at = np.minimum(np.searchsorted(outdated, arrays["ids"]), len(outdated) - 1)
                    current = outdated[at] != arrays["ids"]
                    if not current.all():
                        arrays = {name: array[current] for name, array in arrays.items()}
                if len(arrays["ids"]):
                    yield shard, arrays
            if link is not self.links[-1]:
                outdated = np.unique(np.concatenate([*changed, *link._removed(table, owned)]))

    def _removed(self, table: str, owned: Owned | None) -> Iterator[NDArray[np.uint64]]:
        for part in self._parts_of(RemovedPart, table, owned):
            yield self._part_reader.removed(part)

    def _follow(self, base: Base | None) -> None:
        """Opens the checkpoints that this one builds on, down to a full one."""
        root = self.root
        newest = parse_step(self.path.rpartition("/")[2])
        while base is not None:
            path = f"{root}/{step_name(base.step)}"
            remedy = "Use another checkpoint: this one lacks most of its rows."
            if newest is not None and base.step >= newest:
                raise CheckpointError(f"{self.path} adds to a later step, {base.step}. {remedy}", path=self.path)
            try:
                link = _Link(path)
            except CheckpointError as error:
                raise CheckpointError(
                    f"{self.path} adds to {path}, which cannot be read: {error.message} {remedy}",
                    path=self.path,
                    base=path,
                ) from None
            if link.manifest.content != base.content:
                raise CheckpointError(
                    f"{self.path} adds to {path}, which has been replaced since. {remedy}", path=self.path, base=path
                )
            for name, table in self.manifest.tables.items():
                base_table = link.manifest.tables.get(name)
                if (
                    base_table is None
                    or base_table.dim != table.dim
                    or (table.rows and base_table.rows and base_table.state_width != table.state_width)
                ):
                    raise CheckpointError(
                        f"{self.path} adds to {path}, whose table {name!r} has another dim or optimizer state, or does "
                        f"not exist. {remedy}",
                        path=self.path,
                        base=path,
                    )
            self.links.append(link)
            newest, base = base.step, link.manifest.base

    @property
    def root(self) -> str:
        """URL of the directory that contains the steps."""
        url = self._storage.url.rstrip("/")
        return url if self._prefix else os.path.dirname(url if "://" in url else os.path.abspath(url))

    def tensors(self, name: str, framework: Literal["torch", "numpy"] = "torch") -> dict[str, Any]:
        """Reads the tensors added under a name, into CPU memory.

        Args:
            name: name given to `add_tensors`.
            framework: "torch"; or "numpy", which does not import torch and does not support bfloat16.

        Raises:
            CheckpointError: the name does not exist, the part is missing or damaged, or numpy lacks a dtype.
        """
        views = self._part_reader.tensors(self._find(TensorsPart, name))
        return {key: view.torch() if framework == "torch" else view.numpy() for key, view in views.items()}

    def state(self, name: str) -> Any:
        """Reads the value added under a name.

        Raises:
            CheckpointError: the name does not exist, or the part is missing or damaged.
        """
        part = self._find(StatePart, name)
        return unpack(self._part_reader.tensors(part), self._part_reader.full(part))

    def views(self, part: TensorsPart | StatePart) -> dict[str, TensorView]:
        """Reads the tensors of a part as bytes, for `CheckpointWriter.copy`.

        Raises:
            CheckpointError: the part is missing or damaged.
        """
        return self._part_reader.tensors(part)

    def describe(self, part: Part) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Returns name, dtype, shape and bytes of each tensor of a part. Reads its header only.

        Raises:
            CheckpointError: the part is missing, or its header is invalid.
        """
        return self._part_reader.describe(part)

    def verify(self, progress: Callable[[int], object] = lambda _: None) -> int:
        """Reads and checks every part, including those of the checkpoints that this one builds on.

        Args:
            progress: called with the bytes of each part after it has been read, in the order of `all_parts`.

        Returns:
            Number of bytes read.

        Raises:
            CheckpointError: parts are missing or damaged; the message lists all of them.
        """
        problems, total = [], 0
        for check in self.check(self.all_parts()):
            if check.problem:
                problems.append(check.problem)
            total += check.bytes
            progress(check.bytes)
        if problems:
            raise CheckpointError("\n".join(problems), path=self.path, problems=problems)
        return total

    def check(self, parts: Sequence[tuple[CheckpointReader, Part]]) -> Iterator[PartCheck]:
        """Reads parts, as `all_parts` returns them, and yields for each in order whether it is intact."""
        with ThreadPoolExecutor(READERS, "persia-checkpoint-read") as pool:
            pending: deque[tuple[Part, Future[str | None]]] = deque()
            for link, part in parts:
                pending.append((part, pool.submit(link._part_reader.problem, part)))
                if len(pending) == READERS:
                    part, problem = pending.popleft()
                    yield PartCheck(part.bytes, problem.result() or "")
            for part, problem in pending:
                yield PartCheck(part.bytes, problem.result() or "")

    def all_parts(self) -> list[tuple[CheckpointReader, Part]]:
        """Returns the parts of this checkpoint, and the row parts of those that it builds on."""
        return [(self, part) for part in self.manifest.parts] + [
            (link, part)
            for link in self.links[1:]
            for part in link.manifest.parts
            if isinstance(part, RowsPart | RemovedPart)
        ]

    def _resolve(self, step: StepChoice) -> str:
        """Returns the path prefix of the step directory, relative to the given directory."""
        if step == "latest":
            step = None
        if step is None and self._storage.size(MANIFEST) is not None:
            return ""
        steps = complete_steps(self._storage)
        have = f"Complete steps are {', '.join(map(str, steps[-8:]))}: name one by step=." if steps else ""
        if step == "best":
            best = read_best(self._storage)
            if best is None:
                where = self._storage.full()
                raise CheckpointError(
                    f"{where} names no best checkpoint: there is no {BEST}. Training writes it with "
                    f"trainer.keep_best or trainer.patience; leave step out for the latest. {have}".strip(),
                    path=where,
                )
            step = best.step
        if step is None:
            step = latest_step(self._storage)
            if step is None:
                where = self._storage.full()
                remedy = have or "Give the directory that `persia train --output`, or `save` of a trainer, has written."
                raise CheckpointError(f"{where} holds no checkpoint: there is no {LATEST}. {remedy}", path=where)
        if not isinstance(step, int) or step not in steps:
            path = self._storage.full(step_name(step) if isinstance(step, int) else str(step))
            raise CheckpointError(f"{path} holds no complete checkpoint. {have}".strip(), path=path, step=step)
        return f"{step_name(step)}/"

    def _find(self, kind: type[_P], name: str) -> _P:
        parts = {part.name: part for part in self.manifest.parts if isinstance(part, kind)}
        if name not in parts:
            what = "tensors" if kind is TensorsPart else "state"
            known = ", ".join(parts) or "none"
            raise CheckpointError(f"{self.path} has no {what} {name!r}; it has {known}.", path=self.path, name=name)
        return parts[name]


class _Link(CheckpointReader):
    """A checkpoint in the chain of another one, which opens the base in its place."""

    def _follow(self, base: Base | None) -> None:
        pass
