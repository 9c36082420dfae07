"""Training on a stream: its offsets in checkpoints, going on after an end, waiting, stopping, commits to the group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from confluent_kafka import Consumer, TopicPartition

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import CheckpointError, ConfigError
from persia.modes import Gba, Hybrid, Sync
from persia.services import Connection
from persia.trainer.fit_checks import check_stream
from persia.trainer.options import TrainerOptions
from support import stream_run
from support.kafka import SCHEMA, Kafka, clicks, until

pytestmark = pytest.mark.processes

MODES = [Sync(), Hybrid(2, warmup=0), Gba(20)]


@pytest.fixture
def kafka():
    return Kafka()


def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)


def model():
    torch.manual_seed(0)
    return persia.nn.models.DeepFM(SCHEMA, hidden=(8,))


def trainer(mode=MODES[0], **options):
    return persia.Trainer(
        model(),
        SCHEMA,
        optimizer=optimizer,
        embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=mode,
        options=TrainerOptions(progress=False, **options),
    )


def parameters(one):
    return torch.cat([p.detach().ravel() for p in one.model.parameters()])


def test_a_resumed_run_trains_what_an_uninterrupted_one_does(kafka, tmp_path):
    kafka.write(clicks(range(60)))
    whole = trainer()
    whole.fit(kafka.reader(5))
    assert whole.global_step == 12
    first = trainer(checkpoint_dir=str(tmp_path))
    first.fit(kafka.reader(5), max_steps=5)
    assert CheckpointReader(str(tmp_path)).state("training")["offsets"] == {kafka.topic: {0: 25, 1: 0, 2: 0, 3: 0}}
    resumed = persia.Trainer.resume(str(tmp_path), model(), optimizer=optimizer)
    # A start is for partitions without an offset.
    result = resumed.fit(kafka.reader(5, start="latest"))
    assert (result.rows, resumed.global_step) == (35, 12)
    assert torch.equal(parameters(resumed), parameters(whole))


def test_evaluations_do_not_change_what_a_stream_trains(kafka, tmp_path):
    kafka.write(clicks(range(60)))
    held_out = list(kafka.reader(5))[:3]
    whole = trainer()
    whole.fit(kafka.reader(5))
    steered = trainer(eval_every_steps=3, patience=1, checkpoint_dir=str(tmp_path), keep_best="log_loss")
    result = steered.fit(kafka.reader(5), held_out)
    assert (result.global_step, result.stopped_early) == (12, "")
    assert result.best_step in (3, 6, 9, 12)
    assert steered.state.offsets == whole.state.offsets
    assert torch.equal(parameters(steered), parameters(whole))


@pytest.mark.slow
def test_a_repeatedly_killed_run_ends_as_an_undisturbed_one(kafka, tmp_path):
    kafka.write(clicks(range(400)))
    whole = stream_run.trainer(str(tmp_path / "whole"))
    whole.fit(stream_run.reader(kafka.bootstrap, kafka.topic))
    killed = str(tmp_path / "killed")
    words = [sys.executable, "-m", "support.stream_run", kafka.bootstrap, kafka.topic, killed]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    steps = [0]
    while steps[-1] < 50:
        with subprocess.Popen(words, env=environment) as process:
            try:
                until(lambda: steps[-1] + 15 < last_step(killed), 60)
            finally:  # It waits for that.
                process.send_signal(signal.SIGKILL)
        steps.append(last_step(killed))
    resumed = stream_run.trainer(killed)
    assert resumed.global_step == steps[-1] < 80
    resumed.fit(stream_run.reader(kafka.bootstrap, kafka.topic))
    assert resumed.state.offsets == whole.state.offsets
    assert resumed.global_step == whole.global_step == 80
    assert torch.equal(parameters(resumed), parameters(whole))
    ids = resumed.embeddings.row_ids("item", np.arange(400))
    one, other = (each.embeddings.rows("item", ids) for each in (resumed, whole))
    assert one.found.all()
    assert np.array_equal(one.values, other.values)


def last_step(directory):
    """The step that a resumed run has: a kill may come when a later checkpoint is whole, and not yet the latest."""
    try:
        return CheckpointReader(directory).manifest.global_step
    except CheckpointError:
        return 0


@pytest.mark.parametrize("mode", MODES, ids=lambda m: type(m).__name__)
def test_messages_are_trained_once_over_calls_that_stop_anywhere(kafka, mode, tmp_path):
    for partition in range(3):
        kafka.write(clicks(range(partition * 100, partition * 100 + 40)), partition)
    one = trainer(mode, checkpoint_dir=str(tmp_path))
    rows = sum(one.fit(kafka.reader(10), max_steps=2).rows for _ in range(2))
    two = persia.Trainer.resume(str(tmp_path), model(), optimizer=optimizer)
    result = two.fit(kafka.reader(10))
    assert rows + result.rows == 120
    assert two.finished
    kafka.write(clicks(range(7)), 3)
    assert two.fit(kafka.reader(10)).rows == 7
    assert two.state.offsets == {kafka.topic: {0: 40, 1: 40, 2: 40, 3: 7}}


def test_a_call_after_an_end_goes_on_also_in_another_process(kafka, tmp_path):
    kafka.write(clicks(range(10)))
    trainer(checkpoint_dir=str(tmp_path)).fit(kafka.reader(5))
    kafka.write(clicks(range(10, 17)))
    resumed = persia.Trainer.resume(str(tmp_path), model(), optimizer=optimizer)
    assert resumed.fit(kafka.reader(5)).rows == 7
    result = resumed.fit(kafka.reader(5))
    assert (result.rows, resumed.finished) == (0, True)
    assert "at step 4 the stream has nothing behind its offsets" in result.nothing_left


def once_idle(one, rows, act):
    """Acts when so many rows are trained, and training waits for more."""
    try:
        until(lambda: one.monitor._rows == rows, 60)
    except BaseException:
        one.stop()  # Else training never ends.
        raise
    time.sleep(0.5)  # Nothing shows that it waits; it does by now, but for a stall.
    act()


@pytest.mark.parametrize("mode", MODES, ids=lambda m: type(m).__name__)
def test_stop_ends_a_stream_that_is_idle(kafka, mode, tmp_path):
    kafka.write(clicks(range(20)))
    one = trainer(mode, checkpoint_dir=str(tmp_path))
    stopper = threading.Thread(target=once_idle, args=(one, 20, one.stop))
    stopper.start()
    result = one.fit(kafka.reader(10, until=None))
    stopper.join()
    assert result.rows == 20
    assert not one.finished
    assert list_checkpoints(str(tmp_path))[-1].step == one.global_step
    kafka.write(clicks(range(20, 30)))
    assert one.fit(kafka.reader(10)).rows == 10


def test_sigterm_saves_while_a_stream_is_idle(kafka, tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        kafka.write(clicks(range(20)))
        one = trainer(checkpoint_dir=str(tmp_path))
        terminate = threading.Thread(target=once_idle, args=(one, 20, lambda: os.kill(os.getpid(), signal.SIGTERM)))
        with pytest.raises(SystemExit):
            terminate.start()
            one.fit(kafka.reader(10, until=None))
        terminate.join()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert CheckpointReader(str(tmp_path)).state("training")["offsets"][kafka.topic][0] == 20


def test_a_stream_may_be_idle_for_longer_than_the_timeout(kafka):
    kafka.write(clicks(range(10)))
    one = trainer(timeout=4.0)

    def write_more():
        time.sleep(5.0)
        kafka.write(clicks(range(10, 20)))

    writer = threading.Thread(target=once_idle, args=(one, 10, write_more))
    writer.start()
    assert one.fit(kafka.reader(10, until=None), max_steps=2).rows == 20
    writer.join()


def test_offsets_are_committed_once_their_checkpoint_is_complete(kafka, tmp_path, monkeypatch):
    kafka.write(clicks(range(40)))
    one = trainer(checkpoint_dir=str(tmp_path), checkpoint_every_steps=2)
    reader = kafka.reader(10, group="lag")
    seen = []
    commit = reader.commit

    def committing(offsets):
        seen.append((list_checkpoints(str(tmp_path))[-1].step, offsets[kafka.topic][0]))
        commit(offsets)

    monkeypatch.setattr(reader, "commit", committing)
    one.fit(reader)
    assert {step * 10 == offset for step, offset in seen} == {True}
    assert seen[-1] == (4, 40)
    consumer = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "lag"})
    (found,) = consumer.committed([TopicPartition(kafka.topic, 0)], timeout=10)
    consumer.close()
    assert found.offset == 40


def test_records_do_not_grow_with_a_run(kafka):
    kafka.write(clicks(range(100)))
    one = trainer()
    reader = kafka.reader(10)
    one.fit(reader, max_steps=6)
    with pytest.raises(persia.errors.DataError, match="Batch 5 of the stream is not recorded; batches 6 to"):
        reader.offsets(5)


def test_metrics_of_the_stream_are_those_of_the_process(kafka):
    kafka.write(clicks(range(30)))
    one = trainer()
    one.fit(kafka.reader(10))
    found = {m.name: m.value for m in one.monitor.observe().metrics if m.labels.get("partition", "0") == "0"}
    assert (found["stream_rows"], found["stream_poison"], found["stream_lag"]) == (30, 0, 0)


def test_several_passes_over_a_stream_are_refused(kafka):
    with pytest.raises(ConfigError, match="epochs = 2, and train_data is a stream"):
        trainer().fit(kafka.reader(10), epochs=2)


def test_a_stream_that_cannot_be_shared_is_refused_when_needed(kafka):
    class Alone:
        interrupted = False
        batches = begin = offsets = forget = commit = observe = print

    one, two = Connection(None, []), Connection(None, [], nn_workers=2)
    for connection, elsewhere in ((two, False), (one, True)):
        with pytest.raises(ConfigError, match="train_data is a Alone, a stream that only a single NN worker can read"):
            check_stream(Alone(), 1, connection, in_other_processes=elsewhere)
        check_stream([], 1, connection, in_other_processes=elsewhere)
    check_stream(Alone(), 1, one, in_other_processes=False)
    check_stream(kafka.reader(10), 1, one, in_other_processes=True)
    with pytest.raises(ConfigError, match="Call `fit` in the program that made the cluster"):
        check_stream(kafka.reader(10), 1, two, in_other_processes=False)
    check_stream(kafka.reader(10), 1, two._replace(stream=lambda data: None), in_other_processes=False)
