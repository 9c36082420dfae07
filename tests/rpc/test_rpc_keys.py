"""With keys, everything is encrypted and strangers get no answer; without, nobody listens to other hosts."""

import os
from contextlib import nullcontext

import pytest
import zmq

from persia import rpc
from persia.errors import ConfigError, DeadlineError
from persia.rpc.keys import find_keys
from support.rpc_samples import DEADLINE, Sample, Service, expire
from support.waiting import wait_until


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "cluster.keys"
    rpc.make_keys(path)
    return path


def test_a_cluster_with_keys(keys, monkeypatch):
    with rpc.serve(Service(), protocol=Sample, keys=keys) as server:
        stub = rpc.connect(server.address, Sample, keys=keys, timeout=DEADLINE)
        assert stub.defaults(2) == "xx"
        rpc.close(stub)
        monkeypatch.setenv("PERSIA_CURVE_KEYS", str(keys))
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        assert stub.defaults(2) == "xx"
        assert [item.number for item in stub.chunks(2, 10)] == [0, 1]
        rpc.close(stub)


def test_the_variable_is_enough_for_both_sides(keys, monkeypatch):
    monkeypatch.setenv("PERSIA_CURVE_KEYS", str(keys))
    with rpc.serve(Service(), protocol=Sample) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        assert stub.defaults(1) == "x"
        rpc.close(stub)
        monkeypatch.delenv("PERSIA_CURVE_KEYS")
        _refused(server, rpc.connect(server.address, Sample, timeout=DEADLINE))


def test_strangers_get_no_answer(keys, tmp_path):
    other = tmp_path / "other.keys"
    rpc.make_keys(other)
    service = Service()
    with rpc.serve(service, protocol=Sample, keys=keys) as server:
        _refused(server, rpc.connect(server.address, Sample, timeout=DEADLINE))
        _refused(server, rpc.connect(server.address, Sample, keys=other, timeout=DEADLINE))
        # One who knows the server's public key, but is not of the cluster.
        context = zmq.Context()
        socket = context.socket(zmq.DEALER)
        public, _ = tuple(line.split("'")[1] for line in keys.read_text().splitlines() if "'" in line)
        socket.curve_serverkey = public.encode()
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        failed = server.statistics()["handshakes_failed"]
        socket.connect(server.address)
        socket.send(b"anything")
        wait_until(lambda: server.statistics()["handshakes_failed"] > failed)
        assert not socket.poll(100)
        context.destroy(linger=0)
        assert server.statistics()["malformed"] == server.statistics()["calls"] == 0
        stub = rpc.connect(server.address, Sample, keys=keys, timeout=DEADLINE)
        assert stub.defaults(1) == "x"
        rpc.close(stub)


def test_a_server_without_the_keys_gets_nothing(keys):
    service = Service()
    with rpc.serve(service, protocol=Sample) as server:
        _refused(server, rpc.connect(server.address, Sample, keys=keys, timeout=DEADLINE))


def _refused(server, stub):
    calls = server.statistics()["calls"]
    late = rpc.start(stub.nothing, 1)
    wait_until(lambda: stub._connection._trouble, "the failed handshake")
    expire(stub)
    with pytest.raises(DeadlineError, match="same keys"):
        late.result()
    assert server.statistics()["calls"] == calls
    rpc.close(stub)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:*", "tcp://*:*", "tcp://[::]:*", "tcp://192.0.2.1:7000"])
def test_open_addresses_need_keys(address):
    with pytest.raises(ConfigError, match=r"PERSIA_CURVE_KEYS.*insecure=True"):
        rpc.serve(Service(), address, protocol=Sample)


def test_open_addresses_with_keys_or_on_demand(keys):
    with rpc.serve(Service(), "tcp://0.0.0.0:*", protocol=Sample, keys=keys):
        pass
    with rpc.serve(Service(), "tcp://0.0.0.0:*", protocol=Sample, insecure=True) as server:
        assert server.address.startswith("tcp://0.0.0.0:")
    with rpc.serve(Service(), "tcp://localhost:*", protocol=Sample) as server:
        assert server.address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("owner", "mode", "accepted"),
    [
        (0, 0o400, True),
        (0, 0o440, True),
        (0, 0o640, True),
        (0, 0o460, False),
        (0, 0o444, False),
        (1000, 0o400, True),
        (1000, 0o440, False),
    ],
)
def test_the_group_may_read_keys_of_root(keys, monkeypatch, owner, mode, accepted):
    """Kubernetes mounts secrets so, for a pod that runs as another user."""
    keys.chmod(mode)
    fstat = os.fstat

    def owned(descriptor):
        found = fstat(descriptor)
        return os.stat_result([*found[:4], owner, *found[5:10]])

    monkeypatch.setattr("persia.secret_files.os.fstat", owned)
    monkeypatch.setattr("persia.secret_files.os.geteuid", lambda: 1000)
    with nullcontext() if accepted else pytest.raises(ConfigError, match=r"open to other users.*defaultMode: 0440"):
        assert find_keys(keys)


def test_key_files(keys, tmp_path, monkeypatch):
    assert os.stat(keys).st_mode & 0o777 == 0o600
    with pytest.raises(ConfigError, match="File exists"):
        rpc.make_keys(keys)
    keys.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        rpc.serve(Service(), protocol=Sample, keys=keys)
    bad = tmp_path / "bad.keys"
    for text in ("", "public = 'x'\nsecret = 'y'\n", "not toml", "\xff", "public = 3\nsecret = 4"):
        bad.write_text(text, encoding="latin-1")
        bad.chmod(0o600)
        with pytest.raises(ConfigError, match="make_keys"):
            rpc.serve(Service(), protocol=Sample, keys=bad)
    monkeypatch.setenv("PERSIA_CURVE_KEYS", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="missing"):
        rpc.connect("tcp://127.0.0.1:1", Sample)
