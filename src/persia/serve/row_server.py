"""`RowServer`: a part of all rows of a log of changes, for predictors of other processes."""

from __future__ import annotations

import threading
import time
from types import NoneType, TracebackType
from typing import NamedTuple

import numpy as np

from persia.checks import check_integer, check_kind
from persia.errors import ConfigError, PublishError, StoreError
from persia.publish import Description, follow
from persia.publish.epoch_reader import EpochReader, Update
from persia.serve.cache import SnapshotCache
from persia.serve.options import RowServerOptions
from persia.serve.polling import LogPoller
from persia.serve.updates import EpochRows, RowPart, RowReading
from persia.services import FoundRows, RowServerState, RowsVersion, ServedEpoch
from persia.telemetry.logs import get_logger
from persia.types import Packed

__all__ = ["MAX_PARTS", "RowServer"]

LOG = get_logger("persia.serve")

MAX_PARTS = 1024
"""Largest number of row servers of a predictor."""

MAX_ANSWER_BYTES = 1 << 28
"""Maximum size of the rows in an answer: each lookup in progress needs as much memory as its answer."""


class _Earlier(NamedTuple):
    """The previous epoch, and the time until which it is kept, by the monotonic clock."""

    rows: EpochRows
    until: float


class RowServer:
    """Follows a log of changes, and serves the rows of one part. Implements `persia.services.ServedRows`. Thread-safe.

    Part i of n has the ids that embedding PS i of n would own, whatever the number of PSs that publish. Lookups never
    wait for an update.

        with RowServer("s3://bucket/changes", 0, 2) as server:
            with rpc.serve(server, "tcp://127.0.0.1:7000", protocol=ServedRows):
                ...

    Args:
        url: URL of the log of changes, as in `PublishOptions`.
        part: number of the part, from 0.
        parts: number of parts.
        options: interval, cache, ...

    Raises:
        CheckpointError: the URL is not valid.
        MissingExtraError: a package for the URL's file system is not installed.
        ConfigError: an argument is not valid.
    """

    def __init__(self, url: str, part: int, parts: int, options: RowServerOptions | None = None) -> None:
        check_integer("parts", parts, 1, MAX_PARTS)
        check_integer("part", part, 0, parts - 1)
        check_kind("options", options, (RowServerOptions, NoneType), "a RowServerOptions, or None")
        options = options or RowServerOptions()
        self._part = RowPart(part, parts)
        self._grace = options.grace_seconds
        self._follower = follow(url, network=False)
        self._stop = threading.Event()
        # Parts of one log may share a directory.
        cache = None if options.cache_dir is None else SnapshotCache(options.cache_dir, f"{url}#{part}/{parts}")
        self._reading = RowReading(cache, self._stop, self._part)
        self._poller = LogPoller(self.refresh, options.poll_seconds, self._stop, url)
        self._lock = threading.Lock()
        self._reader = EpochReader(self._follower, self._begin)
        self._earlier: _Earlier | None = None
        self._problem = ""

    # --- start and close ----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts following the log in a thread. Does not block; `state` lists the rows that are available."""
        self._poller.start(at_once=True)

    def close(self) -> None:
        """Ends the thread and frees the rows. Close the `rpc.Server` first."""
        self._poller.end()
        with self._lock:
            self._reader.clear()
            self._earlier = None

    def __enter__(self) -> RowServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- updates ------------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Applies new entries of the log. The thread does so every `RowServerOptions.poll_seconds`. Blocks."""
        with self._lock:
            for epoch, _ in self._reader.read():
                self._adopt(epoch)
            self._problem = self._reader.problem or self._follower.problem
            if self._earlier is not None and time.monotonic() >= self._earlier.until:
                self._earlier = None

    def _begin(self, run: str, update: Update, description: Description | None) -> EpochRows:
        assert description is not None
        return EpochRows(run, update, description.schema, self._reading)

    def _adopt(self, epoch: EpochRows) -> None:
        """Serves an epoch once it is complete; keeps the previous epoch for the grace period."""
        if epoch is not self._reader.next or epoch.contained() is None:
            return
        if self._reader.current is not None:
            self._earlier = _Earlier(self._reader.current, time.monotonic() + self._grace)
        self._reader.adopt(epoch)
        LOG.info("part %d/%d has the rows of epoch %d", *self._part, epoch.number)

    # --- requests -----------------------------------------------------------------------------------------------

    def state(self) -> RowServerState:
        """See `ServedRows.state`."""
        return RowServerState(
            *self._part, [_described(epoch) for epoch in self._epochs()], self._problem or self._poller.failure
        )

    def lookup(self, version: RowsVersion, ids: Packed[np.uint64]) -> FoundRows:
        """See `ServedRows.lookup`."""
        if (version.part, version.parts) != self._part:
            raise ConfigError(
                f"This row server has part {self._part.part}/{self._part.parts}, not {version.part}/{version.parts}; "
                "correct the addresses of row servers, or the part of this one.",
                field="part",
            )
        epoch = next((epoch for epoch in self._epochs() if epoch.run == version.run), None)
        if epoch is None:
            raise PublishError(
                f"It does not have the epoch {version.run[:32]!r} of the log: it is still reading it, has dropped it "
                "after the grace period, or reads another log.",
                run=version.run[:32],
            )
        contained = epoch.contained()
        if contained is None or contained < version.step:
            raise PublishError(
                f"Its rows contain step {contained}, and step {version.step} is requested; it has not read newer "
                "entries of the log yet.",
                step=version.step,
            )
        self._check(epoch, ids)
        return epoch.source().lookup(ids)

    def _check(self, epoch: EpochRows, ids: Packed[np.uint64]) -> None:
        """Raises StoreError if ids cannot be looked up."""
        unknown = next((name for name in ids.names if name not in epoch.dims), None)
        if unknown is not None:
            raise StoreError(
                f"There is no table {unknown[:200]!r}; the schema has {', '.join(epoch.dims)}.", table=unknown[:200]
            )
        if ids.widths is not None:
            raise StoreError("Ids must be uint64 of one dimension, by table.")
        answer = sum(4 * count * epoch.dims[name] for name, count in zip(ids.names, ids.counts, strict=True))
        if answer > MAX_ANSWER_BYTES:
            raise StoreError(
                f"The rows of {len(ids.buffer)} ids have {answer} bytes, and {MAX_ANSWER_BYTES} are allowed; look up "
                "fewer ids per call."
            )

    def _epochs(self) -> list[EpochRows]:
        """Returns the epochs that are served, the newest first."""
        # In this order: an epoch becomes the earlier one before another replaces it as the newest.
        newest = self._reader.current
        earlier = self._earlier
        epochs = [newest, None if earlier is None else earlier.rows]
        return list(dict.fromkeys(epoch for epoch in epochs if epoch is not None))


def _described(epoch: EpochRows) -> ServedEpoch:
    rows = epoch.source()
    return ServedEpoch(epoch.run, epoch.number, min(rows.steps().values()), rows.time(), len(rows))
