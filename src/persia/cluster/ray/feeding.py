"""The source and feed of the data loaders, as the driver sends them, also to data loaders that start later."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import ray

from persia.cluster.ray.processes import Process
from persia.errors import ConfigError, DeadlineError
from persia.types import Feed

__all__ = ["AHEAD", "LoaderData", "LoaderFeed"]

AHEAD = 4
"""Batches that each data loader keeps ready for each NN worker."""


class LoaderData(NamedTuple):
    """The data that the data loaders read.

    Attributes:
        name: unique.
        pickled: reference of Ray to the source, pickled.
        accumulation_steps: number of consecutive batches of an NN worker at one embedding worker.
    """

    name: str
    pickled: Any
    accumulation_steps: int


class LoaderFeed:
    """The source and the feed of the current run. For one thread at a time.

    Args:
        timeout: seconds that a data loader may take to begin.
        nn_workers: number of NN workers that take batches.
    """

    def __init__(self, timeout: float, nn_workers: int) -> None:
        self._timeout = timeout
        self._nn_workers = nn_workers
        self._source: LoaderData | None = None
        self._feed: Feed | None = None

    @property
    def has_source(self) -> bool:
        """Whether the data loaders have a source; otherwise NN workers read their data themselves."""
        return self._source is not None

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

    def clear(self) -> None:
        """Removes the source."""
        self._source = self._feed = None

    def renew(self, generation: int) -> None:
        """Adopts a new generation of NN workers, which gets all batches from the start of the feed again."""
        if self._feed is not None:
            self._feed = self._feed._replace(generation=generation)

    def begin(self, feed: Feed, loaders: Sequence[Process]) -> None:
        """Starts another pass, or another part of one."""
        self._feed = feed
        self.send(loaders)

    def send(self, loaders: Sequence[Process]) -> None:
        """Sends each data loader the source and its share of the feed.

        Raises:
            DataError: the source cannot be shared by this many data loaders.
            DeadlineError: a data loader did not begin in time.
        """
        source, feed = self._source, self._feed
        if source is None or feed is None:
            return
        ahead = AHEAD * self._nn_workers if feed.on_demand else AHEAD
        calls = [
            loader.handle.begin.remote(
                source.pickled,
                source.name,
                source.accumulation_steps,
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
                    f"{loader.title} did not begin to read within {self._timeout:g} s. See its log lines, or raise "
                    "`timeout`.",
                    role=loader.role,
                    rank=loader.rank,
                    seconds=self._timeout,
                ) from error
