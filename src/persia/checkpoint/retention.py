"""Which checkpoints of a directory stay: the newest, the best, and those that they add to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, TypeAlias

from persia.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest, parse_step, step_name
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

__all__ = ["Retention"]

_Manifest: TypeAlias = Manifest[dict[str, Any]]


class Retention(NamedTuple):
    """What `CheckpointWriter.commit` leaves.

    Attributes:
        last: so many of the newest; None for all.
        best: also the one with the highest score.
    """

    last: int | None = None
    best: bool = False

    def apply(self, storage: Storage, newest: int) -> None:
        """Removes the other checkpoints before step `newest`, and what interrupted writers have left there.

        Raises:
            CheckpointError: the storage fails, or what a kept one adds to is not known; then nothing is removed.
        """
        if self.last is None:
            return
        steps = sorted(
            (s for name in storage.names() if (s := parse_step(name)) is not None and s <= newest), reverse=True
        )
        complete = [step for step in steps if MANIFEST in storage.names(step_name(step))]
        kept = set(complete[: self.last])
        if len(complete) > self.last:
            manifests = {step: _manifest(storage, step) for step in complete}
            kept |= self._best(manifests)
            kept |= {base for step in kept for base in _bases(manifests, step)}
        for step in steps:
            if step in kept or step == newest:
                continue
            if step in complete:
                storage.remove(f"{step_name(step)}/{MANIFEST}")  # first: what is half removed is no checkpoint
            storage.remove(step_name(step))

    def _best(self, manifests: dict[int, _Manifest | None]) -> set[int]:
        if not self.best:
            return set()
        scores = {s: m.extra["score"] for s, m in manifests.items() if m and _is_number(m.extra.get("score"))}
        return {max(scores, key=lambda step: (scores[step], step))} if scores else set()


def _bases(manifests: dict[int, _Manifest | None], step: int) -> Iterator[int]:
    """All that a checkpoint adds to, as far as they are there."""
    kept = step
    while step in manifests:
        manifest = manifests[step]
        if manifest is None:
            raise CheckpointError(
                f"The manifest of step {step}, which step {kept} needs, is damaged, so nobody knows which steps it "
                "adds to. Remove both by hand if they are of no use.",
                step=step,
            )
        if manifest.base is None or manifest.base.step >= step:  # The latter is damage, too: nobody can read it.
            return
        step = manifest.base.step
        yield step


def _manifest(storage: Storage, step: int) -> _Manifest | None:
    """None where it is damaged; that it cannot be read at this moment is an error."""
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
