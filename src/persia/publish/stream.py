"""Writes the entries of one stream of the log of changes: parts first, then the manifest, which makes them visible."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from persia.checkpoint.format import checksum_text
from persia.checkpoint.tensors import encode, view
from persia.publish.format import (
    FORMAT,
    VERSION,
    Kind,
    LogEntry,
    Part,
    TableChanges,
    entry_name,
    epoch_name,
    parse_entry,
    part_name,
)
from persia.publish.log_storage import LogStorage
from persia.types.publishing import PublishDtype

__all__ = ["StreamWriter"]


class StreamWriter:
    """Writes the entries of one stream of an epoch, one at a time, and removes old ones. Used by one thread.

    A call that raised CheckpointError or PublishError may be repeated; it had no effect visible to readers.

    Args:
        storage: storage of the log.
        epoch: number of the epoch.
        run: its identifier.
        stream: name of the stream.
        dtype: type of rows.
        keep: number of snapshots, or of versions of the network, to keep.

    Attributes:
        sequence: number of the last entry that is complete, or may be; -1 before the first.
        snapshot_bytes: size of the last snapshot.
        increment_bytes: total size of the increments since then.
        increments: number of increments since then.
    """

    def __init__(
        self, storage: LogStorage, epoch: int, run: str, stream: str, dtype: PublishDtype = "float32", keep: int = 1
    ) -> None:
        self._storage = storage
        self._epoch = epoch
        self._run = run
        self._stream = stream
        self._dtype = dtype
        self._keep = keep
        self._parts: list[Part] = []
        self._entries: list[tuple[int, Kind, int]] = []
        """Sequence, kind and number of parts of the entries that exist, or may exist."""
        self._whole: list[int] = []
        """Sequences of the existing complete snapshots, or networks."""
        self.sequence = -1
        self.snapshot_bytes = self.increment_bytes = self.increments = 0

    def has_entries(self) -> bool:
        """Returns whether the stream has entries; before the first `commit`, another writer must have written them."""
        self._storage.refresh()
        return any(parse_entry(name) for name in self._storage.names(f"{epoch_name(self._epoch)}/{self._stream}"))

    def add_part(self, tensors: Mapping[str, Any]) -> None:
        """Writes the next part of the entry in progress, from arrays or tensors by name."""
        path = self._path(part_name(self.sequence + 1, len(self._parts)))
        size, crc = self._storage.write(path, encode({name: view(value, name) for name, value in tensors.items()}))
        self._parts.append(Part(bytes=size, checksum=checksum_text(crc)))

    def discard(self) -> None:
        """Abandons the entry in progress. Its number is reused, unless readers may have seen it."""
        if self._entries:
            self.sequence = self._entries[-1][0]
        self._parts = []

    def commit(self, kind: Kind, step: int, started: float, tables: list[TableChanges]) -> None:
        """Completes the entry in progress. Entries before it stay until `remove_old`.

        Args:
            kind: kind of the entry.
            step: global steps that it contains.
            started: `time.monotonic` before its rows were read.
            tables: tables of the entry, with their numbers of rows.
        """
        sequence = self.sequence + 1
        entry = LogEntry(
            format=FORMAT,
            version=VERSION,
            run=self._run,
            epoch=self._epoch,
            stream=self._stream,
            sequence=sequence,
            kind=kind,
            step=step,
            time=time.time() - (time.monotonic() - started),
            dtype=self._dtype,
            tables=tables,
            parts=self._parts,
        )
        self._storage.sync()
        if not self._entries or self._entries[-1][0] != sequence:
            self._entries.append((sequence, kind, len(self._parts)))  # It may exist even if `put` raises.
        self._storage.put(self._path(entry_name(sequence, kind)), msgspec.json.encode(entry))
        nbytes = sum(part.bytes for part in self._parts)
        if kind == "increment":
            self.increment_bytes += nbytes
            self.increments += 1
        else:
            self.snapshot_bytes, self.increment_bytes, self.increments = nbytes, 0, 0
            self._whole.append(sequence)
        self.sequence, self._parts = sequence, []

    def remove_old(self) -> None:
        """Removes the entries before the oldest snapshot, or network, to keep."""
        if len(self._whole) <= self._keep:
            return
        oldest = self._whole[-self._keep]
        while self._entries[0][0] < oldest:
            sequence, kind, parts = self._entries[0]
            self._storage.remove(
                self._path(entry_name(sequence, kind))
            )  # First: an entry without a manifest does not exist.
            for part in range(parts):
                self._storage.remove(self._path(part_name(sequence, part)))
            del self._entries[0]
        del self._whole[: -self._keep]

    def _path(self, name: str) -> str:
        return f"{epoch_name(self._epoch)}/{self._stream}/{name}"
