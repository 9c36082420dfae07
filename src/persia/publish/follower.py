"""Follows the log of changes: reads new entries, and checks that none is missing, damaged or out of order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import LATEST, MANIFEST, checksum_text
from persia.checkpoint.tensors import TensorView
from persia.checkpoint.tensors import decode as decode_tensors
from persia.errors import CheckpointError, PublishError
from persia.metrics.drift import DriftReference
from persia.publish.format import (
    DRIFT_FILE,
    EPOCH_FILE,
    MAX_DRIFT_BYTES,
    MAX_EPOCH_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_MODEL_BYTES,
    MODEL_FILE,
    NETWORK,
    Description,
    Drift,
    Epoch,
    LogEntry,
    TableChanges,
    decode,
    entry_name,
    epoch_name,
    parse_entry,
    parse_epoch,
    part_name,
    stream_of,
)
from persia.publish.log_storage import open_storage
from persia.publish.values import NAMES, decode_values
from persia.telemetry.logs import get_logger
from persia.types import BucketMap

__all__ = ["Change", "Changes", "Follower", "NetworkUpdate", "RowsUpdate", "follow"]

LOG = get_logger("persia.publish")


class Change(NamedTuple):
    """Changes of the rows of one table. Drop `removed` first, then set `ids`.

    Attributes:
        table: name of the table.
        ids: uint64 `[n]`, each once.
        values: float32 `[n, dim]`.
        removed: uint64 `[m]`.
        step: minimum number of global steps that the values contain.
    """

    table: str
    ids: NDArray[np.uint64]
    values: NDArray[np.float32]
    removed: NDArray[np.uint64]
    step: int


class Changes(Iterator[Change]):
    """The changes of an entry, in order. The entry counts as read once they have been read to the end, or skipped.

    Args:
        changes: iterator over the changes; may raise PublishError.

    Attributes:
        complete: whether the entry counts as read.
        failure: why the entry is refused; empty if it is not.
    """

    def __init__(self, changes: Iterator[Change]) -> None:
        self._changes = changes
        self.complete = False
        self.failure = ""

    def __next__(self) -> Change:
        try:
            return next(self._changes)
        except StopIteration:
            self.complete = not self.failure
            raise
        except (PublishError, CheckpointError) as error:
            self.reject(error.message)
            raise PublishError(error.message) from error

    def skip(self) -> None:
        """Counts the entry as read, for a reader that has its rows from another source."""
        self.complete = not self.failure

    def reject(self, problem: str) -> None:
        """Refuses the entry, as if it were damaged: the follower reads another snapshot."""
        self.failure, self.complete = problem, False
        self._changes = iter(())


@dataclass(frozen=True)
class RowsUpdate:
    """An entry of a PS. Read `changes` to the end before the next update.

    Attributes:
        epoch: number of the epoch. A new epoch invalidates the rows of earlier ones.
        buckets: the PS of each bucket of ids in this epoch; the first update of each PS is whole.
        server: number of the PS.
        sequence: number of the entry.
        step: global steps that the PS's rows contain after it.
        time: time of the rows, in seconds since 1970.
        whole: whether it has all rows of the PS, so that it replaces all earlier rows of the PS.
        changes: changes to apply in order. An increment has been checked as a whole. A part of a whole update is
            checked when it is read, so apply it to a new copy, and drop the copy if this raises PublishError.
    """

    epoch: int
    buckets: BucketMap
    server: int
    sequence: int
    step: int
    time: float
    whole: bool
    changes: Changes


@dataclass(frozen=True)
class NetworkUpdate:
    """A version of the network.

    Attributes:
        epoch: number of the epoch.
        buckets: the PS of each bucket of ids in this epoch.
        sequence: number of the version.
        step: its global step.
        time: time of the version, in seconds since 1970.
        tensors: tensors by name, as in `state_dict`; `TensorView.torch()` and `.numpy()` convert them.
    """

    epoch: int
    buckets: BucketMap
    sequence: int
    step: int
    time: float
    tensors: dict[str, TensorView]


def follow(url: str, *, rows: bool = True, network: bool = True) -> Follower:
    """Returns a follower of the log of changes in a directory or a topic.

    Args:
        url: URL of the log: a path, any URL that fsspec supports, or `kafka://HOST:PORT/TOPIC`; see `PublishOptions`.
        rows: whether to read the rows. Without them, there are only updates of the network.
        network: whether to read the network.

    Raises:
        CheckpointError: the URL does not name a file system.
        ConfigError: the URL does not name a topic.
        MissingExtraError: a package for the URL is not installed.
    """
    return Follower(url, rows=rows, network=network)


class Follower:
    """Reads the log of changes from its newest snapshots on. Not thread-safe.

    It reads a newer snapshot instead of entries that are missing or damaged. Until there is one, and while a new epoch
    is not complete, there are no updates: keep the current state.

    Args:
        url: URL of the log.
        rows: whether to read the rows.
        network: whether to read the network.

    Attributes:
        problem: problem of the last call of `updates`; empty if there was none.
    """

    def __init__(self, url: str, *, rows: bool = True, network: bool = True) -> None:
        self._storage = open_storage(url)
        self._reads_rows, self._reads_network = rows, network
        self._epoch: Epoch | None = None
        self._description: tuple[Epoch, Description] | None = None
        """The content of `model.json` of an epoch."""
        self._positions: dict[str, int] = {}
        """Sequence of the last entry that was read, by stream."""
        self.problem = ""

    @property
    def epoch(self) -> int:
        """Number of the current epoch; -1 before the first."""
        return -1 if self._epoch is None else self._epoch.epoch

    @property
    def run(self) -> str:
        """Random identifier of the current epoch; empty before the first."""
        return "" if self._epoch is None else self._epoch.run

    def description(self) -> Description | None:
        """Returns the schema, precision and model of the epoch that it reads; None before the first.

        Reads a file at the first call in an epoch.

        Raises:
            PublishError: the file is missing, damaged, or of another epoch; or the brokers do not answer.
            CheckpointError: the file system has failed.
        """
        epoch = self._epoch
        if epoch is None:
            return None
        if self._description is None or self._description[0] != epoch:
            self._description = epoch, self._read_description(epoch)
        return self._description[1]

    def drift(self) -> DriftReference | None:
        """Returns the distributions of inputs and predictions in training; None while the epoch does not have them.

        Reads a file in each call, as it changes during training.

        Raises:
            PublishError: the file is damaged, or of another epoch; or the brokers do not answer.
            CheckpointError: the file system has failed.
        """
        epoch = self._epoch
        path = "" if epoch is None else f"{epoch_name(epoch.epoch)}/{DRIFT_FILE}"
        if epoch is None or (data := self._read_if_present(path, MAX_DRIFT_BYTES)) is None:
            return None
        full = self._storage.full(path)
        drift = decode(data, Drift, full)
        if (drift.run, drift.epoch) != (epoch.run, epoch.epoch):
            raise PublishError(f"{full} belongs to epoch {drift.epoch} of run {drift.run}.", path=path)
        return drift.training

    def updates(self) -> Iterator[RowsUpdate | NetworkUpdate]:
        """Yields new entries, and ends when there are no more. Blocks for the file system or the brokers only.

        An update counts as read once the next one is requested. If it was not read to its end, it is yielded again.
        """
        self.problem = ""
        try:
            self._storage.refresh()
            self._record_problem(self._storage.problem)
            self._find_epoch()
            if self._epoch is None:
                return
            if self._reads_rows:
                for server in range(self._epoch.buckets.servers):
                    yield from self._rows(self._epoch, server)
            if self._reads_network:
                yield from self._network(self._epoch)
        except (PublishError, CheckpointError) as error:
            self._record_problem(error.message)

    def _record_problem(self, problem: str) -> None:
        if not self.problem:
            self.problem = problem

    # --- epochs -------------------------------------------------------------------------------------------------

    def _find_epoch(self) -> None:
        """Switches to the newest epoch whose streams all have entries."""
        names = self._storage.names()
        numbers = [number for name in names if (number := parse_epoch(name)) is not None]
        begun = False
        for number in sorted(numbers, reverse=True):
            try:
                epoch = self._read_epoch(number)
            except PublishError as error:
                begun = True
                self._record_problem(error.message)
                continue
            if epoch is None:
                continue
            begun = True
            if epoch == self._epoch:
                return
            if self._is_complete(epoch):
                self._epoch, self._positions = epoch, {}
                return
        if not begun:
            url, hint = self._storage.url, ""
            if LATEST in names or MANIFEST in names:
                hint = (
                    f", but checkpoints: `persia checkpoint publish {url} --output LOG [--step N|best|latest]` writes "
                    "a log of changes from one"
                )
            self._record_problem(f"there is no epoch in {url}{hint}")

    def _read_epoch(self, number: int) -> Epoch | None:
        """Returns an epoch; None if its writer has not begun it, or was killed before."""
        path = f"{epoch_name(number)}/{EPOCH_FILE}"
        data = self._read_if_present(path, MAX_EPOCH_BYTES)
        if data is None:
            return None
        epoch = decode(data, Epoch, self._storage.full(path))
        if epoch.epoch != number:
            raise PublishError(f"{self._storage.full(path)} belongs to epoch {epoch.epoch}.", path=path)
        return epoch

    def _read_description(self, epoch: Epoch) -> Description:
        path = f"{epoch_name(epoch.epoch)}/{MODEL_FILE}"
        full = self._storage.full(path)
        description = decode(self._read(path, MAX_MODEL_BYTES), Description, full)
        if (description.run, description.epoch) != (epoch.run, epoch.epoch):
            raise PublishError(f"{full} belongs to epoch {description.epoch} of run {description.run}.", path=path)
        return description

    def _is_complete(self, epoch: Epoch) -> bool:
        streams = [stream_of(server) for server in range(epoch.buckets.servers)]
        kinds = {stream: [kind for _, kind in self._entries(epoch, stream)] for stream in [*streams, NETWORK]}
        return all("snapshot" in kinds[stream] for stream in streams) and bool(kinds[NETWORK])

    def _entries(self, epoch: Epoch, stream: str) -> list[tuple[int, str]]:
        """Returns sequence and kind of the existing entries of a stream, in order."""
        names = self._storage.names(f"{epoch_name(epoch.epoch)}/{stream}")
        return sorted(entry for name in names if (entry := parse_entry(name)) is not None)

    # --- entries ------------------------------------------------------------------------------------------------

    def _rows(self, epoch: Epoch, server: int) -> Iterator[RowsUpdate]:
        stream = stream_of(server)
        entries = self._entries(epoch, stream)
        position = self._positions.get(stream, -1)
        while (entry := self._next(epoch, stream, entries, position)) is not None:
            whole = entry.kind == "snapshot"
            try:
                changes = self._changes(entry)
                read = Changes(changes if whole else iter(list(changes)))
            except (PublishError, CheckpointError) as error:
                self._record_problem(error.message)
                entries = [other for other in entries if other[0] > entry.sequence and other[1] == "snapshot"]
                continue
            yield RowsUpdate(epoch.epoch, epoch.buckets, server, entry.sequence, entry.step, entry.time, whole, read)
            if read.failure:
                self._record_problem(read.failure)
                entries = [other for other in entries if other[0] != entry.sequence]
                continue
            if not read.complete:
                return
            position = self._positions[stream] = entry.sequence

    def _next(self, epoch: Epoch, stream: str, entries: list[tuple[int, str]], position: int) -> LogEntry | None:
        """Returns the entry to read next: the following one, or the newest snapshot if that is not readable."""
        later = [entry for entry in entries if entry[0] > position]
        snapshots = [entry for entry in later if entry[1] == "snapshot"]
        follows = position >= 0 and bool(later) and later[0][0] == position + 1
        candidates = ([later[0]] if follows else []) + snapshots[::-1]
        if later and not follows and position >= 0:
            self._record_problem(f"entry {position + 1} of {stream} in epoch {epoch.epoch} is missing")
        for sequence, kind in candidates:
            try:
                return self._read_entry(epoch, stream, sequence, kind)
            except (PublishError, CheckpointError) as error:
                self._record_problem(error.message)
        return None

    def _read_entry(self, epoch: Epoch, stream: str, sequence: int, kind: str) -> LogEntry:
        path = f"{epoch_name(epoch.epoch)}/{stream}/{entry_name(sequence, kind)}"  # type: ignore[arg-type]
        full = self._storage.full(path)
        entry = decode(self._read(path, MAX_MANIFEST_BYTES), LogEntry, full)
        place = (entry.run, entry.epoch, entry.stream, entry.sequence, entry.kind)
        if place != (epoch.run, epoch.epoch, stream, sequence, kind):
            raise PublishError(
                f"{full} belongs elsewhere: it is entry {entry.sequence} of {entry.stream} in epoch {entry.epoch} of "
                f"run {entry.run}.",
                path=full,
            )
        return entry

    def _network(self, epoch: Epoch) -> Iterator[NetworkUpdate]:
        position = self._positions.get(NETWORK, -1)
        for sequence, kind in reversed(self._entries(epoch, NETWORK)):  # The newest suffices: a version is complete.
            if sequence <= position:
                return
            try:
                entry = self._read_entry(epoch, NETWORK, sequence, kind)
                tensors = {name: tensor for part in self._parts(entry) for name, tensor in part.items()}
            except (PublishError, CheckpointError) as error:
                self._record_problem(error.message)
                continue
            yield NetworkUpdate(epoch.epoch, epoch.buckets, sequence, entry.step, entry.time, tensors)
            self._positions[NETWORK] = sequence
            return

    def _changes(self, entry: LogEntry) -> Iterator[Change]:
        """Yields the changes of an entry, and checks them against its manifest."""
        rows, removed = [0] * len(entry.tables), [0] * len(entry.tables)
        for number, tensors in enumerate(self._parts(entry)):
            where = f"part {number} of entry {entry.sequence} of {entry.stream} in epoch {entry.epoch}"
            known = 0
            for place, table in enumerate(entry.tables):
                table_tensors = {
                    name: tensors[f"{place}.{name}"]
                    for name in ("removed", "ids", "values", "scales")
                    if f"{place}.{name}" in tensors
                }
                if not table_tensors:
                    continue
                known += len(table_tensors)
                change = _change(table, table_tensors, entry, where)
                rows[place] += len(change.ids)
                removed[place] += len(change.removed)
                yield change
            if known != len(tensors):
                raise PublishError(f"{where} has unexpected tensors.", entry=entry.sequence)
        for table, row_count, removed_count in zip(entry.tables, rows, removed, strict=True):
            if (row_count, removed_count) != (table.rows, table.removed):
                raise PublishError(
                    f"Entry {entry.sequence} of {entry.stream} has {row_count} rows and {removed_count} removed ids "
                    f"of table {table.name!r}; its manifest says {table.rows} and {table.removed}.",
                    entry=entry.sequence,
                )

    def _parts(self, entry: LogEntry) -> Iterator[dict[str, TensorView]]:
        """Yields the tensors of each part by name, after checking its length and checksum."""
        for number, part in enumerate(entry.parts):
            path = f"{epoch_name(entry.epoch)}/{entry.stream}/{part_name(entry.sequence, number)}"
            full = self._storage.full(path)
            size = self._storage.size(path)
            if size != part.bytes:
                fault = "is missing" if size is None else f"has {size} bytes"
                raise PublishError(f"{full} {fault}; its manifest says {part.bytes} bytes.", path=full)
            data, crc = self._storage.load(path, part.bytes)
            if checksum_text(crc) != part.checksum:
                raise PublishError(f"{full} is damaged: its checksum does not match its manifest.", path=full)
            yield decode_tensors(data, full)

    def _read(self, path: str, limit: int) -> bytes:
        data = self._read_if_present(path, limit)
        if data is None:
            raise PublishError(f"{self._storage.full(path)} is missing.", path=path)
        return data

    def _read_if_present(self, path: str, limit: int) -> bytes | None:
        size = self._storage.size(path)
        if size is not None and size > limit:
            raise PublishError(f"{self._storage.full(path)} has {size} bytes, more than {limit}.", path=path)
        return None if size is None else self._storage.head(path, 0, size)


def _change(table: TableChanges, tensors: dict[str, TensorView], entry: LogEntry, where: str) -> Change:
    """Returns the change of a table, after checking the dtypes and shapes of its tensors."""
    none = TensorView("U64", (0,), memoryview(b""))
    removed, ids = tensors.pop("removed", none), tensors.pop("ids", none)
    n = ids.shape[0] if ids.shape else 0
    expected = {"values": (NAMES[entry.dtype], (n, table.dim)), "scales": ("F32", (n,))}
    if entry.dtype != "int8":
        del expected["scales"]
    layout = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    columns = [(column.dtype, len(column.shape)) for column in (removed, ids)]
    if columns != [("U64", 1)] * 2 or layout != (expected if n else {}):
        raise PublishError(
            f"{where}: the tensors of table {table.name!r} have dtypes or shapes that do not fit its manifest.",
            table=table.name,
        )
    values = np.empty((0, table.dim), np.float32)
    if n:
        scales = tensors["scales"].numpy() if "scales" in tensors else None
        values = decode_values(tensors["values"].numpy(), scales)
    # On a little-endian machine, converts only the name of the byte order.
    native = [np.asarray(each.numpy(), np.uint64) for each in (ids, removed)]
    return Change(table.name, native[0], np.asarray(values, np.float32), native[1], entry.step)
