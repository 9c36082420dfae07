"""The source and feed of the data loaders. The driver sends them, also to data loaders that start later."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple, TypeAlias

import ray

from persia.cluster.ray.processes import Process
from persia.errors import ConfigError, DeadlineError
from persia.services import SharedStream
from persia.types import Feed, Offsets

__all__ = ["AHEAD", "LoaderData", "LoaderFeed", "SourceKind"]

SourceKind: TypeAlias = Literal["batches", "stream"] | None

AHEAD = 4
"""Number of batches that each data loader prepares ahead for each NN worker."""


class LoaderData(NamedTuple):
    """The data that the data loaders read.

    Attributes:
        name: unique name.
        pickled: Ray reference to the pickled source.
        accumulation_steps: number of consecutive batches of an NN worker at one embedding worker.
    """

    name: str
    pickled: Any
    accumulation_steps: int


class LoaderFeed:
    """The source and the feed of the current run. For one thread at a time.

    Args:
        timeout: seconds that a data loader may take to start.
        nn_workers: number of NN workers that take batches; it may differ in the next run.

    Attributes:
        nn_workers: see above.
        share: factor of the batches per update; see `persia.services.ProcessCluster`.
    """

    def __init__(self, timeout: float, nn_workers: int) -> None:
        self._timeout = timeout
        self.nn_workers = nn_workers
        self.share = Fraction(1)
        self._source: LoaderData | None = None
        self._feed: Feed | None = None
        self._stream: SharedStream | None = None

    @property
    def kind(self) -> SourceKind:
        """Kind of the data loaders' source; None if NN workers read their data themselves."""
        if self._source is None:
            return None
        return "stream" if self._stream is not None else "batches"

    def commit(self, offsets: Offsets) -> None:
        """Commits the offsets that a checkpoint covers to the stream. Returns immediately."""
        if self._stream is not None:
            threading.Thread(target=self._stream.commit, args=(offsets,), name="persia-commit", daemon=True).start()

    def set(self, source: Any, feed: Feed, accumulation_steps: int) -> None:
        """Sets another source, for the next run.

        Raises:
            ConfigError: the source cannot be pickled.
        """
        try:
            pickled = ray.cloudpickle.dumps(source)
        except Exception as error:
            raise ConfigError(
                f"The data cannot be pickled for the data loaders: {error}. Pass a reader or a list, not an iterator.",
                field="train_data",
            ) from error
        self._source = LoaderData(uuid.uuid4().hex, ray.put(pickled), accumulation_steps)
        self._feed = feed
        self._stream = source if isinstance(source, SharedStream) else None

    def clear(self) -> None:
        """Removes the source."""
        self._source = self._feed = self._stream = None

    def renew(self, generation: int) -> None:
        """Switches to a new generation of NN workers, which gets all batches from the start of the feed again."""
        if self._feed is not None:
            takers = 1 if self._feed.on_demand else self.nn_workers
            self._feed = self._feed._replace(generation=generation, nn_workers=takers)

    def begin(self, feed: Feed, loaders: Sequence[Process]) -> None:
        """Starts another pass, or another part of one."""
        self._feed = feed
        self.send(loaders)

    def send(self, loaders: Sequence[Process]) -> None:
        """Sends each data loader the source and its share of the feed.

        Raises:
            DataError: the source cannot be shared by this many data loaders.
            DeadlineError: a data loader did not start in time.
        """
        source, feed = self._source, self._feed
        if source is None or feed is None:
            return
        accumulation_steps = max(1, int(source.accumulation_steps * self.share))
        ahead = AHEAD * self.nn_workers if feed.on_demand else AHEAD
        calls = [
            loader.handle.begin.remote(
                source.pickled,
                source.name,
                accumulation_steps,
                feed._replace(loader=number, loaders=len(loaders), ahead=ahead),
            )
            for number, loader in enumerate(loaders)
        ]
        for loader, call in zip(loaders, calls, strict=True):
            try:
                ray.get(call, timeout=self._timeout)
            except ray.exceptions.RayTaskError as error:
                raise error.cause from error
            except ray.exceptions.RayActorError:
                continue  # Its share is sent after its restart.
            except ray.exceptions.GetTimeoutError as error:
                raise DeadlineError(
                    f"{loader.title} did not start to read within {self._timeout:g} s. See its log lines, or raise "
                    "`timeout`.",
                    role=loader.role,
                    rank=loader.rank,
                    seconds=self._timeout,
                ) from error
