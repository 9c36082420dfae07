"""The NN worker: embeddings as torch tensors, prefetching, models."""

from persia.nn import losses, models
from persia.nn.collection import EmbeddingCollection
from persia.nn.gate import Staleness
from persia.nn.options import CollectionOptions
from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings, SequenceEmbedding
from persia.nn.prepared import PreparedBatch
from persia.nn.ranking import RankingModel
from persia.nn.regularization import embedding_l2
from persia.nn.targets import Targets
from persia.types import RowsSet, RowState, StoredRows

__all__ = [
    "CollectionOptions",
    "EmbeddingCollection",
    "Embeddings",
    "ModelOutput",
    "PreparedBatch",
    "RankingModel",
    "RowState",
    "RowsSet",
    "SequenceEmbedding",
    "Staleness",
    "StoredRows",
    "Targets",
    "embedding_l2",
    "losses",
    "models",
]
