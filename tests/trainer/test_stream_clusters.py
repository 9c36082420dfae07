"""Training on a stream with several NN workers and data loaders: each message once, through stops, ends and deaths."""

from __future__ import annotations

import json
import threading
import time

import numpy as np
import pytest
import torch
from confluent_kafka import KafkaException

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import DataError
from persia.modes import Async, Gba, Hybrid, Sync
from persia.testing import Threads
from persia.trainer.options import TrainerOptions
from support.kafka import SCHEMA, Kafka, Outages, clicks, row, until

pytestmark = pytest.mark.processes

MODES = [Sync(), Hybrid(2, warmup=0), Gba(20), Async()]
BY_NAME = pytest.mark.parametrize("mode", MODES, ids=lambda m: type(m).__name__)


@pytest.fixture
def kafka():
    return Kafka()


def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)


def model():
    torch.manual_seed(0)
    return persia.nn.models.DeepFM(SCHEMA, hidden=(8,))


def trainer(member, mode, **options):
    return persia.Trainer(
        model(),
        SCHEMA,
        optimizer=optimizer,
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=mode,
        cluster=member,
        options=TrainerOptions(progress=False, **{"timeout": 30.0, **options}),
    )


def times_trained(one, messages):
    """Returns how often each message was trained, by the updates of its row: each has an id of its own."""
    rows = one.embeddings.rows("item", one.embeddings.row_ids("item", np.arange(messages)), state=True)
    return rows.state.update_count


@BY_NAME
def test_each_message_is_trained_once_by_several_processes(kafka, mode, tmp_path):
    for partition in range(3):  # Partition 3 is idle.
        kafka.write(clicks(range(partition * 100, partition * 100 + 45)), partition)
    cluster = Threads(2, data_loaders=2)

    def work(member):
        one = trainer(member, mode, checkpoint_dir=str(tmp_path))
        reader = kafka.reader(10)
        first = one.fit(reader, max_steps=3)
        offsets = one.state.offsets
        rest = one.fit(reader)
        if member.rank == 0:
            ids = [*range(45), *range(100, 145), *range(200, 245)]
            assert times_trained(one, 245)[ids].tolist() == [1] * 135
        return first.rows, rest.rows, offsets, one.state.offsets, one.finished

    results = cluster.run(work)
    assert sum(results[0][:2]) == 135
    assert results[0][3] == results[1][3] == {kafka.topic: {0: 45, 1: 45, 2: 45, 3: 0}}
    assert sum(results[0][2][kafka.topic].values()) == results[0][0]
    assert results[0][4]
    assert CheckpointReader(str(tmp_path)).state("training")["offsets"] == results[0][3]


@BY_NAME
def test_stop_ends_an_idle_stream_at_the_same_batch_everywhere(kafka, mode, tmp_path):
    kafka.write(clicks(range(50)))
    cluster = Threads(2, data_loaders=2)
    trainers = {}

    def work(member):
        one = trainers[member.rank] = trainer(member, mode, checkpoint_dir=str(tmp_path))
        return one.fit(kafka.reader(10, until=None, linger=0.1))

    def stop():
        try:
            until(lambda: len(trainers) == 2 and sum(t.monitor._rows for t in trainers.values()) >= 40, 60)
        finally:  # Else training never ends.
            for one in trainers.values():
                one.stop()

    stopper = threading.Thread(target=stop)
    stopper.start()
    results = cluster.run(work)
    stopper.join()
    offsets = trainers[0].state.offsets[kafka.topic][0]
    assert results[0].rows == offsets == trainers[1].state.offsets[kafka.topic][0] <= 50
    assert not trainers[0].finished
    kafka.write(clicks(range(50, 63)), 1)

    def resume(member):
        one = persia.Trainer.resume(str(tmp_path), model(), optimizer=optimizer, cluster=member)
        return one.fit(kafka.reader(10)).rows, one.state.offsets

    rows, offsets_at_end = Threads(3).run(resume)[0]
    assert rows == 63 - offsets
    assert offsets_at_end == {kafka.topic: {0: 50, 1: 13, 2: 0, 3: 0}}
    assert list_checkpoints(str(tmp_path))


@BY_NAME
def test_nothing_is_lost_or_repeated_when_data_loaders_die(kafka, mode):
    for partition in range(4):
        kafka.write(clicks(range(partition * 150, (partition + 1) * 150)), partition)
    cluster = Threads(2, data_loaders=3)
    deaths = []

    def work(member):
        one = trainer(member, mode)
        if member.rank == 0:
            one.model.register_forward_pre_hook(lambda *_: kill())
        result = one.fit(kafka.reader(10))
        return result.rows, times_trained(one, 600).tolist(), one.state.offsets

    def kill():
        if len(deaths) < 12:
            deaths.append(len(deaths) % 3)
            cluster.stream.restart(deaths[-1])

    rows, times, offsets = cluster.run(work)[0]
    assert (rows, set(times)) == (600, {1})
    assert offsets == {kafka.topic: dict.fromkeys(range(4), 150)}
    assert deaths  # One for each batch of NN worker 0, of which it has any number in asynchronous modes.


@pytest.mark.parametrize("poison", [b"poison", json.dumps({**row(1), "at": 2**63}).encode()])
def test_unreadable_data_in_a_data_loader_end_training(kafka, poison):
    kafka.write(clicks(range(40)))
    kafka.write([poison], 1)
    with pytest.raises(DataError, match=r"Data loader .: .*partition 1 of topic .* cannot be converted"):
        Threads(2, data_loaders=2).run(lambda member: trainer(member, Sync()).fit(kafka.reader(10, event_time="at")))


@pytest.mark.parametrize("mode", [Sync(), Gba(20)], ids=lambda m: type(m).__name__)
def test_an_unexpected_exception_in_a_data_loader_ends_training(kafka, mode, monkeypatch):
    kafka.write(clicks(range(40)))
    monkeypatch.setattr("persia.data.streams.message_rows.MessageConverter.convert", lambda *_: 1 / 0)
    with pytest.raises(DataError, match=r"loader .: ZeroDivisionError while waiting for messages: division by zero"):
        Threads(2, data_loaders=2).run(lambda member: trainer(member, mode).fit(kafka.reader(10)))


@pytest.mark.parametrize("mode", [Sync(), Gba(20)], ids=lambda m: type(m).__name__)
def test_a_stream_may_be_idle_for_longer_than_the_timeout(kafka, mode):
    """With several NN workers none waits for another that has no data, and a step waits for all its batches."""
    kafka.write(clicks(range(30)))
    cluster = Threads(2, timeout=4.0)

    trainers = {}

    def work(member):
        one = trainers[member.rank] = trainer(member, mode)
        return one.fit(kafka.reader(10, until=None, linger=0.1), max_steps=2).rows

    def more():
        try:
            until(lambda: len(trainers) == 2 and sum(t.monitor._rows for t in trainers.values()) >= 20, 60)
            time.sleep(5.0)  # Longer than the timeout.
        finally:  # Else training never ends.
            kafka.write(clicks(range(30, 60)))

    writer = threading.Thread(target=more)
    writer.start()
    rows = cluster.run(work)[0]
    writer.join()
    assert rows == 40


CALL_SECONDS = 5.0
AWAY_SECONDS = 17.0


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Sync(), Gba(20)], ids=lambda m: type(m).__name__)
def test_brokers_may_be_away_for_longer_than_any_call_may_take(mode):
    outages = Outages()
    kafka = Kafka(outages.bootstrap)
    cluster = Threads(2, timeout=CALL_SECONDS, data_loaders=2)
    trainers, unreachable = {}, []

    def written(first):
        for partition in range(3):  # Partition 3 is idle.
            begin = first + 60 * partition
            kafka.write(clicks(range(begin, begin + 60)), partition)

    def trained():
        return sum(one.monitor._rows for one in trainers.values())

    def work(member):
        one = trainers[member.rank] = trainer(member, mode, timeout=CALL_SECONDS)
        one.fit(kafka.reader(10, until=None, linger=0.1, timeout=600.0))
        return times_trained(one, 360).tolist(), one.state.offsets

    def away():
        try:
            until(lambda: trained() >= 160, 60)
            outages.down()
            time.sleep(AWAY_SECONDS)
            try:
                kafka.producer.list_topics(timeout=1)
            except KafkaException:
                unreachable.append(True)
            outages.up()
            written(180)
            until(lambda: trained() >= 350 and sum(cluster.stream.log._next.values()) == 360, 60)
            # One batch may wait for another.
            time.sleep(1.0)
        finally:  # Else training never ends.
            outages.up()
            for one in trainers.values():
                one.stop()

    written(0)
    outage = threading.Thread(target=away)
    outage.start()
    results = cluster.run(work)
    outage.join()
    assert unreachable
    for times, offsets in results:
        assert times == [1] * 360
        assert offsets == {kafka.topic: {0: 120, 1: 120, 2: 120, 3: 0}}
