"""A batch for a step in which this NN worker has no data (docs/reference/protocol.md, sections 6 and 7)."""

from __future__ import annotations

import numpy as np
import torch

from persia.nn.prepared import PreparedBatch, PreparedRows
from persia.schema import Schema
from persia.types import Int64Array, Inverse

__all__ = ["dummy_batch"]


def dummy_batch(schema: Schema, rows: int, device: torch.device) -> PreparedBatch:
    """Zeros, and samples without ids: the network can be run with it, so that collectives find all NN workers.

    Args:
        schema: of the model's input.
        rows: samples, 0 or more.
        device: where the network runs.
    """
    on_host = device.type == "cpu"
    names = [f.name for f in schema.id_features]
    # Pooling needs a row to point to, though no id does.
    tables = {name: torch.zeros(1, table.dim, device=device) for name, table in schema.resolved_tables().items()}
    if on_host:
        index: dict[str, Inverse] = {name: np.empty(0, np.uint16) for name in names}
        ends: dict[str, Int64Array | None] = {name: np.zeros(rows + 1, np.int64) for name in names}
        found = PreparedRows(tables, index, ends)
    else:
        nowhere = torch.empty(0, dtype=torch.int64, device=device)
        starts: dict[str, torch.Tensor | None] = {name: nowhere.new_zeros(rows + 1) for name in names}
        found = PreparedRows(tables, dict.fromkeys(names, nowhere), starts)
    return PreparedBatch(
        torch.zeros(rows, len(schema.dense_features), device=device),
        torch.zeros(rows, len(schema.labels), device=device),
        None,
        found,
        None,
        dummy=True,
    )
