"""The embedding store of one process: tables of rows by id.

:class:`EmbeddingStore` is the native one, :class:`ReferenceStore` its slow, readable twin with the same results.
"""

from persia.store.config import OPTIMIZER_PARAMS, TableConfig
from persia.store.native import EmbeddingStore
from persia.store.reference import ReferenceStore
from persia.store.rows import Rows, ShardState, Spill

__all__ = ["OPTIMIZER_PARAMS", "EmbeddingStore", "ReferenceStore", "Rows", "ShardState", "Spill", "TableConfig"]
