"""Which checkpoints of a directory stay: the newest, the best, and those that they add to."""

from __future__ import annotations

from typing import Any, NamedTuple

from persia.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest, parse_step, step_name
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

__all__ = ["Retention"]


class Retention(NamedTuple):
    """What `CheckpointWriter.commit` leaves.

    Attributes:
        last: so many of the newest; None for all.
        best: also the one with the highest score.
    """

    last: int | None = None
    best: bool = False

    def apply(self, storage: Storage, newest: int) -> None:
        """Removes the other checkpoints before step `newest`, and what interrupted writers have left there."""
        if self.last is None:
            return
        steps = sorted(
            (s for name in storage.names() if (s := parse_step(name)) is not None and s <= newest), reverse=True
        )
        complete = [step for step in steps if MANIFEST in storage.names(step_name(step))]
        kept = set(complete[: self.last])
        if len(complete) > self.last:
            manifests = {step: _manifest(storage, step) for step in complete}
            kept |= self._worth(manifests, kept)
        for step in steps:
            if step in kept or step == newest:
                continue
            if step in complete:
                storage.remove(f"{step_name(step)}/{MANIFEST}")  # first: what is half removed is no checkpoint
            storage.remove(step_name(step))

    def _worth(self, manifests: dict[int, Manifest[dict[str, Any]] | None], kept: set[int]) -> set[int]:
        """The best one, and all that the kept ones add to."""
        more: set[int] = set()
        if self.best:
            scores = {s: m.extra["score"] for s, m in manifests.items() if m and _is_number(m.extra.get("score"))}
            if scores:
                more.add(max(scores, key=lambda step: (scores[step], step)))
        for step in kept | more:
            manifest = manifests.get(step)
            while manifest is not None and manifest.base is not None and manifest.base.step not in more:
                more.add(manifest.base.step)
                manifest = manifests.get(manifest.base.step)
        return more


def _manifest(storage: Storage, step: int) -> Manifest[dict[str, Any]] | None:
    """None where it cannot be read: such a one has no score, and nothing that it needs."""
    path = f"{step_name(step)}/{MANIFEST}"
    try:
        size = storage.size(path)
        return decode_manifest(storage.head(path, 0, size), path) if size and size <= MAX_MANIFEST_BYTES else None
    except CheckpointError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
