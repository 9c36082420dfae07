"""A training run publishes: readers have its rows and its network, of a present that was not undone."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest
from test_resume import adam, model, reader, schema_of

import persia
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError, ConfigError
from persia.modes import Gba, Hybrid, Sync
from persia.optim import Adagrad
from persia.publish import PublishOptions, Replica, follow
from persia.publish.publisher import Publisher
from persia.trainer.run_publishing import Publishing
from support.change_log import unwritable
from support.several_ps import Several


def trainer(url, *, mode=None, cluster=None, seconds=0.05, **options):
    schema = schema_of()
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode or Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(str(url), seconds=seconds), **options),
    )


def replica_of(url):
    found = Replica(follow(str(url)))
    found.refresh()
    assert not found.problem
    return found


def assert_published(replica, run):
    assert set(replica.steps.values()) == {run.global_step}
    assert replica.network.step == run.global_step
    for name, tensor in run.model.state_dict().items():
        np.testing.assert_array_equal(replica.network.tensors[name].torch().numpy(), tensor.numpy())
    trained: dict[str, dict[int, bytes]] = {}
    for server in run.embeddings.connection.servers:
        for chunk in server.export_rows():
            ids, rows = chunk.arrays["ids"].tolist(), chunk.arrays["embeddings"]
            trained.setdefault(chunk.table, {}).update((id_, row.tobytes()) for id_, row in zip(ids, rows, strict=True))
    assert trained == {name: {i: row.tobytes() for i, row in replica.rows(name).items()} for name in trained}


@pytest.mark.parametrize(("mode", "servers"), [(Sync(), 1), (Sync(), 2), (Hybrid(4, warmup=0), 2), (Gba(400), 1)])
def test_a_reader_has_what_training_has(mode, servers, tmp_path):
    run = trainer(tmp_path / "log", mode=mode, cluster=Several(servers) if servers > 1 else None)
    run.fit(reader(), max_steps=20)
    assert_published(replica_of(tmp_path / "log"), run)


def test_each_call_of_fit_is_an_epoch_and_older_ones_are_removed(tmp_path):
    url = tmp_path / "log"
    run = trainer(url)
    run.fit(reader(), max_steps=3)
    replica = replica_of(url)
    run.save(tmp_path / "saved")
    run.fit(reader(), max_steps=3)
    assert sorted(os.listdir(url)) == ["epoch-0000000001"]
    run = trainer(url)
    run.load(str(tmp_path / "saved"))  # Training goes back: what came after is gone.
    run.fit(reader(), max_steps=1)
    replica.refresh()
    assert (replica.epoch, replica.network.step) == (2, 4)
    assert_published(replica, run)


def test_a_ps_whose_rows_go_back_begins_an_epoch(tmp_path):
    url = tmp_path / "log"
    run = trainer(url, cluster=Several(2))
    data = list(reader())
    server = run.embeddings.connection.servers[1]

    def batches():
        for number, batch in enumerate(data):
            yield batch
            if number == 5:
                deadline = 200
                while replica.epoch < 0 and (deadline := deadline - 1):
                    replica.refresh()
                    time.sleep(0.05)
                server._publishing.go_back()

    replica = Replica(follow(str(url)))
    run.fit(batches())
    replica.refresh()
    assert replica.epoch == 1
    assert_published(replica, run)


def test_a_place_that_cannot_be_written_does_not_end_training(tmp_path, monkeypatch, caplog):
    def failing(self, *args):
        raise CheckpointError("cannot write") from OSError("no space")

    run = trainer(tmp_path / "log")
    run.fit(reader(), max_steps=1)  # A place that cannot be written from the start is found before the first step.
    monkeypatch.setattr(Storage, "write", failing)
    with caplog.at_level(logging.WARNING, "persia.publish"):
        result = run.fit(reader(), max_steps=20)
    assert result.steps == 19
    lines = [record.getMessage() for record in caplog.records]
    assert sum("Cannot publish the network" in line for line in lines) == 1
    found = {figure.name: figure.value for figure in run.monitor.observe().metrics}
    assert found["nn_publish_failing"] == 1


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def batches_before(url, call):
    """Yields batches, calls a function once an epoch has begun, and yields the last ones."""
    data = list(reader())[:8]
    yield from data[:4]
    replica = Replica(follow(str(url)))
    until(lambda: replica.refresh() or replica.epoch == 0)
    call()
    yield from data[4:]


@pytest.mark.parametrize("what", ["", "network"])
def test_the_last_rows_and_network_are_retried(tmp_path, monkeypatch, what):
    monkeypatch.setattr("persia.publish.publisher.LAST_RETRY_SECONDS", 0.05)
    end, url = Publishing.end, tmp_path / "log"
    run = trainer(url)
    with ExitStack() as broken:
        repair = threading.Timer(0.3, broken.close)  # From the end of training on, for several attempts.

        def ending(publishing, **how):
            repair.start()
            end(publishing, **how)

        def fail():
            broken.enter_context(unwritable(url / "epoch-0000000000" / what))
            monkeypatch.setattr(Publishing, "end", ending)

        run.fit(batches_before(url, fail))
        repair.join()
    assert_published(replica_of(url), run)


def test_without_the_last_rows_the_last_network_is_not_published(tmp_path, monkeypatch, caplog):
    """A server would wait for these rows, and not say so."""
    end = Publisher._end_thread

    def hurried(publisher, seconds, *, last=False):
        """PS 1 has a moment, once it has failed; PS 0 has as long as ever."""
        if last and publisher._order.server == 1:
            publisher._stop.set()
            until(lambda: publisher.status.error)
            seconds = 0.1
        end(publisher, seconds, last=last)

    monkeypatch.setattr(Publisher, "_end_thread", hurried)
    url = tmp_path / "log"
    run = trainer(url, cluster=Several(2), seconds=3600.0)
    rows = url / "epoch-0000000000" / "rows-1"
    with ExitStack() as broken, caplog.at_level(logging.WARNING, "persia.publish"):
        run.fit(batches_before(url, lambda: broken.enter_context(unwritable(rows))))
    said = caplog.records[-1].getMessage()
    assert said.startswith(f"The last changes are not published to {url}: PS 1 (")
    assert "Not a directory" in said
    assert f"so the network of step {run.global_step} is not published" in said
    assert sum("PS 1 could not publish its last rows" in record.getMessage() for record in caplog.records) == 1
    replica = replica_of(url)
    assert replica.steps[0] == run.global_step
    assert replica.steps[1] < run.global_step
    assert replica.network.step < run.global_step
    found = {figure.name: figure.value for figure in run.monitor.observe().metrics}
    assert found["nn_publish_failing"] == 1


def test_a_place_that_hangs_at_the_end_is_named(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("persia.trainer.run_publishing.LAST_SECONDS", 0.5)
    monkeypatch.setattr("persia.trainer.run_publishing.RETRY_SECONDS", 0.0)
    url = tmp_path / "log"
    pipe = url / "epoch-0000000000" / "network" / "0000000001.00000.safetensors"
    with caplog.at_level(logging.WARNING, "persia.publish"):
        # Opening the pipe waits for a reader.
        trainer(url, seconds=3600.0).fit(batches_before(url, lambda: os.mkfifo(pipe)))
    reader = os.open(pipe, os.O_RDWR)
    until(lambda: not any(thread.name == "persia-publish-network" for thread in threading.enumerate()))
    os.close(reader)
    assert f"Publishing to {url} has not ended within 0.5 s" in caplog.records[0].getMessage()


def test_an_invalid_place_ends_fit_at_once(tmp_path):
    with pytest.raises(CheckpointError, match="file system"):
        trainer("nonsense://there").fit(reader(), max_steps=1)


@pytest.mark.parametrize(
    "options",
    [
        {"url": 3},
        {"url": "x", "seconds": 0},
        {"url": "x", "rows": 0},
        {"url": "x", "dtype": "int4"},
        {"url": "x", "keep": 0},
    ],
)
def test_options_are_checked(options):
    with pytest.raises(ConfigError):
        PublishOptions(**{"url": "log"} | options)


def test_the_options_are_those_of_the_run():
    with pytest.raises(ConfigError, match="publish"):
        persia.TrainerOptions(publish="s3://bucket")
