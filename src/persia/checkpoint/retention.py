"""Retention of checkpoints: keeps the newest, the best, and the checkpoints that they build on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from persia.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest, parse_step, step_name
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

__all__ = ["Retention"]

_Manifest: TypeAlias = Manifest[dict[str, Any]]


class Retention(NamedTuple):
    """Policy by which `CheckpointWriter.commit` removes older checkpoints.

    Attributes:
        last: number of newest checkpoints to keep; None keeps all.
        best: also keep the checkpoint with the highest score.
    """

    last: int | None = None
    best: bool = False

    def apply(self, storage: Storage, newest: int) -> None:
        """Removes the other checkpoints before step `newest`, and incomplete checkpoints of interrupted writers.

        Raises:
            CheckpointError: the storage failed, or the base of a retained checkpoint is unknown; then nothing is
                removed.
        """
        if self.last is None:
            return
        steps = sorted(
            (s for name in storage.names() if (s := parse_step(name)) is not None and s <= newest), reverse=True
        )
        complete = [step for step in steps if MANIFEST in storage.names(step_name(step))]
        retained = set(complete[: self.last])
        if len(complete) > self.last:
            manifests = {step: _manifest(storage, step) for step in complete}
            retained |= self._best(manifests)
            retained |= {base for step in retained for base in _bases(manifests, step)}
        for step in steps:
            if step in retained or step == newest:
                continue
            if step in complete:
                storage.remove(
                    f"{step_name(step)}/{MANIFEST}"
                )  # First: a partially removed checkpoint must not be complete.
            storage.remove(step_name(step))

    def _best(self, manifests: dict[int, _Manifest | None]) -> set[int]:
        if not self.best:
            return set()
        scores = {s: m.extra["score"] for s, m in manifests.items() if m and _is_number(m.extra.get("score"))}
        return {max(scores, key=lambda step: (scores[step], step))} if scores else set()


def _bases(manifests: dict[int, _Manifest | None], step: int) -> Iterator[int]:
    """Yields the existing steps that a checkpoint builds on."""
    retained = step
    while step in manifests:
        manifest = manifests[step]
        if manifest is None:
            raise CheckpointError(
                f"The manifest of step {step}, which step {retained} builds on, is damaged, so the steps that it needs "
                "are unknown. Remove both by hand if you do not need them.",
                step=step,
            )
        if manifest.base is None or manifest.base.step >= step:  # A later base is also damage.
            return
        step = manifest.base.step
        yield step


def _manifest(storage: Storage, step: int) -> _Manifest | None:
    """Reads the manifest of a step; None if it is damaged.

    Raises:
        CheckpointError: the storage failed.
    """
    path = f"{step_name(step)}/{MANIFEST}"
    size = storage.size(path)
    if not size or size > MAX_MANIFEST_BYTES:
        return None
    data = storage.head(path, 0, size)
    try:
        return decode_manifest(data, path)
    except CheckpointError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
