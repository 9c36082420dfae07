"""Arrays by name in one buffer: they cross as one array, without a copy, and what does not fit is refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from persia import rpc
from persia.errors import WireError
from persia.rpc.array_encoding import Decoder, encode
from persia.types.packed import Gradients, Packed, PackedGradients

LIMIT = 100
FLOATS = Packed[np.float32]


class Frame:
    """What ZeroMQ would have received."""

    def __init__(self, array):
        self.buffer = memoryview(array.reshape(-1)).cast("B") if array.size else memoryview(b"")


def crossed(kind, value):
    """A value as the other side decodes it, and the arrays that were sent."""
    payload, arrays = encode(value, LIMIT)
    return Decoder(kind).decode(payload, [Frame(array) for array in arrays]), arrays


def by_name(dimensions):
    shapes = hnp.array_shapes(min_dims=dimensions, max_dims=dimensions, min_side=0, max_side=4)
    return st.dictionaries(st.text(max_size=3), hnp.arrays(np.float32, shapes), max_size=4)


def assert_equal(found, expected):
    assert list(found) == list(expected)
    assert len(found) == len(expected)
    for (name, array), other in zip(found.items(), found.values(), strict=True):
        assert array.dtype == expected[name].dtype
        for view in (array, other, found[name]):
            np.testing.assert_array_equal(view, expected[name])


@settings(deadline=None)
@given(by_name(1) | by_name(2), st.booleans())
def test_packed_arrays_are_a_mapping_of_them_and_cross_as_one(arrays, packs):
    packed = Packed.of(arrays, np.float32)
    assert_equal(packed, arrays)
    found, sent = crossed(FLOATS, packed if packs else arrays)  # A plain dict is understood, too.
    assert isinstance(found, Packed)
    assert_equal(found, arrays)
    assert len(sent) == (1 if packs else len(arrays))


@settings(deadline=None)
@given(by_name(2))
def test_packed_gradients_are_a_mapping_of_gradients(rows):
    gradients = {name: Gradients(np.arange(len(array), dtype=np.uint64), array) for name, array in rows.items()}
    packed = PackedGradients.of(gradients)
    for value in (packed, gradients):
        found, _ = crossed(PackedGradients, value)
        assert list(found) == list(gradients)
        for name, (ids, values) in found.items():
            np.testing.assert_array_equal(ids, gradients[name].ids)
            np.testing.assert_array_equal(values, gradients[name].values)
    assert len(crossed(PackedGradients, packed)[1]) == 2


def test_nothing_is_copied_between_a_buffer_and_the_arrays_in_it():
    buffer = np.arange(10, dtype=np.float32)
    packed = Packed(["a", "b"], [2, 3], buffer, [2, 2])
    assert Packed.of(packed, np.float32) is packed
    found, (sent,) = crossed(FLOATS, packed)
    assert sent is buffer
    assert found.buffer.ctypes.data == buffer.ctypes.data
    assert found["b"].ctypes.data == buffer.ctypes.data + 4 * buffer.itemsize
    found["b"][0, 0] = 77
    assert buffer[4] == 77


F = np.zeros(6, np.float32)
MALFORMED = {
    "no list": 3,
    "too short": [["a"], [6], F],
    "names that are no texts": [[1], [6], None, F],
    "names that are no list": ["a", [6], None, F],
    "a name twice": [["a", "a"], [3, 3], None, F],
    "fewer counts": [["a", "b"], [6], None, F],
    "a negative count": [["a", "b"], [7, -1], None, F],
    "a count that is no whole number": [["a"], [6.0], None, F],
    "a count that is a bool": [["a", "b"], [5, True], None, F],
    "a huge count": [["a"], [2**64 - 1], None, F],
    "counts beyond the buffer": [["a"], [7], None, F],
    "counts short of the buffer": [["a"], [5], None, F],
    "fewer widths": [["a", "b"], [1, 2], [2], F],
    "a negative width": [["a", "b"], [1, 2], [-2, 4], F],
    "widths beyond the buffer": [["a"], [3], [3], F],
    "sizes that overflow": [["a"], [2**62], [8], F],
    "another dtype": [["a"], [6], None, F.astype(np.float64)],
    "two dimensions": [["a"], [6], None, F.reshape(2, 3)],
    "no buffer": [["a"], [6], None, [0.0] * 6],
    "a dict of another dtype": {"a": F.astype(np.float16)},
    "a dict of arrays and more": {"a": F, "b": 3},
    "a dict of arrays of one and of two dimensions": {"a": F, "b": F.reshape(2, 3)},
    "a dict of scalars": {"a": np.array(1, np.float32)},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_does_not_fit_is_refused(name):
    with pytest.raises(WireError, match="does not fit its type"):
        crossed(FLOATS, MALFORMED[name])
    with pytest.raises(WireError):
        crossed(PackedGradients, [Packed(["a"], [6], F.astype(np.uint64)), MALFORMED[name]])


@pytest.mark.parametrize("value", [3, [1], {"a": F}, {"a": [F]}, {"a": [F, F]}, [[], []], [{}, {}, {}]])
def test_gradients_that_do_not_fit_are_refused(value):
    with pytest.raises(WireError):
        crossed(PackedGradients, value)


class Tables:
    def double(self, rows: Packed[np.float32 | np.float16]) -> Packed[np.float32 | np.float16]:
        return Packed(rows.names, rows.counts, rows.buffer * 2, rows.widths)


def test_either_dtype_crosses_between_processes_and_no_other():
    with rpc.serve(Tables()) as server:
        stub = rpc.connect(server.address, Tables)
        for dtype in (np.float32, np.float16):
            found = stub.double({"a": np.ones((2, 3), dtype)})
            assert found["a"].dtype == dtype
            assert found["a"].flags.writeable
            assert (found["a"] == 2).all()
        with pytest.raises(WireError, match=r"expected an array of float16 or float32, got float64"):
            stub.double({"a": np.ones(2)})
        with pytest.raises(WireError, match="values, but"):
            stub.double(Packed(["a"], [5], F))
        assert server.statistics()["malformed"] == 2
        rpc.close(stub)
