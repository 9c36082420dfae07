"""The data loader of a stream: what happens to exceptions of the stream and of its record."""

from __future__ import annotations

import time

import numpy as np
import pytest

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.data.streams import loader as stream_loader
from persia.data.streams.loader import StreamLoader
from persia.data.streams.offset_log import OffsetLog
from persia.errors import DataError, DeadlineError
from persia.membership import Directory
from persia.schema import IdFeature, Schema
from persia.services import NewBatch
from persia.types import BatchId, Feed, OffsetRange, Partition, PartitionBounds

pytestmark = pytest.mark.processes

SCHEMA = Schema([IdFeature("id", dim=2)])
ONLY = Partition("numbers", 0)


class Numbers:
    """A stream of three batches, and its share. Its methods raise what is in `errors`."""

    topics = ("numbers",)

    def __init__(self, **errors):
        self.errors = errors

    def share(self, log, loader, loaders, stopping):
        self.log = log
        log.assign([PartitionBounds(ONLY, 0)])
        return self

    def read(self, found):
        self.fail("read")
        ids = np.array([found.begin], np.uint64)
        return Batch({"id": IdColumn(ids)}, np.zeros((1, 0), np.float32), np.zeros((1, 1), np.float32))

    def poll(self):
        self.fail("poll")
        (bounds,) = self.log.assign([])
        if bounds.begin == 3:
            time.sleep(0.01)
            return None
        found = OffsetRange(ONLY, bounds.begin, bounds.begin + 1)
        return NewBatch(self.log.record(found), found, self.read(found))

    def close(self):
        self.fail("close")

    def fail(self, name):
        if self.errors.get(name):
            raise self.errors[name].pop()


class Registering:
    """Stands for an embedding worker."""

    number = 0

    def register(self, id_features):
        self.number += 1
        return BatchId(0, 1, self.number).pack()

    def release(self, batch_id): ...


@pytest.fixture
def make():
    made = []

    def make(source, log):
        loader = StreamLoader(source, log, SCHEMA, Directory.fixed("embedding_worker", [Registering()]), timeout=20.0)
        made.append(loader)
        loader.begin(Feed(0, 0, 1, 0, 1, 4))
        return loader

    yield make
    for loader in made:
        loader.end()


def test_an_exception_of_a_stream_is_named_to_waiting_calls(make, caplog):
    log = OffsetLog()
    make(Numbers(poll=[KeyError("column")], close=[OSError("already closed")]), log)
    with pytest.raises(DataError, match=r"loader 0: KeyError while waiting for messages: 'column'\. .*\(Numbers\)"):
        log.lookup(0, 0, 20.0)
    assert "Traceback" in caplog.text
    assert "already closed" in caplog.text


def test_a_batch_that_cannot_be_reread_is_named_and_retried(make):
    log = OffsetLog(0, {"numbers": {0: 0}})
    log.assign([PartitionBounds(ONLY, 0)])
    for number in range(3):
        log.record(OffsetRange(ONLY, number, number + 1))
    source = Numbers(read=[MemoryError("too large")])
    loader = make(source, log)
    with pytest.raises(DataError, match="MemoryError while reading batch 0 again: too large"):
        loader.take(0, 0, 0)
    assert [loader.take(0, 0, n).batch is not None for n in range(3)] == [True] * 3


def test_reading_is_retried_while_its_failure_cannot_be_reported(make, monkeypatch):
    class Unreachable(OffsetLog):
        lost = 2

        def fail_stream(self, late, message):
            if self.lost:
                self.lost -= 1
                raise DeadlineError("the coordinator is late")
            super().fail_stream(late, message)

    monkeypatch.setattr(stream_loader, "REPORT_SECONDS", 0.05)
    for failures, reported in ((1, False), (3, True)):
        log = Unreachable()
        make(Numbers(poll=[DeadlineError("no answer")] * failures), log)
        if reported:
            with pytest.raises(DeadlineError, match="Data loader 0: no answer"):
                log.lookup(0, 0, 20.0)
        else:
            assert log.lookup(0, 2, 20.0).range == OffsetRange(ONLY, 0, 1)
