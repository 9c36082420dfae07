"""`BEST`: names the best checkpoint of a directory, next to `LATEST`, with the metric and its value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from persia.checkpoint.format import MANIFEST, MAX_MANIFEST_BYTES, Manifest, decode_manifest, parse_step, step_name
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError

__all__ = ["BEST", "BestCheckpoint", "Score", "best_of", "read_best", "read_manifest", "write_best"]

BEST: Final = "BEST"

_MAX_BYTES = 1 << 10


class Score(NamedTuple):
    """Held-out metric of a checkpoint.

    Attributes:
        metric: its name.
        value: its value.
        score: what is compared: higher is better.
    """

    metric: str
    value: float
    score: float


class BestCheckpoint(NamedTuple):
    """The best checkpoint of a directory.

    Attributes:
        step: its step.
        metric: the metric that it is the best of.
        value: value of the metric.
    """

    step: int
    metric: str
    value: float


def write_best(storage: Storage, best: BestCheckpoint) -> None:
    """Replaces `BEST` atomically.

    Raises:
        CheckpointError: it cannot be written.
    """
    storage.put(BEST, f"{step_name(best.step)} {best.value!r} {best.metric}\n".encode())


def read_best(storage: Storage) -> BestCheckpoint | None:
    """Returns what `BEST` names; None if there is no `BEST`.

    Raises:
        CheckpointError: it is damaged.
    """
    size = storage.size(BEST)
    if size is None:
        return None
    try:
        text = storage.head(BEST, 0, min(size, _MAX_BYTES)).decode()
        name, value, metric = text.removesuffix("\n").split(" ", 2)
        step = parse_step(name)
        if step is not None and text.endswith("\n") and math.isfinite(float(value)):
            return BestCheckpoint(step, metric, float(value))
    except ValueError:
        pass
    path = storage.full(BEST)
    raise CheckpointError(
        f"{path} is damaged. Name the step to read by step=; the next checkpoint with a score replaces the file.",
        path=path,
    )


def best_of(manifests: Mapping[int, Manifest[dict[str, Any]] | None]) -> BestCheckpoint | None:
    """Returns the best of some checkpoints by the metric of the newest one that has a score; the earlier of equals.

    Args:
        manifests: by step; None for a damaged one.
    """
    scores = {step: score for step, m in sorted(manifests.items()) if m is not None and (score := _score(m))}
    if not scores:
        return None
    metric = scores[max(scores)].metric
    alike = {step: score for step, score in scores.items() if score.metric == metric}
    best = max(alike, key=lambda step: (alike[step].score, -step))
    return BestCheckpoint(best, metric, alike[best].value)


def read_manifest(storage: Storage, step: int) -> Manifest[dict[str, Any]] | None:
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


def _score(manifest: Manifest[dict[str, Any]]) -> Score | None:
    """Returns the score of a checkpoint. Those of before `BEST` have no metric of their own: options name it."""
    extra = manifest.extra
    score, metric, value = _number(extra.get("score")), extra.get("metric"), _number(extra.get("value"))
    if score is None:
        return None
    if not isinstance(metric, str) or not metric or value is None:
        options = manifest.config.get("options")
        named = options.get("keep_best") if isinstance(options, dict) else None
        metric = named if isinstance(named, str) and named else "score"
        value = abs(score) if metric == "log_loss" else score
    return Score(" ".join(metric.split()), value, score)


def _number(value: object) -> float | None:
    known = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if known else None  # type: ignore[arg-type]
