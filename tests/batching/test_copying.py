"""Copies of arrays on several threads."""

from __future__ import annotations

import numpy as np
import pytest

from persia import batching
from persia.errors import DataError

POOLS = {threads: batching.ThreadPool(threads) for threads in (1, 3)}
DTYPES = [np.float64, np.float32, np.float16, np.int64, np.uint64, np.int32, np.uint32, np.uint16, np.uint8, np.bool_]


@pytest.mark.parametrize("threads", POOLS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_array_is_copied_whole(threads, dtype):
    for size in (0, 1, 1_300_001):
        array = np.random.default_rng(size).integers(0, 100, size).astype(dtype).reshape(-1, 1)
        array.flags.writeable = False
        to = np.zeros_like(array)
        batching.copy_array(to, array, POOLS[threads])
        np.testing.assert_array_equal(to, array)


def test_arrays_that_do_not_fit_are_refused():
    array = np.arange(6, dtype=np.float32)
    read_only = np.zeros(6, np.float32)
    read_only.flags.writeable = False
    others = (array[:5].copy(), np.zeros(6), np.zeros(6, np.int32), np.zeros(12, np.float32)[::2], read_only, array)
    for to in others:
        with pytest.raises(DataError, match=r"must be contiguous, of one dtype and size, and not overlap"):
            batching.copy_array(to, array, POOLS[1])
    with pytest.raises(DataError, match="contiguous"):
        batching.copy_array(np.zeros(3, np.float32), array[::2], POOLS[1])
