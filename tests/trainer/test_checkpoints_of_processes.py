"""Checkpoints of PSs in processes of their own, which reach the storage by themselves, or do not."""

import uuid

import fsspec
import pytest
import torch
from test_resume import adam, model, reader

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.modes import Sync
from persia.optim import Adagrad
from support.ps_processes import PSProcesses
from support.rows_by_servers import contents, rows_of

pytestmark = pytest.mark.processes

TIMEOUT = 60.0


@pytest.fixture
def memory():
    """A place that only this process has, as a directory that is not shared is on one host only."""
    root = f"memory://{uuid.uuid4().hex}/run"
    yield root
    fsspec.filesystem("memory").rm(root, recursive=True)


def trainer(cluster, **options):
    torch.manual_seed(1)
    schema = reader().schema
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, **options),
    )


def test_they_write_and_read_the_same_by_themselves_and_through_the_nn_worker(tmp_path, memory, caplog):
    with PSProcesses(tmp_path / "log", TIMEOUT, 3) as cluster:
        first = trainer(cluster)
        first.fit(reader(), max_steps=12)
        first.save(str(tmp_path / "run"))
        assert "cannot write" not in caplog.text
        first.save(memory)
        assert "3 of 3 embedding PSs cannot write to memory://" in caplog.text
        assert contents(tmp_path / "run") == contents(memory)
        expected = rows_of(first.embeddings.connection.servers)
    for number, place in enumerate((str(tmp_path / "run"), memory)):
        caplog.clear()
        with PSProcesses(tmp_path / f"log-{number}", TIMEOUT, 3) as cluster:
            second = trainer(cluster)
            second.load(place)
            assert ("3 of 3 embedding PSs do not see" in caplog.text) == (place == memory)
            assert rows_of(second.embeddings.connection.servers) == expected
    alone = trainer(persia.cluster.Embedded())
    alone.load(str(tmp_path / "run"))
    (rows,) = rows_of(alone.embeddings.connection.servers)
    assert sum(map(len, rows.values())) == sum(len(some) for own in expected for some in own.values())


def test_periodic_checkpoints_are_written_while_training_goes_on(tmp_path):
    with PSProcesses(tmp_path / "log", TIMEOUT, 2) as cluster:
        options = {"checkpoint_every_steps": 4, "checkpoint_increments": 2, "keep_last": 9}
        t = trainer(cluster, checkpoint_dir=str(tmp_path / "run"), **options)
        t.fit(reader())
    steps = [entry.step for entry in list_checkpoints(tmp_path / "run")]
    assert steps[0] == 4  # Later ones may have been due while it was written.
    assert steps[-1] == 20
    for step in steps:
        reading = CheckpointReader(tmp_path / "run", step)
        assert reading.manifest.span == (step, step)
        reading.verify()
