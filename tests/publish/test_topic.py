"""A topic of Kafka as the place of a log: URLs, files, where readers begin, retention, outages."""

from __future__ import annotations

import builtins
import logging
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("confluent_kafka", reason='Kafka is not installed: pip install "persia-recsys[kafka]"')

from confluent_kafka import KafkaError

import persia
from persia.checkpoint.storage import crc32
from persia.errors import ConfigError, MissingExtraError, PublishError
from persia.publish import Publisher, PublishOptions, PublishOrder, Replica, follow
from persia.publish.epochs import begin_epoch
from persia.publish.format import NETWORK
from persia.publish.log_storage import open_storage
from persia.publish.stream import StreamWriter
from persia.publish.topic import client, topic_storage
from persia.publish.topic.address import parse_address
from persia.publish.topic.client import TopicClient
from persia.publish.topic.file_records import CHUNK, FileRecord, RemovalRecord
from persia.publish.topic.index import TopicIndex
from persia.types import BucketMap
from support.change_log import ChangeLog, advance, assert_equal_rows, begun, outgrow, replica_of
from support.kafka import Outages, until

pytestmark = pytest.mark.processes

SCHEMA = persia.Schema([persia.IdFeature("item", 3)])


@pytest.fixture
def eager(monkeypatch):
    """Writers look at the topic before each record, so that new readers begin as late as possible."""
    monkeypatch.setattr(topic_storage, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(topic_storage, "RENEW_SECONDS", 0.0)


def flood(log, partition):
    """Has the topic's retention delete what is in a partition: the mock keeps 5 MiB."""
    log.storage._client.write(partition, CHUNK, [("flood", bytes(900_000))] * 7)


# --- URL ----------------------------------------------------------------------------------------------------


def test_an_address_has_brokers_topic_and_settings(tmp_path):
    file = tmp_path / "client.properties"
    file.write_text("# of the brokers\n\nsasl.username = me\nsasl.password=a=b\n")
    found = parse_address(f"kafka://a:9092,[::1]:93/changes.v-1?security.protocol=SASL_SSL&config={file}")
    assert (found.bootstrap, found.topic) == ("a:9092,[::1]:93", "changes.v-1")
    assert found.settings == {"security.protocol": "SASL_SSL", "sasl.username": "me", "sasl.password": "a=b"}
    assert found.url == "kafka://a:9092,[::1]:93/changes.v-1"
    assert "a=b" not in repr(found)
    file.write_text("acks=0")
    with pytest.raises(ConfigError, match="'acks', which persia sets"):
        parse_address(f"kafka://a:1/t?config={file}")
    file.write_text("\nno setting")
    with pytest.raises(ConfigError, match=r"Invalid line 2 of .*; expected SETTING=VALUE"):
        parse_address(f"kafka://a:1/t?config={file}")


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("kafka://a:1", "expected kafka://HOST:PORT"),
        ("kafka://a/t", "expected kafka://HOST:PORT"),
        ("kafka://a:1/t/more", "expected kafka://HOST:PORT"),
        ("kafka://a:1/..", "expected kafka://HOST:PORT"),
        ("kafka://me:pass@a:1/t", "expected kafka://HOST:PORT"),
        ("kafka://a:1/t#x", "expected kafka://HOST:PORT"),
        ("kafka://[a:1/t", "is not a URL"),
        ("kafka://a:1/t?x", "is not a URL"),
        ("kafka://a:1/t?sasl.password=pass", "give [?]config=FILE"),
        ("kafka://a:1/t?ssl.key.pem=pass", "give [?]config=FILE"),
        ("kafka://a:1/t?group.id=1", "which persia sets"),
        ("kafka://a:1/t?config=/no/such/file", "Cannot read the settings"),
    ],
)
def test_addresses_that_are_refused(wrong, said):
    with pytest.raises(ConfigError, match=said) as failed:
        follow(wrong)
    assert "pass@" not in str(failed.value)
    assert "=pass" not in str(failed.value)


def test_settings_that_librdkafka_refuses(topic):
    with pytest.raises(ConfigError, match="No such configuration property"):
        follow(f"{topic}?no.such.setting=1")


def test_the_package_is_an_extra(monkeypatch):
    def no_kafka(name, *arguments):
        if name.startswith("confluent_kafka"):
            raise ImportError(name)
        return imported(name, *arguments)

    imported = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", no_kafka)
    with pytest.raises(MissingExtraError, match=r'pip install "persia-recsys\[kafka\]"'):
        follow("kafka://a:1/t")


# --- files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_files_are_split_into_messages(topic, partitions, monkeypatch):
    monkeypatch.setattr(TopicClient, "partitions", lambda self: partitions)
    log = begun(f"{topic}?message.max.bytes=5200")
    advance(log, 2)
    log.storage.refresh()
    assert len(log.storage._index.get(log.place("0000000000.00000.safetensors")).chunks) > 1
    assert_equal_rows(replica_of(log), log)
    place = open_storage(log.url)
    sizes = [0, 1, 1103, 1104, 1105, 20_000]
    for size in sizes:
        data = np.random.default_rng(size).bytes(size)
        assert place.write(f"a/b/{size}", [memoryview(data[:7]), memoryview(data[7:])]) == (size, crc32(data))
        place.put(f"a/{size}", data)
    place.refresh()
    for size in sizes:
        data = np.random.default_rng(size).bytes(size)
        found, crc = place.load(f"a/b/{size}", size)
        assert (bytes(found), crc) == (data, crc32(data))
        assert place.head(f"a/{size}", 0, size) == data
    assert place.names("a") == sorted(["b", *map(str, sizes)])
    with pytest.raises(PublishError, match="it does not exist"):
        place.head("a/other", 0, 1)
    with pytest.raises(PublishError, match="has 1 bytes instead of 2"):
        place.load("a/b/1", 2)


def test_a_message_that_the_brokers_refuse(topic):
    place = open_storage(f"{topic}?message.max.bytes=1000")
    with pytest.raises(PublishError, match=r"Cannot write to kafka://.*too large"):
        place.write("a", [memoryview(bytes(10_000))])
    place.put("b", b"1")  # With another producer.
    place.refresh()
    assert place.names() == ["b"]


PATHS = st.sampled_from(["e-1/a/x", "e-1/a/y", "e-1/b/x", "e-1/z", "e-1", "e-1/a", "e-2/a/x", "e-2", "top", "e-11/a"])


@given(st.lists(st.tuples(PATHS, st.booleans()), max_size=20), st.integers(0, 20))
def test_the_index_is_that_of_a_directory(records, low):
    index, files = TopicIndex(), {}
    for offset, (path, removal) in enumerate(records):
        if removal:
            index.apply(offset, RemovalRecord(path, 0))
            files = {other: at for other, at in files.items() if not f"{other}/".startswith(f"{path}/")}
        elif path.rpartition("/")[2] not in ("a", "e-1", "e-2"):
            index.apply(offset, FileRecord(path, 0, 0, "crc32:00000000", b""))
            files[path] = offset
    for forget in (0, low):
        index.forget_before(forget)
        files = {path: at for path, at in files.items() if at >= forget}
        assert index.begin(99) == min(files.values(), default=99)
        for directory in ("", "e-1", "e-1/a", "e-11", "none"):
            prefix = f"{directory}/" if directory else ""
            below = {path[len(prefix) :].partition("/")[0] for path in files if path.startswith(prefix)}
            assert index.names(directory) == sorted(below)
        assert all((index.get(path) is not None) == (path in files) for path, _ in records)


# --- where readers begin ------------------------------------------------------------------------------------


def test_a_late_reader_begins_at_the_newest_snapshot(topic, eager, monkeypatch):
    log = begun(topic, keep=1)
    outgrow(log)
    outgrow(log)
    read = []
    messages = TopicClient.messages

    def counted(self, partition, begin, end):
        read.append((partition, begin, end))
        return messages(self, partition, begin, end)

    monkeypatch.setattr(TopicClient, "messages", counted)
    monkeypatch.setattr(topic_storage, "TAIL", 1)
    late = replica_of(log)
    assert_equal_rows(late, log)
    assert not late.problem
    snapshot = next(record for record in log.names() if record.endswith("snapshot.json"))
    first = log.storage._index._offsets[log.place(snapshot.replace("-snapshot.json", ".00000.safetensors"))]
    assert 0 < min(begin for partition, begin, _ in read if partition == 0) <= first


def test_an_epoch_that_was_not_removed_is_read_from_its_start(topic):
    log = begun(topic)
    advance(log, 3)
    log.epoch += 1
    log.run = f"{log.epoch:032x}"
    begin_epoch(log.storage, BucketMap.even(2), SCHEMA)  # Its PSs never begin.
    late = replica_of(log)
    assert (late.epoch, late.problem) == (0, "")
    assert late.steps == {0: log.step}


def test_the_next_snapshot_replaces_what_retention_deletes(topic, eager):
    log = begun(topic)
    replica = replica_of(log)
    advance(log, 2)
    replica.refresh()
    flood(log, 2)  # The stream of the only PS.
    assert_equal_rows(replica, log)
    late = replica_of(log)
    assert "has been deleted by the topic's retention" in late.problem
    assert late.epoch == -1
    advance(log)
    replica.refresh()
    assert_equal_rows(replica, log)
    assert not replica.problem
    outgrow(log)
    for reader in (late, replica):
        reader.refresh()
        assert_equal_rows(reader, log)
        assert not reader.problem


def test_the_files_of_an_epoch_outlive_retention(topic, eager):
    log = begun(topic)
    advance(log)
    flood(log, 0)
    lagging = follow(topic)
    assert not list(lagging.updates())
    assert "there is no epoch" in lagging.problem
    outgrow(log)
    late = replica_of(log)
    assert not late.problem
    assert_equal_rows(late, log)


def test_records_that_are_deleted_while_read_are_skipped(topic, monkeypatch):
    log = begun(topic)
    flood(log, 0)
    advance(log)
    place = open_storage(topic)
    low, high = place._client.bounds(0)
    assert low > 0
    asked = [(low, high), (0, high)]  # The last one first: before retention.
    monkeypatch.setattr(place._client, "bounds", lambda _: asked.pop())
    place.refresh()
    assert not asked
    other = open_storage(topic)
    monkeypatch.setattr(other._client, "bounds", lambda _: (0, high))
    with pytest.raises(PublishError, match="deleted before it was read"):
        other.refresh()


def test_records_that_were_deleted_before_reading_are_a_gap(topic, eager):
    log = begun(topic)
    replica = replica_of(log)
    advance(log, 2)
    flood(log, 0)
    advance(log)
    replica.refresh()
    assert "is missing" in replica.problem
    assert replica.steps == {0: 3}
    outgrow(log)
    replica.refresh()
    assert_equal_rows(replica, log)


def test_a_queue_that_is_shorter_than_what_is_in_flight(topic):
    log = begun(f"{topic}?message.max.bytes=5200&queue.buffering.max.messages=2")
    advance(log, 2)
    assert_equal_rows(replica_of(log), log)
    place = open_storage(f"{topic}?queue.buffering.max.kbytes=1")
    with pytest.raises(PublishError, match="Queue full"):  # A publisher tries it again.
        place.write("a", [memoryview(bytes(10_000))])


@pytest.mark.parametrize(("entries", "others"), [(3, 0), (1, 8)], ids=["shorter", "longer"])
def test_a_topic_that_was_created_again(topic, kafka, entries, others):
    log = begun(topic)
    advance(log, entries)
    follower = follow(topic)
    replica = Replica(follower)
    replica.refresh()
    new = ChangeLog(f"{topic}-2")
    new.epoch = 3  # Its run is another one.
    new.train(2)
    new.begin()
    advance(new, others)
    new.storage.refresh()
    follower._storage.refresh()
    longer = new.storage._position > follower._storage._position
    assert longer == bool(others)
    follower._storage._client = TopicClient(parse_address(new.url))
    replica.refresh()
    assert (replica.epoch, replica.steps) == (4, {0: 2 + others})
    assert_equal_rows(replica, new)


def test_a_stream_that_has_begun_is_left_alone(topic):
    log = begun(topic)
    log.publishers = []
    again = Publisher(
        log.stores[0], {"item": 0, "user": 1}, PublishOrder(log.options, log.epoch, log.run, 0, 0), lambda: log.step
    )
    again.start()
    until(lambda: again.status.epoch == -1)
    again.stop(last=True)
    assert "0000000001-increment.json" not in log.names()
    assert begin_epoch(open_storage(topic), BucketMap.even(1), SCHEMA).epoch == 1


# --- outages ------------------------------------------------------------------------------------------------


@pytest.fixture
def outages():
    found = Outages()
    yield found
    found.up()


def impatient(monkeypatch, publisher):
    """Has clients wait for brokers for half a second only. For while these are away: a stall must not be an outage."""
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    publisher._writer._storage._client._producer = None  # Its messages would wait for longer.


def patient(monkeypatch):
    monkeypatch.setattr(client, "ANSWER_SECONDS", 10.0)


def test_brokers_that_are_away_make_rows_older_and_nothing_else(outages, monkeypatch, caplog):
    monkeypatch.setattr("persia.publish.publisher.BACKOFF", persia.publish.publisher.BACKOFF._replace(longest=0.5))
    log = ChangeLog(f"kafka://{outages.bootstrap}/changes")
    log.train(2)
    epoch = begin_epoch(log.storage, BucketMap.even(1), SCHEMA)
    network = StreamWriter(log.storage, 0, epoch.run, NETWORK)
    network.add_part({"weight": np.zeros(1, np.float32)})
    network.commit("network", 0, 0.0, [])
    order = PublishOrder(PublishOptions(log.url, seconds=0.05), 0, epoch.run, 0, 0)
    publisher = Publisher(log.stores[0], {"item": 0, "user": 1}, order, lambda: log.step)
    with caplog.at_level(logging.WARNING, "persia.publish"):
        publisher.start()
        until(lambda: publisher.status.sequence == 0)
        replica = Replica(follow(log.url))
        replica.refresh()
        outages.down()
        impatient(monkeypatch, publisher)
        log.train(3)
        until(lambda: publisher.status.error)
        assert "Cannot" in publisher.status.error
        log.train(3)
        replica.refresh()
        assert f"Cannot read kafka://{outages.bootstrap}/changes" in replica.problem
        assert replica.steps == {0: 2}
        outages.up()
        patient(monkeypatch)
        until(lambda: publisher.status.step == 8 and not publisher.status.error)
    lines = [record.getMessage() for record in caplog.records if record.name == "persia.publish"]
    assert "training continues" in lines[0]
    assert lines[-1].endswith("again.")
    publisher.stop(last=True)
    until(lambda: not (replica.refresh() or replica.problem))
    assert publisher.status.step == 8


def test_a_publisher_that_begins_while_brokers_are_away(outages, monkeypatch):
    monkeypatch.setattr("persia.publish.publisher.BACKOFF", persia.publish.publisher.BACKOFF._replace(longest=0.5))
    log = ChangeLog(f"kafka://{outages.bootstrap}/changes")
    log.train(2)
    outages.down()
    order = PublishOrder(PublishOptions(log.url, seconds=0.05), 0, "f" * 32, 0, 0)
    publisher = Publisher(log.stores[0], {"item": 0, "user": 1}, order, lambda: log.step)
    impatient(monkeypatch, publisher)
    publisher.start()
    until(lambda: publisher.status.error)
    outages.up()
    patient(monkeypatch)
    until(lambda: publisher.status.sequence == 0 and not publisher.status.error)
    publisher.stop(last=True)


@pytest.mark.parametrize("code", [KafkaError._TRANSPORT, KafkaError.LEADER_NOT_AVAILABLE])
def test_events_without_messages_are_no_progress(topic, monkeypatch, code):
    class Flapping:
        """The reader of a partition whose leader comes and goes."""

        calls = 0

        def consume(self, count, seconds):
            self.calls += 1
            assert self.calls < 100
            now[0] += 0.3 * client.ANSWER_SECONDS
            return [self]

        def error(self):
            return KafkaError(code)

        def assign(self, partitions): ...

        def unassign(self): ...

        def poll(self, seconds): ...

    now = [0.0]
    reader = TopicClient(parse_address(topic))
    reader._reader = Flapping()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(PublishError, match="Cannot read"):
        list(reader.messages(0, 0, 1))
    assert reader._reader.calls == 4  # It may be over soon.
