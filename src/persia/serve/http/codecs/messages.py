"""Base of the codecs of JSON and msgpack, whose messages are records that msgspec decodes."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import msgspec

from persia.errors import DataError
from persia.serve.http.codecs.codec import Codec, MalformedBodyError, Records, Samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from persia.metrics import AnswerColumns
    from persia.serve.http.limits import ServeLimits

__all__ = ["MessageCodec", "TableColumn", "UserSamples", "Value", "described"]

Scalar: TypeAlias = bool | int | float | str | None
Value: TypeAlias = Scalar | list[Scalar]


class _RankRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One user and many items.

    Attributes:
        user: one sample with the features of the user.
        items: samples with the features of the items.
    """

    user: msgspec.Raw
    items: msgspec.Raw


class _RetrieveRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Users whose nearest items are requested.

    Attributes:
        users: samples with the features of the users.
        k: number of items for each user.
    """

    users: msgspec.Raw
    k: Annotated[int, msgspec.Meta(ge=1)] = 10


class UserSamples(NamedTuple):
    """A `/retrieve` request.

    Attributes:
        users: samples with the features of the users.
        k: number of items for each user.
    """

    users: Samples | Records
    k: int


class TableColumn(NamedTuple):
    """An `/embeddings` request.

    Attributes:
        table: name of the table.
        ids: column with one value of a feature of this table per row.
    """

    table: str
    ids: Any


def described(answer: AnswerColumns) -> dict[str, Any]:
    """Returns kind, unit and classes of the answers for a label, without what it lacks."""
    fields = {"kind": answer.kind, "unit": answer.unit, "classes": answer.classes}
    return {name: value for name, value in fields.items() if value}


class MessageCodec(Codec):
    """A codec that decodes the requests of all routes.

    Args:
        form: name of the format, for messages.
        decoder: makes a function that decodes a type.
    """

    def __init__(self, form: str, decoder: Callable[[Any], Callable[[bytes], Any]]) -> None:
        self._form = form
        self._records = decoder(list[dict[str, Value]])
        self._rank = decoder(_RankRequest)
        self._retrieve = decoder(_RetrieveRequest)

    def samples(self, body: bytes, limits: ServeLimits) -> Samples | Records:
        """See `Codec.samples`. A body that is an array has records; other bodies have columns."""
        if self._starts_array(body):
            records: Records = self._decoded(self._records, body)
            return records
        return self._columns(body)

    def user_and_items(self, body: bytes, limits: ServeLimits) -> tuple[Samples | Records, Samples | Records]:
        """Returns the samples of user and items in a `/rank` request. Raises as `samples` does."""
        request = self._decoded(self._rank, body)
        return self.samples(bytes(request.user), limits), self.samples(bytes(request.items), limits)

    def users(self, body: bytes, limits: ServeLimits) -> UserSamples:
        """Returns the users of a `/retrieve` request. Raises as `samples` does."""
        request = self._decoded(self._retrieve, body)
        return UserSamples(self.samples(bytes(request.users), limits), request.k)

    @abstractmethod
    def ids(self, body: bytes) -> TableColumn:
        """Returns the ids of an `/embeddings` request. Raises as `samples` does."""

    @abstractmethod
    def _starts_array(self, body: bytes) -> bool:
        """Returns whether a body is an array."""

    @abstractmethod
    def _columns(self, body: bytes) -> Samples:
        """Returns samples that are columns."""

    def _decoded(self, decode: Callable[[bytes], Any], body: bytes) -> Any:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            raise DataError(f"The body has another form than /docs describes: {error}.") from error
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise MalformedBodyError(f"The body is not valid {self._form}: {error}. See /docs for examples.") from error
