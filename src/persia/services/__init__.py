"""The Protocols through which roles communicate.

A role is a plain class that has these methods. A caller has the object itself or a stub of it, and uses both in the
same way. All methods block, are thread-safe, and raise :class:`persia.errors.PersiaError`. Calls are idempotent.
docs/reference/protocol.md specifies which role calls which method, and when.
"""

from persia.services.cluster import Attempt, Cluster, Connection, ProcessCluster, RecoveryPoints
from persia.services.control_plane import ControlPlane, Coordinator, Observable, TokenService, TrainingPhase
from persia.services.data import DataLoader, Divisible, Fingerprinted, Seekable, Sharded, fingerprint_of
from persia.services.dense import DenseMaker, DensePS
from persia.services.embedding import EmbeddingPS, EmbeddingWorker, RowChunk, SnapshotInfo, StatePiece
from persia.services.moving import (
    BucketMaps,
    MapRoundsOfRun,
    MapState,
    MovableRows,
    MovedCounts,
    MovedRows,
    MoveProgress,
    MoveStatus,
    Round,
    ScaleRequest,
)
from persia.services.nn_workers import NNWorkersChange, NNWorkersChanges
from persia.services.recording import ReadObserver, Recordable, RecordableRows, RecordableTokens, RecordableWorker
from persia.services.serving import FoundRows, RowServerState, RowsVersion, ServedEpoch, ServedRows
from persia.services.streams import (
    LoaderStream,
    NewBatch,
    SharedStream,
    Stream,
    StreamDataLoader,
    StreamLog,
    StreamPosition,
    StreamShare,
)

__all__ = [
    "Attempt",
    "BucketMaps",
    "Cluster",
    "Connection",
    "ControlPlane",
    "Coordinator",
    "DataLoader",
    "DenseMaker",
    "DensePS",
    "Divisible",
    "EmbeddingPS",
    "EmbeddingWorker",
    "Fingerprinted",
    "FoundRows",
    "LoaderStream",
    "MapRoundsOfRun",
    "MapState",
    "MovableRows",
    "MoveProgress",
    "MoveStatus",
    "MovedCounts",
    "MovedRows",
    "NNWorkersChange",
    "NNWorkersChanges",
    "NewBatch",
    "Observable",
    "ProcessCluster",
    "ReadObserver",
    "Recordable",
    "RecordableRows",
    "RecordableTokens",
    "RecordableWorker",
    "RecoveryPoints",
    "Round",
    "RowChunk",
    "RowServerState",
    "RowsVersion",
    "ScaleRequest",
    "Seekable",
    "ServedEpoch",
    "ServedRows",
    "Sharded",
    "SharedStream",
    "SnapshotInfo",
    "StatePiece",
    "Stream",
    "StreamDataLoader",
    "StreamLog",
    "StreamPosition",
    "StreamShare",
    "TokenService",
    "TrainingPhase",
    "fingerprint_of",
]
