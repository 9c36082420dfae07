"""Synchronization of the dense networks of several NN workers."""

from persia.dense.all_reduce import AllReduce, AllReduceOptions
from persia.dense.network import SharedNetwork
from persia.dense.server import DenseServer, partition
from persia.dense.tensor_layout import spec_of

__all__ = [
    "AllReduce",
    "AllReduceOptions",
    "DenseServer",
    "SharedNetwork",
    "partition",
    "spec_of",
]
