"""Rules of features are fitted to topics: the values of files, which messages are read, and that no trace is left."""

from __future__ import annotations

import itertools
import json
import logging
import threading

import numpy as np
import pytest
from confluent_kafka import Consumer, TopicPartition

import persia
from persia import Buckets, DenseFeature, IdFeature, Schema
from persia.data import fit
from persia.data.streams import first_messages
from persia.data.streams.broker import Broker
from persia.errors import ConfigError, DataError, DeadlineError
from support.kafka import Kafka, arrow, clicks, items, packed, row, until

pytestmark = pytest.mark.processes

SCHEMA = Schema(
    [IdFeature("item", dim=4), IdFeature("band", dim=4, bucketize=Buckets("price", quantiles=8))],
    [DenseFeature("price", fill="mean", log=True, scale="standard")],
    labels=["click"],
)
MINMAX = Schema([IdFeature("item", dim=4)], [DenseFeature("price", scale="minmax")], labels=["click"])


@pytest.fixture
def kafka():
    return Kafka()


def reader(kafka, schema=SCHEMA, **options):
    quick = {"fetch.wait.max.ms": 20}
    options = {"bootstrap": kafka.bootstrap, "timeout": 10.0, "config": quick, **options}
    return persia.data.kafka(kafka.topic, schema, 10, **options)


def span(schema):
    """Returns the lowest and the highest item of a fit of MINMAX, and the number of rows."""
    fitted = schema.dense[0].fitted
    return round(4 * fitted.centre), round(4 * (fitted.centre + fitted.width)), fitted.rows


def of_file(folder, schema, rows):
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return persia.fit_features(schema, persia.data.jsonl(path, schema))


@pytest.mark.parametrize(
    ("values", "written"), [("json", clicks), ("msgpack", packed), ("arrow", lambda x: arrow(x, 50))]
)
def test_values_are_those_of_a_file_with_the_same_rows(kafka, tmp_path, monkeypatch, values, written):
    monkeypatch.setattr(fit, "BLOCK_VALUES", 64)
    monkeypatch.setattr(first_messages, "TURN_ROWS", 100)
    kafka.write(written(range(250)), 0)
    kafka.write(written(range(1000, 1120)), 2)
    order = [*range(100), *range(1000, 1100), *range(100, 200), *range(1100, 1120), *range(200, 250)]
    fitted = persia.fit_features(SCHEMA, reader(kafka, values=values))
    assert fitted == of_file(tmp_path, SCHEMA, [row(item) for item in order])
    assert fitted.dense[0].fitted.rows == 370


def test_training_after_the_fit_reads_all_messages(kafka):
    kafka.write(clicks(range(40)), 0)
    kafka.write(clicks(range(40, 65)), 1)
    stream = reader(kafka, until="now", group="monitored")
    fitted = persia.fit_features(SCHEMA, stream, rows=30)
    assert stream.offsets(0) == {}
    assert stream.observe()[0].value == 0
    watching = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "monitored"})
    (position,) = watching.committed([TopicPartition(kafka.topic, 0)], timeout=10)
    watching.close()
    assert position.offset < 0
    batches = list(stream.with_schema(fitted))
    assert sum(map(len, batches)) == 65


def test_a_fit_does_not_disturb_a_stream_that_is_being_read(kafka):
    kafka.write(clicks(range(40)))
    plain = Schema([IdFeature("item", dim=4)], ["price"], labels=["click"])
    stream = reader(kafka, plain, until="now")
    stream.begin(0, {}, lambda: False)
    batches = stream.batches()
    assert items(next(batches)) == list(range(10))
    assert span(persia.fit_features(MINMAX, stream.with_schema(MINMAX))) == (0, 39, 40)
    assert list(itertools.chain(*map(items, batches))) == list(range(10, 40))


def test_the_first_rows_come_from_all_partitions(kafka):
    kafka.write(clicks(range(40)), 0)
    kafka.write(clicks(range(100, 140)), 3)
    assert span(persia.fit_features(MINMAX, reader(kafka, MINMAX), rows=20)) == (0, 109, 20)


def test_a_fit_begins_where_training_would(kafka):
    kafka.write(clicks(range(40)))
    stream = reader(kafka, MINMAX)
    stream.begin(7, {kafka.topic: {0: 15}}, lambda: False)
    assert span(persia.fit_features(MINMAX, stream)) == (15, 39, 25)
    assert stream.offsets(7) == {kafka.topic: {0: 15}}


def test_messages_that_arrive_during_the_fit_are_not_read(kafka, monkeypatch):
    kafka.write(clicks(range(10)))
    assign = Broker.assign

    def assign_late(self, offsets):
        kafka.write(clicks(range(90, 95)))
        assign(self, offsets)

    monkeypatch.setattr(Broker, "assign", assign_late)
    assert span(persia.fit_features(MINMAX, reader(kafka, MINMAX))) == (0, 9, 10)


def test_more_rows_are_awaited_and_fewer_are_told(kafka, caplog):
    kafka.write(clicks(range(10)))
    with caplog.at_level(logging.WARNING):
        assert span(persia.fit_features(MINMAX, reader(kafka, MINMAX, timeout=2.0), rows=11)) == (0, 9, 10)
    assert f"for 1 more rows of topic '{kafka.topic}'" in caplog.text
    assert f"fitted to 10 rows, not 11: topic '{kafka.topic}' has no more" in caplog.text
    caplog.clear()
    found = []
    fitting = threading.Thread(
        target=lambda: found.append(persia.fit_features(MINMAX, reader(kafka, MINMAX, timeout=60.0), rows=15))
    )
    fitting.start()
    until(lambda: "Waiting up to" in caplog.text)
    kafka.write(clicks(range(100, 120)), 1)
    fitting.join(20)
    assert span(found[0]) == (0, 104, 15)
    assert "fitted to" not in caplog.text


def test_a_bounded_stream_is_not_waited_for(kafka, caplog):
    kafka.write(clicks(range(10)))
    assert span(persia.fit_features(MINMAX, reader(kafka, MINMAX, until="now", timeout=600.0), rows=15)) == (0, 9, 10)
    assert "Waiting" not in caplog.text
    assert "fitted to 10 rows, not 15" in caplog.text


@pytest.mark.parametrize(("rows", "bound"), [(None, None), (5, None), (5, "now")])
def test_no_messages_are_an_error_that_says_what_to_do(kafka, rows, bound):
    kafka.write(clicks(range(10)))
    stream = reader(kafka, start="latest", until=bound, timeout=1.0)
    with pytest.raises(DataError, match=rf"topic '{kafka.topic}' has no messages to fit .*start=\"earliest\""):
        persia.fit_features(SCHEMA, stream, rows=rows)


def test_a_topic_without_its_column_has_no_values(kafka):
    kafka.write([json.dumps({"item": 1, "click": 0}).encode()] * 5)
    with pytest.raises(DataError, match="'price' has no values in the rows that were read"):
        persia.fit_features(SCHEMA, reader(kafka))


def test_poison_is_named_or_skipped(kafka):
    kafka.write([*clicks(range(5)), b"{", b'{"item": 1, "price": "much"}', *clicks(range(5, 9))])
    with pytest.raises(DataError, match=f"Offset 5 of partition 0 of topic '{kafka.topic}'"):
        persia.fit_features(MINMAX, reader(kafka, MINMAX))
    stream = reader(kafka, MINMAX, poison="skip", dead_letters=f"{kafka.topic}-dead")
    assert span(persia.fit_features(MINMAX, stream)) == (0, 8, 9)
    assert f"{kafka.topic}-dead" not in kafka.producer.list_topics(timeout=10).topics
    bands = Schema([IdFeature("band", dim=4, bucketize=Buckets("price", quantiles=2))], labels=["click"])
    stream = reader(kafka, bands, poison="skip")
    assert persia.fit_features(bands, stream).id_features[0].bucketize.fitted == (1.0,)


def test_late_rows_are_left_out_as_in_training(kafka):
    times = [100, 101, 50, 102, 103]
    kafka.write([json.dumps(row(i) | {"at": at}).encode() for i, at in enumerate(times)])
    stream = reader(kafka, MINMAX, event_time="at", allowed_lateness=10)
    assert persia.fit_features(MINMAX, stream).dense[0].fitted.rows == 4


def test_values_of_several_types_are_read(kafka):
    prices = [1.5, "2.5", None, 3, "4"]
    kafka.write([json.dumps({"item": i, "price": price, "click": 1}).encode() for i, price in enumerate(prices)])
    fitted = persia.fit_features(SCHEMA, reader(kafka)).dense[0].fitted
    assert fitted.rows == 5
    assert fitted.mean == 2.75


def test_amounts_in_messages(kafka):
    prices = ["$1,000", 4, "$7.50", "?"]
    kafka.write([json.dumps({"item": i, "price": price, "click": 1}).encode() for i, price in enumerate(prices)])
    amounts = {"units": {"price": "$"}, "thousands": ",", "null_values": ["?"], "fill": {"price": 0}}
    stream = reader(kafka, MINMAX, until="now", **amounts)
    fitted = persia.fit_features(MINMAX, stream)
    assert (fitted.dense[0].fitted.centre, fitted.dense[0].fitted.width) == (0, 1000)
    (batch,) = stream.with_schema(fitted)
    assert batch.dense[:, 0].tolist() == [1, np.float32(0.004), np.float32(0.0075), 0]


def test_negatives_of_a_topic(kafka):
    kafka.write([json.dumps(row(item) | {"click": 1}).encode() for item in range(40)])
    stream = persia.data.negatives(reader(kafka, MINMAX, until="now"), ["item"], 1)
    fitted = persia.fit_features(MINMAX, stream)
    assert span(fitted) == (0, 39, 40)
    assert sum(map(len, stream.with_schema(fitted))) > 40
    joined = persia.data.join(
        reader(kafka, MINMAX, event_time="kafka.timestamp"),
        persia.data.kafka("clicks", Schema([]), bootstrap=kafka.bootstrap, event_time="kafka.timestamp"),
        on="item",
        window=1,
    )
    with pytest.raises(ConfigError, match="JoinedStream gives batches, but no columns"):
        persia.fit_features(MINMAX, joined)


def test_an_unreachable_broker_is_named(monkeypatch):
    monkeypatch.setattr("persia.data.streams.broker.PROBE_SECONDS", 0.2)
    stream = persia.data.kafka("clicks", SCHEMA, bootstrap="127.0.0.1:9", timeout=1.0)
    with pytest.raises(DeadlineError, match=r"Kafka at 127.0.0.1:9 did not give"):
        persia.fit_features(SCHEMA, stream, rows=5)
