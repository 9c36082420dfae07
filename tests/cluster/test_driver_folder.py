"""The directory of a run, without processes of a cluster: what a driver finds that another one has left."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from persia.cluster.ray.driver_folder import (
    FORMAT,
    LAYOUT,
    LOCK,
    POINT,
    DriverFolder,
    PlacedServer,
    RunLayout,
    has_recovery_point,
    server_directory,
)
from persia.errors import ConfigError, PersiaError

SERVERS = (PlacedServer("node", "10.0.0.1", 0, {"id": 10}, {}), PlacedServer("node", "10.0.0.1", 2, {}, {"id": 3}))
RUN = RunLayout(FORMAT, "persia-0123abcd", "/dev/shm", 2, incarnation=3, generation=7, service="{}", servers=SERVERS)
STATE = [b"state of ", memoryview(b"the run")]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run"


def left_behind(path: Path) -> None:
    """What a driver leaves that dies."""
    folder = DriverFolder(str(path))
    folder.write_layout(RUN)
    folder.keep(STATE)
    folder.close()


def test_another_driver_finds_what_a_dead_one_has_left(path):
    assert not has_recovery_point(str(path))
    left_behind(path)
    assert has_recovery_point(str(path))
    folder = DriverFolder(str(path))
    assert folder.layout == RUN
    assert bytes(folder.left) == b"state of the run"
    folder.keep([b"later"])
    assert folder.left is None
    folder.close()
    assert bytes(DriverFolder(str(path)).left) == b"later"


def test_a_driver_that_ends_leaves_nothing_of_the_run(path):
    left_behind(path)
    folder = DriverFolder(str(path))
    folder.forget()
    assert folder.left is None
    folder.end()
    assert not path.exists()
    left_behind(path)
    (path / "notes.txt").touch()
    DriverFolder(str(path)).end()
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
    new = DriverFolder(str(path))
    assert (new.layout, new.left) == (None, None)


def test_before_the_first_recovery_point_only_the_layout_is_left(path):
    folder = DriverFolder(str(path))
    folder.write_layout(RUN)
    folder.close()
    folder = DriverFolder(str(path))
    assert (folder.layout, folder.left) == (RUN, None)


def test_a_second_driver_is_told_of_the_first(path):
    first = DriverFolder(str(path))
    with pytest.raises(PersiaError, match=rf"Another driver .* is still running: process {os.getpid()} on .*, since"):
        DriverFolder(str(path), wait=0)
    first.close()
    first.close()
    DriverFolder(str(path), wait=0).close()


@pytest.mark.processes
def test_a_process_that_is_killed_holds_no_lock(path):
    program = (
        "import sys; from persia.cluster.ray.driver_folder import DriverFolder; held = DriverFolder(sys.argv[1]); "
        "print(1, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"1\n"
        with pytest.raises(PersiaError, match=f"process {holder.pid} "):
            DriverFolder(str(path), wait=0)
        holder.kill()
        holder.wait()
        DriverFolder(str(path), wait=0).close()


def test_who_waited_for_the_lock_of_a_run_that_ended_locks_another_file(path, monkeypatch):
    """Else it would hold a file that nobody else sees. The end removes the directory, too."""
    first = DriverFolder(str(path))
    lock, ended = fcntl.flock, []

    def late(file: int, how: int) -> None:
        if not ended:
            ended.append(True)
            first.end()
        lock(file, how)

    monkeypatch.setattr("persia.cluster.ray.driver_folder.fcntl.flock", late)
    second = DriverFolder(str(path))
    monkeypatch.undo()
    assert ended
    with pytest.raises(PersiaError, match="is still running"):
        DriverFolder(str(path), wait=0)
    second.close()


def test_one_trainer_keeps_its_state(path):
    folder, one, other = DriverFolder(str(path)), [1], [1]
    folder.claim(one)
    folder.claim(one)
    with pytest.raises(ConfigError, match="Use one Trainer"):
        folder.claim(other)


@pytest.mark.parametrize("length", [0, 1, 27, 28, 40, -1])
def test_a_torn_recovery_point_is_refused(path, length):
    left_behind(path)
    data = (path / POINT).read_bytes()
    (path / POINT).write_bytes(data[:length])
    with pytest.raises(PersiaError, match=r"cannot continue: recovery-point: .*remove .* with `persia cluster regions"):
        DriverFolder(str(path))
    (path / POINT).write_bytes(data)
    DriverFolder(str(path), wait=0).close()  # The one that was refused holds no lock.


def test_each_damaged_byte_is_noticed(path):
    left_behind(path)
    data = (path / POINT).read_bytes()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1
        (path / POINT).write_bytes(damaged)
        with pytest.raises(PersiaError, match="cannot continue"):
            DriverFolder(str(path), wait=0)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"format": FORMAT + 1}, "it has format 2"),
        ({"name": "../elsewhere"}, "its values are not valid"),
        ({"name": "persia-0123abcd/.."}, "its values are not valid"),
        ({"incarnation": 0}, "its values are not valid"),
        ({"servers": 1}, "it is no layout"),
        ({"name": "persia-ffffffff"}, "it is of another run"),
    ],
)
def test_a_layout_that_is_not_valid_is_refused(path, change, why):
    left_behind(path)
    fields = msgspec.to_builtins(RUN) | change
    (path / LAYOUT).write_bytes(msgspec.json.encode(fields))
    with pytest.raises(PersiaError, match=why):
        DriverFolder(str(path))


def test_a_recovery_point_without_a_layout_is_refused(path):
    left_behind(path)
    (path / LAYOUT).unlink()
    with pytest.raises(PersiaError, match=r"run\.json is missing"):
        DriverFolder(str(path))


def test_a_write_that_a_death_interrupts_changes_nothing(path, monkeypatch):
    left_behind(path)
    folder = DriverFolder(str(path))

    def dies(self: Path, target: Path) -> None:
        raise OSError(30, "the host dies")

    monkeypatch.setattr(Path, "replace", dies)
    with pytest.raises(PersiaError, match=r"cannot be written: .*RayOptions\.run"):
        folder.keep([b"never there"])
    monkeypatch.undo()
    folder.close()
    assert bytes(DriverFolder(str(path)).left) == b"state of the run"


@pytest.mark.parametrize("number", [28, 5, 116])
def test_a_file_system_that_fails_for_a_while_is_waited_for(path, monkeypatch, number):
    folder = DriverFolder(str(path))
    folder.write_layout(RUN)
    fsync, fails = os.fsync, [True, True]

    def sync(file: int) -> None:
        if fails:
            fails.pop()
            raise OSError(number, os.strerror(number))
        fsync(file)

    monkeypatch.setattr(os, "fsync", sync)
    folder.keep([b"in the end"])
    folder.close()
    assert bytes(DriverFolder(str(path)).left) == b"in the end"


def test_a_place_that_cannot_be_used_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be used: Not a directory"):
        DriverFolder(str(tmp_path / "file" / "run"))

    def none(file: int, how: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("persia.cluster.ray.driver_folder.fcntl.flock", none)
    with pytest.raises(ConfigError, match="with locks"):
        DriverFolder(str(tmp_path / "run"))


def test_the_lock_file_is_the_users_alone(path):
    DriverFolder(str(path)).close()
    assert (path / LOCK).stat().st_mode & 0o077 == 0
    assert path.stat().st_mode & 0o077 == 0


def test_directories_of_pss():
    assert [server_directory(*of) for of in ((0, 0), (3, 2))] == ["ps-0", "ps-3.2"]
    assert [server.directory(rank) for rank, server in enumerate(SERVERS)] == ["ps-0", "ps-1.2"]
