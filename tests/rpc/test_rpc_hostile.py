"""Bytes that no client of ours sends: refused and counted, and the service goes on in bounded memory."""

import contextlib
import random
import resource
import socket
import struct
import time

import msgspec
import numpy as np
import pytest

from persia import rpc
from persia.rpc.array_encoding import DTYPES, MAX_NDIM
from persia.rpc.messages import Kind
from support.examples import examples
from support.rpc_samples import DEADLINE, Sample, Service
from support.strangers import dealer, router
from support.waiting import wait_until

LIMITS = rpc.Limits(message_bytes=4 << 20, header_bytes=64 << 10, arrays=16, requests=64, threads=4, streams=4)
METHODS = ("anything", "array", "floats", "floats_inline", "typed", "tables", "nothing", "defaults", "fail", "chunks")


def extension(frame, dtype, *shape, ndim=None):
    head = struct.pack("<HBB", frame, dtype, len(shape) if ndim is None else ndim)
    return msgspec.msgpack.Ext(1, head + struct.pack(f"<{len(shape)}Q", *shape))


def header(payload, *, version=1, kind=Kind.CALL, call=7, method="array", seconds=5.0):
    return msgspec.msgpack.encode(
        [version, int(kind), call, method, seconds, msgspec.Raw(msgspec.msgpack.encode(payload))]
    )


@pytest.fixture
def server(service):
    with rpc.serve(service, protocol=Sample, limits=LIMITS) as found:
        yield found
        service.gate.set()


def answer(sender):
    assert sender.poll(DEADLINE * 1000)
    frames = sender.recv_multipart()
    version, kind, call, _, _, payload = msgspec.msgpack.decode(frames[0])
    assert version == 1
    return Kind(kind), call, payload


FLOATS = np.zeros(4, np.float32).tobytes()

MALFORMED = {
    "no frame": [b""],
    "noise": [b"\x93\x01\x02"],
    "text": [b"GET / HTTP/1.1\r\n\r\n"],
    "not a list": [msgspec.msgpack.encode({"version": 1})],
    "another version": [header([], version=2)],
    "negative call": [header([], call=-1)],
    "unknown kind": [header([], kind=99)],
    "a reply": [header(None, kind=Kind.RESULT)],
    "huge deadline": [header([], seconds=1e300)],
    "not a number": [header([], seconds=float("nan"))],
    "negative deadline": [header([], seconds=-1.0)],
    "method of bytes": [header([], method=b"array")],
    "long method": [header([], method="a" * 200)],
    "more fields": [msgspec.msgpack.encode([1, 1, 7, "array", 5.0, None, 3])],
    "fewer fields": [msgspec.msgpack.encode([1, 1, 7, "array", 5.0])],
    "unknown method": [header([], method="missing")],
    "private method": [header([], method="__init__")],
    "attribute": [header([], method="gate")],
    "too few arguments": [header([])],
    "too many arguments": [header([1, 2])],
    "no array": [header([1])],
    "missing frame": [header([extension(0, 10, 4)])],
    "frame too many": [header([extension(0, 10, 4)]), FLOATS, b""],
    "frame used twice": [header([[extension(0, 10, 4)] * 2], method="anything"), FLOATS],
    "frame out of range": [header([extension(5, 10, 4)]), FLOATS],
    "unknown dtype": [header([extension(0, len(DTYPES), 4)]), FLOATS],
    "wrong dtype": [header([extension(0, 11, 2)], method="floats"), FLOATS],
    "too short": [header([extension(0, 10, 5)]), FLOATS],
    "too long": [header([extension(0, 10, 3)]), FLOATS],
    "overflow": [header([extension(0, 10, 2**62, 4)]), b""],
    "overflow to the size": [header([extension(0, 10, 2**32, 2**32, 4)]), FLOATS],
    "empty and huge": [header([extension(0, 10, 0, 2**63)]), b""],
    "too many dimensions": [header([extension(0, 10, *[1] * (MAX_NDIM + 1))]), b"\0\0\0\0"],
    "ndim of another size": [header([extension(0, 10, 4, ndim=2)]), FLOATS],
    "empty extension": [header([msgspec.msgpack.Ext(1, b"")])],
    "unknown extension": [header([msgspec.msgpack.Ext(5, b"abcd")], method="anything")],
    "timestamp": [header([msgspec.msgpack.Ext(-1, b"abc")], method="anything")],
    "bad bools": [header([extension(0, 0, 4)]), b"\0\1\2\3"],
    "deep": [header([], method="anything")[:-1] + b"\x91" * 20_000 + b"\xc0"],
    "list of 2^32": [header([])[:-1] + b"\xdd\xff\xff\xff\xff"],
    "text of 2^32": [header([], method="defaults")[:-1] + b"\x92\x01\xdb\xff\xff\xff\xff"],
    "invalid text": [header([])[:-1] + b"\x92\x01\xa2\xff\xff"],
    "trailing bytes": [header([1], method="anything") + b"\0"],
    "large header": [header([b"x" * (64 << 10)], method="anything")],
    "many arrays": [header([[extension(i, 10, 4) for i in range(17)]], method="anything"), *[FLOATS] * 17],
    "many frames": [header([extension(0, 10, 4)]), *[FLOATS] * 1000],
    # Of a larger one, the connection is closed if it is checked before the last frame has come.
    "large in sum": [header([1], method="anything"), *[bytes(1 << 20)] * 4, b"more"],
    "cursor of nothing": [header([1, 2, 3], kind=Kind.NEXT)],
    "cursor of text": [header("x", kind=Kind.NEXT)],
    "huge cursor": [header([2**63, -1, 0], kind=Kind.CLOSE)],
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_messages_get_an_error(server, service, name):
    with dealer(server.address) as sender:
        sender.send_multipart(MALFORMED[name])
        kind, call, failure = answer(sender)
        assert kind is Kind.ERROR
        assert call in (0, 7)
        assert failure[0] == "persia.errors.WireError"
        assert server.statistics()["malformed"] == 1
        assert server.statistics()["calls"] == 0
        assert service.seen is None
        # The same connection still works.
        sender.send_multipart([header([extension(0, 10, 4)]), FLOATS])
        kind, call, _ = answer(sender)
        assert (kind, call) == (Kind.RESULT, 7)
    # The account is settled after the reply has left.
    wait_until(lambda: server.statistics()["requests_held"] == server.statistics()["bytes_held"] == 0)


def test_an_unknown_iterator_is_an_error(server):
    with dealer(server.address) as sender:
        sender.send(header([123, 0], kind=Kind.NEXT))
        kind, call, failure = answer(sender)
        assert (kind, call) == (Kind.ERROR, 7)
        assert "call the method again" in failure[1]


def test_a_frame_beyond_the_limit_closes_the_connection(server):
    with dealer(server.address) as sender:
        sender.send_multipart([header([1]), bytes(LIMITS.message_bytes + 1)])
        wait_until(lambda: server.statistics()["disconnections"] >= 1)
    _works(server)


RAW = [
    b"",
    b"\0",
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\xff" * 1000,
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(48),  # A greeting, then silence.
    b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(48) + b"\x04\xff\x05READY" + b"\xff" * 300,
    b"\xff" + bytes(8) + b"\x7f\x01\x05" + b"\x02\xff" + b"\x7f" * 8,  # An old version, a frame of 2^62 bytes.
    random.Random(0).randbytes(100_000),
]


@pytest.mark.parametrize("number", range(len(RAW)))
def test_raw_bytes_on_the_port(server, number):
    host, _, port = server.address.removeprefix("tcp://").rpartition(":")
    sockets = []
    for _ in range(10):
        sockets.append(found := socket.create_connection((host, int(port)), timeout=DEADLINE))
        with contextlib.suppress(OSError):  # It may have been closed already.
            found.sendall(RAW[number])
    wait_until(lambda: server.statistics()["connections"] >= 10)
    for found in sockets:
        found.close()
    wait_until(lambda: server.statistics()["disconnections"] >= 10)
    _works(server)


def _works(server):
    stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
    assert stub.defaults(2) == "xx"
    rpc.close(stub)


def _mutant(rng):
    """A message that is valid but for one to three accidents, or noise altogether."""
    method = rng.choice(METHODS)
    count = rng.randrange(4)
    arrays = [np.zeros(rng.randrange(50), rng.choice(DTYPES)) for _ in range(count)]
    references = [extension(i, DTYPES.index(a.dtype), *a.shape) for i, a in enumerate(arrays)]
    payload = rng.choice([references, [references], [{"a": references}], [1, "x", *references], [None], 3])
    kind = rng.choice([Kind.CALL, Kind.CALL, Kind.CALL, Kind.NEXT, Kind.CLOSE, Kind.ERROR])
    frames = [header(payload, method=method, kind=kind), *[a.tobytes() for a in arrays]]
    for _ in range(rng.randrange(1, 4)):
        place = rng.randrange(len(frames))
        frame = bytearray(frames[place])
        accident = rng.randrange(7)
        if accident == 0 and frame:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif accident == 1:
            frame = frame[: rng.randrange(len(frame) + 1)]
        elif accident == 2:
            frame += rng.randbytes(rng.randrange(40))
        elif accident == 3:
            frame = bytearray(rng.randbytes(rng.randrange(200)))
        elif accident == 4:
            frames.insert(place, rng.randbytes(rng.randrange(30)))
            continue
        elif accident == 5 and len(frames) > 1:
            del frames[place]
            continue
        elif accident == 6 and len(frame) > 4:
            at = rng.randrange(len(frame) - 4)
            frame[at : at + 4] = b"\xff\xff\xff\xff"
        frames[place] = bytes(frame)
    return frames


def _fuzz(server, count, seed):
    rng = random.Random(seed)
    with dealer(server.address) as sender:
        for number in range(count):
            sender.send_multipart(_mutant(rng))
            while sender.poll(0):
                sender.recv_multipart()
            if number % 1000 == 0:
                _works(server)
        # Whatever came, the next request on the same connection is served.
        sender.send_multipart([header([extension(0, 10, 4)], call=2**40), FLOATS])
        end = time.monotonic() + DEADLINE
        while answer(sender)[1] != 2**40:
            assert time.monotonic() < end
    _works(server)
    counts = server.statistics()
    assert counts["malformed"] > count // 3
    wait_until(lambda: server.statistics()["requests_held"] == server.statistics()["bytes_held"] == 0)
    assert counts["threads"] <= LIMITS.threads + 1
    return counts


def test_fuzzed_messages(server):
    _fuzz(server, examples(2000), 1)


@pytest.mark.slow
def test_fuzzed_messages_at_length():
    with rpc.serve(Service(), protocol=Sample, limits=LIMITS) as server:
        _fuzz(server, 10_000, 2)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        counts = _fuzz(server, 100_000, 3)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        assert grown < 64, f"memory grew by {grown:.0f} MiB"
        assert counts["malformed"] > 30_000


def test_hostile_replies(service):
    """A server that answers anything: calls fail by deadline, or with an error, and memory is bounded."""
    with router() as (fake, address):
        stub = rpc.connect(address, Sample, timeout=DEADLINE)
        for reply, error in [
            ([header([1], kind=Kind.RESULT, call=1)], "does not fit its type"),
            ([header(extension(0, 10, 9), kind=Kind.RESULT, call=2), FLOATS], "do not make a float32 array"),
            ([header("x", kind=Kind.ERROR, call=3)], "does not fit its type"),
            ([header("x", kind=Kind.STREAM, call=4)], "does not fit its type"),
            ([header(["builtins.exec", "m", {}, "t"], kind=Kind.ERROR, call=5)], "builtins.exec: m"),
            ([header(["persia.errors.StoreError", "m", {"message": 1}, "t"], kind=Kind.ERROR, call=6)], "m"),
        ]:
            future = rpc.start(stub.floats, np.zeros(4, np.float32))
            peer = fake.recv_multipart()[0]
            fake.send_multipart([peer, b"noise"])
            fake.send_multipart([peer, header(1, kind=Kind.RESULT, call=999)])
            fake.send_multipart([peer, *reply])
            with pytest.raises(rpc_error(), match=error):
                future.result()
        counts = rpc.statistics(stub)
        assert counts["malformed"] == counts["late_replies"] == 6
        rpc.close(stub)


def rpc_error():
    from persia.errors import PersiaError

    return PersiaError
