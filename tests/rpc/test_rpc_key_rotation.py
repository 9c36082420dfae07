"""Keys are replaced while a cluster runs: no request fails, and whoever has only an old key is locked out."""

import itertools
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from persia import rpc
from persia.errors import ConfigError, DeadlineError, PeerRestartedError
from persia.rpc.key_file import KeyFile
from support.rpc_samples import DEADLINE, Sample, Service, expire
from support.waiting import wait_until

pytestmark = pytest.mark.usefixtures("quick_ticks")


class Host:
    """A host's copy of the key file. Copies are replaced as Kubernetes does it, by a link."""

    def __init__(self, folder, keys):
        folder.mkdir()
        self.keys, self._folder, self._numbers = folder / "keys", folder, itertools.count()
        self.copy(keys)

    def copy(self, keys):
        version, link = self._folder / f"version-{next(self._numbers)}", self._folder / "link"
        shutil.copy(keys, version)
        link.symlink_to(version)
        os.replace(link, self.keys)


@pytest.fixture
def master(tmp_path):
    """The copy of the person who rotates."""
    path = tmp_path / "cluster.keys"
    rpc.make_keys(path)
    return path


@pytest.fixture
def hosts(master, tmp_path):
    """The copies of the server's host and of the client's."""
    return Host(tmp_path / "server", master), Host(tmp_path / "client", master)


def key_changes(server):
    return server.statistics()["key_changes"]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["server-first", "client-first"])
def test_no_request_fails_while_keys_are_rotated(master, hosts, order):
    service, done, made = Service(), threading.Event(), [0] * 4
    array = np.arange(50_000, dtype=np.float32)  # Sent without a copy.
    with rpc.serve(service, protocol=Sample, keys=hosts[0].keys) as server:
        stubs = [rpc.connect(server.address, Sample, keys=hosts[1].keys, timeout=DEADLINE) for _ in range(2)]

        def work(number):
            stub = stubs[number % 2]
            while not done.is_set():
                assert stub.defaults(2) == "xx"
                np.testing.assert_array_equal(stub.floats(array), array)
                assert [pair.number for pair in stub.chunks(5, 10)] == [0, 1, 2, 3, 4]
                made[number] += 1

        def progress():
            """All threads finish two rounds more, at least one of them with the keys of now."""
            goal = [count + 2 for count in made]
            wait_until(lambda: all(count >= least for count, least in zip(made, goal, strict=True)) or failed())

        def failed():
            return [future for future in futures if future.done()]

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, number) for number in range(4)]
            try:
                for number, step in enumerate((rpc.add_key, rpc.promote_key, rpc.retire_keys)):
                    step(master)
                    for host in order:
                        hosts[host].copy(master)
                        progress()
                    wait_until(lambda number=number: key_changes(server) == (number >= 1))
                    progress()
            finally:
                done.set()
            for future in futures:
                future.result()
        for stub in stubs:
            assert rpc.statistics(stub)["connects"] == 2
            rpc.close(stub)
        assert server.statistics()["errors"] == 0


def test_the_old_key_is_refused_once_another_is_first(master, hosts):
    with rpc.serve(Service(), protocol=Sample, keys=hosts[0].keys) as server:
        thief = rpc.connect(server.address, Sample, keys=hosts[1].keys, timeout=DEADLINE)
        assert thief.defaults(1) == "x"
        for step in (rpc.add_key, rpc.promote_key):
            step(master)
            hosts[0].copy(master)
        wait_until(lambda: key_changes(server) == 1)
        calls = server.statistics()["calls"]
        late = rpc.start(thief.nothing, 1)
        wait_until(lambda: thief._connection._trouble, "the failed handshake")
        expire(thief)
        with pytest.raises(DeadlineError, match="same keys"):
            late.result()
        assert server.statistics()["calls"] == calls
        friend = rpc.connect(server.address, Sample, keys=master, timeout=DEADLINE)
        assert friend.defaults(1) == "x"
        for stub in (thief, friend):
            rpc.close(stub)


def test_a_client_waits_for_its_copy(master, hosts):
    """After a theft, one copy has to do."""
    with rpc.serve(Service(), protocol=Sample, keys=hosts[0].keys) as server:
        stub = rpc.connect(server.address, Sample, keys=hosts[1].keys, timeout=DEADLINE)
        assert stub.defaults(1) == "x"
        rpc.add_key(master)
        rpc.promote_key(master)
        hosts[0].copy(master)
        wait_until(lambda: key_changes(server) == 1)
        call = rpc.start(stub.defaults, 2)
        wait_until(lambda: stub._connection._trouble, "the failed handshake")
        hosts[1].copy(master)
        assert call.result() == "xx"
        rpc.close(stub)


def test_a_full_server_ends_the_connections_of_the_old_key(master, hosts):
    """Else one with a stolen key could keep it by calls that block."""
    service = Service()
    with rpc.serve(service, protocol=Sample, keys=hosts[0].keys, limits=rpc.Limits(requests=2, peer_share=1)) as server:
        thief = rpc.connect(server.address, Sample, keys=hosts[1].keys, timeout=DEADLINE)
        blocked = [rpc.start(thief.wait) for _ in range(3)]
        wait_until(lambda: service.waiting == 2)
        for step in (rpc.add_key, rpc.promote_key):
            step(master)
            hosts[0].copy(master)
        wait_until(lambda: not thief._connection._connected and thief._connection._trouble)
        assert server.statistics()["requests_held"] == 2
        service.gate.set()
        expire(thief)
        for call in blocked:
            with pytest.raises(DeadlineError):
                call.result()
        rpc.close(thief)


def test_methods_that_run_once_are_told(master, hosts):
    service = Service()
    with rpc.serve(service, protocol=Sample, keys=hosts[0].keys) as server:
        stub = rpc.connect(server.address, Sample, keys=master, timeout=DEADLINE)
        again, once = rpc.start(stub.wait), rpc.start(stub.wait_once)
        wait_until(lambda: service.waiting == 2)
        for step in (rpc.add_key, rpc.promote_key):
            step(master)
            hosts[0].copy(master)
        with pytest.raises(PeerRestartedError, match="must not be repeated"):
            once.result()
        service.gate.set()
        assert again.result() >= 1
        rpc.close(stub)


STATES = {"old": "1", "added": "12", "promoted": "21", "retired": "2"}


@pytest.mark.parametrize(
    ("server", "client"),
    [pair for pair in itertools.product(STATES, repeat=2) if set(STATES[pair[1]]) >= {STATES[pair[0]][0]}],
)
def test_copies_of_two_steps_reach_each_other(server, client, tmp_path):
    """A client reaches all servers whose first pair it has, so copies of neighbouring steps may be mixed."""
    path = tmp_path / "keys"
    copies = {}
    rpc.make_keys(path)
    for state, step in zip(STATES, (None, rpc.add_key, rpc.promote_key, rpc.retire_keys), strict=True):
        if step is not None:
            step(path)
        copies[state] = shutil.copy(path, tmp_path / state)
    with rpc.serve(Service(), protocol=Sample, keys=copies[server]) as listening:
        stub = rpc.connect(listening.address, Sample, keys=copies[client], timeout=DEADLINE)
        assert stub.defaults(1) == "x"
        rpc.close(stub)


def test_a_client_that_has_neither_key_tries_at_a_bounded_rate(master, tmp_path, monkeypatch):
    monkeypatch.setattr("persia.rpc.port.REDIAL_SECONDS", 1e9)
    other = tmp_path / "other"
    rpc.make_keys(other)
    rpc.add_key(other)
    with rpc.serve(Service(), protocol=Sample, keys=master) as server:
        stub = rpc.connect(server.address, Sample, keys=other, timeout=DEADLINE)
        call = rpc.start(stub.defaults, 1)
        wait_until(lambda: stub._connection._port._keys == KeyFile(other).pairs[1])  # The first change is at once.
        failed = server.statistics()["handshakes_failed"]
        wait_until(lambda: server.statistics()["handshakes_failed"] > failed + 1)
        assert stub._connection._port._keys == KeyFile(other).pairs[1]
        expire(stub)
        with pytest.raises(DeadlineError):
            call.result()
        rpc.close(stub)


def test_a_client_that_was_refused_during_a_change_tries_again(master):
    """ZeroMQ gives up once a server that has the key in use refuses it."""
    with rpc.serve(Service(), protocol=Sample, keys=master) as server:
        admitted = server._port._admitted
        public, admitted.public = admitted.public, b"x" * 40
        stub = rpc.connect(server.address, Sample, keys=master, timeout=DEADLINE)
        call = rpc.start(stub.defaults, 1)
        wait_until(lambda: "keys" in stub._connection._trouble)
        admitted.public = public
        assert call.result() == "x"
        rpc.close(stub)


def test_while_the_file_is_invalid_the_keys_stay(master, hosts, caplog):
    keys = hosts[0].keys
    with rpc.serve(Service(), protocol=Sample, keys=keys) as server:
        stub = rpc.connect(server.address, Sample, keys=hosts[1].keys, timeout=DEADLINE)
        keys.write_text("public = 'half a")
        wait_until(lambda: "cannot be read" in caplog.text)
        keys.chmod(0o644)
        wait_until(lambda: "chmod 600" in caplog.text)
        keys.unlink()
        keys.mkdir()
        wait_until(lambda: "Is a directory" in caplog.text)
        for _ in range(2):
            tick = server._tick
            wait_until(lambda tick=tick: server._tick > tick)
        keys.rmdir()
        assert stub.defaults(1) == "x"
        assert rpc.statistics(stub)["connects"] == 1
        rpc.add_key(master)
        rpc.promote_key(master)
        hosts[0].copy(master)
        hosts[1].copy(master)
        wait_until(lambda: key_changes(server) == 1)
        assert stub.defaults(1) == "x"
        rpc.close(stub)
    warnings = [record.getMessage() for record in caplog.records]
    assert len([text for text in warnings if "Is a directory" in text]) == 1
    assert all(text.endswith("Until then the earlier keys stay in use.") for text in warnings)


def test_a_server_keeps_its_port_while_keys_change(master, hosts):
    """No other process can take it, and who connects in between is let in."""
    with rpc.serve(Service(), protocol=Sample, keys=hosts[0].keys) as server:
        address = server.address
        for number in range(1, 4):
            rpc.add_key(master)
            rpc.promote_key(master)
            rpc.retire_keys(master)
            hosts[0].copy(master)
            wait_until(lambda number=number: key_changes(server) == number)
            with pytest.raises(ConfigError, match="in use"):
                rpc.serve(Service(), address, protocol=Sample, keys=master)
            stub = rpc.connect(address, Sample, keys=master, timeout=DEADLINE)
            assert stub.defaults(1) == "x"
            rpc.close(stub)
        descriptors = len(os.listdir("/proc/self/fd"))
        rpc.add_key(master)
        rpc.promote_key(master)
        hosts[0].copy(master)
        wait_until(lambda: key_changes(server) == 4)
        wait_until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)


def test_connections_of_the_old_key_are_forgotten(master, hosts):
    """Also those whose beginning was not noted yet: ZeroMQ does not report their end."""
    with rpc.serve(Service(), protocol=Sample, keys=hosts[0].keys) as server:
        watch, server._watch = server._watch, lambda: None
        stub = rpc.connect(server.address, Sample, keys=hosts[1].keys, timeout=DEADLINE)
        assert stub.defaults(1) == "x"
        for step in (rpc.add_key, rpc.promote_key):
            step(master)
            hosts[0].copy(master)
        wait_until(lambda: key_changes(server) == 1)
        rpc.close(stub)
        server._watch = watch
        watch()
        wait_until(lambda: not server._intake._since)
        assert not server._intake.strangers


# --- the file ---------------------------------------------------------------------------------------------------------


def test_steps_of_a_rotation(master, tmp_path):
    (first,) = KeyFile(master).pairs
    with pytest.raises(ConfigError, match=r"only one pair; add one with `persia keys add"):
        rpc.promote_key(master)
    rpc.add_key(master)
    kept, second = KeyFile(master).pairs
    assert kept == first != second
    rpc.promote_key(master)
    assert KeyFile(master).pairs == (second, first)
    assert os.stat(master).st_mode & 0o777 == 0o600
    link = tmp_path / "link"
    link.symlink_to(master)
    rpc.retire_keys(link)
    assert KeyFile(master).pairs == (second,)
    assert link.is_symlink()
    assert sorted(os.listdir(tmp_path)) == [master.name, link.name]


def test_a_pair_that_is_invalid_is_refused_with_the_others(master):
    rpc.add_key(master)
    text = master.read_text()
    _, second = KeyFile(master).pairs
    master.write_text(text.replace(second.secret.decode(), "x" * 40))
    with pytest.raises(ConfigError, match="one that is invalid"):
        KeyFile(master)
    master.write_text("other = 3\n" + text.split("[[other]]")[0])
    with pytest.raises(ConfigError, match="one that is invalid"):
        KeyFile(master)


def test_a_folder_that_cannot_be_written(master, monkeypatch):
    def refuse(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("persia.rpc.key_file.tempfile.mkstemp", refuse)
    with pytest.raises(ConfigError, match=r"Cannot write the keys .*Permission denied"):
        rpc.add_key(master)


def test_a_change_within_the_clocks_resolution_is_seen(master, tmp_path):
    """Of the same length, in the same file."""
    rpc.add_key(master)
    other = shutil.copy(master, tmp_path / "other")
    rpc.promote_key(other)
    file = KeyFile(master)
    first, second = file.pairs
    before = os.stat(master)
    master.write_text(other.read_text())
    os.utime(master, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = os.stat(master)
    assert (after.st_ino, after.st_size, after.st_mtime_ns) == (before.st_ino, before.st_size, before.st_mtime_ns)
    file.refresh()
    assert file.pairs == (second, first)
