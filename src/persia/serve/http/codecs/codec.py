"""Base of the codecs, which decode the bodies of requests and encode the bodies of answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from persia.errors import DataError

if TYPE_CHECKING:
    from persia.serve.http.batcher import JobResult
    from persia.serve.http.limits import ServeLimits
    from persia.serve.item_index import Retrieved
    from persia.serve.table_embeddings import TableEmbeddings

__all__ = ["ARROW", "JSON", "MSGPACK", "Codec", "MalformedBodyError", "Records", "Samples"]

JSON = "application/json"
MSGPACK = "application/msgpack"
ARROW = "application/vnd.apache.arrow.stream"


class MalformedBodyError(DataError):
    """A body does not match its Content-Type."""


Records: TypeAlias = list[dict[str, Any]]
"""Samples as rows: values by feature."""


class Samples(NamedTuple):
    """Samples as columns: lists, arrays, pairs of values and offsets, or columns of Arrow.

    Attributes:
        features: columns by feature.
        dense: columns by dense feature, or all dense features as `[rows, dense features]` in the order of the schema.
    """

    features: Mapping[str, Any]
    dense: Any


class Codec(ABC):
    """Bodies of one media type. Thread-safe.

    Attributes:
        media_type: media type of answers.
        names: all media types of this format, in lower case.
    """

    media_type: str
    names: tuple[str, ...]

    @abstractmethod
    def samples(self, body: bytes, limits: ServeLimits) -> Samples | Records:
        """Returns the samples of a body.

        Args:
            body: body of a `/predict` request, or a part of another one.
            limits: limits for formats in which a small body can expand to large values; the caller checks the result.

        Raises:
            MalformedBodyError: the body is not of this media type.
            DataError: the body has another form than the server accepts, or exceeds the limits.
        """

    @abstractmethod
    def predictions(self, predictions: JobResult) -> bytes:
        """Returns the body of an answer with probabilities or scores, or, for labels of several kinds, predictions."""

    @abstractmethod
    def embeddings(self, table: str, embeddings: TableEmbeddings) -> bytes:
        """Returns the body of an answer with the rows of a table."""

    @abstractmethod
    def nearest(self, items: Retrieved) -> bytes:
        """Returns the body of an answer with the nearest items of users."""
