"""The regions of an embedding PS: rows in files of shared memory, which outlive its process (Persia paper, 4.2.4).

Each PS has its own directory, with a file for each shard of each table and, once all files exist, a manifest. A process
that finds the manifest attaches to the regions. Without a manifest it creates the regions, and overwrites existing
files. Rows on disk are in other directories; see `persia.ps.spill`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from persia.errors import StoreError, StoreFullError
from persia.memory import file_system
from persia.ps.ownership import Ownership
from persia.ps.spill import SpillPlaces, cold_files, spill_places
from persia.store import EmbeddingStore, TableConfig
from persia.telemetry.logs import get_logger

__all__ = [
    "DEFAULT_ROOT",
    "LAYOUT",
    "Leftover",
    "Regions",
    "leftovers",
    "remove_leftovers",
    "taken_space",
]

DEFAULT_ROOT = "/dev/shm"
MANIFEST = "regions.json"
MODE = "mode.json"
NN_WORKERS = "nn_workers.json"
OWNERSHIP = "ownership.json"
APPLIED = "applied"
STEP = struct.Struct("<QQ")
"""Generation and turn + 1 of the last applied step of a barrier. The file is an array of these."""

FORMAT = 1

LAYOUT = 3
"""Version of the layout of a region: `kFormat` in `cpp/include/persia/layout.hpp`."""
HEADER = struct.Struct("<QI")
"""The beginning of a region: its magic number, and the version of its layout."""
MAGIC = int.from_bytes(b"PERSIA01", "little")

log = get_logger("persia.ps")


class _Manifest(msgspec.Struct, frozen=True):
    format: int
    tables: list[str]


class Regions:
    """The files of one PS.

    Args:
        directory: directory of this PS alone, created when needed. `/dev/shm/...` is memory; other file systems write
            pages back to disk.
    """

    def __init__(self, directory: str) -> None:
        self.directory = Path(directory)
        self._file: int | None = None
        self._lock = threading.Lock()

    @property
    def complete(self) -> bool:
        """Whether all tables have been created in this directory."""
        return (self.directory / MANIFEST).exists()

    def create_or_attach(
        self, store: EmbeddingStore, configs: Sequence[TableConfig], roots: Mapping[str, str] | None = None
    ) -> bool:
        """Creates the tables, or attaches to the tables of an earlier process. Blocks while indices are rebuilt.

        Args:
            store: a store without tables.
            configs: configurations of the tables.
            roots: `Table.spill` of tables with rows on disk, by name.

        Returns:
            Whether the tables existed.

        Raises:
            StoreError: the regions are in use by another process, damaged, or of other tables.
            StoreFullError: there is not enough space for the regions.
        """
        began = time.monotonic()
        names = [config.name for config in configs]
        spill = SpillPlaces(roots or {}, self.directory)
        manifest = self._read()
        if manifest is None:
            try:
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"Cannot create the directory {self.directory} for regions: {error.strerror}. Choose another one, "
                    "or None to keep rows in the memory of the process.",
                    path=str(self.directory),
                ) from error
        elif manifest.format != FORMAT or manifest.tables != names:
            raise StoreError(
                f"{self.directory} has regions of the tables {', '.join(manifest.tables)} (format {manifest.format}), "
                f"expected {', '.join(names)} (format {FORMAT}). Choose another directory, or remove this one with "
                "`persia cluster regions --clean`.",
                path=str(self.directory),
            )
        self._check_layout()
        if manifest is None:
            spill.create()
        numbers = [
            store.create_table(
                config, self._path(number, config.name), manifest is not None, spill.path(number, config.name)
            )
            for number, config in enumerate(configs)
        ]
        if manifest is None:
            for place in spill.directories:
                if place != self.directory:  # So that the place is listed even if the regions are lost with the host.
                    _write(place, _Manifest(FORMAT, spill.tables(place)))
            self.forget_steps()
            _write(self.directory, _Manifest(FORMAT, names))
            _hint(self.directory)
            return False
        sums: Counter[str] = Counter()
        for table in numbers:
            sums.update(store.recovery(table))
        log.warning(
            "attached to the regions in %s in %.2f s: %d shards, %d interrupted; %d rows rolled back, %d pushes to "
            "continue, %d indices rebuilt",
            self.directory, time.monotonic() - began,
            sums["shards"], sums["busy"], sums["undone"], sums["open"], sums["rebuilt"],
        )  # fmt: skip
        return True

    def _check_layout(self) -> None:
        """Raises StoreError if another version of persia has written regions that this one cannot read."""
        if self.complete and (other := _layout(self.directory)) not in (None, LAYOUT):
            raise StoreError(
                f"The regions in {self.directory} have layout {other}, and this version of persia reads layout "
                f"{LAYOUT}. Start the version that wrote them again; or stop the run so that it saves a checkpoint, "
                "remove them with `persia cluster regions --clean`, and resume from the checkpoint.",
                path=str(self.directory),
                layout=other,
            )

    def remember(self, mode: str) -> None:
        """Stores the mode of the PS for the next process.

        Raises:
            StoreFullError: the file system is full; the previous mode is still stored.
        """
        if mode != self.mode:
            self._store_text(MODE, mode, "the mode")

    @property
    def mode(self) -> str:
        """The stored mode of an earlier process; empty if the mode was never switched."""
        return self._stored_text(MODE)

    def remember_nn_workers(self, nn_workers: int) -> None:
        """Stores the number of NN workers for the next process.

        Raises:
            StoreFullError: the file system is full; the previous number is still stored.
        """
        if nn_workers != self.nn_workers:
            self._store_text(NN_WORKERS, str(nn_workers), "the number of NN workers")

    @property
    def nn_workers(self) -> int:
        """The stored number of NN workers of an earlier process; 0 if none was."""
        return int(self._stored_text(NN_WORKERS) or 0)

    def remember_ownership(self, ownership: Ownership) -> None:
        """Stores which rows the PS owns for the next process.

        Raises:
            StoreFullError: the file system is full; what was stored before still is.
        """
        self._store_text(OWNERSHIP, msgspec.json.encode(ownership).decode(), "the bucket map")

    @property
    def ownership(self) -> Ownership | None:
        """The stored ownership of an earlier process; None if no rows have ever moved."""
        text = self._stored_text(OWNERSHIP)
        return msgspec.json.decode(text, type=Ownership) if text else None

    def _store_text(self, name: str, text: str, what: str) -> None:
        draft = self.directory / f"{name}.draft"
        try:
            draft.write_text(text)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise StoreFullError(
                f"Cannot store {what} in {self.directory}: the file system is full. Free some space, or choose another "
                "directory for `regions`",
                path=str(self.directory),
            ) from error
        draft.replace(self.directory / name)

    def _stored_text(self, name: str) -> str:
        path = self.directory / name
        return path.read_text() if self.complete and path.exists() else ""

    def keep_step(self, barrier: int, generation: int, turn: int) -> None:
        """Stores the last applied step, so that the next process answers its repeated pushes.

        A step before the stored one has no effect: it is of NN workers that have restarted since.
        """
        with self._lock:
            last = self.last_step(barrier)
            if last is None or (generation, turn) > last:
                # Within one page, so a kill cannot tear it.
                os.pwrite(self._applied(), STEP.pack(generation, turn + 1), barrier * STEP.size)

    def last_step(self, barrier: int) -> tuple[int, int] | None:
        """Returns generation and turn of the last applied step; None if no step was applied in this mode."""
        stored = os.pread(self._applied(), STEP.size, barrier * STEP.size)
        generation, after = STEP.unpack(stored.ljust(STEP.size, b"\0"))
        return (generation, after - 1) if generation else None  # Generations begin at 1.

    def forget_steps(self) -> None:
        """Clears the applied steps, as the turns of another mode are not comparable."""
        os.pwrite(self._applied(), bytes(os.fstat(self._applied()).st_size), 0)

    def _applied(self) -> int:
        """Returns the file of the applied steps. It is allocated on creation, so that writing to it cannot fail."""
        if self._file is None:
            path = self.directory / APPLIED
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            weakref.finalize(self, os.close, self._file)
            try:
                os.posix_fallocate(self._file, 0, STEP.size)
            except OSError as error:
                raise StoreFullError(
                    f"Cannot create {path}: {error.strerror}. Free some space, or choose another directory for "
                    "`regions`.",
                    path=str(path),
                ) from error
        return self._file

    def remove(self) -> None:
        """Removes the files. A process that has mapped them keeps its rows until it exits."""
        _remove(self.directory)

    def _path(self, number: int, table: str) -> str:
        return str(self.directory / f"{number:03d}-{re.sub(r'[^A-Za-z0-9_]', '_', table)[:64]}")

    def _read(self) -> _Manifest | None:
        path = self.directory / MANIFEST
        try:
            return msgspec.json.decode(path.read_bytes(), type=_Manifest)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, msgspec.MsgspecError) as error:
            raise StoreError(
                f"Cannot read {path}: {error}. Remove the regions with `persia cluster regions --clean`, and resume "
                "from a checkpoint.",
                path=str(path),
            ) from error


def _write(directory: Path, manifest: _Manifest) -> None:
    path = directory / MANIFEST
    draft = path.with_suffix(".draft")
    draft.write_bytes(msgspec.json.encode(manifest))
    draft.replace(path)


class Leftover(NamedTuple):
    """The regions and rows on disk of a PS on this host; or only the latter, if the regions are elsewhere or lost.

    Attributes:
        path: directory of the PS.
        tables: names of the tables; empty if the start of the PS was interrupted.
        memory: bytes of regions.
        in_use: whether a process has the files open.
        seconds: seconds since the start of the PS.
        disk: bytes of rows on disk.
        layout: version of the layout of the regions; None without regions. Another one than `LAYOUT` cannot be read.
    """

    path: str
    tables: list[str]
    memory: int
    in_use: bool
    seconds: float
    disk: int
    layout: int | None = None

    def remove(self) -> bool:
        """Removes the files, unless a process has opened them. Returns whether they were removed."""
        with contextlib.ExitStack() as stack:
            for path in _all_files(Path(self.path)):
                if not stack.enter_context(_locked(path)):
                    return False
            _remove(Path(self.path))
        return True


def remove_leftovers(root: str, pattern: str) -> None:
    """Removes the regions of this host that no process has open."""
    for left in leftovers(root, pattern):
        left.remove()


def leftovers(root: str = DEFAULT_ROOT, pattern: str = "persia-*/*") -> list[Leftover]:
    """Returns the regions of PSs and the states of coordinators on this host, also if in use.

    Args:
        root: directory of the regions of all clusters.
        pattern: selects cluster and role, as in `Path.glob`.
    """
    regions = []
    for directory in sorted(Path(root).glob(pattern)):
        try:
            manifest = msgspec.json.decode((directory / MANIFEST).read_bytes(), type=_Manifest)
        except (OSError, msgspec.MsgspecError):
            manifest = None
        try:
            files = _all_files(directory)
            regions.append(
                Leftover(
                    str(directory),
                    manifest.tables if manifest is not None else [],
                    sum(_blocks(path) for path in files if not _is_cold(path)),
                    any(_in_use(path) for path in files),
                    time.time() - directory.stat().st_mtime,
                    sum(_blocks(path) for path in files if _is_cold(path)),
                    _layout(directory),
                )
            )
        except OSError:  # It is being removed.
            continue
    return regions


def taken_space(directory: str) -> int:
    """Returns the bytes of the regions of a cluster on this host, given the directory of one of its PSs."""
    taken = 0
    with contextlib.suppress(OSError):  # The directory does not exist yet.
        for neighbour in Path(directory).parent.iterdir():
            with contextlib.suppress(OSError):  # Not a directory, not readable, or being removed.
                taken += sum(_blocks(path) for path in _files(neighbour) if not _is_cold(path))
    return taken


def _all_files(directory: Path) -> list[Path]:
    """Returns the files of a PS, including its rows on disk."""
    return _files(directory) + [path for place in spill_places(directory) for path in cold_files(place)]


def _layout(directory: Path) -> int | None:
    """Returns the version of the layout of a PS's regions; None if there are none. They are damaged if it is wrong."""
    for path in _files(directory):
        try:
            with path.open("rb") as file:
                magic, version = HEADER.unpack(file.read(HEADER.size))
        except (OSError, struct.error):
            continue
        if magic == MAGIC and not _is_cold(path):
            return int(version)
    return None


def _is_cold(path: Path) -> bool:
    return ".cold." in path.name


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if re.fullmatch(r"\d+-.*\.\d+", path.name))


def _blocks(path: Path) -> int:
    """Returns the bytes of memory or disk that a file takes."""
    try:
        return path.stat().st_blocks * 512
    except FileNotFoundError:  # It is being removed.
        return 0


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Takes the lock of a region if it is free; yields whether it was free."""
    try:
        number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # It is being removed.
        yield True
        return
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(number)


def _in_use(path: Path) -> bool:
    with _locked(path) as free:
        return not free


def _remove(directory: Path) -> None:
    # The manifest first, so that no process attaches to the remaining files of an interrupted removal.
    (directory / MANIFEST).unlink(missing_ok=True)
    for place in spill_places(directory):
        for path in [*cold_files(place), place / MANIFEST]:
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):  # Other PSs of the cluster may use it.
            place.rmdir()
            place.parent.rmdir()
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):  # Other PSs of the cluster may use it.
        directory.parent.rmdir()


def _hint(directory: Path) -> None:
    if not _huge_pages(directory):
        log.info(
            "%s has pages of 4 KiB; lookups are faster with huge pages: as root, `mount -o remount,huge=advise %s`, or "
            "use a directory of hugetlbfs (`python -m benchmarks 'recovery.shm_lookup*'` says how much)",
            directory, DEFAULT_ROOT,
        )  # fmt: skip


def _huge_pages(directory: Path) -> bool:
    """Returns whether the file system of a directory supports huge pages on request."""
    mounted = file_system(directory)
    if mounted.kind == "hugetlbfs":
        return True
    forced = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    asked = "[force]" in forced.read_text() if forced.exists() else False
    requested = any(f"huge={how}" in mounted.options for how in ("always", "within_size", "advise"))
    return mounted.kind == "tmpfs" and (asked or requested)
