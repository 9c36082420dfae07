"""Rows of snapshots as local files, which the processes of a host map and share."""

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
"""Between two looks whether another process still writes."""

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
        """Name of its directory, in that of its PS."""
        return f"epoch-{self.epoch:010d}-{self.sequence:010d}-{self.run}"


class SnapshotCache:
    """Files with the rows of snapshots. Any number of processes may use the directory.

    A snapshot is there once its directory has its name, which it gets when all of it is written. One process at a time
    writes the snapshots of a PS; others wait for it, and map what it has written. Older snapshots of the PS, those
    of other epochs, and those of PSs that there are no more, are removed then; a process that has mapped them keeps
    them.

    Args:
        directory: on a local disk, or in memory; made if it does not exist.
        url: of the log; logs may share a directory.

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
        """Holds the lock of a PS's snapshots, after other processes; those that die let go of it.

        Args:
            server: number of the PS.
            check: called while it waits; may raise to give up.
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
        """Maps a snapshot; returns None if it is not there, or not as it should be.

        Args:
            key: of the snapshot.
            dims: of the tables, by name.
        """
        place = self._place(key)
        if not place.is_dir():
            return None
        try:
            tables = {name: ServedTable(dim, place / _file(number)) for number, (name, dim) in enumerate(dims.items())}
            if any(table.base_name != name for name, table in tables.items()):
                raise StoreError("it has other tables")
        except (StoreError, OSError) as error:
            LOG.warning("%s is not used, and the snapshot is read from the log: %s", place, error)
            shutil.rmtree(place, ignore_errors=True)
            return None
        self._remove_others(key)
        return tables

    def keep(self, key: SnapshotKey, tables: Mapping[str, ServedTable]) -> dict[str, ServedTable] | None:
        """Writes a snapshot, and maps it. Call it with the lock. Returns None if that fails, after a warning.

        Args:
            key: of the snapshot.
            tables: with its rows, by name.
        """
        place = self._place(key)
        place.parent.mkdir(exist_ok=True)
        for left in place.parent.glob(".writing-*"):  # By a process that has died: the lock is here.
            shutil.rmtree(left, ignore_errors=True)
        try:
            draft = tempfile.mkdtemp(prefix=".writing-", dir=place.parent)
            try:
                for number, (name, table) in enumerate(tables.items()):
                    table.write_snapshot(Path(draft, _file(number)), name)
                os.rename(draft, place)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        except (StoreError, OSError) as error:
            LOG.warning("Rows are not kept in %s, and not shared with other processes: %s", place, error)
            return None
        return self.open(key, {name: table.dim for name, table in tables.items()})

    def _place(self, key: SnapshotKey) -> Path:
        return self._directory / f"rows-{key.server}" / key.name

    def _remove_others(self, key: SnapshotKey) -> None:
        """Removes what is not needed any more. An epoch may have a lower number than those of an earlier log here."""
        for other in self._place(key).parent.iterdir():
            found = _NAME.fullmatch(other.name)
            if found and (found[3] != key.run or int(found[2]) < key.sequence):
                shutil.rmtree(other, ignore_errors=True)
        for rows in self._directory.glob("rows-*"):
            number = rows.name.removeprefix("rows-")
            if number.isdecimal() and int(number) >= key.servers:
                shutil.rmtree(rows, ignore_errors=True)


def _file(number: int) -> str:
    """Returns the name of the file of a table, by its number in the schema."""
    return f"{number}.rows"
