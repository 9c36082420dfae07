"""The embedding store of one process: tables of rows by id.

:class:`EmbeddingStore` is the interface, :class:`NativeStore` the native implementation, :class:`ReferenceStore` its
slow, readable twin with the same results.
"""

from persia.store.config import MAX_ROWS, OPTIMIZER_PARAMS, ROW_OVERHEAD, TableConfig
from persia.store.native import NativeStore
from persia.store.protocol import EmbeddingStore, Rows, ShardState, Spill
from persia.store.reference import ReferenceStore

__all__ = [
    "MAX_ROWS",
    "OPTIMIZER_PARAMS",
    "ROW_OVERHEAD",
    "EmbeddingStore",
    "NativeStore",
    "ReferenceStore",
    "Rows",
    "ShardState",
    "Spill",
    "TableConfig",
]
