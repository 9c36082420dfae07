"""Codes of items in a file of `persia semantic-ids`, and the ids of their prefixes."""

from __future__ import annotations

import functools
import io
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError
from persia.filesystems import missing_package
from persia.schema.mappings import MAX_CODES
from persia.types import Ids, Int64Array

__all__ = ["CODEBOOKS", "ID_COLUMN", "ItemCodes", "code_column", "prefix_ids", "read_codes"]

ID_COLUMN = "id"
"""Column of such a file with the ids of the items, uint64."""
CODEBOOKS = b"persia.codebooks"
"""Key of the metadata that describe the codes."""
UNKNOWN = 0
"""The id of every prefix of an item without codes."""
REREAD_SECONDS = 10.0
"""How often a file is looked at again, at most, when ids are not in it."""


def code_column(level: int) -> str:
    """Returns the name of the column with the codes of a level, from 1 on."""
    return f"code_{level}"


@dataclass(frozen=True)
class ItemCodes:
    """The codes of items.

    Attributes:
        ids: uint64 `[items]`, ascending.
        codes: int32 `[items, levels]`, each in [0, `codes_per_level`).
        codes_per_level: codes that a level may have.
    """

    ids: Ids
    codes: NDArray[np.int32]
    codes_per_level: int

    def prefixes(self, length: int) -> Ids:
        """Returns the ids of the first `length` codes of each item, from 1 on, uint64 `[items]`.

        Prefixes of different lengths have different ids: those of length n follow all shorter ones.
        """
        per_level = np.uint64(self.codes_per_level)
        first = sum(self.codes_per_level**shorter for shorter in range(length))
        prefix = np.zeros(len(self.ids), np.uint64)
        for level in range(length):
            prefix = prefix * per_level + self.codes[:, level].astype(np.uint64)
        return prefix + np.uint64(first)


def read_codes(path: str) -> tuple[ItemCodes, Any]:
    """Reads a file that `persia semantic-ids` wrote, a path or URL.

    Returns:
        The codes, and the pyarrow table.

    Raises:
        DataError: the file cannot be read, or is no such file.
        MissingExtraError: the file system of a URL is not installed.
    """
    import fsspec
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with fsspec.open(path, "rb") as stream:
            table = pq.read_table(io.BytesIO(stream.read()))
    except ImportError as error:
        raise missing_package(path, error) from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(
            f"The codes of items in {path} cannot be read ({error}). Write them by `persia semantic-ids`, and give a "
            "path or URL that every process can read.",
            path=path,
        ) from error
    return _checked(path, table), table


def _checked(path: str, table: Any) -> ItemCodes:
    try:
        said: Mapping[str, Any] = json.loads((table.schema.metadata or {})[CODEBOOKS])
        levels, per_level = int(said["levels"]), int(said["codes"])
        if not (1 <= levels <= MAX_CODES and per_level >= 1):
            raise ValueError(f"{levels} levels of {per_level} codes")
        ids = np.asarray(table[ID_COLUMN], np.uint64)
        codes = np.column_stack([np.asarray(table[code_column(level + 1)], np.int32) for level in range(levels)])
        if codes.min(initial=0) < 0 or codes.max(initial=0) >= per_level:
            raise ValueError(f"a code is not in [0, {per_level})")
        if (ids[1:] <= ids[:-1]).any():
            raise ValueError("its ids do not ascend")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path} is no file of codes of items ({type(error).__name__}: {error}); write it by `persia "
            "semantic-ids`.",
            path=path,
        ) from error
    return ItemCodes(ids, codes, per_level)


@dataclass
class _File:
    """The codes of one file, as it was when it was read last; thread-safe."""

    path: str
    _read: ItemCodes | None = None
    _mark: object = None
    _looked: float = 0.0
    _prefixes: dict[int, Ids] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def map(self, length: int, ids: Ids) -> Ids:
        with self._lock:
            self._load()
            mapped, known = self._look_up(length, ids)
            if not known.all() and time.monotonic() - self._looked >= REREAD_SECONDS and self._changed():
                self._read = None
                self._load()
                mapped, _ = self._look_up(length, ids)
            return mapped

    def _load(self) -> None:
        if self._read is not None:
            return
        mark = _mark(self.path)
        self._read, _ = read_codes(self.path)
        self._mark, self._looked = mark, time.monotonic()
        self._prefixes.clear()

    def _changed(self) -> bool:
        self._looked = time.monotonic()
        mark = _mark(self.path)
        return mark is not None and mark != self._mark

    def _look_up(self, length: int, ids: Ids) -> tuple[Ids, NDArray[np.bool_]]:
        assert self._read is not None
        levels = self._read.codes.shape[1]
        if length > levels:
            raise DataError(
                f"CodePrefix.length = {length}, but {self.path} has {levels} codes for each item; give at most "
                f"{levels}.",
                path=self.path,
            )
        if length not in self._prefixes:
            self._prefixes[length] = self._read.prefixes(length)
        places: Int64Array = np.searchsorted(self._read.ids, ids)
        known = np.zeros(len(ids), np.bool_)
        inside = places < len(self._read.ids)
        known[inside] = self._read.ids[places[inside]] == ids[inside]
        mapped = np.full(len(ids), UNKNOWN, np.uint64)
        mapped[known] = self._prefixes[length][places[known]]
        return mapped, known


def _mark(path: str) -> object:
    """Returns what changes when the file is written again; None if it cannot be told now."""
    import fsspec

    try:
        system, name = fsspec.core.url_to_fs(path)
        if hasattr(system, "invalidate_cache"):
            system.invalidate_cache()
        return sorted((key, repr(value)) for key, value in system.info(name).items())
    except Exception:  # Each file system has its own errors; reading the file then says what is wrong.
        return None


@functools.lru_cache(maxsize=64)
def _file(path: str) -> _File:
    return _File(path)


def prefix_ids(path: str, length: int, ids: Ids) -> Ids:
    """Returns the ids of the first `length` codes of items; 0 for those that the file does not name.

    A process reads a file once, with all threads waiting for it. If an id is not in it, the file is looked at again, at
    most every 10 s, and read again if it has changed. Thread-safe.

    Args:
        path: file of `persia semantic-ids`, a path or URL.
        length: number of codes.
        ids: uint64 `[n]`.

    Raises:
        DataError: the file cannot be read, is no such file, or has fewer codes for each item.
        MissingExtraError: the file system of a URL is not installed.
    """
    return _file(path).map(length, np.ascontiguousarray(ids, np.uint64))
