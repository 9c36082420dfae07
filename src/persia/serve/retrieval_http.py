"""The route `/retrieve` of a prediction server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from persia.batching.batch import Batch
from persia.errors import ClosedError, DataError, PersiaError
from persia.serve.reading import part_of

if TYPE_CHECKING:
    from fastapi import APIRouter

    from persia.serve.retriever import Retriever

__all__ = ["retrieval_router"]

MOST_ITEMS = 10_000
MOST_USERS = 1024
MOST_BYTES = 16 << 20

Column = Annotated[list[Any], msgspec.Meta(min_length=1, max_length=MOST_USERS)]
Name = Annotated[str, msgspec.Meta(max_length=1024)]


class _Request(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a request.

    Attributes:
        users: by feature, a value, or a list of ids, for each user.
        k: number of items.
    """

    users: dict[Name, Column]
    k: Annotated[int, msgspec.Meta(ge=1, le=MOST_ITEMS)] = 10


class TooLargeError(PersiaError):
    """A body that is longer than allowed."""


def retrieval_router(retriever: Retriever) -> APIRouter:
    """Returns a router with `POST /retrieve`, for `app.include_router`.

    The body is JSON, `{"users": {"user": [3], "history": [[8, 4]], "age": [31]}, "k": 10}`: the features that the
    vector of a user is made of, with a value, or a list of ids, for each user. The answer has `ids` and `scores`,
    `[users, k]`, nearest first, and the `step` of the network. At most 1,024 users, 10,000 items and 16 MiB. Errors are
    JSON, as those of the other routes.

    Args:
        retriever: started; before, requests are answered with 503.
    """
    from fastapi import APIRouter
    from starlette.requests import Request
    from starlette.responses import Response

    async def retrieve(request: Request) -> Response:
        try:
            body = await _body(request)
            found = await asyncio.to_thread(_found, retriever, body)
        except PersiaError as error:
            status = {ClosedError: 503, TooLargeError: 413}.get(type(error), 422)
            headers = {"Retry-After": "1"} if status == 503 else None
            content = {"error": type(error).__name__, "message": error.message[:2000], "fields": {}}
            return Response(msgspec.json.encode(content), status, headers, media_type="application/json")
        return Response(msgspec.json.encode(found), media_type="application/json")

    router = APIRouter()
    router.add_route("/retrieve", retrieve, methods=["POST"])
    return router


async def _body(request: Any) -> bytes:
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > MOST_BYTES:
            raise TooLargeError(f"The body has more than {MOST_BYTES} bytes; send fewer users at once.")
        parts.append(part)
    return b"".join(parts)


def _found(retriever: Retriever, body: bytes) -> dict[str, Any]:
    try:
        request = msgspec.json.decode(body, type=_Request)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        example = '{"users": {"<feature>": [<value of each user>]}, "k": 10}'
        raise DataError(f"The body has another form than {example}: {error}.") from error
    found = retriever.search(_users(retriever, request.users), request.k)
    return {"ids": found.ids.tolist(), "scores": found.scores.tolist(), "step": found.step}


def _users(retriever: Retriever, columns: dict[str, Any]) -> Batch:
    """Returns the users as a batch of the features that their vectors are made of.

    Raises:
        DataError: a feature is unknown or missing, or does not fit.
    """
    schema = retriever.schema
    ids, dense = retriever.index.user_features
    for name in columns.keys() - {*ids, *dense}:
        raise DataError(f"{name[:100]!r} is no feature of the user, which has {', '.join([*ids, *dense])}; remove it.")
    for name in {*ids, *dense} - columns.keys():
        raise DataError(f"The feature {name!r} of the users is missing; give it.", feature=name)
    rows = len(columns[ids[0]])
    others = {name: np.zeros(rows, np.float32) for name in schema.dense_features if name not in dense}
    return Batch.from_columns(part_of(schema, ids), {**columns, **others}, require_labels=False)
