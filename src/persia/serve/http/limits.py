"""Limits of a prediction server."""

from __future__ import annotations

import msgspec

from persia.checks import check_integer, check_number, check_seconds, plain_fields

__all__ = ["ServeLimits"]


class ServeLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a prediction server. Requests above a limit are refused as early as possible.

    Args:
        max_body_bytes: largest body of a request.
        max_held_bytes: total size of the bodies of all requests that are being read, converted or computed.
        max_rows: maximum number of samples, items or ids of a request.
        max_values: maximum number of ids of a feature in a request, and of items that `/retrieve` finds for all users.
        max_k: maximum number of items that `/retrieve` finds for one user.
        max_batch: maximum number of samples in a batch. A larger request is computed by itself.
        max_wait_ms: time for which a batch waits for more samples. 0 computes immediately; while a batch is computed,
            the next one forms in any case.
        max_queue: maximum number of requests that wait for computation.
        max_queue_rows: maximum number of samples that wait for computation.
        deadline_ms: time within which a request must be answered. It is refused immediately if that is not expected,
            and is not computed if its deadline passes while it waits. The header `Persia-Deadline-Ms` can shorten it.
        body_seconds: time within which the body of a request must arrive, and for which a client may leave more than
            64 KiB of answers unread.
        head_seconds: time within which the head of a request must arrive.
        max_connections: maximum number of open connections. A new connection above it replaces the one that has waited
            longest for its client; it is refused if all are being answered.

    Raises:
        ConfigError: a limit is out of range.
    """

    max_body_bytes: int = 8 << 20
    max_held_bytes: int = 128 << 20
    max_rows: int = 4096
    max_values: int = 1 << 17
    max_k: int = 10_000
    max_batch: int = 1024
    max_wait_ms: float = 1.0
    max_queue: int = 512
    max_queue_rows: int = 16384
    deadline_ms: float = 1000.0
    body_seconds: float = 10.0
    head_seconds: float = 10.0
    max_connections: int = 1024

    def __post_init__(self) -> None:
        plain_fields(self)
        for name in ("max_rows", "max_values", "max_k", "max_batch", "max_queue", "max_queue_rows", "max_connections"):
            check_integer(name, getattr(self, name), 1)
        for name in ("max_body_bytes", "max_held_bytes"):
            check_integer(name, getattr(self, name), 1, 1 << 40)
        check_number("max_wait_ms", self.max_wait_ms, 0, 60_000)
        check_number("deadline_ms", self.deadline_ms, 0, 3_600_000, open_low=True)
        check_seconds("body_seconds", self.body_seconds)
        check_seconds("head_seconds", self.head_seconds)
