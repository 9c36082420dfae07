"""Small typed records that several layers share and that cross from one role to another.

They consist of arrays, numbers, strings, lists, dicts and other records, so that `rpc` can carry them.
docs/reference/protocol.md defines what they mean.
"""

from persia.types.arrays import BoolArray, Bytes, Floats, Halves, Ids, Int32Array, Int64Array, Inverse, WireRows
from persia.types.batches import (
    COUNTER_BITS,
    INCARNATION_BITS,
    MERGED,
    RANK_BITS,
    BatchId,
    Contribution,
    Delivery,
    FedBatch,
    Feed,
    LookedUp,
    Offsets,
    PushHeader,
    UpdateCounts,
    sum_counts,
)
from persia.types.dense import DenseState, Pulled, PushedDense, TensorSpec
from persia.types.membership import TITLES, Member, Membership
from persia.types.packed import Gradients, Packed, PackedGradients
from persia.types.publishing import PublishOptions, PublishOrder, PublishStatus
from persia.types.rows import RowsSet, RowState, StoredRows
from persia.types.streams import OffsetRange, Partition, PartitionBounds, RecordedBatch, StreamStart, loader_of
from persia.types.tokens import (
    ArrivalRecord,
    Caller,
    JournalRecord,
    PhaseRecord,
    QuiesceResult,
    ReadRecord,
    RowStaleness,
    StepTiming,
    Ticket,
    Token,
    TokenReport,
    WorkerReport,
)

__all__ = [
    "COUNTER_BITS",
    "INCARNATION_BITS",
    "MERGED",
    "RANK_BITS",
    "TITLES",
    "ArrivalRecord",
    "BatchId",
    "BoolArray",
    "Bytes",
    "Caller",
    "Contribution",
    "Delivery",
    "DenseState",
    "FedBatch",
    "Feed",
    "Floats",
    "Gradients",
    "Halves",
    "Ids",
    "Int32Array",
    "Int64Array",
    "Inverse",
    "JournalRecord",
    "LookedUp",
    "Member",
    "Membership",
    "OffsetRange",
    "Offsets",
    "Packed",
    "PackedGradients",
    "Partition",
    "PartitionBounds",
    "PhaseRecord",
    "PublishOptions",
    "PublishOrder",
    "PublishStatus",
    "Pulled",
    "PushHeader",
    "PushedDense",
    "QuiesceResult",
    "ReadRecord",
    "RecordedBatch",
    "RowStaleness",
    "RowState",
    "RowsSet",
    "StepTiming",
    "StoredRows",
    "StreamStart",
    "TensorSpec",
    "Ticket",
    "Token",
    "TokenReport",
    "UpdateCounts",
    "WireRows",
    "WorkerReport",
    "loader_of",
    "sum_counts",
]
