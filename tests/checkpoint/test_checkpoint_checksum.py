"""The checksum of parts against zlib's."""

from __future__ import annotations

import zlib

from hypothesis import given
from hypothesis import strategies as st

from persia.checkpoint.storage import crc32


@given(st.binary(max_size=2000), st.integers(0, 2000), st.integers(0, 2**32 - 1))
def test_as_zlib(data, first, begin):
    assert crc32(memoryview(data), begin) == zlib.crc32(data, begin)
    assert crc32(memoryview(data)[first:], crc32(memoryview(data)[:first])) == zlib.crc32(data)
