"""Lists the checkpoints of a directory."""

from __future__ import annotations

import os
from typing import NamedTuple

from persia.checkpoint.best import read_best
from persia.checkpoint.format import LATEST, MANIFEST, parse_step, step_name
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

__all__ = ["CheckpointEntry", "complete_steps", "latest_step", "list_checkpoints"]


class CheckpointEntry(NamedTuple):
    """A complete checkpoint in a directory: its step, its path, and whether LATEST, and BEST, name it."""

    step: int
    path: str
    latest: bool
    best: bool = False


def list_checkpoints(url: str | os.PathLike[str]) -> list[CheckpointEntry]:
    """Lists the complete checkpoints of a directory by step. None is marked if LATEST, or BEST, is damaged or missing.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    storage = Storage(url)
    try:
        latest = latest_step(storage)
    except CheckpointError:
        latest = None
    try:
        best = read_best(storage)
    except CheckpointError:
        best = None
    marked = best.step if best is not None else None
    return [CheckpointEntry(s, storage.full(step_name(s)), s == latest, s == marked) for s in complete_steps(storage)]


def complete_steps(storage: Storage) -> list[int]:
    """Returns the steps that have a manifest."""
    steps = [step for name in storage.names() if (step := parse_step(name)) is not None]
    return [step for step in steps if storage.size(f"{step_name(step)}/{MANIFEST}") is not None]


def latest_step(storage: Storage) -> int | None:
    """Returns the step that LATEST names; None if there is no LATEST."""
    if storage.size(LATEST) is None:
        return None
    content = storage.head(LATEST, 0, 64)
    name, end = content[:-1], content[-1:]
    step = parse_step(name.decode("ascii", "replace")) if end == b"\n" else None
    if step is None:
        path = storage.full(LATEST)
        raise CheckpointError(
            f"{path} is damaged: {content[:32]!r} is not the name of a step. "
            "Name the step to read by step=; the next checkpoint replaces the file.",
            path=path,
        )
    return step
