"""Disks of tests: one that is soon full, and one that stalls. Both need the right to mount."""

from __future__ import annotations

import gc
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def _mount(*arguments: str) -> None:
    command = ["mount", *arguments]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")


@contextmanager
def small_disk(place: Path, size: str = "24m") -> Iterator[Path]:
    """Mounts a file system of this size."""
    place.mkdir()
    _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield place
    finally:
        gc.collect()
        subprocess.run(["umount", "-l", str(place)], check=True)


def filled(place: Path) -> Path:
    """Fills a disk; returns the file to remove."""
    filler = place / "filler"
    with pytest.raises(OSError, match="No space left"), filler.open("wb", buffering=0) as file:
        while True:
            assert file.write(bytes(65536))
    return filler


@contextmanager
def freezing_disk(folder: Path) -> Iterator[Path]:
    """Mounts a file system of its own, which holds back writes while it is frozen."""
    image, place = folder / "image", folder / "freezing"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    if not all(map(shutil.which, ("mkfs.ext4", "mount", "fsfreeze"))):
        pytest.skip("there is no mkfs.ext4, mount or fsfreeze")
    if subprocess.run(["mkfs.ext4", "-q", str(image)], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    _mount("-o", "loop", str(image), str(place))
    try:
        yield place
    finally:
        subprocess.run(["fsfreeze", "-u", str(place)], capture_output=True, check=False)
        gc.collect()
        subprocess.run(["umount", "-l", str(place)], check=True)


@contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Freezes a disk for the block: writes wait for its end."""
    subprocess.run(["fsfreeze", "-f", str(place)], check=True)
    try:
        yield
    finally:
        subprocess.run(["fsfreeze", "-u", str(place)], check=True)
