"""What strangers and peers can make a server hold: bounded before they are let in, and after."""

import contextlib
import os
import resource
import socket
import struct
import threading
import time
import tracemalloc
from typing import Any

import msgspec
import pytest

from persia import rpc
from persia.errors import ConfigError
from persia.rpc import keys as keys_of
from persia.rpc.intake import Intake, Traffic, _host, _traffic
from persia.rpc.keys import Password, keys_to_connect, keys_to_listen
from persia.rpc.limits import Limits
from support.rpc_samples import DEADLINE, Sample, Service
from support.strangers import connected, raw_dealer
from support.waiting import wait_until

LIMITS = rpc.Limits(message_bytes=4 << 20, header_bytes=64 << 10, arrays=16)
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN" + bytes(47)


def pour(peer, piece, most, until):
    """Sends the piece again and again until a condition holds, or the connection is closed. Returns the bytes sent."""
    sent, end, rest = 0, time.monotonic() + DEADLINE, b""
    peer.settimeout(0.05)  # A server that has closed the connection may leave a sender without an answer.
    while sent < most and not until():
        assert time.monotonic() < end
        rest = rest or memoryview(piece)
        try:
            count = peer.send(rest)
        except TimeoutError:
            continue
        except OSError:
            break
        sent, rest = sent + count, rest[count:]
    return sent


def memory():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_tiny_frames_of_a_stranger_are_not_even_read(serve):
    """117 MiB of them took 3.7 GiB, when anyone was let in."""
    server, stub = serve()
    before = memory()
    with connected(server.address) as stranger:
        stranger.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL" + bytes(48))
        sent = pour(stranger, b"\x01\x00" * (1 << 16), 117 << 20, lambda: server.statistics()["handshakes_failed"])
    assert sent < 16 << 20
    assert memory() - before < 64 << 20
    assert stub.defaults(1) == "x"
    wait_until(lambda: server.statistics()["handshakes_failed"] >= 1)


@pytest.mark.parametrize("greeting", [GREETING, b""])
def test_a_handshake_without_end_is_ended(serve, greeting):
    server, stub = serve()
    command = b"\x06" + struct.pack(">Q", 1 << 29) + b"\x05HELLO"  # Half a gigabyte is announced.
    with connected(server.address) as stranger:
        stranger.sendall(greeting + command)
        sent = pour(stranger, bytes(1 << 16), 1 << 29, lambda: server.statistics()["disconnections"])
    assert sent < 1 << 29
    wait_until(lambda: server.statistics()["disconnections"] == 1)
    assert server.statistics()["connections_refused"] == (greeting == GREETING)
    assert stub.defaults(1) == "x"
    assert rpc.statistics(stub)["connects"] == 1


def test_strangers_lock_nobody_out(serve, monkeypatch):
    server, stub = serve(strangers=4)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(server.address)) for _ in range(20)]
        wait_until(lambda: server.statistics()["connections_refused"] >= 16)
        monkeypatch.setattr("persia.rpc.intake._SLOW_SECONDS", 0.0)  # Those that are left have been long enough.
        other = rpc.connect(server.address, Sample, timeout=DEADLINE)
        assert other.defaults(1) == stub.defaults(1) == "x"
        assert rpc.statistics(stub)["connects"] == 1
        rpc.close(other)
        for one in silent[4:]:
            while one.recv(1000):
                pass


def test_many_that_come_together_are_all_let_in(serve):
    server, stub = serve(strangers=4)
    stubs = [rpc.connect(server.address, Sample, timeout=DEADLINE) for _ in range(40)]
    assert [future.result() for future in [rpc.start(one.defaults, 1) for one in stubs]] == ["x"] * 40
    assert rpc.statistics(stub)["connects"] == 1
    for one in stubs:
        rpc.close(one)


def test_connections_are_bounded_in_all(serve):
    server, stub = serve(connections=3)
    peers = contextlib.ExitStack()
    with peers:
        for _ in range(2):
            peers.enter_context(raw_dealer(server.address))
        wait_until(lambda: not server._intake.strangers)
        with connected(server.address) as late:
            late.settimeout(DEADLINE)
            with contextlib.suppress(ConnectionError):
                while late.recv(1000):
                    pass
        assert server.statistics()["connections_refused"] == 1
        assert stub.defaults(1) == "x"
    wait_until(lambda: server.statistics()["disconnections"] == 3)
    with raw_dealer(server.address):  # There is room again.
        wait_until(lambda: server.statistics()["connections"] == 5)


@pytest.mark.usefixtures("quick_ticks")
def test_unread_bytes_are_bounded_in_all(serve):
    """Of connections each of which keeps to what one message may have."""
    server, stub = serve(unread_bytes=8 << 20)
    part, frame = (b"\x03" + struct.pack(">Q", size) + bytes(size) for size in (1 << 16, 1 << 20))  # And more to come.
    with contextlib.ExitStack() as stack:
        small, large = (stack.enter_context(raw_dealer(server.address)) for _ in range(2))
        for _ in range(2):
            small.sendall(part)
        assert pour(large, frame, 512 << 20, lambda: server.statistics()["disconnections"]) < 512 << 20
        wait_until(lambda: server.statistics()["disconnections"] == 1)
        assert server.statistics()["connections_refused"] == 1
        small.sendall(part)
        assert stub.defaults(1) == "x"
        assert rpc.statistics(stub)["connects"] == 1


# --- the account, with a kernel of the test's own ---------------------------------------------------------------------


class Kernel:
    """Counters by descriptor."""

    def __init__(self, monkeypatch):
        self.traffic = {}
        self.hosts = {}
        self.closed = []
        monkeypatch.setattr("persia.rpc.intake._host", lambda descriptor, _port: self.hosts.get(descriptor, ""))
        monkeypatch.setattr("persia.rpc.intake._traffic", self.look)
        monkeypatch.setattr("persia.rpc.intake._connection", self.close)

    def look(self, descriptor, _port):
        if descriptor not in self.traffic:
            raise OSError
        return self.traffic[descriptor]

    def close(self, descriptor, *_):
        self.closed.append(descriptor)
        raise OSError


def intake(**limits):
    return Intake(Limits(message_bytes=1 << 20, unread_bytes=1 << 30, **limits), 7000, handshake_bytes=80)


def test_a_peer_is_admitted_once_it_got_more_than_a_handshake(monkeypatch):
    kernel, account = Kernel(monkeypatch), intake()
    for descriptor, sent in ((5, 80), (6, 81)):
        account.accepted(descriptor)
        kernel.traffic[descriptor] = Traffic(sent, 65_536)
    account.check(behind=False)
    assert (account.strangers, kernel.closed) == (1, [])
    for descriptor, sent in ((5, 80), (6, 81)):
        kernel.traffic[descriptor] = Traffic(sent, 65_537)
    account.check(behind=True)
    assert (account.strangers, kernel.closed, account.closed) == (0, [5], 1)


def test_only_what_came_since_the_last_whole_message_counts(monkeypatch):
    kernel, account = Kernel(monkeypatch), intake()
    account.accepted(5)
    whole = 0
    for _ in range(5):
        whole += 1 << 20
        kernel.traffic[5] = Traffic(100, whole)
        account.delivered(5)
        account.check(behind=False)
    kernel.traffic[5] = Traffic(100, whole + account._most)
    account.check(behind=False)
    assert kernel.closed == []
    kernel.traffic[5] = Traffic(100, whole + account._most + 1)
    account.check(behind=True)  # Up to 16 whole ones may wait.
    assert kernel.closed == []
    account.check(behind=False)
    assert kernel.closed == [5]


def test_those_with_the_most_are_closed_until_the_rest_fits(monkeypatch):
    kernel = Kernel(monkeypatch)
    account = Intake(Limits(message_bytes=1 << 20, unread_bytes=100), 7000, handshake_bytes=80)
    for descriptor, received in ((5, 30), (6, 90), (7, 60), (8, 10)):
        account.accepted(descriptor)
        kernel.traffic[descriptor] = Traffic(100, received)
    account.check(behind=False)
    assert kernel.closed == [6]
    kernel.traffic[8] = Traffic(100, 11)
    account.check(behind=False)
    assert kernel.closed == [6, 7]


def test_connections_whose_frames_take_too_much_memory_are_closed(monkeypatch):
    """Not those whose message ended since, or whose number an earlier one had."""
    kernel, account, memory = Kernel(monkeypatch), intake(), [0]
    account._most = 1 << 40  # What one message may have.
    monkeypatch.setattr("persia.rpc.growth.allocated_bytes", lambda: memory[0])

    def check(grown, received):
        memory[0] += grown
        for descriptor in (5, 6, 7):
            kernel.traffic[descriptor] = Traffic(100, received)
        account.check(behind=False)
        assert account.watching

    for descriptor in (5, 6, 7):
        account.accepted(descriptor)
    check(0, 100 << 20)
    account.delivered(6)
    account.gone(7)
    account.accepted(7)
    check(1 << 30, 200 << 20)
    check(0, 300 << 20)
    assert kernel.closed == []
    check(1, 300 << 20)
    assert kernel.closed == [5]


def test_memory_of_too_many_bytes_is_blamed_on_no_others(monkeypatch):
    kernel, account, memory = Kernel(monkeypatch), intake(), [0]
    account._most = 1 << 40
    monkeypatch.setattr("persia.rpc.growth.allocated_bytes", lambda: memory[0])
    account._growth._clock = lambda: 1000.0
    for descriptor in (5, 6):
        account.accepted(descriptor)
        kernel.traffic[descriptor] = Traffic(100, 100 << 20)
    account.check(behind=False)
    memory[0], kernel.traffic[6] = 1 << 30, Traffic(100, 1 << 30)
    account.check(behind=False)
    memory[0] += 1
    account.check(behind=False)
    assert kernel.closed == [6]


def test_of_too_many_strangers_a_slow_one_goes_first(monkeypatch):
    kernel, account = Kernel(monkeypatch), intake(strangers=2)
    now = [0.0]
    monkeypatch.setattr("persia.rpc.intake.time.monotonic", lambda: now[0])
    for descriptor in (5, 6, 7):
        kernel.traffic[descriptor] = Traffic(64, 64)
        account.accepted(descriptor)
    assert kernel.closed == [7]
    now[0] = 2.0
    kernel.traffic[5] = Traffic(81, 500)  # It was let in.
    kernel.traffic[8] = kernel.traffic[9] = Traffic(64, 64)
    account.accepted(8)
    account.accepted(9)
    assert kernel.closed == [7, 6]


def test_strangers_of_one_host_displace_one_another(monkeypatch):
    kernel, account = Kernel(monkeypatch), intake(strangers=3)
    monkeypatch.setattr("persia.rpc.intake.time.monotonic", lambda: 0.0)
    kernel.hosts = {5: "flood", 6: "flood", 7: "flood", 8: "other", 9: "flood", 10: "third"}
    for descriptor in kernel.hosts:
        kernel.traffic[descriptor] = Traffic(64, 64)
        account.accepted(descriptor)
    assert kernel.closed == [7, 9, 6]


def test_the_busiest_host_loses_its_newest_connection(monkeypatch):
    kernel, account = Kernel(monkeypatch), intake(connections=4)
    kernel.hosts = {5: "a", 6: "b", 7: "b", 8: "b", 9: "a", 10: "b", 11: "c"}
    for descriptor in (5, 6, 7, 8, 9, 10, 11):
        kernel.traffic[descriptor] = Traffic(100, 500)
        account.accepted(descriptor)
    assert kernel.closed == [8, 10, 9]
    account.gone(7)
    account.accepted(12)
    assert kernel.closed == [8, 10, 9]


@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("::1", "::/64"), ("::ffff:127.0.0.1", "127.0.0.1")]
)
def test_a_host_is_known_by_its_address(host, address):
    """Of IPv6 by its network: one host has 2^64 addresses there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(family))
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            listener.bind(("::" if "ffff" in host else host, 0))
            listener.listen()
            port = listener.getsockname()[1]
            stack.enter_context(socket.create_connection((host.removeprefix("::ffff:"), port)))
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        other, _ = listener.accept()
        stack.enter_context(other)
        assert _host(other.fileno(), port) == address
        assert not _host(other.fileno(), port + 1)
    assert not _host(other.fileno(), port)


class Waiting:
    """A method that runs until a test lets it end."""

    def __init__(self):
        self.proceed = threading.Event()

    def take(self, value: Any) -> int:
        """Waits."""
        assert self.proceed.wait(DEADLINE)
        return len(value)


def test_a_header_counts_for_what_it_becomes_in_memory():
    """A byte may become an object of 72."""
    service, payload = Waiting(), [{}] * 10_000
    tracemalloc.start()
    copy = msgspec.msgpack.decode(msgspec.msgpack.encode(payload))
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(copy) == 10_000
    with rpc.serve(service, limits=rpc.Limits(request_bytes=5 << 20, peer_share=1)) as server:
        stub = rpc.connect(server.address, Waiting, timeout=DEADLINE)
        calls = [rpc.start(stub.take, payload) for _ in range(20)]
        wait_until(lambda: server.statistics()["bytes_held"] >= 5 << 20)
        statistics = server.statistics()
        assert statistics["bytes_held"] >= statistics["requests_held"] * held
        assert statistics["requests_held"] <= 5
        service.proceed.set()
        assert [call.result() for call in calls] == [10_000] * 20
        rpc.close(stub)


def test_a_number_that_another_socket_has_got_is_left_alone():
    account = intake()
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        peer = stack.enter_context(socket.create_connection(listener.getsockname()))
        other, _ = listener.accept()
        stack.enter_context(other)
        peer.sendall(bytes(200_000))
        account.accepted(other.fileno())
        wait_until(lambda: _traffic(other.fileno(), listener.getsockname()[1]).received > 1 << 16)
        account.check_strangers()
        account._close(other.fileno())
        peer.sendall(b"x")  # It is open.
        assert len(other.recv(1000)) == 1000
        assert account.strangers == 0


def test_the_check_of_strangers_looks_at_no_others(monkeypatch):
    kernel, account = Kernel(monkeypatch), intake()
    for descriptor in (5, 6):
        kernel.traffic[descriptor] = Traffic(81, 0)
        account.accepted(descriptor)
    account.check(behind=False)
    account.accepted(7)
    kernel.traffic = {7: Traffic(64, 65_537)}
    account.check_strangers()
    assert kernel.closed == [7]
    assert account._since.keys() == {5, 6}


def test_what_is_not_tcp_is_no_stranger(monkeypatch):
    Kernel(monkeypatch)
    account = intake()
    account.accepted(5)
    account.check(behind=False)
    assert account.strangers == 0


# --- the password -----------------------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.delenv("PERSIA_CURVE_KEYS", raising=False)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "none"))
    return tmp_path / "persia" / "password"


HERE = ["tcp://127.0.0.1:*", "tcp://127.0.0.2:1", "tcp://localhost:7", "tcp://[::1]:*", "ipc://calls"]


def test_a_user_has_one_password_for_all_addresses_of_this_host(state):
    first = keys_to_connect(HERE[0], None)
    assert isinstance(first, Password)
    assert len(first.text) == 40
    assert state.stat().st_mode & 0o777 == 0o600
    assert state.parent.stat().st_mode & 0o777 == 0o700
    assert os.listdir(state.parent) == ["password"]
    for address in HERE:
        assert keys_to_connect(address, None) == keys_to_listen(address, None, insecure=True) == first
    assert first.text not in repr(first)


def test_it_never_leaves_the_host(state):
    assert keys_to_connect("tcp://192.0.2.1:7000", None) is None
    assert keys_to_listen("tcp://0.0.0.0:*", None, insecure=True) is None
    assert not state.exists()


def test_of_two_that_make_it_at_the_same_time_one_is_first(state, monkeypatch):
    link = os.link

    def late(draft, path):
        monkeypatch.setattr(os, "link", link)
        late.other = keys_to_connect(HERE[0], None)
        link(draft, path)

    monkeypatch.setattr(os, "link", late)
    assert keys_to_connect(HERE[0], None) == late.other
    assert os.listdir(state.parent) == ["password"]


@pytest.mark.parametrize("damage", ["open", "short", "link", "fifo", "folder"])
def test_a_password_that_others_may_know_is_not_used(state, damage, tmp_path):
    keys_to_connect(HERE[0], None)
    if damage == "open":
        state.chmod(0o640)
    elif damage == "fifo":
        state.unlink()
        os.mkfifo(state, 0o600)
    elif damage == "folder":
        state.parent.chmod(0o770)
    elif damage == "short":
        state.write_text("x")
    else:
        (tmp_path / "other").write_text("x" * 40)
        (tmp_path / "other").chmod(0o600)
        state.unlink()
        state.symlink_to(tmp_path / "other")
    (tmp_path / "none").mkdir()  # Nor is another one made in its place, which other processes would not know.
    with pytest.raises(ConfigError, match=r"password.*PERSIA_CURVE_KEYS"):
        keys_to_connect(HERE[0], None)


def test_without_a_home_it_is_kept_among_temporary_files(tmp_path, monkeypatch):
    (tmp_path / "home").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = keys_of._password()
    assert (tmp_path / f"persia-{os.geteuid()}" / "password").read_text() == found.text


def test_it_is_not_logged(serve, caplog):
    with caplog.at_level("DEBUG"):
        serve()
    assert keys_to_connect(HERE[0], None).text not in caplog.text


def test_a_server_open_to_anyone_is_reached_from_its_host():
    with rpc.serve(Service(), "tcp://0.0.0.0:*", protocol=Sample, insecure=True) as server:
        address = server.address.replace("0.0.0.0", "127.0.0.1")
        stub = rpc.connect(address, Sample, timeout=DEADLINE, insecure=True)
        assert stub.defaults(1) == "x"
        rpc.close(stub)


def test_another_user_gets_no_answer(serve, tmp_path, monkeypatch):
    server, _ = serve()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
    rpc.start(stub.nothing, 1)
    wait_until(lambda: "accept" in (stub._connection._trouble or ""))
    assert server.statistics()["calls"] == 1
    rpc.close(stub)
