"""Rows as float16 with a scale: against the twin, within the error bound, and alike on the host and in torch."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stnp

from persia import batching
from persia.errors import DataError
from persia.nn import transfer
from persia.types.packed import Packed
from support.examples import examples
from support.twins import batching as reference


def bits(array):
    return array.view(f"u{array.itemsize}")


def assert_same(found, expected):
    """To the bit; NaN is NaN."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    unknown = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), unknown)
    np.testing.assert_array_equal(bits(found)[~unknown], bits(expected)[~unknown])


def floats(**options):
    return stnp.arrays(
        np.float32,
        st.tuples(st.integers(0, 6), st.integers(1, 40)),
        elements=st.floats(width=32, **options),
    )


@settings(deadline=None, max_examples=examples(300))
@given(floats())
def test_it_is_the_twin(rows):
    halves, scales = batching.encode_rows(rows)
    expected_halves, expected_scales = reference.encode_rows(rows)
    assert_same(scales, expected_scales)
    assert_same(halves, expected_halves)
    assert_same(batching.decode_rows(halves, scales), reference.decode_rows(halves, scales))


@settings(deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 3, 7, 8, 13, 16, 24, 31, 32, 48]), st.integers(-140, 120))
def test_it_is_the_twin_for_rows_of_any_magnitude(seed, dim, exponent):
    rng = np.random.default_rng(seed)
    rows = np.ldexp(rng.standard_normal((50, dim)), exponent + rng.integers(-30, 4, (50, dim))).astype(np.float32)
    halves, scales = batching.encode_rows(rows)
    for found, expected in zip((halves, scales), reference.encode_rows(rows), strict=True):
        assert_same(found, expected)
    assert_same(batching.decode_rows(halves, scales), reference.decode_rows(halves, scales))


@settings(deadline=None, max_examples=examples(300))
@given(floats(allow_nan=False, allow_infinity=False))
def test_the_error_is_bounded(rows):
    halves, scales = batching.encode_rows(rows)
    found = batching.decode_rows(halves, scales).astype(np.float64)
    assert np.isfinite(found).all()
    exact = rows.astype(np.float64)
    bound = np.maximum(np.abs(exact) * (2.0**-11 + 2.0**-23), 2.0**-25 * scales[:, None].astype(np.float64))
    # Of a product that float32 cannot express there remains half its smallest step.
    assert (np.abs(found - exact) <= bound + 2.0**-150).all()


@settings(deadline=None)
@given(floats())
def test_what_is_not_finite_stays_so(rows):
    found = batching.decode_rows(*batching.encode_rows(rows))
    np.testing.assert_array_equal(np.isfinite(found).all(axis=1), np.isfinite(rows).all(axis=1))


@settings(deadline=None)
@given(floats())
def test_torch_does_the_same(rows):
    halves, scales = transfer.encode({"t": rows})
    found_halves, found_scales = transfer.encode_tensors({"t": torch.from_numpy(rows)})
    assert_same(found_halves["t"].numpy(), halves["t"])
    assert_same(found_scales["t"].numpy(), scales["t"])
    found = transfer.decode_tensors(found_halves, found_scales)
    assert_same(found["t"].numpy(), transfer.decode(halves, scales)["t"])


@pytest.mark.parametrize("adjacent", [True, False])
def test_tables_of_one_width_are_converted_together(adjacent):
    counts, widths = {"a": 3, "b": 2, "c": 0, "d": 4, "e": 1}, {"a": 3, "b": 5, "c": 3, "d": 3, "e": 5}
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(n, widths[name])).astype(np.float32) for name, n in counts.items()}
    tensors = {name: torch.from_numpy(rows) for name, rows in arrays.items()}
    if adjacent:  # As rows arrive: views of one buffer.
        packed = Packed.of(arrays, np.float32)
        tensors = transfer.unpacked(torch.from_numpy(packed.buffer), packed)
    halves, scales = transfer.encode(arrays)
    found_halves, found_scales = transfer.encode_tensors(tensors)
    decoded = transfer.decode(halves, scales)
    found = transfer.decode_tensors(found_halves, found_scales)
    assert list(found_halves) == list(found_scales) == list(found) == list(counts)
    for name in counts:
        assert_same(found_halves[name].numpy(), halves[name])
        assert_same(found_scales[name].numpy(), scales[name])
        assert_same(found[name].numpy(), decoded[name])


def test_tables_without_scales_come_as_they_are():
    rows = Packed(["t"], [2], np.ones(6, np.float32), [3])
    assert transfer.decode(rows, None) is rows
    tensor = torch.ones(2, 3)
    assert transfer.decode_tensors({"t": tensor}, None)["t"] is tensor


def test_slices_and_transposed_rows_are_taken():
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (rows[1:3], rows[:, 1:4], rows.T, rows[:0]):
        found = batching.decode_rows(*batching.encode_rows(view))
        np.testing.assert_allclose(found, view, rtol=2**-11)


@pytest.mark.parametrize("rows", [np.ones((2, 3)), np.ones(3, np.float32), np.ones((2, 3), np.float16)])
def test_other_arrays_are_refused(rows):
    with pytest.raises(DataError, match="float32"):
        batching.encode_rows(rows)


@pytest.mark.parametrize(
    ("halves", "scales"),
    [
        (np.ones((2, 3), np.float32), np.ones(2, np.float32)),
        (np.ones((2, 3), np.float16), np.ones(3, np.float32)),
        (np.ones((2, 3), np.float16), np.ones(2)),
        (np.ones((2, 3), np.float16), np.ones((2, 1), np.float32)),
    ],
)
def test_halves_and_scales_that_do_not_fit_are_refused(halves, scales):
    with pytest.raises(DataError, match=r"halves|float"):
        batching.decode_rows(halves, scales)
