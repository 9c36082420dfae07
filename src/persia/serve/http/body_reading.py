"""Reads bodies of requests within limits of bytes and time."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from persia.errors import OverloadedError
from persia.serve.http.problems import RefusedError

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.requests import Request

    from persia.serve.http.limits import ServeLimits

__all__ = ["HeldBytes", "read_body"]


class HeldBytes:
    """Counts the bytes of bodies that the server holds. Used from the event loop only.

    Args:
        limit: limit of all requests together.
    """

    def __init__(self, limit: int) -> None:
        self.total = 0
        self._limit = limit

    def share(self) -> Share:
        """Returns the share of one request, for a `with` block, which releases it."""
        return Share(self)

    def take(self, count: int) -> None:
        """Adds bytes to the total.

        Raises:
            OverloadedError: the limit is reached.
        """
        if self.total + count > self._limit:
            raise OverloadedError(
                f"The server is overloaded: it holds {self.total} bytes of requests (--max-held-bytes = "
                f"{self._limit}). Try again later, or add servers.",
                retry_after=1,
            )
        self.total += count


class Share:
    """Bytes that one request holds."""

    def __init__(self, held: HeldBytes) -> None:
        self._held = held
        self._count = 0

    def __enter__(self) -> Share:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._held.total -= self._count

    def reserve(self, count: int) -> None:
        """Grows the share to at least `count` bytes. Raises as `HeldBytes.take` does."""
        if count > self._count:
            self._held.take(count - self._count)
            self._count = count


async def read_body(request: Request, limits: ServeLimits, share: Share) -> bytes:
    """Returns the body of a request. If its Content-Length is too large, refuses it before reading.

    Raises:
        RefusedError: it is too large, encoded, or does not arrive in time.
        OverloadedError: the server holds too many bytes.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RefusedError(415, f"Content-Encoding {encoding[:50]!r} is not supported; send the body as it is.")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal():
        _check_length(int(declared), limits)
        share.reserve(int(declared))
    parts: list[bytes] = []
    length = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in request.stream():
                length += len(part)
                _check_length(length, limits)
                share.reserve(length)
                parts.append(part)
    except TimeoutError:
        raise RefusedError(
            408,
            f"The body did not arrive within {limits.body_seconds:g} s (--body-seconds); {length} bytes did. Send it "
            "faster, or in several requests.",
            close=True,
        ) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _check_length(length: int, limits: ServeLimits) -> None:
    if length > limits.max_body_bytes:
        raise RefusedError(
            413,
            f"The body has {length} bytes or more; the server takes {limits.max_body_bytes} (--max-body-bytes). Send "
            "several requests.",
            close=True,
        )
