"""Bodies of answers, in the form that the client accepts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError
from persia.serve.http.arrow_bodies import write_columns, write_embeddings, write_lists
from persia.serve.http.wire import ARROW, JSON, MSGPACK, MSGPACK_NAMES, array_of

if TYPE_CHECKING:
    from persia.serve.http.batcher import JobResult

__all__ = ["AnswerBody", "accepted", "content_kind", "embeddings_answer", "found_answer", "predictions_answer"]

_KINDS = {JSON: JSON, ARROW: ARROW, **dict.fromkeys(MSGPACK_NAMES, MSGPACK)}


class AnswerBody(NamedTuple):
    """Body of an answer.

    Attributes:
        kind: its media type.
        body: the bytes.
        step: global step of the network or rows that it was computed with.
        epoch: their epoch of the log of changes; None if it is not known.
    """

    kind: str
    body: bytes
    step: int
    epoch: int | None


def content_kind(header: str | None) -> str | None:
    """Returns the form of a body by its Content-Type; None if it is not supported."""
    return _KINDS.get((header or "").partition(";")[0].strip().lower())


def accepted(header: str | None, default: str) -> str | None:
    """Returns the form that an Accept header prefers; None if it accepts no form that is supported.

    Args:
        header: of the request; None or empty accepts all.
        default: form for those that accept all: that of the request.
    """
    ranges = []
    for position, part in enumerate((header or "*/*").split(",")):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        quality = next((p[2:] for p in parameters if p.startswith("q=")), "1")
        try:
            weight = float(quality)
        except ValueError:
            weight = 0.0
        if weight > 0:
            ranges.append((-weight, position, name))
    for _, _, name in sorted(ranges):
        if name in ("*/*", "application/*"):
            return default
        if name in _KINDS:
            return _KINDS[name]
    return None


def predictions_answer(kind: str, labels: Sequence[str], found: JobResult) -> AnswerBody:
    """Returns the answer with the probabilities or scores `[rows, labels]`.

    Raises:
        DataError: one is not a number.
    """
    _check_numbers(found.values, "prediction")
    if kind == ARROW:
        columns = {label: np.ascontiguousarray(found.values[:, i]) for i, label in enumerate(labels)}
        return AnswerBody(kind, write_columns(columns, _metadata(found.step, found.epoch)), found.step, found.epoch)
    if kind == JSON:
        values: Any = {label: found.values[:, i].tolist() for i, label in enumerate(labels)}
    else:
        values = {"labels": list(labels), "values": array_of(found.values)}
    return _encoded(kind, {found.name: values, "step": found.step, "epoch": found.epoch})


def embeddings_answer(
    kind: str, table: str, found: NDArray[np.bool_], rows: NDArray[np.float32], step: int, epoch: int
) -> AnswerBody:
    """Returns the answer with rows `[n, dim]`, zeros where none was found. They are finite, as the server checks."""
    if kind == ARROW:
        return AnswerBody(kind, write_embeddings(found, rows, _metadata(step, epoch)), step, epoch)
    parts: dict[str, Any] = {"table": table}
    if kind == JSON:
        parts |= {"found": found.tolist(), "rows": rows.tolist()}
    else:
        parts |= {"found": array_of(found), "rows": array_of(rows)}
    return _encoded(kind, {**parts, "step": step, "epoch": epoch})


def found_answer(kind: str, ids: NDArray[np.uint64], scores: NDArray[np.float32], step: int) -> AnswerBody:
    """Returns the answer with ids and scores of items `[users, k]`, nearest first.

    Raises:
        DataError: a score is not a number.
    """
    _check_numbers(scores, "score")
    if kind == ARROW:
        return AnswerBody(kind, write_lists({"ids": ids, "scores": scores}, {"persia.step": str(step)}), step, None)
    values = [each.tolist() if kind == JSON else array_of(each) for each in (ids, scores)]
    return _encoded(kind, {"ids": values[0], "scores": values[1], "step": step})


def _check_numbers(values: NDArray[np.float32], what: str) -> None:
    """Raises DataError if a value `[rows, n]` is not finite: the network is, so a value of the request is too large."""
    finite = np.isfinite(values)
    if not finite.all():
        row = int(finite.reshape(len(values), -1).all(axis=1).argmin())
        raise DataError(
            f"The {what} of row {row} is not a number: a dense feature there is so large that the network computes "
            "beyond float32. Correct the value, or clip such values as in the training data.",
            row=row,
        )


def _encoded(kind: str, content: dict[str, Any]) -> AnswerBody:
    encode = msgspec.json.encode if kind == JSON else msgspec.msgpack.encode
    return AnswerBody(kind, encode(content), content["step"], content.get("epoch"))


def _metadata(step: int, epoch: int) -> dict[str, str]:
    return {"persia.step": str(step), "persia.epoch": str(epoch)}
