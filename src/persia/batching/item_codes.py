"""Codes of items in a file of `persia semantic-ids`, and the ids of their prefixes."""

from __future__ import annotations

import functools
import io
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError, PersiaError
from persia.filesystems import missing_package
from persia.schema import CodePrefix, Schema
from persia.schema.mappings import MAX_CODES
from persia.telemetry.logs import get_logger
from persia.types import Ids, Int64Array

__all__ = [
    "CODEBOOKS",
    "ID_COLUMN",
    "ItemCodes",
    "code_column",
    "prefix_ids",
    "read_code_files",
    "read_codes",
]

LOG = get_logger("persia.data")

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
        digest: of the codebooks; empty if unknown.
    """

    ids: Ids
    codes: NDArray[np.int32]
    codes_per_level: int
    digest: str = ""

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


def read_code_files(schema: Schema) -> None:
    """Reads the files of codes that a schema names, so that no request waits for them.

    Raises:
        DataError: a file cannot be read, or is no such file.
    """
    for feature in schema.id_features:
        if isinstance(feature.mapping, CodePrefix):
            _file(feature.mapping.codes).read()


def _checked(path: str, table: Any) -> ItemCodes:
    try:
        said: Mapping[str, Any] = json.loads((table.schema.metadata or {})[CODEBOOKS])
        levels, per_level = int(said["levels"]), int(said["codes"])
        if not (1 <= levels <= MAX_CODES and per_level >= 1 and per_level**levels < 1 << 63):
            raise ValueError(f"{levels} levels of {per_level} codes")
        if any(column.null_count for column in table.columns):
            raise ValueError("a value is null")
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
    return ItemCodes(ids, codes, per_level, str(said.get("digest", "")))


class _Read(NamedTuple):
    """The content of a file, as it was read.

    Attributes:
        codes: the codes.
        prefixes: ids of prefixes of each length up to the number of levels.
        mark: what changes when the file is written again.
    """

    codes: ItemCodes
    prefixes: tuple[Ids, ...]
    mark: object


class _File:
    """The codes of one file, as it was when it was read last; thread-safe.

    Args:
        path: path or URL.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._read: _Read | None = None
        self._looked = 0.0
        self._lock = threading.Lock()
        self.rereading: threading.Thread | None = None

    def read(self) -> _Read:
        """Returns what the file has; blocks while it is read for the first time."""
        if self._read is None:
            with self._lock:
                if self._read is None:
                    self._read = self._now()
                    self._looked = time.monotonic()
        return self._read

    def map(self, length: int, ids: Ids) -> Ids:
        """See `prefix_ids`."""
        read = self.read()
        if length > len(read.prefixes):
            raise DataError(
                f"CodePrefix.length = {length}, but {self._path} has {len(read.prefixes)} codes for each item; give at "
                f"most {len(read.prefixes)}.",
                path=self._path,
            )
        places: Int64Array = np.searchsorted(read.codes.ids, ids)
        known = np.zeros(len(ids), np.bool_)
        inside = places < len(read.codes.ids)
        known[inside] = read.codes.ids[places[inside]] == ids[inside]
        mapped = np.full(len(ids), UNKNOWN, np.uint64)
        mapped[known] = read.prefixes[length - 1][places[known]]
        if not known.all():
            self._look_again()
        return mapped

    def _now(self) -> _Read:
        mark = _mark(self._path)
        codes, _ = read_codes(self._path)
        prefixes = tuple(codes.prefixes(length + 1) for length in range(codes.codes.shape[1]))
        return _Read(codes, prefixes, mark)

    def _look_again(self) -> None:
        """Begins to read the file again in a thread if it may have changed: lookups of others go on meanwhile."""
        with self._lock:
            if time.monotonic() - self._looked < REREAD_SECONDS:
                return
            if self.rereading is not None and self.rereading.is_alive():
                return
            self._looked = time.monotonic()
            self.rereading = threading.Thread(target=self._reread, name="persia-item-codes", daemon=True)
            self.rereading.start()

    def _reread(self) -> None:
        before = self.read()
        if _mark(self._path) in (None, before.mark):
            return
        try:
            after = self._now()
        except PersiaError as error:
            LOG.warning("%s The codes that were read before stay in use.", error)
            return
        if after.codes.digest != before.codes.digest:
            LOG.warning(
                "%s has other codebooks now, so that its codes mean something else. Those that were read before stay "
                "in use. Write other codebooks to another file, and new items by `persia semantic-ids --like`.",
                self._path,
            )
            return
        self._read = after


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

    A process reads a file once, with all threads waiting for it. If an id is not in it, a thread looks at the file
    again, at most every 10 s, and reads it if it has changed; later calls then have the new items. Thread-safe.

    Args:
        path: file of `persia semantic-ids`, a path or URL.
        length: number of codes.
        ids: uint64 `[n]`.

    Raises:
        DataError: the file cannot be read, is no such file, or has fewer codes for each item.
        MissingExtraError: the file system of a URL is not installed.
    """
    return _file(path).map(length, np.ascontiguousarray(ids, np.uint64))
