"""Compressors: what arrives and what is lost are the values; torch, native code and reference agree."""

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.batching.native import ThreadPool
from persia.errors import ConfigError
from persia.optim import Compressor, OneBit, StochasticTernary, TopK, Uncompressed
from persia.optim.compressors import AnyCompressor
from persia.optim.native_buckets import _core, sum_of_squares
from support.examples import examples
from support.twins.apmsqueeze import reference_compress

ALL = [OneBit(block=64), OneBit("l2", 128), TopK(0.07), StochasticTernary(block=64, seed=3), Uncompressed()]
ODD = st.sampled_from([0, 1, 2, 7, 8, 9, 63, 64, 65, 127, 129, 500, 1025])


def values(count, seed, scaled=True):
    v = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return v if not scaled else v * np.float32(10.0 ** int(np.random.default_rng(seed + 1).integers(-3, 3)))


def through(compressor, v, key=0):
    """What is lost, what arrives, and the bytes."""
    lost, arrived = torch.from_numpy(v.copy()), torch.full((len(v),), 9.0)
    payload = torch.full((compressor.payload_bytes(len(v)),), 255, dtype=torch.uint8)
    compressor.compress(lost, payload, key)
    compressor.decompress(payload, arrived)
    return lost.numpy(), arrived.numpy(), payload.numpy()


@pytest.mark.parametrize("compressor", ALL, ids=str)
@given(count=ODD, seed=st.integers(0, 1000), key=st.integers(0, 1 << 62))
@settings(max_examples=examples(40), deadline=None)
def test_what_arrives_is_the_reference_and_the_rest_is_lost(compressor, count, seed, key):
    v = values(count, seed)
    lost, arrived, payload = through(compressor, v, key)
    scale = np.abs(v).max(initial=0.0)
    np.testing.assert_allclose(lost + arrived, v, rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(arrived, reference_compress(compressor, v.astype(np.float64), key), atol=1e-5 * scale)
    again = through(compressor, v, key)
    np.testing.assert_array_equal(payload, again[2])


@pytest.mark.parametrize("block", [64, 2048])
@pytest.mark.parametrize("scale", ["mean", "l2"])
@given(count=ODD, seed=st.integers(0, 1000))
@settings(max_examples=examples(40), deadline=None)
def test_native_packing_is_the_torch_path(block, scale, count, seed):
    v = values(count, seed)
    lost, arrived, payload = through(OneBit(scale, block), v)
    mine, out, packed = v.copy(), np.empty_like(v), np.full_like(payload, 255)
    _core.pack(mine, packed, block, scale == "l2")
    _core.unpack(packed, out, block, scale == "l2")
    scales = 4 * -(-count // block)
    np.testing.assert_array_equal(packed[scales:], payload[scales:])
    np.testing.assert_allclose(out, arrived, rtol=1e-6)
    np.testing.assert_allclose(mine, lost, rtol=0, atol=1e-5 * np.abs(v).max(initial=0.0))


@given(count=ODD, workers=st.integers(1, 8), seed=st.integers(0, 1000))
@settings(max_examples=examples(30), deadline=None)
def test_native_average_is_the_torch_path(count, workers, seed):
    compressor, pool = OneBit(block=64), ThreadPool(2)
    payloads = [through(compressor, values(count, seed + w, False))[2] for w in range(workers)]
    rows = torch.from_numpy(np.stack([np.pad(p, (0, -len(p) % 64)) for p in payloads]))[:, : payloads[0].size]
    error = torch.from_numpy(values(count, seed + 99, False))
    mine, payload = error.clone(), torch.zeros(compressor.payload_bytes(count), dtype=torch.uint8)
    compressor.average(rows, error, payload, 0)
    packed = np.zeros_like(payload.numpy())
    _core.average(np.ascontiguousarray(rows.numpy()), mine.numpy(), packed, 64, False, pool)
    scales = 4 * -(-count // 64)
    np.testing.assert_array_equal(packed[scales:], payload.numpy()[scales:])
    np.testing.assert_allclose(mine.numpy(), error.numpy(), rtol=0, atol=1e-5)


def test_zero_has_the_sign_plus():
    v = np.array([0.0, -0.0, 1.0, -1.0], np.float32)
    _, arrived, payload = through(OneBit(), v)
    np.testing.assert_array_equal(arrived, [0.5, 0.5, 0.5, -0.5])
    assert payload[-1] == 0b0111


def test_padding_never_enters_a_scale():
    v = np.full(65, 2.0, np.float32)  # The second block has one value.
    lost, arrived, _ = through(OneBit(block=64), v)
    np.testing.assert_array_equal(arrived, 2.0)
    np.testing.assert_array_equal(lost, 0.0)


def test_bytes():
    assert OneBit().payload_bytes(12_000_000) * 31 < 4 * 12_000_000
    assert TopK(0.01).payload_bytes(1000) == 80
    assert TopK(0.01).payload_bytes(1) == 8
    assert StochasticTernary().payload_bytes(2048) == 4 + 512
    assert Uncompressed().payload_bytes(7) == 28
    assert all(c.payload_bytes(0) == 0 for c in ALL)


@pytest.mark.parametrize("compressor", [OneBit(), TopK(0.01), StochasticTernary()], ids=str)
def test_less_is_lost_than_there_was_whatever_the_values_are(compressor):
    """Else errors would grow without bound. The L2 scale of the paper has not this property."""
    sparse = np.zeros(2048, np.float32)
    sparse[::400] = 1.0
    heavy = np.random.default_rng(0).standard_cauchy(2048).astype(np.float32)
    for v in (sparse, heavy, values(2048, 3)):
        lost = np.mean([np.square(through(compressor, v, key)[0]).sum() for key in range(20)])
        assert lost < np.square(v).sum()
    assert np.square(through(OneBit("l2"), sparse)[0]).sum() > np.square(sparse).sum()


def test_random_choices_differ_by_key_and_seed():
    v = values(500, 1)
    one, other = through(StochasticTernary(), v, 1)[1], through(StochasticTernary(), v, 2)[1]
    assert (one != other).any()
    assert (one != through(StochasticTernary(seed=1), v, 1)[1]).any()


def test_a_compressor_is_one_class():
    class Halves(Compressor, frozen=True, tag="halves"):
        def payload_bytes(self, count):
            return 2 * count

        def compress(self, values, payload, key):
            halves = values.half()
            payload.view(torch.float16).copy_(halves)
            values.sub_(halves.float())

        def decompress(self, payload, out):
            out.copy_(payload.view(torch.float16))

    lost, arrived, _ = through(Halves(), values(99, 1))
    np.testing.assert_allclose(lost + arrived, values(99, 1), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: OneBit("median"), "scale"),
        (lambda: OneBit(block=100), "block"),
        (lambda: TopK(0.0), "ratio"),
        (lambda: TopK(1.5), "ratio"),
        (lambda: StochasticTernary(block=3), "block"),
    ],
)
def test_wrong_arguments(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.fields["field"] == field


def test_compressors_are_configured_by_kind():
    for compressor in ALL:
        assert msgspec.convert(msgspec.to_builtins(compressor), AnyCompressor) == compressor


def test_a_sum_of_squares_is_finite_if_the_values_are():
    pool, v = ThreadPool(1), torch.full((1000,), 3e38)
    assert np.isfinite(sum_of_squares([v, v], pool))
    parts = [torch.arange(3.0), torch.arange(3.0, 5.0), torch.empty(0)]
    assert sum_of_squares(parts, pool) == 30.0
    assert sum_of_squares(parts, None) == pytest.approx(30.0)
    assert sum_of_squares([], pool) == sum_of_squares([], None) == 0.0
    for bad in (np.nan, np.inf, -np.inf):
        v[999] = bad
        assert not np.isfinite(sum_of_squares([parts[0], v], pool))
        assert not np.isfinite(sum_of_squares([parts[0], v], None))
