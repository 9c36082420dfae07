"""What the mock cluster cannot do: offsets by time, partitions that are added, deleted topics, other consumers.

Set KAFKA_BOOTSTRAP to run these. They have not been run yet.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime

import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewPartitions

from persia.data.streams import broker
from persia.errors import DataError
from support.kafka import Kafka, clicks, items, until

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif("KAFKA_BOOTSTRAP" not in os.environ, reason="set KAFKA_BOOTSTRAP to a real broker"),
]


@pytest.fixture
def kafka(monkeypatch):
    monkeypatch.setattr(broker, "METADATA_SECONDS", 0.5)
    found = Kafka()
    yield found
    AdminClient({"bootstrap.servers": found.bootstrap}).delete_topics([found.topic])


def test_start_and_until_are_times_of_messages(kafka):
    now = int(time.time() * 1000)
    for number in range(4):
        kafka.write(clicks(range(10 * number, 10 * number + 10)), timestamp=now - (4 - number) * 60_000)

    def ago(seconds: float) -> datetime:
        return datetime.fromtimestamp(now / 1000 - seconds, UTC)

    found = [items(batch) for batch in kafka.reader(start=ago(190), until=ago(70))]
    assert found == [list(range(10, 20)), list(range(20, 30))]


def test_partitions_that_a_broker_adds_are_read(kafka):
    kafka.write(clicks(range(3)))
    stream = kafka.reader(3, until=None, linger=0.1).batches()
    assert items(next(stream)) == [0, 1, 2]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    for done in admin.create_partitions([NewPartitions(kafka.topic, 5)]).values():
        done.result()
    until(lambda: len(kafka.producer.list_topics(kafka.topic, timeout=10).topics[kafka.topic].partitions) == 5)
    kafka.write(clicks(range(10, 13)), 4)
    assert items(next(stream)) == [10, 11, 12]
    stream.close()


def test_a_topic_that_is_deleted_is_an_error(kafka):
    kafka.write(clicks(range(3)))
    stream = kafka.reader(3, until=None, linger=0.1).batches()
    next(stream)
    for done in AdminClient({"bootstrap.servers": kafka.bootstrap}).delete_topics([kafka.topic]).values():
        done.result()
    with pytest.raises(DataError, match=kafka.topic):
        next(stream)


def test_consumers_of_the_group_take_no_partition_away(kafka):
    kafka.write(clicks(range(3)))
    reader = kafka.reader(3, until=None, linger=0.1, group=f"{kafka.topic}-group")
    reader.begin(0, {}, lambda: False)
    stream = reader.batches()
    next(stream)
    other = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": f"{kafka.topic}-group"})
    other.subscribe([kafka.topic])
    until(lambda: other.poll(0.2) is not None or bool(other.assignment()))
    kafka.write(clicks(range(3, 6)))
    assert items(next(stream)) == [3, 4, 5]
    other.close()
    kafka.write(clicks(range(6, 9)))
    assert items(next(stream)) == [6, 7, 8]
    stream.close()
