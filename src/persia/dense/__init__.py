"""How the dense networks of several NN workers are kept alike."""

from persia.dense.all_reduce import AllReduce, AllReduceOptions
from persia.dense.merge import merged_metrics

__all__ = ["AllReduce", "AllReduceOptions", "merged_metrics"]
