"""A server is killed, and another one takes its address."""

import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from persia import rpc
from persia.errors import DeadlineError, PeerRestartedError, WireError
from support.ports import lasting_port
from support.rpc_samples import DEADLINE, Sample, expire
from support.waiting import wait_until

pytestmark = pytest.mark.processes

SCRIPT = Path(__file__).parents[1] / "support" / "rpc_process.py"


@contextmanager
def server_process(address):
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.fixture
def first():
    with server_process(f"tcp://127.0.0.1:{lasting_port()}") as (process, address):
        stub = rpc.connect(address, Sample, peer="sample 1", timeout=DEADLINE)
        yield process, address, stub
        rpc.close(stub)


def test_calls_without_reply_are_sent_again(first):
    process, address, stub = first
    assert stub.process() == process.pid
    array = np.arange(1 << 18, dtype=np.float32)
    kept = [rpc.start(stub.wait_with, array) for _ in range(3)]
    wait_until(lambda: rpc.statistics(stub)["in_flight"] == 3)
    kill(process)
    pid = rpc.start(stub.process)
    big = rpc.start(stub.array, array)
    with server_process(address) as (second, _):
        assert pid.result() == second.pid
        assert np.array_equal(big.result(), array)
        counts = rpc.statistics(stub)
        # Those sent before the kill; the later ones too if ZeroMQ had not yet seen the end of the connection.
        assert 3 <= counts["resent"] <= 5
        assert counts["connects"] == 2
        assert counts["in_flight"] == 3  # The new server has them, and they block there.
        with pytest.raises(DeadlineError) as caught:
            rpc.within(stub, 0.1).wait()
        assert "lost" not in caught.value.message
        expire(stub)
        with pytest.raises(DeadlineError, match="has not answered; connections lost since it was sent: 1"):
            kept[0].result()
    del kept


def test_a_call_that_must_not_be_repeated_fails(first):
    process, address, stub = first
    assert stub.process() == process.pid
    future = rpc.start(stub.wait_once)
    later = rpc.start(stub.process)
    assert later.result() == process.pid  # So the first has been sent, too.
    kill(process)
    with server_process(address) as (second, _):
        with pytest.raises(PeerRestartedError, match=r"sample 1 .* wait_once, which must not be repeated") as caught:
            future.result()
        assert caught.value.fields == {"peer": "sample 1", "address": address, "operation": "wait_once"}
        assert stub.process() == second.pid


def test_calls_before_the_server_are_sent_when_it_comes(first):
    process, address, stub = first
    kill(process)
    other = rpc.connect(address, Sample, timeout=DEADLINE)
    futures = [rpc.start(other.defaults, n) for n in range(5)]
    with server_process(address):
        assert [future.result() for future in futures] == ["x" * n for n in range(5)]
        assert stub.defaults(1) == "x"
    rpc.close(other)


def test_iterators_do_not_survive(first):
    process, address, stub = first
    items = stub.chunks(100, 10)
    assert next(items).number == 0
    assert next(items).number == 1
    kill(process)
    with server_process(address), pytest.raises(WireError, match="call the method again"):
        list(items)


def test_the_lost_connection_is_named(first):
    process, _, stub = first
    assert stub.process() == process.pid
    kill(process)
    late = rpc.start(stub.process)
    wait_until(lambda: not stub._connection._connected, "the end of the connection")
    expire(stub)
    with pytest.raises(DeadlineError, match="the connection is lost"):
        late.result()


@pytest.mark.parametrize(("handshakes", "says"), [(1, "the connection is lost"), (2, "it uses another protocol")])
def test_one_handshake_that_fails_is_the_end_of_a_process(first, handshakes, says):
    """Its connections close before its listening socket, so the client may begin a handshake in between."""
    process, address, stub = first
    assert stub.process() == process.pid
    kill(process)
    late = rpc.start(stub.process)
    with socket.create_server(("127.0.0.1", int(address.rpartition(":")[2]))) as listening:
        begun = [listening.accept()[0]]
        with stub._connection._port.lock:  # The exit of the process may have cut off another one before.
            stub._connection._watch()
            stub._connection._failed_handshakes = 0
        while len(begun) < handshakes:
            begun[-1].close()
            begun.append(listening.accept()[0])
    begun[-1].close()
    wait_until(lambda: stub._connection._failed_handshakes == handshakes, "the failed handshakes")
    expire(stub)
    with pytest.raises(DeadlineError, match=says):
        late.result()
