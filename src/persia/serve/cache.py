"""Caches the rows of snapshots in local files, which the processes of a host map and share."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from persia.errors import CheckpointError, StoreError
from persia.store.served import ServedTable
from persia.telemetry.logs import get_logger

__all__ = ["SnapshotCache", "SnapshotKey"]

LOG = get_logger("persia.serve")

LOCK_POLL_SECONDS = 0.02
"""Interval of polling for the lock of another process."""

_NAME = re.compile(r"epoch-([0-9]{10})-([0-9]{10})-([0-9a-f]{32})")


class SnapshotKey(NamedTuple):
    """Identifies the snapshot of a PS in a log.

    Attributes:
        run: random identifier of the epoch.
        epoch: number of the epoch.
        server: number of the PS.
        sequence: number of the entry.
        servers: number of PSs.
    """

    run: str
    epoch: int
    server: int
    sequence: int
    servers: int

    @property
    def name(self) -> str:
        """Name of the snapshot's directory, within the directory of its PS."""
        return f"epoch-{self.epoch:010d}-{self.sequence:010d}-{self.run}"


class SnapshotCache:
    """Files with the rows of snapshots. Any number of processes may use the directory.

    A snapshot's directory gets its final name once the snapshot is complete. One process at a time writes the snapshots
    of a PS; the others wait for it, and map the files that it has written. Older snapshots of the PS, snapshots of
    other epochs, and snapshots of PSs that no longer exist are then removed. A process that has mapped them keeps its
    mapping.

    Args:
        directory: directory on a local disk or in memory; created if it does not exist.
        url: URL of the log; logs may share a directory.

    Raises:
        CheckpointError: the directory cannot be made.
    """

    def __init__(self, directory: str, url: str) -> None:
        self._directory = Path(directory, hashlib.sha256(url.encode()).hexdigest()[:16])
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"Cannot make the cache directory {self._directory}: {error}. Choose another cache_dir.",
                path=str(self._directory),
            ) from error

    @contextlib.contextmanager
    def locked(self, server: int, check: Callable[[], object]) -> Iterator[None]:
        """Holds the lock of a PS's snapshots across processes; a process that dies releases it.

        Args:
            server: number of the PS.
            check: called while waiting for the lock; may raise to give up.
        """
        descriptor = os.open(self._directory / f"rows-{server}.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            while True:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    check()
                    time.sleep(LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(descriptor)

    def open(self, key: SnapshotKey, dims: Mapping[str, int]) -> dict[str, ServedTable] | None:
        """Maps a snapshot; returns None if it is missing or invalid.

        Args:
            key: key of the snapshot.
            dims: dimensions of the tables, by name.
        """
        directory = self._place(key)
        if not directory.is_dir():
            return None
        try:
            tables = {
                name: ServedTable(dim, directory / _file(number)) for number, (name, dim) in enumerate(dims.items())
            }
            if any(table.base_name != name for name, table in tables.items()):
                raise StoreError("it has other tables")
        except (StoreError, OSError) as error:
            LOG.warning("%s is not used, and the snapshot is read from the log: %s", directory, error)
            shutil.rmtree(directory, ignore_errors=True)
            return None
        self._remove_others(key)
        return tables

    def keep(self, key: SnapshotKey, tables: Mapping[str, ServedTable]) -> dict[str, ServedTable] | None:
        """Writes a snapshot, and maps it. The caller holds the lock. Logs a warning and returns None on failure.

        Args:
            key: key of the snapshot.
            tables: tables with the snapshot's rows, by name.
        """
        directory = self._place(key)
        directory.parent.mkdir(exist_ok=True)
        for leftover in directory.parent.glob(".writing-*"):  # Its process has died: this one holds the lock.
            shutil.rmtree(leftover, ignore_errors=True)
        try:
            draft = tempfile.mkdtemp(prefix=".writing-", dir=directory.parent)
            try:
                for number, (name, table) in enumerate(tables.items()):
                    table.write_snapshot(Path(draft, _file(number)), name)
                os.rename(draft, directory)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        except (StoreError, OSError) as error:
            LOG.warning("Rows are not cached in %s, and not shared with other processes: %s", directory, error)
            return None
        return self.open(key, {name: table.dim for name, table in tables.items()})

    def _place(self, key: SnapshotKey) -> Path:
        return self._directory / f"rows-{key.server}" / key.name

    def _remove_others(self, key: SnapshotKey) -> None:
        """Removes obsolete snapshots. Epochs are identified by run, as an earlier log may have had higher numbers."""
        for other in self._place(key).parent.iterdir():
            match = _NAME.fullmatch(other.name)
            if match and (match[3] != key.run or int(match[2]) < key.sequence):
                shutil.rmtree(other, ignore_errors=True)
        for rows in self._directory.glob("rows-*"):
            number = rows.name.removeprefix("rows-")
            if number.isdecimal() and int(number) >= key.servers:
                shutil.rmtree(rows, ignore_errors=True)


def _file(number: int) -> str:
    """Returns the name of the file of a table, by its number in the schema."""
    return f"{number}.rows"
