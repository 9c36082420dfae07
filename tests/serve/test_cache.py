"""Processes of a host share the rows of snapshots, and neither the dead nor the late among them do any harm."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from persia.errors import CheckpointError
from persia.serve import Predictor, ServeOptions
from persia.serve.cache import SnapshotCache, SnapshotKey
from persia.store.served import ServedTable
from support.written_log import IDS, Steps, WrittenLog, batch


def rows_of(predictor):
    found, rows = predictor.embeddings("item", IDS)
    assert found.all()
    return set(rows.flat)


def files(directory):
    """Returns the snapshots that are there, by PS."""
    return sorted(f"{path.parent.name}/{path.name[:27]}" for path in Path(directory).glob("*/rows-*/*"))


def test_a_second_process_maps_what_the_first_has_read(log, serve, tmp_path):
    first = serve(log, cache_dir=str(tmp_path / "cache"))
    for server in range(2):
        os.remove(log.path("0000000000.00000.safetensors", server))
    second = serve(log, cache_dir=str(tmp_path / "cache"))  # Reads no part of the log.
    for server in range(2):
        log.rows(server, 4, removed=[7])
    log.network(4)
    for predictor in (first, second):
        assert rows_of(predictor) == {3}
        predictor.refresh()
        found, rows = predictor.embeddings("item", IDS)
        assert np.flatnonzero(~found).tolist() == [7]
        assert set(rows.flat) == {0, 4}
        assert predictor.predict(batch()).step == 4
    assert len(files(tmp_path / "cache")) == 2
    log.publish(5, whole=True)
    first.refresh()
    assert files(tmp_path / "cache") == [f"rows-{n}/epoch-0000000000-0000000002" for n in range(2)]
    assert rows_of(first) == {5}
    assert second.embeddings("item", [7])[0].tolist() == [False]  # It still has the file that was removed.
    log.begin(6)
    second.refresh()
    assert rows_of(second) == {6}
    first.refresh()
    assert files(tmp_path / "cache") == [f"rows-{n}/epoch-0000000001-0000000000" for n in range(2)]


def test_snapshots_of_another_log_or_of_gone_servers_are_removed(log, serve, tmp_path):
    for step in (4, 5):
        log.begin(step)
    serve(log, cache_dir=str(tmp_path / "cache"))
    assert files(tmp_path / "cache") == [f"rows-{n}/epoch-0000000002-0000000000" for n in range(2)]
    shutil.rmtree(log.url)
    again = WrittenLog(log.url, servers=1)
    again.begin(1)
    assert rows_of(serve(again, cache_dir=str(tmp_path / "cache"))) == {1}
    assert files(tmp_path / "cache") == ["rows-0/epoch-0000000000-0000000000"]


def test_processes_that_start_at_once_write_once(log, tmp_path, monkeypatch):
    results, written, write = [], [], ServedTable.write_snapshot

    def counted(table, path, name=""):
        written.append(name)
        write(table, path, name)

    monkeypatch.setattr(ServedTable, "write_snapshot", counted)

    def start():
        with Predictor(log.url, Steps, ServeOptions(cache_dir=str(tmp_path / "cache"))) as predictor:
            results.append(rows_of(predictor))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{3}] * 4
    assert sorted(written) == ["item", "item", "user", "user"]  # One of the threads, for both PSs.
    assert len(files(tmp_path / "cache")) == 2


@pytest.mark.parametrize("harm", ["damaged", "another", "missing"])
def test_files_that_cannot_be_used_are_replaced(log, serve, tmp_path, harm):
    serve(log, cache_dir=str(tmp_path / "cache"))
    for place in (tmp_path / "cache").glob("*/rows-*/*"):
        if harm == "damaged":
            os.truncate(place / "0.rows", 10)
        elif harm == "another":
            ServedTable(4).write_snapshot(place / "0.rows", "users")
        else:
            os.remove(place / "1.rows")
    for left in (tmp_path / "cache").glob("*/rows-?"):
        (left / ".writing-by-the-dead").mkdir()
    assert rows_of(serve(log, cache_dir=str(tmp_path / "cache"))) == {3}
    assert not list((tmp_path / "cache").glob("*/*/.writing-*"))
    assert len(files(tmp_path / "cache")) == 2


def test_a_cache_that_cannot_be_written_is_not_needed(log, serve, tmp_path, caplog, monkeypatch):
    def full(self, path, name=""):
        raise OSError("disk full")

    monkeypatch.setattr(ServedTable, "write_snapshot", full)
    assert rows_of(serve(log, cache_dir=str(tmp_path / "cache"))) == {3}
    assert "disk full" in caplog.text
    assert not files(tmp_path / "cache")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="another cache_dir"):
        Predictor(log.url, Steps, ServeOptions(cache_dir=str(tmp_path / "file")))


def test_a_lock_is_free_once_its_owner_is_gone(tmp_path):
    cache, other = (SnapshotCache(str(tmp_path), "log") for _ in range(2))

    def give_up():
        raise InterruptedError

    with cache.locked(0, give_up):
        with pytest.raises(InterruptedError), other.locked(0, give_up):
            pass
        with other.locked(1, give_up):
            pass
    with other.locked(0, give_up):
        pass
    assert cache.open(SnapshotKey("0" * 32, 0, 0, 0, 1), {"item": 4}) is None
    shutil.rmtree(tmp_path)
