"""Topics of Kafka as batches: boundaries, reading again, formats of values, poison messages, ends."""

from __future__ import annotations

import builtins
import itertools
import json
import logging
import pickle
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

import persia
from persia.data.streams import broker
from persia.data.streams.message_rows import MessageConverter
from persia.errors import ConfigError, DataError, DeadlineError, MissingExtraError
from persia.types import OffsetRange, Partition
from support.kafka import SCHEMA, Kafka, Outages, arrow, clicks, items, packed, row, until

pytestmark = pytest.mark.processes


@pytest.fixture
def kafka():
    return Kafka()


def test_each_batch_is_a_range_of_one_partition_without_waiting(kafka):
    kafka.write(clicks(range(25)), 0)
    kafka.write(clicks(range(100, 103)), 2)  # Partitions 1 and 3 stay empty.
    found = [items(batch) for batch in kafka.reader()]
    assert sorted(found) == [list(range(10)), list(range(10, 20)), list(range(20, 25)), [100, 101, 102]]
    assert [b for b in found if b[0] < 100] == [list(range(10)), list(range(10, 20)), list(range(20, 25))]


@pytest.mark.parametrize(
    ("values", "written"), [("json", clicks), ("msgpack", packed), ("arrow", lambda x: arrow(x, 4))]
)
def test_values_of_every_format_give_the_same_rows(kafka, values, written):
    kafka.write(written(range(20)))
    batches = list(kafka.reader(8, values=values))
    assert [items(batch) for batch in batches] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    expected = persia.Batch.from_columns(SCHEMA, {n: [row(i)[n] for i in range(20)] for n in row(0)})
    for name, column in expected.id_features.items():
        assert np.array_equal(np.concatenate([b.id_features[name].values for b in batches]), column.values)
    assert np.array_equal(np.concatenate([b.labels for b in batches]), expected.labels)


def test_an_arrow_message_with_more_rows_is_a_batch_by_itself(kafka):
    kafka.write([*arrow(range(3), 3), *arrow(range(3, 20), 17), *arrow(range(20, 22), 2)])
    assert [len(batch) for batch in kafka.reader(8, values="arrow")] == [3, 17, 2]


def test_recorded_batches_are_read_again_exactly(kafka):
    kafka.write(clicks(range(14)), 0)
    kafka.write(clicks(range(50, 57)), 1)
    reader = kafka.reader(5, until=None, linger=0.2)
    reader.begin(0, {}, lambda: False)
    stream = reader.batches(0, 0)
    first = [items(next(stream)) for _ in range(4)]
    kafka.write(clicks(range(57, 80)), 1)  # What was cut short is not filled up when it is read again.
    first += [items(next(stream)) for _ in range(3)]
    stream.close()
    assert sum(map(len, first)) < 44
    for start in (0, 3, 6):
        again = reader.batches(0, start)
        assert [items(batch) for batch in itertools.islice(again, 7 - start)] == first[start:]
        again.close()


def test_paused_partitions_lose_nothing(kafka, monkeypatch):
    kafka.write(clicks(range(300)), 0)
    kafka.write(clicks(range(1000, 1300)), 1)
    reader = kafka.reader(5)
    reader.begin(0, {kafka.topic: {0: 0, 1: 0, 2: 0, 3: 0}}, lambda: False)
    reader._record.record(OffsetRange(Partition(kafka.topic, 1), 0, 300))
    paused = []
    pause = broker.Broker.pause

    def noted(self: Any, partition: Partition, wanted: bool) -> None:
        paused.append(wanted)
        pause(self, partition, wanted)

    monkeypatch.setattr(broker.Broker, "pause", noted)
    found = [items(batch) for batch in reader.batches()]
    assert found[0] == list(range(1000, 1300))
    assert list(itertools.chain(*found[1:])) == list(range(300))
    assert any(paused)


def test_offsets_continue_in_another_process(kafka):
    kafka.write(clicks(range(30)), 0)
    kafka.write(clicks(range(50, 80)), 3)
    reader = kafka.reader(7)
    reader.begin(0, {"another topic": {0: 5}}, lambda: False)
    stream = reader.batches()
    first = [items(next(stream)) for _ in range(3)]
    offsets = reader.offsets(2)
    stream.close()
    assert offsets == {kafka.topic: {0: 14, 1: 0, 2: 0, 3: 0}} or 0 < offsets[kafka.topic][3] <= 14
    other = pickle.loads(pickle.dumps(kafka.reader(7)))
    other.begin(2, offsets, lambda: False)
    rest = [items(batch) for batch in other.batches(0, 2)]
    assert sorted(itertools.chain(*first[:2], *rest)) == [*range(30), *range(50, 80)]
    with pytest.raises(DataError, match="Batch 1 of the stream is not recorded; batches 2 to"):
        next(other.batches(0, 1))


def test_a_bounded_stream_ends_at_the_offsets_of_its_beginning(kafka):
    kafka.write(clicks(range(10)))
    reader = kafka.reader(4)
    stream = iter(reader)
    assert items(next(stream)) == [0, 1, 2, 3]
    kafka.write(clicks(range(10, 20)))
    assert [items(batch) for batch in stream] == [[4, 5, 6, 7], [8, 9]]
    reader.begin(0, {}, lambda: False)
    assert len(list(reader.batches())) == 5
    kafka.write(clicks(range(20, 30)))
    assert [items(batch)[0] for batch in reader.batches(0, 3)] == [12, 16]


def test_start_latest_skips_what_there_is(kafka):
    kafka.write(clicks(range(10)))
    assert list(kafka.reader(start="latest")) == []


def test_the_earliest_message_goes_first(kafka):
    kafka.write(clicks(range(4)), 0, timestamp=3_000)
    kafka.write(clicks(range(10, 14)), 1, timestamp=1_000)
    kafka.write(clicks(range(20, 24)), 2, timestamp=2_000)
    reader = kafka.reader(4)
    buffered = broker.Broker.poll
    found = []

    def poll_all(self: Any, messages: int) -> None:
        while not all(self.buffers[Partition(kafka.topic, n)].position == 4 for n in range(3)):
            buffered(self, messages)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker.Broker, "poll", poll_all)
        found = [items(batch)[0] for batch in reader]
    assert found == [10, 20, 0]


def test_the_time_of_a_message_is_a_column(kafka):
    kafka.write(clicks(range(2)), timestamp=86_400_000 * 5 + 1)
    kafka.write(clicks(range(2, 4)), timestamp=86_400_000 * 6)
    (batch,) = kafka.reader(day="kafka.timestamp", day_unit="ms")
    assert batch.day.tolist() == [5, 5, 6, 6]


def test_a_waiting_message_is_delivered_after_linger(kafka):
    kafka.write(clicks(range(3)))
    stream = kafka.reader(until=None, linger=0.3).batches()
    began = time.monotonic()
    assert items(next(stream)) == [0, 1, 2]
    assert 0.3 <= time.monotonic() - began < 5
    stream.close()


def test_waiting_ends_when_it_is_asked_to(kafka):
    kafka.write(clicks(range(3)))
    stopping = threading.Event()
    reader = kafka.reader(3, until=None)
    reader.begin(0, {}, stopping.is_set)
    stream = reader.batches()
    next(stream)
    threading.Timer(0.3, stopping.set).start()
    assert list(stream) == []
    assert reader.interrupted
    assert reader.offsets(1)[kafka.topic][0] == 3


POISON = [b"{", b"[1]", b'{"item": 1, "price": "much", "click": 0}', b'{"item": 1}', None, b"", b"{},{}"]
POISON += [b'{"item": ' + b"[" * 50_000]


def test_poison_is_an_error_that_names_its_offset(kafka):
    for number, value in enumerate(POISON):
        kafka.topic = f"{kafka.topic}-{number}"
        kafka.write([*clicks(range(5)), value, *clicks(range(6, 9))])
        with pytest.raises(DataError, match=rf"Offset 5 of partition 0 of topic '{kafka.topic}'") as raised:
            list(kafka.reader())
        assert raised.value.fields["offset"] == 5


def test_poison_is_skipped_counted_and_sent_to_dead_letters(kafka):
    values = clicks(range(40))
    for number, value in enumerate(POISON):
        values.insert(5 * number + 3, value)
    kafka.write(values)
    dead = f"{kafka.topic}-dead"
    reader = kafka.reader(20, poison="skip", dead_letters=dead)
    reader.begin(0, {}, lambda: False)
    found = [items(batch) for batch in reader.batches()]
    assert list(itertools.chain(*found)) == list(range(40))
    counts = {metric.name: metric.value for metric in reader.observe() if not metric.labels}
    assert counts["stream_poison"] == len(POISON)
    assert counts["stream_rows"] == 40
    letters = read_all(kafka, dead, len(POISON))
    assert [letter.value() for letter in letters] == POISON
    headers = dict(letters[1].headers())
    assert headers["persia.topic"].decode() == kafka.topic
    assert (headers["persia.partition"], headers["persia.offset"]) == (b"0", b"8")
    assert [items(batch) for batch in reader.batches(0, 0)] == found


def test_a_message_refused_by_dead_letters_is_named_not_skipped(kafka):
    large = b'{"item": "' + b"x" * 5000
    kafka.write([*clicks(range(5)), large, *clicks(range(5, 9))])
    dead = f"{kafka.topic}-dead"
    options = {"poison": "skip", "dead_letters": dead}
    reader = kafka.reader(config={"fetch.wait.max.ms": 20, "message.max.bytes": 2000}, **options)
    reader.begin(0, {}, lambda: False)
    with pytest.raises(DataError, match=r"offset 5: .*too large\)\. They are not skipped\..* raise message.max.bytes"):
        list(reader.batches())
    assert {metric.name: metric.value for metric in reader.observe()}["stream_poison"] == 0
    again = kafka.reader(**options)
    again.begin(0, reader.offsets(0), lambda: False)
    assert [items(batch) for batch in again.batches()] == [list(range(9))]
    assert [letter.value() for letter in read_all(kafka, dead, 1)] == [large]


def test_more_dead_letters_than_librdkafka_holds_are_written(kafka):
    kafka.write([*clicks(range(5)), *POISON])
    dead = f"{kafka.topic}-dead"
    config = {"fetch.wait.max.ms": 20, "queue.buffering.max.messages": 2}
    (batch,) = kafka.reader(20, poison="skip", dead_letters=dead, config=config)
    assert items(batch) == list(range(5))
    assert [letter.value() for letter in read_all(kafka, dead, len(POISON))] == POISON


def test_a_message_of_two_rows_does_not_offset_one_of_none(kafka):
    one = clicks([1])[0]
    kafka.write([one, one + b"," + one, b" ", one])
    reader = kafka.reader(poison="skip")
    reader.begin(0, {}, lambda: False)
    assert [items(batch) for batch in reader.batches()] == [[1, 1]]


def test_a_batch_of_poison_only_is_part_of_the_next_one(kafka):
    kafka.write([b"{"] * 4 + clicks(range(4)) + [b"{"] * 4)
    reader = kafka.reader(4, poison="skip")
    reader.begin(0, {}, lambda: False)
    assert [items(batch) for batch in reader.batches()] == [[0, 1, 2, 3]]
    assert [items(batch) for batch in reader.batches(0, 0)] == [[0, 1, 2, 3]]
    assert reader.offsets(1)[kafka.topic][0] == 8


def test_a_schema_that_fits_no_message_is_an_error_despite_skip(kafka):
    kafka.write([b'{"thing": 1}'] * 20)
    with pytest.raises(DataError, match="Neither can the others of 20 messages"):
        list(kafka.reader(20, poison="skip"))


def test_large_ids_and_texts_that_look_like_times_are_unchanged(kafka):
    rows = [row(i) | {"item": 2**64 - 1 - i} for i in range(4)]
    kafka.write([msgspec.json.encode(r) for r in rows])
    (batch,) = kafka.reader()
    expected = persia.Batch.from_columns(SCHEMA, {n: np.array([r[n] for r in rows]) for n in rows[0]})
    assert np.array_equal(batch.id_features["item"].values, expected.id_features["item"].values)
    kafka.topic += "-text"
    kafka.write([msgspec.json.encode(row(i) | {"item": "2024-01-01 00:00:00"}) for i in range(2)])
    (batch,) = kafka.reader()
    text = persia.Batch.from_columns(SCHEMA, {"item": ["2024-01-01 00:00:00"], "price": [0.0], "click": [0]})
    assert set(batch.id_features["item"].values) == set(text.id_features["item"].values)


def test_messages_that_have_been_deleted_are_named(kafka):
    value = b'{"item": 1, "price": 1, "click": 0, "filler": "' + b"x" * 50_000 + b'"}'
    kafka.write([value] * 200)  # 10 MB, of which the mock keeps 5 MiB.
    reader = kafka.reader()
    reader.begin(0, {kafka.topic: {0: 3, 1: 0, 2: 0, 3: 0}}, lambda: False)
    with pytest.raises(DataError, match=rf"offset 3 of partition 0 of topic '{kafka.topic}' is not there; it has"):
        list(reader.batches())


def test_a_topic_that_was_made_anew_is_an_error(kafka):
    kafka.write(clicks(range(5)))
    for offsets in ({0: 6, 1: 0, 2: 0, 3: 0}, {0: 5, 1: 0, 2: 0, 3: 0, 4: 7}):
        reader = kafka.reader()
        reader.begin(3, {kafka.topic: offsets}, lambda: False)
        with pytest.raises(DataError, match=r"is not there; .*or the topic was recreated"):
            list(reader.batches(0, 3))


def test_a_start_is_for_topics_without_a_position(kafka):
    other = f"{kafka.topic}-other"
    kafka.write(clicks(range(4)))
    kafka.write(clicks(range(10, 14)), topic=other)
    reader = persia.data.kafka([kafka.topic, other], SCHEMA, 4, bootstrap=kafka.bootstrap, until="now", start="latest")
    reader.begin(0, {kafka.topic: {0: 2}}, lambda: False)
    assert [items(batch) for batch in reader.batches()] == [[2, 3]]
    assert reader.offsets(1) == {kafka.topic: {0: 4, 1: 0, 2: 0, 3: 0}, other: {0: 4, 1: 0, 2: 0, 3: 0}}


def test_a_broker_that_is_not_there_is_waited_for_and_named(kafka, caplog, monkeypatch):
    monkeypatch.setattr(broker, "PROBE_SECONDS", 0.2)
    with caplog.at_level(logging.WARNING), pytest.raises(DeadlineError, match=r"Kafka at 127.0.0.1:9 did not give"):
        list(kafka.reader(bootstrap="127.0.0.1:9", timeout=4.0))
    assert "Kafka at 127.0.0.1:9 cannot be reached" in caplog.text


@pytest.fixture
def outages():
    found = Outages()
    yield found
    found.up()


def test_reading_goes_on_when_the_broker_is_back(outages, caplog, monkeypatch):
    monkeypatch.setattr(broker, "PROBE_SECONDS", 0.2)
    kafka = Kafka(outages.bootstrap)
    kafka.write(clicks(range(6)))
    reader = kafka.reader(3, until=None)
    reader.begin(0, {}, lambda: False)
    stream = reader.batches()
    assert [items(next(stream)) for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    outages.down()
    waited = threading.Thread(target=lambda: rest.append(items(next(stream))))
    rest: list[list[int]] = []
    waited.start()
    until(lambda: f"Kafka at {outages.bootstrap} cannot be reached" in caplog.text)
    assert not rest
    outages.up()
    until(lambda: "can be reached again" in caplog.text)
    kafka.write(clicks(range(6, 9)))
    waited.join(20)
    assert rest == [[6, 7, 8]]
    stream.close()


def test_an_outage_is_an_error_after_the_timeout(outages, monkeypatch):
    monkeypatch.setattr(broker, "PROBE_SECONDS", 0.2)
    kafka = Kafka(outages.bootstrap)
    kafka.write(clicks(range(3)))
    stream = kafka.reader(3, until=None, timeout=4.0).batches()
    next(stream)
    outages.down()
    with pytest.raises(DeadlineError, match=f"Kafka at {outages.bootstrap} did not give messages within 4 s"):
        next(stream)


def test_a_topic_that_is_deleted_while_it_is_read_is_named(outages, monkeypatch):
    monkeypatch.setattr(broker, "METADATA_SECONDS", 0.2)
    kafka = Kafka(outages.bootstrap)
    kafka.write(clicks(range(3)))
    stream = kafka.reader(3, until=None).batches()
    next(stream)
    outages.delete(kafka.topic)
    with pytest.raises(DataError, match=f"refused the partitions of topic '{kafka.topic}': .*that the topic exists"):
        next(stream)


def test_a_leader_that_is_being_elected_is_waited_for(outages, monkeypatch):
    monkeypatch.setattr(broker, "METADATA_SECONDS", 0.2)
    listed, asked = broker.Broker.partitions, []
    monkeypatch.setattr(broker.Broker, "partitions", lambda self: asked.append(self) or listed(self))
    kafka = Kafka(outages.bootstrap)
    kafka.write(clicks(range(3)))
    stream = kafka.reader(3, until=None).batches()
    next(stream)
    outages.answer(kafka.topic, KafkaError.LEADER_NOT_AVAILABLE)
    before, found = len(asked), []
    reading = threading.Thread(target=lambda: found.append(items(next(stream))))
    reading.start()
    until(lambda: len(asked) > before)
    time.sleep(0.3)
    assert reading.is_alive()
    outages.answer(kafka.topic, KafkaError.NO_ERROR)
    kafka.write(clicks(range(3, 6)))
    reading.join(20)
    assert found == [[3, 4, 5]]
    stream.close()


def test_added_partitions_are_read_from_their_first_message(kafka, monkeypatch):
    monkeypatch.setattr(broker, "METADATA_SECONDS", 0.2)
    listed = broker.Broker.partitions
    few = [True]
    monkeypatch.setattr(broker.Broker, "partitions", lambda self: listed(self)[: 1 if few[0] else 4])
    kafka.write(clicks(range(3)), 0)
    reader = kafka.reader(3, until=None, start="latest")
    reader.begin(0, {}, lambda: False)
    stream = reader.batches()
    kafka.write(clicks(range(10, 13)), 2)
    found: list[list[int]] = []
    reading = threading.Thread(target=lambda: found.extend(items(next(stream)) for _ in range(2)))
    reading.start()
    until(lambda: reader.offsets(0) == {kafka.topic: {0: 3}})
    few[0] = False
    until(lambda: len(found) == 1)
    kafka.write(clicks(range(3, 6)), 0)
    reading.join(20)
    assert found == [[10, 11, 12], [3, 4, 5]]
    assert reader.offsets(2) == {kafka.topic: {0: 6, 1: 0, 2: 3, 3: 0}}
    stream.close()
    again = reader.batches(0, 0)
    assert [items(next(again)) for _ in range(2)] == found


def test_offsets_are_committed_to_the_group(kafka):
    kafka.write(clicks(range(5)))
    reader = kafka.reader(group="monitored")
    reader.commit({kafka.topic: {0: 4, 1: 0}, "another topic": {0: 1}})
    assert committed(kafka, "monitored") == 4
    kafka.reader(bootstrap="127.0.0.1:9", group="monitored").commit({})


def test_a_commit_that_fails_is_logged(kafka, caplog, monkeypatch):
    monkeypatch.setattr("persia.data.streams.kafka.COMMIT_SECONDS", 0.2)
    kafka.reader(bootstrap="127.0.0.1:9", group="g").commit({kafka.topic: {0: 1}})
    assert "Offsets were not committed to group g of Kafka at 127.0.0.1:9" in caplog.text


def test_lag_is_what_is_not_read(kafka, monkeypatch):
    monkeypatch.setattr("persia.data.streams.share.MEASURE_SECONDS", 0.0)
    kafka.write(clicks(range(10)))
    reader = kafka.reader(4)
    reader.begin(0, {}, lambda: False)
    stream = reader.batches()
    next(stream)
    (first,) = (m.value for m in reader.observe() if m.name == "stream_lag" and m.labels["partition"] == "0")
    list(stream)
    lags = [m.value for m in reader.observe() if m.name == "stream_lag"]
    assert lags == [0] * 4  # Also of the partitions that had nothing, and were never fetched.
    assert first == 6


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"values": "avro"}, "values"),
        ({"poison": "ignore"}, "poison"),
        ({"start": "first"}, "start"),
        ({"until": "end"}, "until"),
        ({"until": datetime.now(UTC) + timedelta(hours=1)}, "until"),
        ({"dead_letters": "dead"}, "dead_letters"),
        ({"config": {"group.id": "g"}}, "config"),
        ({"batch_size": 0}, "batch_size"),
        ({"allowed_lateness": 1.0}, "event_time"),
        ({"event_time": "at", "allowed_lateness": -1.0}, "allowed_lateness"),
        ({"event_time": "at", "allowed_lateness": 1e300}, "allowed_lateness"),
        ({"late": "never"}, "late"),
        ({"linger": -1.0}, "linger"),
        ({"linger": float("nan")}, "linger"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
        ({"timeout": "10"}, "timeout"),
        ({"event_time_unit": "h"}, "event_time_unit"),
    ],
)
def test_invalid_arguments_are_named(options, field):
    with pytest.raises(ConfigError) as raised:
        persia.data.kafka("t", SCHEMA, **{"bootstrap": "x:1", **options})
    assert raised.value.fields["field"] == field


@pytest.mark.parametrize("topics", ["", [], ["a", "a"], [1]])
def test_invalid_topics_are_refused(topics):
    with pytest.raises(ConfigError, match="topics = "):
        persia.data.kafka(topics, SCHEMA, bootstrap="x:1")


def test_a_missing_library_is_named(monkeypatch):
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("confluent_kafka"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r'pip install "persia-recsys\[kafka\]"'):
        persia.data.kafka("t", SCHEMA, bootstrap="x:1")


def test_several_topics_are_one_stream(kafka):
    other = f"{kafka.topic}-other"
    kafka.write(clicks(range(4)))
    kafka.write(clicks(range(10, 14)), topic=other)
    reader = persia.data.kafka([kafka.topic, other], SCHEMA, 4, bootstrap=kafka.bootstrap, until="now")
    reader.begin(0, {}, lambda: False)
    assert sorted(items(batch)[0] for batch in reader.batches()) == [0, 10]
    assert reader.offsets(2)[other][0] == 4


def read_all(kafka: Kafka, topic: str, count: int) -> list[Any]:
    """Returns the messages of a topic that should have so many; more, if there are."""
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "check", "auto.offset.reset": "earliest"})
    consumer.assign([TopicPartition(topic, n, 0) for n in range(4)])
    found: list[Any] = []
    until(lambda: bool(found.extend(consumer.consume(100, 0.5)) or len(found) >= count))
    consumer.close()
    return sorted(found, key=lambda m: int(dict(m.headers())["persia.offset"]))


def committed(kafka: Kafka, group: str) -> int:
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": group})
    (found,) = consumer.committed([TopicPartition(kafka.topic, 0)], timeout=10)
    consumer.close()
    return int(found.offset)


def timed(kafka, rows, partition=0):
    """Writes rows of items and event times in seconds."""
    kafka.write([json.dumps({**row(item), "at": at}).encode() for item, at in rows], partition)


def late_items(rows, allowed):
    """Items that are late, one after the other."""
    newest, found = None, []
    for item, at in rows:
        if at is None:
            continue
        if newest is not None and at < newest - allowed:
            found.append(item)
        newest = at if newest is None else max(newest, at)
    return found


LATENESS = {"event_time": "at", "allowed_lateness": 10.0}


def test_late_rows_are_counted_and_left_out_or_kept_as_set(kafka):
    rng = np.random.default_rng(0)
    rows = [(item, None if item % 9 == 5 else float(item + rng.integers(-25, 25))) for item in range(200)]
    late = late_items(rows, 10)
    assert 20 < len(late) < 150
    timed(kafka, rows)
    timed(kafka, [(1000, 0.0), (1001, 1.0)], 1)  # Each partition has a time of its own.
    for option in ("drop", "keep"):
        reader = kafka.reader(16, late=option, **LATENESS)
        found = sorted(itertools.chain(*(items(batch) for batch in reader)))
        assert found == sorted({*range(200), 1000, 1001} - (set(late) if option == "drop" else set()))
        (counted,) = (m.value for m in reader.observe() if m.name == "stream_late")
        assert counted == len(late)


def test_late_rows_are_the_same_in_resumed_runs_and_rereads(kafka):
    rng = np.random.default_rng(1)
    rows = [(item, float(item + rng.integers(-25, 25))) for item in range(150)]
    timed(kafka, [*rows[:60], *((item, -1000.0) for item in range(900, 930)), *rows[60:]])
    reader = kafka.reader(10, **LATENESS)
    reader.begin(0, {}, lambda: False)
    whole = [items(batch) for batch in reader.batches()]
    assert sorted(itertools.chain(*whole)) == sorted(set(range(150)) - set(late_items(rows, 10)))
    for start in (0, 4, len(whole) - 1):
        again = reader.batches(0, start)
        assert [items(batch) for batch in again] == whole[start:]
        other = kafka.reader(10, **LATENESS)
        other.begin(start, reader.offsets(start), lambda: False)
        assert list(itertools.chain(*(items(b) for b in other.batches(0, start)))) == list(
            itertools.chain(*whole[start:])
        )


@pytest.mark.parametrize(
    ("unit", "at", "expected"),
    [
        ("s", ["2026-01-02T00:00:00", "2026-01-01T00:00:00"], [0]),
        ("ms", [20_000, 9_999, 10_000], [0, 2]),
        ("s", [20, 9, 10], [0, 2]),
    ],
)
def test_times_are_timestamps_or_numbers_in_their_unit(kafka, unit, at, expected):
    import pyarrow as pa

    table = pa.Table.from_pylist([row(item) for item in range(len(at))])
    column = pa.array(at) if unit == "ms" or at[0] == 20 else pa.array([datetime.fromisoformat(t) for t in at])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.append_column("at", column).schema) as writer:
        writer.write_table(table.append_column("at", column))
    kafka.write([sink.getvalue().to_pybytes()])
    reader = kafka.reader(8, values="arrow", event_time_unit=unit, **LATENESS)
    assert [items(batch) for batch in reader] == [expected]


@pytest.mark.parametrize("at", [2**63, 10**16, -(10**16), 5 * 10**15, 1e300])
def test_a_message_with_a_time_that_is_too_large_is_poison(kafka, at):
    timed(kafka, [(0, 10), (1, 11), (2, at), (3, 12)])
    with pytest.raises(
        DataError, match=r"Offset 2 .* 'at', the event time, has a value that is not a time .* since 1970"
    ):
        list(kafka.reader(8, **LATENESS))
    reader = kafka.reader(8, poison="skip", **LATENESS)
    assert [items(batch) for batch in reader] == [[0, 1, 3]]
    counts = {metric.name: metric.value for metric in reader.observe()}
    assert (counts["stream_poison"], counts["stream_late"]) == (1, 0)


@pytest.mark.parametrize(
    ("times", "expected", "poison"),
    [
        (pa.array([10, 10**16, 12], pa.timestamp("s", "UTC")), [0, 2], 1),  # Beyond 64 bits in milliseconds.
        (pa.array([10_999_999, 11_000_000, -1], pa.timestamp("us")), [0, 1], 0),
        (pa.array([20.0, float("inf"), 9.0]), [0], 1),
        (pa.array([20.0, float("nan"), None]), [0, 1, 2], 0),  # Rows without a time.
        (pa.array([2**63, 2**63 + 1, 12], pa.uint64()), [2], 2),
    ],
)
def test_times_of_arrow_columns_are_times_or_poison(kafka, times, expected, poison):
    for number in range(3):
        table = pa.Table.from_pylist([row(number)]).append_column("at", times[number : number + 1])
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        kafka.write([sink.getvalue().to_pybytes()])
    reader = kafka.reader(8, values="arrow", poison="skip", **LATENESS)
    assert [items(batch) for batch in reader] == [expected]
    counts = {metric.name: metric.value for metric in reader.observe()}
    assert (counts["stream_poison"], counts["stream_late"]) == (poison, 3 - len(expected) - poison)


def test_an_event_time_that_is_none_is_an_error(kafka):
    kafka.write([json.dumps({**row(1), "at": "noon"}).encode()])
    with pytest.raises(DataError, match="'at', the event time, is string: give timestamps or numbers"):
        list(kafka.reader(8, **LATENESS))


def test_shared_negatives_are_of_messages_before_and_the_same_again(kafka):
    kafka.write(clicks(range(70)), 0)
    kafka.write(clicks(range(100, 130)), 1)
    stream = persia.data.shared_negatives(kafka.reader(8), ["item"], 8, by="popularity", window=16, seed=1)
    stream.begin(0, {}, lambda: False)
    found = [(items(b), b.id_features["negative_item"].values.tolist(), b.dense.tolist()) for b in stream.batches()]
    assert sorted(item for own, _, _ in found for item in own) == [*range(70), *range(100, 130)]
    for own, drawn, _ in found:
        first = own[0] - own[0] % 100  # Of the partition.
        window = (own[0] - first) // 16
        before = range(first + 16 * (window - 1), first + 16 * window) if window else own
        assert len(drawn) == len(own)
        assert {item for item in before if item % 2} >= set(drawn)  # Those that were clicked.
    again = [(items(b), b.id_features["negative_item"].values.tolist(), b.dense.tolist()) for b in stream.batches(0, 5)]
    assert again == found[5:]
    other = pickle.loads(pickle.dumps(stream))
    other.begin(9, stream.offsets(4), lambda: False)
    continued = [b.id_features["negative_item"].values.tolist() for b in other.batches(0, 9)]
    assert sorted(continued) == sorted(drawn for _, drawn, _ in found[4:])


def test_messages_before_are_drawn_without_counting_them_or_their_poison_again(kafka, monkeypatch):
    values = clicks(range(70))
    for at in (3, 20, 50):
        values[at] = b"{"
    kafka.write(values, 0)
    buried, converted = [], []
    convert = MessageConverter.convert
    monkeypatch.setattr(MessageConverter, "_bury", lambda *args: buried.extend(m.offset for m, _ in args[3]))
    monkeypatch.setattr(
        MessageConverter, "convert", lambda *args: converted.append([m.offset for m in args[2]]) or convert(*args)
    )
    reader = kafka.reader(8, poison="skip", dead_letters="dead")
    stream = persia.data.shared_negatives(reader, ["item"], 8, window=24, seed=1)
    stream.begin(0, {}, lambda: False)
    found = [items(batch) for batch in stream.batches()]
    assert list(itertools.chain(*found)) == [item for item in range(70) if item not in (3, 20, 50)]
    assert sorted(itertools.chain(*converted)) == sorted([*range(70), *range(48)])  # The windows from 0 and 24, too.
    assert max(map(len, converted)) == 8  # No window is in memory as a whole.
    assert buried == [3, 20, 50]
    counts = {metric.name: metric.value for metric in stream.observe() if not metric.labels}
    assert (counts["stream_rows"], counts["stream_batches"], counts["stream_poison"]) == (67, len(found), 3)


def test_negatives_pass_offsets_on_and_are_the_same_again(kafka):
    kafka.write(clicks(range(40)))
    stream = persia.data.negatives(kafka.reader(8), ["item"], 2)
    stream.begin(0, {}, lambda: False)
    found = [(items(b), b.id_features["item"].values.tolist()) for b in stream.batches()]
    assert [len(values) for _, values in found] == [8 + 8] * 5
    assert [(items(b), b.id_features["item"].values.tolist()) for b in stream.batches(0, 2)] == found[2:]
    assert stream.offsets(2) == {kafka.topic: {0: 16, 1: 0, 2: 0, 3: 0}}
    other = pickle.loads(pickle.dumps(stream))
    other.begin(7, stream.offsets(2), lambda: False)
    assert [(items(b), b.id_features["item"].values.tolist()) for b in other.batches(0, 7)] == found[2:]
    assert {m.name: m.value for m in stream.observe()}["stream_rows"] == 64
