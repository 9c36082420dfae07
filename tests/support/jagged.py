"""TorchRec's KeyedJaggedTensor, or a stand-in with what `persia.interop.torchrec.to_batch` reads of it."""

import itertools
import warnings

import pytest
import torch


class Jagged:
    """Ids of several features, as TorchRec lays them out: those of one feature after those of another."""

    def __init__(self, keys, values, weights=None, *, lengths):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def lengths(self):
        return self._lengths

    def weights_or_none(self):
        return self._weights

    def stride(self):
        return len(self._lengths) // len(self._keys)

    def variable_stride_per_key(self):
        return False


def theirs(*arguments, **options):
    """A KeyedJaggedTensor; skips the test where TorchRec is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torchrec = pytest.importorskip("torchrec", reason="TorchRec is not installed; docs/guide/from-torchrec.md")
        return torchrec.KeyedJaggedTensor(*arguments, **options)


KINDS = [pytest.param(Jagged, id="stand-in"), pytest.param(theirs, id="torchrec")]


def parts(keys, ids, lengths):
    """The ids of each feature and sample, as lists."""
    bounds = [0, *torch.cumsum(lengths, 0).tolist()]
    lists = [ids[low:high].tolist() for low, high in itertools.pairwise(bounds)]
    rows = len(lists) // len(keys)
    return {key: lists[at * rows : (at + 1) * rows] for at, key in enumerate(keys)}
