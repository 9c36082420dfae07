"""Checkpoints: safetensors parts and a manifest, written so that a kill leaves the old or the new one.

The format is specified in `docs/reference/checkpoint.md`. Nothing here imports torch until it meets a torch tensor.
"""

from persia.checkpoint.compatibility import same_rule
from persia.checkpoint.format import Base, Manifest, Part, RemovedPart, RowsPart, StatePart, TableRecord, TensorsPart
from persia.checkpoint.inspection import Inspection, format_inspection, inspect
from persia.checkpoint.reader import CheckpointEntry, CheckpointReader, list_checkpoints
from persia.checkpoint.writer import CheckpointWriter

__all__ = [
    "Base",
    "CheckpointEntry",
    "CheckpointReader",
    "CheckpointWriter",
    "Inspection",
    "Manifest",
    "Part",
    "RemovedPart",
    "RowsPart",
    "StatePart",
    "TableRecord",
    "TensorsPart",
    "format_inspection",
    "inspect",
    "list_checkpoints",
    "same_rule",
]
