"""Retention of checkpoints: keeps the newest, the best, and the checkpoints that they build on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

from persia.checkpoint.best import best_of, read_best, read_manifest
from persia.checkpoint.format import MANIFEST, Manifest, parse_step, step_name
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

__all__ = ["Retention"]

_Manifest: TypeAlias = Manifest[dict[str, Any]]


class Retention(NamedTuple):
    """Policy by which `CheckpointWriter.commit` removes older checkpoints.

    Attributes:
        last: number of newest checkpoints to keep; None keeps all.
        best: also keep the checkpoint with the highest score. The checkpoint that `BEST` names is always kept.
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
            manifests = {step: read_manifest(storage, step) for step in complete}
            retained |= self._best(storage, manifests)
            retained |= {base for step in retained for base in _bases(manifests, step)}
        for step in steps:
            if step in retained or step == newest:
                continue
            if step in complete:
                storage.remove(
                    f"{step_name(step)}/{MANIFEST}"
                )  # First: a partially removed checkpoint must not be complete.
            storage.remove(step_name(step))

    def _best(self, storage: Storage, manifests: dict[int, _Manifest | None]) -> set[int]:
        best = best_of(manifests) if self.best else None
        with suppress(CheckpointError):  # A damaged one names nothing.
            best = read_best(storage) or best
        return {best.step} & manifests.keys() if best is not None else set()


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
