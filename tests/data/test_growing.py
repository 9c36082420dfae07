"""Directories that grow: new partitions, markers, late files, positions in checkpoints; also on WebHDFS."""

from __future__ import annotations

import pickle
import threading
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia import data
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import ConfigError, DataError
from persia.services import Stream
from persia.trainer.options import TrainerOptions
from support.webhdfs import webhdfs

SCHEMA = persia.Schema([persia.IdFeature("item", dim=4)], dense_features=["price"], labels=["label"])


def write(path, ids):
    """Writes a file with these ids, under another name first."""
    ids = np.asarray(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}")
    pq.write_table(pa.table({"item": ids, "price": ids / 100, "label": ids % 2}), part)
    part.rename(path)


def items(batches):
    return [batch.id_features["item"].values.tolist() for batch in batches]


@pytest.fixture
def hours(tmp_path):
    folder = tmp_path / "clicks"
    for hour in range(3):
        write(folder / f"hour={hour:02}" / "part-0.parquet", range(hour * 100, hour * 100 + 5))
    return folder


def test_a_batch_is_a_range_of_rows_of_one_file(hours):
    reader = data.growing(hours, SCHEMA, 3, until="now", day="hour")
    assert isinstance(reader, Stream)
    batches = list(reader)
    assert items(batches) == [[0, 1, 2], [3, 4], [100, 101, 102], [103, 104], [200, 201, 202], [203, 204]]
    assert [batch.day.tolist() for batch in batches[:2]] == [[0, 0, 0], [0, 0]]
    again = pickle.loads(pickle.dumps(reader))
    assert items(again.batches()) == items(batches)
    assert not again.interrupted


def test_recorded_batches_are_reread_by_file_and_row(hours):
    reader = data.growing(hours, SCHEMA, 3, until="now")
    reader.begin(7, {}, lambda: False)
    whole = items(reader.batches(0, 7))
    write(hours / "hour=03" / "part-0.parquet", [300])
    assert items(reader.batches(0, 10)) == [*whole[3:], [300]]
    assert reader.offsets(7) == {}
    assert reader.offsets(8) == {f"{hours}/hour=00/part-0.parquet": {0: 3}}
    reader.forget(10)
    with pytest.raises(DataError, match="Batch 9 of the directory is not recorded; batches 10 to 14 are"):
        reader.offsets(9)
    after = data.growing(hours, SCHEMA, 3, until="now")
    after.begin(0, {"other/topic": {0: 5}, **reader.offsets(10)}, lambda: False)
    assert items(after.batches()) == [*whole[3:], [300]]
    (hours / "hour=00" / "part-0.parquet").unlink()  # Older files may go.
    after.begin(0, reader.offsets(11), lambda: False)
    assert items(after.batches()) == [*whole[4:], [300]]
    (hours / "hour=01" / "part-0.parquet").unlink()
    with pytest.raises(DataError, match=r"hour=01/part-0.parquet no longer has rows 3 to 5"):
        list(reader.batches(0, 10))


def test_new_partitions_are_picked_up_and_stop_ends_a_wait(hours):
    stop = threading.Event()
    reader = data.growing(hours, SCHEMA, 5, poll_seconds=0.01)
    reader.begin(0, {}, stop.is_set)
    batches = reader.batches()
    assert items(next(batches) for _ in range(3)) == [[*range(5)], [*range(100, 105)], [*range(200, 205)]]
    threading.Timer(0.05, write, (hours / "hour=03" / "part-0.parquet", [300])).start()
    assert items([next(batches)]) == [[300]]
    threading.Timer(0.05, stop.set).start()
    assert list(batches) == []
    assert reader.interrupted
    counts = {metric.name: metric.value for metric in reader.observe()}
    assert counts == {"stream_rows": 16, "stream_batches": 4, "stream_late_files": 0}


def test_a_marker_completes_a_partition_and_delays_later_ones(hours):
    def reader():
        return data.growing(hours, SCHEMA, 10, success="_SUCCESS", until="now")

    assert list(reader()) == []
    (hours / "hour=01" / "_SUCCESS").touch()
    assert list(reader()) == []  # That of hour 0 is still to come.
    (hours / "hour=00" / "_SUCCESS").touch()
    assert items(reader()) == [[*range(5)], [*range(100, 105)]]


def test_late_files_are_an_error_or_counted(hours, caplog):
    for late in ("error", "skip"):
        reader = data.growing(hours, SCHEMA, 5, until="now", late=late)
        reader.begin(0, {}, lambda: False)
        assert len(list(reader.batches())) == 3
        path = hours / f"hour=01/part-{late}.parquet"
        write(path, [1])
        if late == "error":
            with pytest.raises(
                DataError, match=r"part-error.parquet was added after reading of hour=02/part-0.parquet.*late=\"sk"
            ):
                list(reader.batches(0, 3))
        else:
            assert items(reader.batches(0, 3)) == []
            assert "part-skip.parquet is skipped" in caplog.text
            assert reader.observe()[2].value == 1
        path.unlink()


def test_nothing_there_yet_and_wrong_arguments(tmp_path):
    assert list(data.growing(tmp_path / "none", SCHEMA, until="now")) == []
    write(tmp_path / "a.parquet", [])
    write(tmp_path / "b.parquet", [1])
    write(tmp_path / "_c.parquet", [2])
    (tmp_path / "notes.txt").touch()
    assert items(data.growing(tmp_path, SCHEMA, until="now")) == [[1]]
    for wrong in ({"batch_size": 0}, {"late": "never"}, {"until": "noon"}, {"poll_seconds": 0}):
        with pytest.raises(ConfigError, match=f"Invalid {next(iter(wrong))} = "):
            data.growing(tmp_path, SCHEMA, **wrong)


def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)


def model():
    torch.manual_seed(0)
    return persia.nn.models.DeepFM(SCHEMA, hidden=(8,))


def trainer(folder=None):
    options = TrainerOptions(progress=False, checkpoint_dir=folder)
    return persia.Trainer(
        model(), SCHEMA, optimizer=optimizer, embedding_optimizer=persia.optim.SGD(lr=0.1),
        mode=persia.modes.Sync(), options=options,
    )  # fmt: skip


def parameters(one):
    return torch.cat([p.detach().ravel() for p in one.model.parameters()])


def test_a_resumed_run_trains_what_an_uninterrupted_one_does(hours, tmp_path):
    whole = trainer()
    whole.fit(data.growing(hours, SCHEMA, 3, until="now"))
    folder = str(tmp_path / "run")
    trainer(folder).fit(data.growing(hours, SCHEMA, 3, until="now"), max_steps=3)
    expected = {f"{hours}/hour=01/part-0.parquet": {0: 3}}
    assert CheckpointReader(folder).state("training")["offsets"] == expected
    resumed = persia.Trainer.resume(folder, model(), optimizer=optimizer)
    assert resumed.fit(data.growing(hours, SCHEMA, 3, until="now")).rows == 7
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.fixture
def hdfs(tmp_path):
    with webhdfs(tmp_path) as url:
        yield url


@pytest.mark.processes
def test_webhdfs(hours, hdfs, tmp_path):
    url = f"{hdfs}/clicks"
    assert items(data.growing(url, SCHEMA, 5, until="now")) == items(data.growing(hours, SCHEMA, 5, until="now"))
    assert items(data.parquet(url, SCHEMA, 8)) == items(data.parquet(hours, SCHEMA, 8))
    assert items(data.parquet(f"{url}/hour=0[12]/*.parquet", SCHEMA, 5)) == [[*range(100, 105)], [*range(200, 205)]]
    with pytest.raises(DataError, match="There is no file or directory"):
        data.parquet(f"{hdfs}/nothing", SCHEMA)
    reader = data.parquet(f"{url}/hour=00/part-0.parquet", SCHEMA)
    (hours / "hour=00" / "part-0.parquet").unlink()
    with pytest.raises(DataError, match=r"part-0.parquet: there is no such file"):
        list(reader)


@pytest.mark.processes
def test_checkpoints_on_webhdfs(hours, hdfs):
    folder = f"{hdfs}/run"
    first = trainer(folder)
    first.fit(data.parquet(hours, SCHEMA, 5), max_steps=2)
    assert [entry.step for entry in list_checkpoints(folder)] == [2]
    CheckpointReader(folder).verify()
    resumed = persia.Trainer.resume(folder, model(), optimizer=optimizer)
    assert (resumed.global_step, resumed.position) == (2, 2)
    assert torch.equal(parameters(resumed), parameters(first))


@pytest.mark.processes
def test_names_that_need_quotes_on_webhdfs(hdfs, tmp_path):
    write(Path(tmp_path / "a b" / "country=São Tomé" / "part 1.parquet"), [1, 2])
    schema = persia.Schema([persia.IdFeature("country", dim=4, kind="text"), *SCHEMA.id_features], labels=["label"])
    (batch,) = data.parquet(f"{hdfs}/a b", schema)
    assert batch.id_features["item"].values.tolist() == [1, 2]
