"""How the dense networks of several NN workers are kept alike."""

from persia.dense.all_reduce import AllReduce, AllReduceOptions
from persia.dense.client import Shared
from persia.dense.flat import spec_of
from persia.dense.merge import merged_metrics
from persia.dense.server import DenseServer, partition
from persia.dense.threads import Meeting, ThreadReplicas

__all__ = [
    "AllReduce",
    "AllReduceOptions",
    "DenseServer",
    "Meeting",
    "Shared",
    "ThreadReplicas",
    "merged_metrics",
    "partition",
    "spec_of",
]
