"""Checkpoints: safetensors parts and a manifest. After a crash during a save, the old or the new checkpoint is valid.

The format is specified in `docs/reference/checkpoint.md`. Torch is imported only for torch tensors.
"""

from persia.checkpoint.best import BestCheckpoint, Score
from persia.checkpoint.comparing import TableDifference, diff
from persia.checkpoint.compatibility import check_values, same_rule
from persia.checkpoint.exporting import export
from persia.checkpoint.format import (
    MOST_SHARDS,
    Base,
    Manifest,
    Part,
    RemovedPart,
    RowsPart,
    StatePart,
    StepChoice,
    TableRecord,
    TensorsPart,
)
from persia.checkpoint.inspection import Inspection, format_inspection, inspect
from persia.checkpoint.listing import CheckpointEntry, list_checkpoints
from persia.checkpoint.reader import CheckpointReader
from persia.checkpoint.resharding import ReshardOptions, compact, reshard
from persia.checkpoint.row_view import Checkpoint, TableRows, open
from persia.checkpoint.servers import clock_gaps, server_pieces
from persia.checkpoint.sketches import AdmissionSketches
from persia.checkpoint.writer import CheckpointWriter

__all__ = [
    "MOST_SHARDS",
    "AdmissionSketches",
    "Base",
    "BestCheckpoint",
    "Checkpoint",
    "CheckpointEntry",
    "CheckpointReader",
    "CheckpointWriter",
    "Inspection",
    "Manifest",
    "Part",
    "RemovedPart",
    "ReshardOptions",
    "RowsPart",
    "Score",
    "StatePart",
    "StepChoice",
    "TableDifference",
    "TableRecord",
    "TableRows",
    "TensorsPart",
    "check_values",
    "clock_gaps",
    "compact",
    "diff",
    "export",
    "format_inspection",
    "inspect",
    "list_checkpoints",
    "open",
    "reshard",
    "same_rule",
    "server_pieces",
]
