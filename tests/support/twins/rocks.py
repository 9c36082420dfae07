"""A twin of the native store whose rows on disk are in RocksDB: slow and independent, for tests and comparisons."""

from __future__ import annotations

import struct
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np

from persia.store.table_config import TableConfig
from support.twins.shard import ReferenceRow
from support.twins.store import ReferenceStore

__all__ = ["RocksStore"]

NUMBERS = struct.Struct("<IIII")
"""Update count, last step, stamp and epoch of a row, before its values."""


class RocksStore(ReferenceStore):
    """A `ReferenceStore` that keeps rows on disk in a RocksDB database for each shard.

    Args:
        pool: not used; see `ReferenceStore`.
    """

    def __init__(self, pool: object = None) -> None:
        super().__init__(pool)
        import rocksdict

        self._library: Any = rocksdict

    def _cold_rows(self, config: TableConfig, path: str) -> MutableMapping[int, ReferenceRow]:
        return _RocksRows(self._library.Rdict(path, self._library.Options(raw_mode=True)), config)


class _RocksRows(MutableMapping[int, ReferenceRow]):
    """Rows by id. The order in which they came is in memory, as RocksDB orders by key."""

    def __init__(self, database: Any, config: TableConfig) -> None:
        self._database = database
        self._dim = config.dim
        self._ids: dict[int, None] = {}

    def __getitem__(self, id_: int) -> ReferenceRow:
        if id_ not in self._ids:
            raise KeyError(id_)
        found = self._database[_key(id_)]
        values = np.frombuffer(found, np.float32, offset=NUMBERS.size).copy()
        return ReferenceRow(id_, values[: self._dim], values[self._dim :], *NUMBERS.unpack_from(found))

    def __setitem__(self, id_: int, row: ReferenceRow) -> None:
        numbers = NUMBERS.pack(row.update_count, row.last_step, row.stamp, row.epoch)
        self._database[_key(id_)] = numbers + row.embedding.tobytes() + row.state.tobytes()
        self._ids.pop(id_, None)
        self._ids[id_] = None

    def __delitem__(self, id_: int) -> None:
        del self._ids[id_]
        del self._database[_key(id_)]

    def __contains__(self, id_: object) -> bool:
        return id_ in self._ids

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def _key(id_: int) -> bytes:
    return id_.to_bytes(8, "little")
