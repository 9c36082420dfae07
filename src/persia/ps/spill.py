"""The files of rows on disk of an embedding PS: their directories, and the free space there.

With regions, each PS has its own directory below `Table.spill`, with the name of the directory of its regions, which
has a list of these directories. Without regions, the files have no name and vanish with the process.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from persia.errors import StoreError
from persia.ps.memory_checks import fits_disk
from persia.ps.sizes import TableSize
from persia.store import TableConfig
from persia.telemetry.logs import get_logger

__all__ = ["SpillPlaces", "cold_files", "free_bytes", "spill_places", "warn_of_disks"]

PLACES = "spill.json"
COLD = re.compile(r"\d+-.*\.cold\.\d+(\.slots)?")

log = get_logger("persia.ps")


class SpillPlaces:
    """Paths of the files of one PS.

    Args:
        roots: `Table.spill` of each table with `spill`, by name.
        regions: directory of the regions of the PS; None if it has none.
    """

    def __init__(self, roots: Mapping[str, str], regions: Path | None = None) -> None:
        self._regions = regions
        self._directories = {
            table: Path(root) if regions is None else Path(root) / regions.parent.name / regions.name
            for table, root in roots.items()
        }
        self._prefix = "" if regions is not None else f"persia-{os.getpid()}-{uuid.uuid4().hex[:8]}-"

    @property
    def directories(self) -> list[Path]:
        """The directories, each once."""
        return list(dict.fromkeys(self._directories.values()))

    def tables(self, directory: Path) -> list[str]:
        """Returns the tables with files in a directory."""
        return [table for table, own_directory in self._directories.items() if own_directory == directory]

    def create(self) -> None:
        """Creates the directories, for this user alone.

        Raises:
            StoreError: a directory cannot be created.
        """
        for directory in self.directories:
            try:
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            except OSError as error:
                raise StoreError(
                    f"Cannot create the directory {directory} for rows on disk: {error.strerror}. Set `spill` of "
                    f"{', '.join(map(repr, self.tables(directory)))} to another one.",
                    path=str(directory),
                ) from error
        if self._regions is not None and self._directories:
            names = msgspec.json.encode([str(directory) for directory in self.directories])
            (self._regions / PLACES).write_bytes(names)

    def path(self, number: int, table: str) -> str | None:
        """Returns the path of the files of a table for `EmbeddingStore.create_table`; None for a table without."""
        directory = self._directories.get(table)
        if directory is None:
            return None
        return str(directory / f"{self._prefix}{number:03d}-{re.sub(r'[^A-Za-z0-9_]', '_', table)[:64]}.cold")


def spill_places(regions: Path) -> list[Path]:
    """Returns the directories of rows on disk that belong to the regions of a PS.

    Only directories named like the regions count, so that a list written by someone else cannot lead elsewhere.
    """
    try:
        names = msgspec.json.decode((regions / PLACES).read_bytes(), type=list[str])
    except (OSError, msgspec.MsgspecError):
        return []
    places = [Path(name) for name in names if name.startswith("/") and "\0" not in name]
    return [place for place in places if place != regions and place.parts[-2:] == regions.parts[-2:]]


def cold_files(directory: Path) -> list[Path]:
    """Returns the files of rows on disk in a directory; none if it is gone, or is a link."""
    if directory.is_symlink():
        return []
    with contextlib.suppress(OSError):
        return sorted(path for path in directory.iterdir() if COLD.fullmatch(path.name) and not path.is_symlink())
    return []


def free_bytes(directory: Path) -> int:
    """Returns the bytes that are free at a directory, which need not exist yet."""
    while not directory.exists():
        directory = directory.parent
    return shutil.disk_usage(directory).free


def warn_of_disks(
    places: SpillPlaces, sizes: Sequence[TableSize], configs: Mapping[str, TableConfig], neighbours: int
) -> None:
    """Warns of each disk that is too small for the rows that a PS may have there.

    Args:
        places: places of the files of the PS.
        sizes: shares of the PS.
        configs: configurations by table.
        neighbours: number of PSs that share the disk, including this one.
    """
    of_disk: dict[int, list[Path]] = {}
    for directory in places.directories:
        of_disk.setdefault(os.stat(directory).st_dev, []).append(directory)
    for directories in of_disk.values():
        names = {table for directory in directories for table in places.tables(directory)}
        on_disk = [size for size in sizes if size.name in names and size.capacity is not None]
        free = free_bytes(directories[0]) // neighbours
        records = {size.name: configs[size.name].record_bytes for size in on_disk}
        if fits_disk(on_disk, records, free, str(directories[0])):
            log.info("%s has %.1f GiB free for rows on disk of an embedding PS", directories[0], free / (1 << 30))
