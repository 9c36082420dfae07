"""Encodes the answers of a prediction server in the format that the client accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError

if TYPE_CHECKING:
    from persia.serve.http.batcher import JobResult
    from persia.serve.http.codecs.codec import Codec
    from persia.serve.item_index import Retrieved
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["AnswerBody", "embeddings_answer", "nearest_answer", "predictions_answer"]


class AnswerBody(NamedTuple):
    """Body of an answer.

    Attributes:
        media_type: media type of the body.
        body: the bytes.
        step: global step of the network or rows that the answer was computed with.
        epoch: epoch of the network or rows in the log of changes; None if it is not known.
    """

    media_type: str
    body: bytes
    step: int
    epoch: int | None


def predictions_answer(codec: Codec, predictions: JobResult) -> AnswerBody:
    """Returns the answer with the answers for each label.

    Raises:
        DataError: a value is not a number.
    """
    _check_numbers(predictions.values, "prediction")
    body = codec.predictions(predictions)
    return AnswerBody(codec.media_type, body, predictions.step, predictions.epoch)


def embeddings_answer(codec: Codec, table: str, embeddings: TableEmbeddings) -> AnswerBody:
    """Returns the answer with rows of a table. Served rows are finite, so they are not checked."""
    body = codec.embeddings(table, embeddings)
    return AnswerBody(codec.media_type, body, embeddings.step, embeddings.epoch)


def nearest_answer(codec: Codec, items: Retrieved) -> AnswerBody:
    """Returns the answer with the nearest items of users.

    Raises:
        DataError: a score is not a number.
    """
    _check_numbers(items.scores, "score")
    return AnswerBody(codec.media_type, codec.nearest(items), items.step, None)


def _check_numbers(values: NDArray[np.float32], what: str) -> None:
    """Raises DataError if a value `[rows, n]` is not finite, which is due to the request, as the weights are finite."""
    finite = np.isfinite(values)
    if not finite.all():
        row = int(finite.reshape(len(values), -1).all(axis=1).argmin())
        raise DataError(
            f"The {what} of row {row} is not a number: a dense feature there is so large that the network computes "
            "beyond float32. Correct the value, or clip such values as in the training data.",
            row=row,
        )
