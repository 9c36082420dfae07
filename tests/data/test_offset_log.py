"""The record of a stream's batches: numbers, offsets, ends, repeated calls, a restart of its process."""

from __future__ import annotations

import threading

import pytest

from persia.data.streams.offset_log import AWAITED_SECONDS, COMPACT, OffsetLog
from persia.errors import DataError, DeadlineError, PersiaError
from persia.types import OffsetRange, Partition, PartitionBounds, RecordedBatch

ONE, TWO = Partition("a", 0), Partition("b", 1)
RANGES = [OffsetRange(ONE, 10, 14), OffsetRange(TWO, 7, 9), OffsetRange(ONE, 14, 20)]


def filled(path=None, end=None):
    log = OffsetLog(3, {"a": {0: 10}}, path)
    log.assign([PartitionBounds(TWO, 7, end), PartitionBounds(ONE, 99, end)])
    assert [log.record(found) for found in RANGES] == [3, 4, 5]
    return log


def test_ranges_are_forgotten_and_offsets_kept():
    log = filled()
    assert [log.stream_offsets(n) for n in range(3, 7)] == [
        {"a": {0: 10}, "b": {1: 7}},
        {"a": {0: 14}, "b": {1: 7}},
        {"a": {0: 14}, "b": {1: 9}},
        {"a": {0: 20}, "b": {1: 9}},
    ]
    log.covered(5)
    assert log.stream_offsets(5) == {"a": {0: 14}, "b": {1: 9}}
    assert log.lookup(5, 5, 0) == RecordedBatch(RANGES[2])
    assert log.recorded(5, 9) == RANGES[2:]
    assert log.lookup(6, 6, 0) == RecordedBatch(None)
    for call in (lambda: log.lookup(4, 4, 0), lambda: log.stream_offsets(4), lambda: log.recorded(4, 1)):
        with pytest.raises(DataError, match="Batch 4 of the stream is not recorded; batches 5 to 6 are"):
            call()
    with pytest.raises(DataError, match="Batch 7 of the stream is not recorded"):
        log.stream_offsets(7)


def test_a_message_is_in_one_batch_even_if_recorded_repeatedly():
    log = filled()
    assert log.record(RANGES[2]) == 5  # Its answer was lost.
    for other in (RANGES[0], OffsetRange(ONE, 14, 19), OffsetRange(ONE, 21, 22), OffsetRange(Partition("c", 0), 0, 1)):
        assert log.record(other) is None
    assert log.assign([PartitionBounds(ONE, 0)]) == [PartitionBounds(ONE, 20), PartitionBounds(TWO, 9)]
    assert log.stream_offsets(None) == log.stream_offsets(6)


def test_a_step_begins_once_all_its_batches_are_recorded():
    log = filled(end=50)
    assert log.lookup(4, 7, 0) == RecordedBatch(None)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(log.lookup(4, 6, 60)))
    waiter.start()
    log.record(OffsetRange(ONE, 20, 50))
    waiter.join(60)
    assert answers == [RecordedBatch(RANGES[1])]
    log.exhaust([ONE])
    assert log.lookup(7, 7, 0) == RecordedBatch(None)
    log.exhaust([TWO])
    assert log.lookup(6, 9, 0) == RecordedBatch(OffsetRange(ONE, 20, 50))
    assert log.lookup(7, 9, 0) == RecordedBatch(None, over=True)
    assert log.stream_offsets(9) == log.stream_offsets(7)  # Numbers of NN workers that have no batch in the last step.
    log.close_stream()
    assert not log.lookup(7, 7, 0).interrupted  # It had ended before.


def test_a_closed_record_serves_its_batches_and_takes_no_more():
    log = filled()
    log.close_stream()
    assert log.record(OffsetRange(TWO, 9, 11)) is None
    assert log.lookup(5, 7, 0) == RecordedBatch(RANGES[2])
    assert log.lookup(6, 6, 0) == RecordedBatch(None, over=True, interrupted=True)
    offsets = log.stream_offsets(4)
    log.begin_stream(4, offsets, fresh=False)
    assert log.recorded(4, 9) == RANGES[1:]
    assert log.record(OffsetRange(TWO, 9, 11)) == 6
    log.begin_stream(4, offsets, fresh=True)
    assert log.stream_offsets(None) == offsets
    log.begin_stream(9, offsets, fresh=False)  # Not in the record: what goes with the state counts.
    assert log.stream_offsets(9) == offsets


def test_whoever_waits_learns_that_reading_has_failed():
    log = filled()
    log.fail_stream(False, "offset 3 is poison")
    assert log.lookup(5, 5, 0).range == RANGES[2]
    with pytest.raises(DataError, match="offset 3 is poison"):
        log.lookup(6, 6, 60)
    log.fail_stream(True, "no broker")
    with pytest.raises(DeadlineError, match="no broker"):
        log.lookup(6, 6, 60)
    log.begin_stream(6, log.stream_offsets(6), fresh=False)
    assert log.lookup(6, 6, 0) == RecordedBatch(None)


def test_a_stream_is_idle_while_somebody_waits_for_it():
    now = [100.0]
    log = OffsetLog(clock=lambda: now[0])
    assert not log.awaited()
    log.lookup(0, 0, 0)
    assert log.awaited()
    now[0] += AWAITED_SECONDS
    assert not log.awaited()


def test_event_times_are_part_of_the_position():
    log = OffsetLog(0, {"a": {0: 5}, "a@event_time": {0: 1000}})
    assert log.assign([PartitionBounds(ONE, 0)]) == [PartitionBounds(ONE, 5, None, 1000)]
    log.record(OffsetRange(ONE, 5, 8, 1000, 1200))
    log.record(OffsetRange(ONE, 8, 9, 1200, 1300))
    assert log.stream_offsets(1) == {"a": {0: 8}, "a@event_time": {0: 1200}}
    log.covered(1)
    assert log.stream_offsets(1) == {"a": {0: 8}, "a@event_time": {0: 1200}}
    assert log.assign([])[0].newest == 1300


def test_a_restarted_process_has_the_record(tmp_path):
    path = str(tmp_path / "stream")
    log = filled(path, end=50)
    log.covered(4)
    log.exhaust([TWO])
    with open(path, "ab") as file:  # An entry that was not written to its end.
        file.write(b"\0\0\0\x09half")
    again = OffsetLog(path=path)
    assert again.recorded(5, 9) == log.recorded(5, 9)
    assert again.record(RANGES[2]) == 5
    assert again.record(OffsetRange(ONE, 20, 50)) == 6
    again.exhaust([ONE])
    again.close_stream()
    third = OffsetLog(path=path)
    assert third.stream_offsets(5) == log.stream_offsets(5)
    assert third.lookup(7, 7, 0) == RecordedBatch(None, over=True)
    third.begin_stream(0, {"a": {0: 1}}, fresh=True)
    assert OffsetLog(path=path).stream_offsets(0) == {"a": {0: 1}}
    (tmp_path / "damaged").write_bytes(b"\0\0\0\x01x")
    with pytest.raises(PersiaError, match="damaged is not the record of a stream"):
        OffsetLog(path=str(tmp_path / "damaged"))


def test_the_file_does_not_grow_with_a_run(tmp_path):
    path = tmp_path / "stream"
    log = OffsetLog(path=str(path))
    log.assign([PartitionBounds(ONE, 0)])
    for number in range(COMPACT + 10):
        log.record(OffsetRange(ONE, number, number + 1))
    size = path.stat().st_size
    log.covered(COMPACT + 5)
    assert path.stat().st_size < size / 100
    assert OffsetLog(path=str(path)).stream_offsets(None) == {"a": {0: COMPACT + 10}}
