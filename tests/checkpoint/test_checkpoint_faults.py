"""A kill, an error or a full disk at any moment leaves the old checkpoint or the new one."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from persia.checkpoint import CheckpointReader, CheckpointWriter, list_checkpoints
from persia.errors import CheckpointError
from support.checkpoint_samples import OPTIMIZER, SCHEMA, make_rows, write


class Kill(BaseException):
    """What a SIGKILL would be: nobody catches it."""


class Faults:
    """Counts every call that changes a file system, and does something at the n-th."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.at = -1
        self.calls: list[str] = []
        self.lock = threading.Lock()
        self.act: Callable[[], None] = lambda: None
        for owner, name in (
            (LocalFileSystem, "open"),
            (LocalFileSystem, "makedirs"),
            (LocalFileSystem, "rm"),
            (LocalFileOpener, "write"),
            (MemoryFileSystem, "open"),
            (MemoryFileSystem, "pipe_file"),
            (MemoryFileSystem, "makedirs"),
            (MemoryFileSystem, "rm"),
            (MemoryFile, "write"),
            (os, "replace"),
            (os, "fsync"),
        ):
            self._wrap(patch, owner, name)

    def _wrap(self, patch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            path = next((a for a in args if isinstance(a, str)), "")
            with self.lock:
                index = len(self.calls)
                self.calls.append(f"{name} {path.rpartition('/')[2]}")
            if index == self.at:
                self.act()
            return original(*args, **kwargs)

        patch.setattr(owner, name, call, raising=False)

    def arm(self, at: int, act: Callable[[], None]) -> None:
        self.calls, self.at, self.act = [], at, act


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def write_without_cleanup(url: str, step: int, **options: Any) -> None:
    """Like `write`, but leaving does not abort: what a kill leaves."""
    writer = CheckpointWriter(url, step, **options)
    writer.add_rows("item", 0, make_rows(7, seed=step))
    writer.add_state("trainer", {"step": step})
    writer.commit(schema=SCHEMA, optimizer=OPTIMIZER)


def check(url: str, allowed: set[int]) -> int:
    """The latest checkpoint is one of these and whole; so is every listed one."""
    step = CheckpointReader(url).manifest.global_step
    assert step in allowed
    for entry in list_checkpoints(url):
        reader = CheckpointReader(url, entry.step)
        reader.verify()
        assert reader.state("trainer")["step"] == entry.step
    return step


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # The disk does not fail here, and is slow; calls are counted.
    return Faults(monkeypatch)


@pytest.mark.parametrize("step", [20, 10], ids=["new step", "same step again"])
def test_kill_at_every_call(url: str, faults: Faults, step: int) -> None:
    write(url, 5)
    write(url, 10)
    at, seen = 0, set()
    while True:
        faults.arm(at, raising(Kill()))
        try:
            write_without_cleanup(url, step, keep_last=2)
        except Kill:
            faults.arm(-1, raising(Kill()))
            seen.add(check(url, {10, step}))
            if CheckpointReader(url).manifest.global_step == step != 10:
                write(url, 10)  # make it the latest again
            at += 1
            continue
        break
    assert at > 8
    faults.arm(-1, raising(Kill()))
    assert check(url, {step}) == step
    if step == 20:
        assert seen == {10, 20}  # both outcomes have occurred


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("step", [20, 10], ids=["new step", "same step again"])
def test_error_at_every_call(url: str, faults: Faults, code: int, step: int) -> None:
    write(url, 10)
    fs, root = fsspec.core.url_to_fs(url)
    at = 0
    while (error := attempt(faults, at, code, url, step)) is not None:
        assert error.fields["errno"] == code
        assert root.rpartition("/")[2] in error.message
        assert "Older checkpoints remain valid" in error.message
        assert (code != errno.ENOSPC) or "free space" in error.message
        check(url, {10, step})
        if step == 20:
            new = f"{root}/step-{step:012d}"
            assert fs.exists(new) == fs.exists(f"{new}/manifest.json"), "a partial directory is removed"
            if fs.exists(new):
                write(url, 10)  # the latest again
                fs.rm(new, recursive=True)
        at += 1
    assert at > 8


def attempt(faults: Faults, at: int, code: int, url: str, step: int) -> CheckpointError | None:
    faults.arm(at, raising(OSError(code, os.strerror(code))))
    try:
        write(url, step)
    except CheckpointError as error:
        return error
    finally:
        faults.arm(-1, lambda: None)
    return None


def test_sync_order_on_local_disks(tmp_path: Path, faults: Faults) -> None:
    """Everything a manifest names is synced before it is put in place, and it before LATEST."""
    faults.arm(-1, lambda: None)
    write(tmp_path / "run", 1)
    calls = faults.calls
    replaced = [i for i, call in enumerate(calls) if call.startswith("replace")]
    assert len(replaced) == 2

    def synced(begin: int, end: int) -> int:
        return sum(call.startswith("fsync") for call in calls[begin:end])

    opened = [i for i, call in enumerate(calls) if call.startswith("open")]
    assert len(opened) == 6  # 4 parts, the manifest, LATEST
    assert synced(opened[3], opened[4]) == 4 + 7  # parts; run and its parent, step, rows, item, dense, state
    assert synced(opened[4], replaced[0]) >= 1
    assert synced(replaced[0], opened[5]) >= 1
    assert synced(opened[5], replaced[1]) >= 1
    assert calls[-1].startswith("fsync")


@pytest.mark.processes
@pytest.mark.parametrize("point", range(0, 40, 3))
def test_sigkill(tmp_path: Path, point: int) -> None:
    """The same with a real process and a real signal."""
    write(tmp_path, 10)
    program = (
        "import sys, os, signal\n"
        f"sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1])]!r}\n"
        "import pytest\n"
        "from test_checkpoint_faults import Faults, write_without_cleanup\n"
        "with pytest.MonkeyPatch.context() as patch:\n"
        "    faults = Faults(patch)\n"
        f"    faults.arm({point}, lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "    write_without_cleanup(sys.argv[1], 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=60)
    assert done.returncode in (0, -signal.SIGKILL)
    step = check(str(tmp_path), {10, 20})
    assert done.returncode != 0 or step == 20
    write(tmp_path, 20)
    check(str(tmp_path), {20})


def test_file_size_limit_of_the_system(tmp_path: Path) -> None:
    write(tmp_path, 10)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
        with pytest.raises(CheckpointError, match=r"0-0\.safetensors.*free space"), CheckpointWriter(tmp_path, 20) as w:
            w.add_rows("item", 0, make_rows(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    check(str(tmp_path), {10})
    assert not (tmp_path / "step-000000000020").exists()


def test_directory_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="file"):
        write(tmp_path / "file", 1)
    with pytest.raises(CheckpointError, match="file"):
        CheckpointReader(tmp_path / "file")


def test_failure_to_remove_older_ones_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)
    monkeypatch.setattr(LocalFileSystem, "rm", lambda *args, **kwargs: raising(PermissionError(1, "no"))())
    write(tmp_path, 2, keep_last=1)
    check(str(tmp_path), {2})
