"""Brings models of other libraries into persia, and back."""

from persia.interop import torchrec
from persia.interop.embedding_bag import RowsExported, export_embedding, import_embedding
from persia.interop.row_files import import_rows
from persia.interop.row_transfer import table_ids
from persia.interop.torch_optimizers import embedding_optimizer

__all__ = [
    "RowsExported",
    "embedding_optimizer",
    "export_embedding",
    "import_embedding",
    "import_rows",
    "table_ids",
    "torchrec",
]
