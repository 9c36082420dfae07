"""Compressors of APMSqueeze: one file each, registered in `AnyCompressor`."""

from persia.optim.compressors.base import Compressor
from persia.optim.compressors.one_bit import OneBit
from persia.optim.compressors.stochastic_ternary import StochasticTernary
from persia.optim.compressors.top_k import TopK
from persia.optim.compressors.uncompressed import Uncompressed

__all__ = ["AnyCompressor", "Compressor", "OneBit", "StochasticTernary", "TopK", "Uncompressed"]

AnyCompressor = OneBit | TopK | StochasticTernary | Uncompressed
"""The compressors that a configuration can name by `kind`."""
