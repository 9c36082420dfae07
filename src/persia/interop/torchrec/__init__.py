"""TorchRec models and batches in persia, and back."""

from persia.interop.torchrec.batches import (
    TorchRecBatch,
    from_batch,
    keyed_jagged_tensor,
    keyed_tensor,
    schema_of,
    to_batch,
)
from persia.interop.torchrec.weights import export_weights, import_dcp, import_weights

__all__ = [
    "TorchRecBatch",
    "export_weights",
    "from_batch",
    "import_dcp",
    "import_weights",
    "keyed_jagged_tensor",
    "keyed_tensor",
    "schema_of",
    "to_batch",
]
