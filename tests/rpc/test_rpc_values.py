"""What crosses comes back as it was, in its own class, and arrays are not copied on the way."""

from types import SimpleNamespace

import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from persia import rpc
from persia.errors import ConfigError, WireError
from persia.rpc.array_encoding import DTYPES, Decoder, encode
from persia.rpc.limits import Limits
from persia.rpc.messages import Kind, header_bytes, parse
from persia.rpc.port import Port
from support.rpc_samples import Column, Nested, Pair, Record

ARRAYS = hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
VALUES = st.recursive(
    SCALARS | st.binary() | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIXTURE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def same(a, b):
    """Equal, with the same classes and dtypes."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Column):
        return type(a) is type(b) and same(a.values, b.values) and same(a.offsets, b.offsets)
    return type(a) is type(b) and a == b


@given(VALUES)
@FIXTURE
def test_any_value_comes_back(stub, value):
    assert same(stub.anything(value), value)


@given(ARRAYS)
@FIXTURE
def test_any_array_comes_back_writable(stub, array):
    found = stub.array(array)
    assert same(found, array)
    assert found.flags.writeable
    assert found.flags.aligned


@pytest.mark.parametrize("offset", range(8))
@pytest.mark.parametrize("size", [0, 1])
def test_arrays_are_aligned_wherever_their_frame_lies(offset, size):
    """Also those without items, which numpy calls aligned and the native core does not."""
    payload, _ = encode(np.zeros(size, "<f8"), 1)
    frame = SimpleNamespace(buffer=memoryview(bytearray(offset + 8 * size))[offset:])
    found = Decoder(NDArray[np.float64]).decode(payload, [frame])
    assert found.shape == (size,)
    assert found.ctypes.data % 8 == 0


@given(
    st.dictionaries(st.text(), st.builds(Pair, st.integers(0, 9), st.none() | hnp.arrays("<f4", 3)), max_size=3),
    hnp.arrays(st.sampled_from(["<u2", "<u4"]), 4),
    st.dictionaries(st.text(), st.builds(Column, hnp.arrays("<u8", 3), st.none() | hnp.arrays("<i8", 2)), max_size=3),
    st.lists(st.builds(Record, st.text()), max_size=3),
)
@FIXTURE
def test_records_come_back_as_their_own_class(stub, service, pairs, either, columns, records):
    nested = Nested(pairs, either)
    assert same(stub.typed(nested, columns, records), nested)
    assert same(service.seen, (nested, columns, records))


def test_arguments_by_name_and_default(stub, service):
    assert stub.nothing() is None
    assert service.seen == (3, "x")
    stub.nothing(text="y", number=4)
    assert service.seen == (4, "y")
    assert stub.defaults(2) == "xx"
    for wrong in (lambda: stub.defaults(), lambda: stub.defaults(1, other=2), lambda: stub.defaults(1, "a", 3)):
        with pytest.raises(TypeError, match="defaults"):
            wrong()


def test_arrays_of_other_layouts_are_made_contiguous(stub):
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    for view in (array.T, array[:, ::2], array[::-1], np.asfortranarray(array)):
        assert np.array_equal(stub.array(view), view)
    assert stub.array(array.astype(">f4")).dtype == np.float32


def test_large_arrays(stub):
    array = np.random.default_rng(0).random((1 << 20, 4), np.float32)
    assert np.array_equal(stub.floats(array), array)


@pytest.mark.parametrize(
    "bad",
    [np.array([object()]), np.array(["a"]), np.array([1j]), object(), {1, 2}.__iter__(), 2**70, np.zeros([1] * 9)],
)
def test_what_cannot_be_sent_is_refused_here(stub, bad):
    with pytest.raises(WireError, match=r"cannot be sent"):
        stub.anything(bad)
    assert stub.anything(1) == 1


@pytest.mark.parametrize(
    ("method", "bad"),
    [
        ("floats", np.zeros(2)),
        ("floats", 7),
        ("floats", None),
        ("typed", 7),
        ("defaults", "x"),
        ("defaults", np.zeros(2)),
    ],
)
def test_wrong_types_are_refused_there(stub, server, method, bad):
    arguments = (bad, {}, []) if method == "typed" else (bad,)
    with pytest.raises(WireError, match=rf"{method}.*\$\[0\]"):
        getattr(stub, method)(*arguments)
    assert server.statistics()["malformed"] == 1
    assert stub.defaults(1) == "x"


@pytest.mark.parametrize("size", [8, 20_000, 1 << 20])
def test_nothing_is_copied_between_arrays_and_the_socket(size):
    """In-process sockets hand the sender's memory to the receiver, so the address survives the whole way."""
    context = zmq.Context()
    sockets = [context.socket(zmq.PAIR) for _ in range(2)]
    sockets[0].bind("inproc://zero-copy")
    sockets[1].connect("inproc://zero-copy")
    sockets[0].copy_threshold = 0  # Below it pyzmq copies, since that is faster; so that small ones prove it, too.
    sender = Port(context, sockets[0])
    receiver = Port(context, sockets[1])
    try:
        array = np.arange(size, dtype=np.float32)
        payload, arrays = encode({"rows": array}, 8)
        assert sender.send((header_bytes(Kind.RESULT, 1, "", 0.0, payload),), arrays)
        message = parse(receiver.receive(8), Limits())
        found = Decoder(dict[str, np.ndarray]).decode(message.header.payload, message.frames)["rows"]
        assert found.ctypes.data == array.ctypes.data
        found[0] = 9
        assert array[0] == 9
        assert np.shares_memory(found, np.frombuffer(message.frames[0].buffer, np.float32))
        del message, found
    finally:
        sender.close(0, term=False)
        receiver.close(0, term=False)
        context.term()


def test_received_arrays_are_the_frames_themselves(stub, service):
    """Over TCP: what a method gets is the memory that ZeroMQ received into."""
    array = np.arange(1 << 16, dtype=np.float32)
    found = stub.array(array)
    for received in (found, service.seen):
        assert not received.flags.owndata
        assert isinstance(received.base, zmq.Frame)


def test_annotations_that_cannot_be_sent_are_named():
    class Loose:
        def method(self, value) -> int:
            return 1

    class Open:
        def method(self, *values: int) -> int:
            return 1

    class Silent:
        def method(self, value: int):
            return 1

    class Union:
        def method(self, value: np.ndarray[tuple[int], np.dtype[np.int8]] | np.ndarray) -> int:
            return 1

    for kind in (Loose, Open, Silent, Union):
        with pytest.raises(ConfigError, match=r"method"):
            rpc.serve(kind())


def test_a_plain_class_is_its_own_protocol():
    class Counter:
        def add(self, a: int, b: int) -> int:
            return a + b

        def _hidden(self, a):
            return a

    with rpc.serve(Counter()) as server:
        stub = rpc.connect(server.address, Counter)
        assert stub.add(1, b=2) == 3
        assert not hasattr(stub, "_hidden")
        rpc.close(stub)
