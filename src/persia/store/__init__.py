"""The embedding store of one process: tables of rows by id.

:class:`EmbeddingStore` is the interface, :class:`NativeStore` the native implementation, :class:`ReferenceStore` its
slow, readable twin with the same results. `persia.store.served` has the rows of a prediction server: values only, read
without locks. `persia.store.rocksdb` has a twin whose rows on disk are in RocksDB.
"""

from persia.store.config import COLD_ROW_BYTES, MAX_ROWS, OPTIMIZER_PARAMS, ROW_OVERHEAD, TableConfig
from persia.store.native import NativeStore
from persia.store.protocol import EmbeddingStore, RowChanges, Rows, ShardState, Spill
from persia.store.reference import ReferenceStore

__all__ = [
    "COLD_ROW_BYTES",
    "MAX_ROWS",
    "OPTIMIZER_PARAMS",
    "ROW_OVERHEAD",
    "EmbeddingStore",
    "NativeStore",
    "ReferenceStore",
    "RowChanges",
    "Rows",
    "ShardState",
    "Spill",
    "TableConfig",
]
