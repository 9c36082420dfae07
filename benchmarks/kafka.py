"""Rows/s of one reader of Kafka, over the same rows in a Parquet file.

    python -m benchmarks 'kafka.*' [--preset smoke|laptop|full] [--json FILE]

Rows are those of `reading.*`, in batches of 4,096. The broker is librdkafka's mock cluster, in a thread of the same
process; as it keeps 5 MiB of a partition and four partitions of a topic, there are several topics. Each round connects
anew, which both sides count. Set KAFKA_BOOTSTRAP to read from brokers of your own.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

import persia
from benchmarks import runner
from benchmarks.reading import SCHEMA, rate, table

ROWS = {"smoke": 5_000, "laptop": 1_200_000, "full": 2_000_000}
ROUNDS = {"smoke": 1, "laptop": 7, "full": 7}
BATCH = 4096
MESSAGE_ROWS = 1024
"""Rows of an Arrow message."""

TOPIC_ROWS = 40_000
"""Rows of a topic: as JSON 12 MB, in four partitions."""


def arrow(rows: pa.Table) -> Iterator[bytes]:
    for batch in rows.to_batches(MESSAGE_ROWS):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        yield sink.getvalue().to_pybytes()


def json(rows: pa.Table) -> Iterator[bytes]:
    return map(msgspec.json.encode, rows.to_pylist())


def msgpack(rows: pa.Table) -> Iterator[bytes]:
    return map(msgspec.msgpack.encode, rows.to_pylist())


def compared(
    name: str, values: Callable[[pa.Table], Iterator[bytes]], preset: str, target: float | None
) -> runner.Measure:
    from confluent_kafka import Producer

    configured = os.environ.get("KAFKA_BOOTSTRAP")
    mock = {} if configured else {"test.mock.num.brokers": 1}
    # Large sets of messages, as of a busy topic: the mock cluster answers with one set of a partition at a time.
    producer = Producer({"bootstrap.servers": configured or "mock", "log_level": 2, "linger.ms": 500, **mock})
    brokers = producer.list_topics(timeout=10).brokers.values()
    bootstrap = configured or ",".join(f"{broker.host}:{broker.port}" for broker in brokers)
    data = table(ROWS[preset])
    topics = []
    for begin in range(0, len(data), TOPIC_ROWS):
        topics.append(f"clicks-{uuid.uuid4().hex}")
        for number, value in enumerate(values(data.slice(begin, TOPIC_ROWS))):
            producer.produce(topics[-1], value=value, partition=number % 4)
            producer.poll(0)
        if producer.flush(60):
            raise RuntimeError("The brokers did not take the rows.")
    reader = persia.data.kafka(topics, SCHEMA, BATCH, bootstrap=bootstrap, values=values.__name__, until="now")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "data.parquet"
        pq.write_table(data, path)
        file = persia.data.parquet(path, SCHEMA, BATCH)
        if sum(map(len, reader)) != len(data):
            raise RuntimeError("Rows are missing: the mock cluster keeps 5 MiB of each partition.")
        return runner.ratio(
            name,
            ours=rate(lambda: sum(map(len, reader))),
            theirs=rate(lambda: sum(map(len, file))),
            of="rows/s",
            rounds=ROUNDS[preset],
            at_least=target,
        )


@runner.measures("kafka.read")
def read_arrow(preset: str) -> runner.Measure:
    """Arrow IPC, 1,024 rows a message."""
    return compared("kafka.read", arrow, preset, 0.5)


@runner.measures("kafka.read_msgpack")
def read_msgpack(preset: str) -> runner.Measure:
    """One row a message."""
    return compared("kafka.read_msgpack", msgpack, preset, None)


@runner.measures("kafka.read_json")
def read_json(preset: str) -> runner.Measure:
    """One row a message."""
    return compared("kafka.read_json", json, preset, None)
