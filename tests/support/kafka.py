"""A Kafka cluster for tests: that of KAFKA_BOOTSTRAP, else librdkafka's mock, which speaks the protocol over sockets.

The mock keeps 5 MiB of each partition, has four partitions for every topic, and finds no offsets by time.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import confluent_kafka
import msgspec
import numpy as np
import pyarrow as pa
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic

import persia
from persia.batching.batch import Batch

SCHEMA = persia.Schema([persia.IdFeature("item", dim=4)], dense_features=["price"], labels=["click"])


class Kafka:
    """Writes to a topic of its own."""

    def __init__(self, configured: str | None = os.environ.get("KAFKA_BOOTSTRAP")) -> None:
        settings: dict[str, Any] = {"test.mock.num.brokers": 1} if configured is None else {}
        self.producer = Producer(
            {"bootstrap.servers": configured or "mock", **settings}, logger=logging.getLogger("mock")
        )
        brokers = self.producer.list_topics(timeout=10).brokers.values()
        self.bootstrap = configured or ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
        self.topic = f"clicks-{uuid.uuid4().hex[:8]}"
        if configured is not None and configured == os.environ.get("KAFKA_BOOTSTRAP"):  # With as many as the mock has.
            admin = AdminClient({"bootstrap.servers": configured})
            for done in admin.create_topics([NewTopic(self.topic, num_partitions=4)]).values():
                done.result()

    def write(
        self, values: Iterable[bytes | None], partition: int = 0, topic: str | None = None, **options: Any
    ) -> None:
        for value in values:
            self.producer.produce(topic or self.topic, value=value, partition=partition, **options)
        assert self.producer.flush(30) == 0

    def reader(self, batch_size: int = 10, **options: Any) -> Any:
        quick = {"fetch.wait.max.ms": 20}  # The mock answers an empty fetch only then.
        options = {"bootstrap": self.bootstrap, "until": "now", "timeout": 10.0, "config": quick, **options}
        return persia.data.kafka(self.topic, SCHEMA, batch_size, **options)


class Outages:
    """A mock cluster that can be taken down: by the test functions of librdkafka, which Python does not have."""

    def __init__(self) -> None:
        (path,) = (Path(confluent_kafka.__file__).parents[1] / "confluent_kafka.libs").glob("librdkafka*")
        self._library = library = ctypes.CDLL(str(path))
        library.rd_kafka_conf_new.restype = library.rd_kafka_new.restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_new.restype = ctypes.c_void_p
        library.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
        producer = 0
        handle = library.rd_kafka_new(producer, ctypes.c_void_p(library.rd_kafka_conf_new()), None, 0)
        self._cluster = ctypes.c_void_p(library.rd_kafka_mock_cluster_new(ctypes.c_void_p(handle), 1))
        self.bootstrap = library.rd_kafka_mock_cluster_bootstraps(self._cluster).decode()

    def down(self) -> None:
        """Refuses connections."""
        self._library.rd_kafka_mock_broker_set_down(self._cluster, 1)

    def up(self) -> None:
        self._library.rd_kafka_mock_broker_set_up(self._cluster, 1)

    def delete(self, topic: str) -> None:
        self.answer(topic, KafkaError.UNKNOWN_TOPIC_OR_PART)

    def answer(self, topic: str, code: int) -> None:
        """Gives an error to whoever asks for the partitions of a topic; NO_ERROR ends that."""
        self._library.rd_kafka_mock_topic_set_error(self._cluster, topic.encode(), code)


def row(item: int) -> dict[str, Any]:
    return {"item": item, "price": item / 4, "click": item % 2}


def clicks(items: Iterable[int]) -> list[bytes]:
    return [json.dumps(row(item)).encode() for item in items]


def packed(items: Iterable[int]) -> list[bytes]:
    return [msgspec.msgpack.encode(row(item)) for item in items]


def arrow(items: Iterable[int], rows: int) -> list[bytes]:
    table = pa.Table.from_pylist([row(item) for item in items])
    values = []
    for batch in table.to_batches(rows):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        values.append(sink.getvalue().to_pybytes())
    return values


def items(batch: Batch) -> list[int]:
    return [int(price * 4) for price in np.asarray(batch.dense)[:, 0]]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
