"""`PrefetchLoader`: batches with rows for a Lightning `Trainer`, which draws one batch ahead of training."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any

import msgspec
import torch

from persia.batching.batch import Batch
from persia.batching.items import check_data
from persia.errors import ConfigError
from persia.nn import EmbeddingCollection, PreparedBatch
from persia.services import Seekable, fingerprint_of
from persia.telemetry.logs import get_logger
from persia.trainer.data_progress import DataProgress, begin_source, fingerprint_of_object
from persia.trainer.sources import parts_of

__all__ = ["PendingBatch", "PrefetchLoader"]


LOG = get_logger("persia.data")


class PrefetchLoader:
    """The batches of `EmbeddingCollection.prefetch`, for a Lightning `Trainer`.

    If the length of a loader is unknown, Lightning draws one batch ahead of each step to detect the last one. Rows must
    not be drawn ahead: a batch is used up when the next one is drawn. This loader therefore yields placeholders, and
    Lightning gets the batch of a placeholder when it moves the placeholder to the device.

    Its position is part of Lightning's checkpoints: a resumed `fit` continues with the batch after the last one, if
    `data` are the same: a reader of `persia.data`, or data with a method `fingerprint`. Other data start at their first
    batch, with a warning. Each pass that trains is another epoch of the data. See docs/guide/continue.md.

    Args:
        embeddings: embeddings of the trained module. Their mode, which Lightning sets, decides whether backward passes
            push gradients (training) or rows are only read (evaluation).
        data: a reader, or any iterable of `persia.Batch` that can be iterated again.
        restart_data: whether to start an incomplete pass of a checkpoint at its first batch.

    Raises:
        DataError: `data` is not of this kind.
    """

    def __init__(self, embeddings: EmbeddingCollection, data: Iterable[Batch], *, restart_data: bool = False) -> None:
        check_data("data", data)
        self.embeddings = embeddings
        self.data = data
        self._restart_data = restart_data
        self._pass: _Pass | None = None
        self._fingerprint = fingerprint_of(data) or fingerprint_of_object(data)
        self._progress = DataProgress(self._fingerprint)
        """Progress including the current pass, or the next one."""
        self._start = 0
        """Number of the first batch of the next pass."""
        self._position = 0, 0
        """End of the last pass: epoch, and number of a batch."""
        self._recorded = self._progress
        """Progress at the end of the last pass."""

    def __iter__(self) -> Iterator[PendingBatch]:
        """Starts a pass over the data, and ends the previous one.

        Raises:
            ConfigError: Lightning runs several processes.
        """
        check_one_process()
        self.close()
        self._progress = self._progress.begin_pass()
        current = self._progress.current
        data = parts_of(self.data, current) if isinstance(self.data, Seekable) else self.data
        current_pass = self._pass = _Pass(self.embeddings, data, self._progress.epoch, self._start)
        number = 0
        while current_pass.has(number):
            yield PendingBatch(current_pass)
            number += 1

    def close(self) -> None:
        """Ends a pass: its threads and the last step. `PersiaCallback` calls it at the end of `fit`."""
        if self._pass is None:
            return
        self._position, self._recorded = self._pass.position, self._reached(self._pass)
        ended_pass, self._pass = self._pass, None
        self._progress = self._progress.end_pass() if ended_pass.trains else self._progress.at_rest(0)
        self._start = 0
        ended_pass.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position for Lightning's checkpoints: the pass, its number of drawn batches, and the data."""
        epoch, batch = self._position if self._pass is None else self._pass.position
        progress = self._recorded if self._pass is None else self._reached(self._pass)
        return {"epoch": epoch, "batch": batch, "data": msgspec.to_builtins(progress)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Starts the next pass at a position from `state_dict`, if the data are the same.

        Raises:
            ConfigError: the pass is incomplete, and the data have changed so that the position is invalid.
        """
        progress = msgspec.convert(state["data"], DataProgress)
        source_start = begin_source(progress, state["batch"], self._fingerprint, restart=self._restart_data)
        if source_start.notice is not None:
            LOG.warning("%s", source_start.notice)
        self._progress = self._recorded = source_start.progress
        self._start = source_start.position
        self._position = source_start.progress.epoch, source_start.position

    def _reached(self, data_pass: _Pass) -> DataProgress:
        """Returns the progress at the position of a pass."""
        return self._progress.end_pass() if data_pass.complete else self._progress


class PendingBatch:
    """A placeholder for a batch. The batch is drawn when Lightning moves it to the device."""

    def __init__(self, data_pass: _Pass) -> None:
        self._pass = data_pass

    def to(self, device: torch.device, **_: Any) -> PreparedBatch:
        """Draws the batch. Blocks until its rows have arrived.

        Raises:
            ConfigError: the collection moves batches to another device.
        """
        batch = self._pass.draw()
        batch_device, target = batch.dense.device, torch.device(device)
        if batch_device.type != target.type:
            raise ConfigError(
                f"Lightning trains on {target}, but the rows are on {batch_device}; make the collection with "
                f'CollectionOptions(device="{target.type}"), or pass accelerator="{batch_device.type}" to the Trainer.',
                field="device",
            )
        return batch


class _Pass:
    """One pass over the data. Lookups start at the first draw, after Lightning has set the mode of the module."""

    def __init__(
        self, embeddings: EmbeddingCollection, data: Iterable[Batch] | Seekable, epoch: int, start: int
    ) -> None:
        items = data.batches(epoch, start) if isinstance(data, Seekable) else islice(data, start, None)
        self._items = _Lookahead(items)
        self._embeddings = embeddings
        self._epoch = epoch
        self._start = start
        self._drawn = 0
        self.trains = False
        """Whether batches were drawn in training mode."""
        self._batches: Generator[PreparedBatch, None, None] | None = None

    @property
    def complete(self) -> bool:
        """Whether all batches were drawn."""
        return self._drawn == self._items.total

    @property
    def position(self) -> tuple[int, int]:
        """Position at which the next pass would continue: epoch, and number of a batch."""
        if self.complete:
            return self._epoch + 1, 0
        return self._epoch, self._start + self._drawn

    def has(self, number: int) -> bool:
        return self._items.has(number)

    def draw(self) -> PreparedBatch:
        if self._batches is None:
            self.trains = self._embeddings.training
            self._batches = self._embeddings.prefetch(self._items)
        batch = next(self._batches)
        self._drawn += 1
        return batch

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


class _Lookahead:
    """An iterator that can tell whether an item exists before the reading thread of `prefetch` takes it."""

    def __init__(self, items: Iterator[Batch]) -> None:
        self._items = items
        self._waiting: deque[Batch] = deque()
        self._count = 0
        """Number of items that were read."""
        self.total: int | None = None
        """Number of items, once known."""
        self._failure: BaseException | None = None
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        with self._lock:
            if not self._waiting:
                self._read()
            if self._waiting:
                return self._waiting.popleft()
            assert self._failure is not None
            raise self._failure

    def has(self, number: int) -> bool:
        """Returns whether the item with this number exists, from 0. True also if reading it fails: its draw raises."""
        if number < self._count:
            return True
        with self._lock:
            while number >= self._count and self._failure is None:
                self._read()
            return number < self._count or not isinstance(self._failure, StopIteration)

    def _read(self) -> None:
        if self._failure is not None:
            return
        try:
            self._waiting.append(next(self._items))
            self._count += 1
        except StopIteration as end:
            self._failure, self.total = end, self._count
        except BaseException as error:
            self._failure = error


def check_one_process(processes: int = 0) -> None:
    """Checks that Lightning runs one process.

    Args:
        processes: number of processes, if known; 0 asks `torch.distributed`.

    Raises:
        ConfigError: there are several processes.
    """
    if not processes and torch.distributed.is_available() and torch.distributed.is_initialized():
        processes = torch.distributed.get_world_size()
    if processes > 1:
        raise ConfigError(
            f"Lightning runs {processes} processes, and each would have its own tables. Use "
            "Trainer(devices=1, num_nodes=1); to train with several, use persia.Trainer with "
            f"persia.cluster.Ray(nn_workers={processes}).",
            field="devices",
        )
