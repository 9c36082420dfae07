"""Errors as HTTP answers: JSON that says what is wrong, where, and what to do; never a traceback."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

from persia.errors import ClosedError, DataError, DeadlineError, OverloadedError, PersiaError, PublishError, StoreError
from persia.serve.http.codecs.codec import MalformedBodyError
from persia.telemetry.logs import get_logger

__all__ = ["RefusedError", "problem_response", "response_of"]

LOG = get_logger("persia.serve")

MAX_MESSAGE, MAX_FIELD = 2000, 200
"""Characters of a message and of a field: both may quote values of the request."""


class RefusedError(PersiaError):
    """A request that is refused with a given HTTP status.

    Args:
        status: the HTTP status.
        message: what is wrong, where, and what to do about it.
        close: whether the connection is closed, as more of the request may follow.
        headers: further headers.
    """

    def __init__(
        self, status: int, message: str, *, close: bool = False, headers: dict[str, str] | None = None
    ) -> None:
        super().__init__(message, status=status)
        self.status = status
        self.headers = {**(headers or {}), **({"Connection": "close"} if close else {})}


def problem_response(
    status: int, kind: str, message: str, fields: dict[str, Any] | None = None, headers: dict[str, str] | None = None
) -> Response:
    """Returns an answer with an error."""
    shown = {name: _short(value) for name, value in (fields or {}).items()}
    content = {"error": kind, "message": _cut(message, MAX_MESSAGE), "fields": shown}
    return Response(msgspec.json.encode(content), status, headers, "application/json")


def response_of(error: Exception) -> Response:
    """Returns the answer to a request that raised an error. Logs errors of the server itself."""
    if isinstance(error, RefusedError):
        return problem_response(error.status, "Refused", error.message, error.fields, error.headers)
    if isinstance(error, OverloadedError):
        after = str(error.fields.get("retry_after", 1))
        return problem_response(503, "OverloadedError", error.message, error.fields, {"Retry-After": after})
    if isinstance(error, MalformedBodyError):
        return problem_response(400, "DataError", error.message, error.fields)
    if isinstance(error, DataError):
        return problem_response(422, "DataError", error.message, error.fields)
    if isinstance(error, (ClosedError, DeadlineError, PublishError, StoreError)):
        LOG.warning("a request failed: %s", error.message)
        return problem_response(503, type(error).__name__, error.message, headers={"Retry-After": "1"})
    if isinstance(error, PersiaError):
        return problem_response(422, type(error).__name__, error.message, error.fields)
    LOG.error("a request failed", exc_info=error)
    message = f"The server failed with {type(error).__name__}; its log has the details. The request may be sent again."
    return problem_response(500, "ServeError", message)


def _short(value: Any) -> Any:
    if isinstance(value, (bool, int, float, type(None))):
        return value if not isinstance(value, int) or -(2**63) <= value < 2**64 else _cut(str(value), MAX_FIELD)
    return _cut(str(value), MAX_FIELD)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text)} characters)"
