"""The embedding store of one process: tables of rows by id.

:class:`EmbeddingStore` is the interface, :class:`NativeStore` the native implementation. `persia.store.served` stores
the rows of a prediction server: values only, read without locks. `tests/support/twins/store.py` is the readable twin.
"""

from persia.store.native import NativeStore
from persia.store.protocol import EmbeddingStore, RowChanges, Rows, ShardState, Spill
from persia.store.table_config import COLD_ROW_BYTES, MAX_ROWS, OPTIMIZER_PARAMS, ROW_OVERHEAD, TableConfig

__all__ = [
    "COLD_ROW_BYTES",
    "MAX_ROWS",
    "OPTIMIZER_PARAMS",
    "ROW_OVERHEAD",
    "EmbeddingStore",
    "NativeStore",
    "RowChanges",
    "Rows",
    "ShardState",
    "Spill",
    "TableConfig",
]
