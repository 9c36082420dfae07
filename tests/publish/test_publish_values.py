"""Published values are off by no more than their dtype says."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from persia.publish import Replica, follow
from persia.publish.values import decode_values, encode_values
from support.change_log import ChangeLog, assert_equal_rows

ROWS = arrays(np.float32, (3, 5), elements=st.floats(width=32, allow_nan=True, allow_infinity=True))


@given(ROWS)
def test_int8_is_off_by_half_a_step_at_most(rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values, scales = encode_values(rows, "int8")
    assert values.dtype == np.int8
    assert values.min(initial=0) >= -127
    back = decode_values(values, scales)
    assert back.dtype == np.float32
    for row, found in zip(rows, back, strict=True):
        if not np.isfinite(row).all():
            assert np.isnan(found).all()
            continue
        peak = float(np.abs(row).max())
        assert (np.abs(found.astype(np.float64) - row) <= max(peak / 254 * (1 + 1e-5), 1.5e-36)).all()


@given(ROWS)
def test_float16_is_the_nearest_and_float32_exact(rows):
    same = decode_values(*encode_values(rows, "float32"))
    assert same.tobytes() == rows.tobytes()
    found = decode_values(*encode_values(rows, "float16"))
    finite = np.isfinite(rows)
    expected = np.clip(rows[finite], -65504, 65504).astype(np.float16).astype(np.float32)
    np.testing.assert_array_equal(found[finite], expected)
    np.testing.assert_array_equal(found[~finite], rows[~finite])


def test_no_rows():
    values, scales = encode_values(np.empty((0, 4), np.float32), "int8")
    assert decode_values(values, scales).shape == (0, 4)


@pytest.mark.parametrize(("dtype", "error"), [("float16", 1e-3), ("int8", 2e-2)])
def test_a_reader_gets_float32(tmp_path, dtype, error):
    log = ChangeLog(tmp_path / "log", dtype=dtype)
    log.train(2)
    log.begin()
    replica = Replica(follow(log.url))
    for _ in range(3):
        replica.refresh()
        assert not replica.problem
        assert_equal_rows(replica, log, error)
        assert all(row.dtype == np.float32 for row in replica.rows("item").values())
        log.train()
        log.publish()
