"""What a publisher promises when it is killed, cannot write, or stops."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import ExitStack

import numpy as np
import pytest

from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError
from persia.publish import Publisher, PublishOptions, PublishOrder, Replica, follow, publisher
from persia.publish.stream import StreamWriter
from persia.retry import Backoff
from support.change_log import ChangeLog, advance, assert_equal_rows, begun, replica_of, unwritable
from support.stores import lookup, update


class KilledError(BaseException):
    pass


DEADLINE = 20.0


def until(condition, seconds=DEADLINE):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("half", [False, True])
def test_a_kill_between_any_two_writes(tmp_path, monkeypatch, half):
    """A reader never sees anything but the rows of a step, and gets those of the new epoch."""
    write = Storage.write
    kill_at = [1 << 30]

    def killed_write(self, path, buffers):
        kill_at[0] -= 1
        if kill_at[0] == 0:
            if half:  # In the middle of a file.
                data = b"".join(bytes(buffer) for buffer in buffers)
                write(self, path, [memoryview(data[: len(data) // 2])])
            raise KilledError
        return write(self, path, buffers)

    monkeypatch.setattr(Storage, "write", killed_write)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # A kill loses nothing that was written, and disks are slow.
    kills = 0
    for kill in range(1, 60):
        log = ChangeLog(tmp_path / f"log-{kill}")
        history = {}
        replica = Replica(follow(log.url))
        kill_at[0] = kill
        try:
            log.train()
            history[log.step] = log.rows(0)
            log.begin()
            for _ in range(4):
                log.train()
                history[log.step] = {id_: row.copy() for id_, row in log.rows(0).items()}
                log.publish()
                replica.refresh()
        except KilledError:
            kills += 1
        else:
            assert kills == kill - 1
            assert kills > 10
            return
        kill_at[0] = 1 << 30
        for reader in (replica, Replica(follow(log.url))):
            reader.refresh()
            if reader.epoch < 0:
                continue
            rows = history[reader.steps[0]]
            assert reader.rows("item").keys() == rows.keys()
            assert all(reader.rows("item")[id_].tobytes() == row.tobytes() for id_, row in rows.items())
        log.epoch += 1
        log.begin()
        replica.refresh()
        assert_equal_rows(replica, log)
    raise AssertionError("the loop above never came to its end")


def order(log, **options):
    log.epoch, log.run = log.epoch + 1, f"{log.epoch + 1:032x}"
    return PublishOrder(PublishOptions(log.url, **options), log.epoch, log.run, 0, 0)


def publisher_of(log, **options):
    return Publisher(log.stores[0], {"item": 0, "user": 1}, order(log, **options), lambda: log.step)


@pytest.fixture
def trained(tmp_path):
    log = ChangeLog(tmp_path / "log")
    log.train(2)
    return log


def test_it_publishes_by_time_and_stops_with_the_last_changes(trained):
    publisher = publisher_of(trained, seconds=0.05)
    publisher.start()
    until(lambda: publisher.status.sequence == 0)
    trained.train()
    until(lambda: publisher.status.step == 3)
    assert publisher.status.sequence >= 1
    trained.train()
    publisher.stop(last=True)
    assert publisher.status.step == 4
    assert not trained.stores[0].begin_changes(0, False)  # Nothing is marked any more.


def test_it_publishes_by_rows(trained):
    publisher = publisher_of(trained, seconds=3600.0, rows=70)
    publisher.start()
    until(lambda: publisher.status.sequence == 0)
    trained.train()
    until(lambda: publisher.status.sequence >= 1)  # Perhaps two: one that was due amid the step.
    publisher.stop(last=False)


def test_rows_count_from_the_beginning_of_the_entry_before(trained, monkeypatch):
    """Those that are applied while it is written may not be in it."""
    publisher = publisher_of(trained, seconds=3600.0, rows=70)
    commit, trains = StreamWriter.commit, [trained.train]

    def commit_amid_training(*arguments):
        commit(*arguments)
        while trains:
            trains.pop()()

    monkeypatch.setattr(StreamWriter, "commit", commit_amid_training)
    publisher.start()
    until(lambda: publisher.status.sequence >= 1)
    publisher.stop(last=False)


def test_rows_of_an_entry_that_has_failed_are_still_due(trained, monkeypatch):
    """Not only once as many have been trained again."""
    monkeypatch.setattr(publisher, "BACKOFF", Backoff(0.01, 0.01))
    publishing = publisher_of(trained, seconds=3600.0, rows=70)
    publishing.start()
    until(lambda: publishing.status.sequence == 0)
    commit, failures = StreamWriter.commit, []

    def fail_once(*arguments):
        if not failures:
            failures.append(None)
            raise RuntimeError("no threads")
        commit(*arguments)

    monkeypatch.setattr(StreamWriter, "commit", fail_once)
    trained.train()
    until(lambda: publishing.status.sequence >= 1)
    publishing.stop(last=False)
    assert failures


@pytest.mark.parametrize("last", [True, False])
def test_an_entry_is_visible_once_approved_or_if_it_is_the_last(trained, last):
    publisher = Publisher(
        trained.stores[0], {"item": 0, "user": 1}, order(trained, seconds=0.02)._replace(approval=True), lambda: 2
    )
    publisher.start()
    until(lambda: publisher.status.waiting == 1)
    publisher.approve(2)  # Of another entry.
    assert publisher.status.sequence == -1
    publisher.approve(1)
    until(lambda: publisher.status.sequence == 0)
    trained.train()
    until(lambda: publisher.status.waiting == 2)
    assert publisher.status.sequence == 0
    publisher.stop(last=last)
    assert (publisher.status.sequence > 0) == last
    assert publisher.status.complete == last


def test_an_entry_that_is_written_again_waits_again(trained, monkeypatch):
    """It has the number of the one before, and other rows."""
    monkeypatch.setattr(publisher.StreamWriter, "commit", lambda *_: 1 / 0)
    publishing = Publisher(
        trained.stores[0], {"item": 0, "user": 1}, order(trained, seconds=0.02)._replace(approval=True), lambda: 2
    )
    publishing.start()
    until(lambda: publishing.status.waiting == 1)
    publishing.approve(1)
    until(lambda: publishing.status.waiting == 2)
    publishing.stop(last=False)


def test_without_changes_nothing_is_written(trained):
    publisher = publisher_of(trained)
    publisher._publish()
    publisher._publish()
    assert publisher.status.sequence == 0
    trained.step += 1  # Readers learn that they have the rows of this step.
    publisher._publish()
    assert (publisher.status.sequence, publisher.status.step) == (1, 3)


def test_an_unwritable_log_makes_only_readers_wait(trained, monkeypatch, caplog):
    broken = [False]
    write = Storage.write

    def failing_write(self, path, buffers):
        if broken[0]:
            raise CheckpointError("cannot write") from OSError("no space")
        return write(self, path, buffers)

    monkeypatch.setattr(Storage, "write", failing_write)
    monkeypatch.setattr("persia.publish.publisher.BACKOFF", Backoff(0.02, 0.02))
    publisher = publisher_of(trained, seconds=0.02)
    publisher.start()
    until(lambda: publisher.status.sequence == 0)
    broken[0] = True
    with caplog.at_level(logging.WARNING, "persia.publish"):
        trained.train(3)
        until(lambda: publisher.status.error)
        assert publisher.status.error == "no space"
        began = time.monotonic()
        trained.train(5)
        assert time.monotonic() - began < DEADLINE / 2
        assert publisher.status.age > 0
        broken[0] = False
        until(lambda: publisher.status.step == 10 and not publisher.status.error)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2
    assert "training continues" in lines[0]
    assert "again" in lines[1]
    publisher.stop(last=True)


def test_a_publisher_that_cannot_write_stops_at_once(trained, monkeypatch):
    def failing_write(self, path, buffers):
        raise CheckpointError("cannot write")

    monkeypatch.setattr(Storage, "write", failing_write)
    publisher = publisher_of(trained, seconds=0.02)
    publisher.start()
    until(lambda: publisher.status.error)
    began = time.monotonic()
    publisher.stop(last=False)
    assert time.monotonic() - began < DEADLINE / 2


# --- the last entry -----------------------------------------------------------------------------------------


@pytest.fixture
def started(trained, monkeypatch):
    """A publisher that has written its snapshot, and rows that are to be in its last entry."""
    monkeypatch.setattr(publisher, "LAST_RETRY_SECONDS", 0.1)
    found = publisher_of(trained, seconds=3600.0)
    found.start()
    until(lambda: found.status.sequence == 0)
    trained.train()
    yield found
    found.stop(last=False)
    until(lambda: not found._thread.is_alive())


def test_the_last_entry_is_retried(trained, started):
    with ExitStack() as broken:
        broken.enter_context(unwritable(trained.path()))
        repair = threading.Thread(target=lambda: [until(lambda: started.status.error), broken.close()])
        repair.start()
        started.stop(last=True)
        repair.join()
    assert started.status.complete
    assert (started.status.step, started.status.error) == (3, "")
    assert "0000000001-increment.json" in os.listdir(trained.path())


def test_a_publisher_that_pauses_writes_the_last_entry_at_once(trained, monkeypatch):
    monkeypatch.setattr(publisher, "BACKOFF", Backoff(2 * DEADLINE, 2 * DEADLINE))
    paused = publisher_of(trained, seconds=0.02)
    paused.start()
    until(lambda: paused.status.sequence == 0)
    with unwritable(trained.path()):
        trained.train()
        until(lambda: paused.status.error)
    trained.train()
    began = time.monotonic()
    paused.stop(last=True)
    assert time.monotonic() - began < DEADLINE / 2
    assert paused.status.complete
    assert paused.status.step == 4


def test_a_last_entry_that_fails_in_another_way_is_retried(trained, started, monkeypatch):
    fail_once(monkeypatch, "encode")
    started.stop(last=True)
    assert started.status.complete
    assert "0000000001-snapshot.json" in os.listdir(trained.path())


def test_a_last_entry_that_cannot_be_written_is_named(trained, started, monkeypatch, caplog):
    monkeypatch.setattr(publisher, "LAST_SECONDS", 0.4)
    join = started._thread.join

    def join_after_a_failure(seconds):
        until(lambda: started.status.error)
        join(seconds)

    monkeypatch.setattr(started._thread, "join", join_after_a_failure)
    with unwritable(trained.path()), caplog.at_level(logging.WARNING, "persia.publish"):
        began = time.monotonic()
        started.stop(last=True)
        assert 0.39 < time.monotonic() - began < DEADLINE / 2
        until(lambda: not started._thread.is_alive())
    assert not started.status.complete
    assert "Not a directory" in started.status.error
    said = caplog.records[-1].getMessage()
    assert said.startswith(f"PS 0 could not publish its last rows to {trained.url} within 0.4 s")
    assert "readers keep the rows of step 2: " in said
    assert "Not a directory" in said


def test_a_last_entry_that_hangs_is_named(trained, started, monkeypatch, caplog):
    monkeypatch.setattr(publisher, "LAST_SECONDS", 0.3)
    pipe = trained.path("0000000001.00000.safetensors")
    os.mkfifo(pipe)  # Opening it waits for a reader.
    with caplog.at_level(logging.WARNING, "persia.publish"):
        started.stop(last=True)
    reader = os.open(pipe, os.O_RDWR)
    until(lambda: not started._thread.is_alive())
    os.close(reader)
    assert not started.status.complete
    assert "no answer within 0.3 s" in caplog.records[0].getMessage()
    assert "0000000001-increment.json" not in os.listdir(trained.path())


def test_unremovable_old_entries_do_not_delay_the_last_one(trained, monkeypatch):
    def failing(self, path):
        raise CheckpointError("cannot remove")

    monkeypatch.setattr(publisher, "MAX_INCREMENTS", 0)
    found = publisher_of(trained, seconds=0.02, keep=1)
    found.start()
    until(lambda: found.status.sequence >= 0)
    monkeypatch.setattr(Storage, "remove", failing)
    trained.train()
    until(lambda: "cannot remove" in found.status.error)
    trained.train()
    began = time.monotonic()
    found.stop(last=True)
    assert time.monotonic() - began < 10.0
    assert found.status.complete
    assert found.status.step == 4


# --- failures of any kind -----------------------------------------------------------------------------------


def fail_once(monkeypatch, where):
    """Has one call fail, as if memory or threads were short."""
    holder, name, error = {
        "encode": (publisher, "encode_values", MemoryError()),
        "sync": (Storage, "sync", RuntimeError("can't start new thread")),
        "put": (Storage, "put", RuntimeError("can't start new thread")),
    }[where]
    right = getattr(holder, name)

    def failing(*args):
        monkeypatch.setattr(holder, name, right)
        if where == "put":
            right(*args)  # Readers see the entry.
        raise error

    monkeypatch.setattr(holder, name, failing)


@pytest.mark.parametrize("kind", ["increment", "snapshot"])
@pytest.mark.parametrize("where", ["encode", "sync", "put"])
def test_what_was_taken_from_the_store_is_in_the_next_entry(tmp_path, monkeypatch, where, kind):
    log = begun(tmp_path / "log")
    advance(log)
    replica = replica_of(log)
    if kind == "snapshot":
        monkeypatch.setattr(publisher, "MAX_INCREMENTS", 1)
    log.train()
    fail_once(monkeypatch, where)
    assert not log.publishers[0]._publish_or_warn()
    monkeypatch.undo()
    replica.refresh()
    for _ in range(3):
        advance(log)
        replica.refresh()
        assert_equal_rows(replica, log)
    assert_equal_rows(replica_of(log), log)
    replica.refresh()
    assert not replica.problem


def test_a_possibly_visible_entry_is_removed_with_the_others(tmp_path, monkeypatch):
    log = begun(tmp_path / "log", keep=1)
    log.train()
    fail_once(monkeypatch, "put")
    log.publishers[0]._publish_or_warn()
    assert "0000000001-increment.json" in log.names()
    advance(log)
    assert [name for name in log.names() if name.endswith(".json")] == ["0000000002-snapshot.json"]
    assert not [name for name in log.names() if name.startswith(("0000000000", "0000000001"))]


def test_too_many_removed_rows_make_a_snapshot(trained):
    publisher = publisher_of(trained)
    publisher._removed_limit = 5
    publisher._publish()
    ids = np.arange(10_000, 10_800, dtype=np.uint64)
    lookup(trained.stores[0], ids)
    trained.step += 1
    publisher._publish()
    assert "0000000001-snapshot.json" in os.listdir(trained.path())


def test_parts_are_bounded(trained, monkeypatch):
    monkeypatch.setattr("persia.publish.publisher.PART_BYTES", 1000)
    trained.epoch = -1
    trained.begin()
    trained.train()
    trained.publish()
    assert os.path.exists(trained.path("0000000000.00001.safetensors"))
    replica = Replica(follow(trained.url))
    replica.refresh()
    assert_equal_rows(replica, trained)


def test_old_snapshots_are_removed_with_their_increments(tmp_path):
    log = ChangeLog(tmp_path / "log", keep=1)
    log.train()
    log.begin()
    for _ in range(30):
        log.train()
        log.publish()
        names = [name for name in os.listdir(log.path()) if name.endswith(".json")]
        assert sum("snapshot" in name for name in names) == 1
        assert "snapshot" in min(names)
        assert min(os.listdir(log.path())).split(".")[0].split("-")[0] == min(names).split("-")[0]
    assert min(names) != "0000000000-snapshot.json"


def test_a_stream_that_has_begun_is_left_alone(trained):
    """A PS that restarts and is asked to publish once more must not write other rows under the same names."""
    first = publisher_of(trained)
    first._publish()
    trained.epoch -= 1
    again = publisher_of(trained)
    again.start()
    until(lambda: again.status.epoch == -1)
    again.stop(last=True)
    assert os.listdir(trained.path()).count("0000000001-increment.json") == 0


def test_what_fails_in_the_store_is_repaired_by_a_snapshot(trained):
    store = trained.stores[0]
    publisher = publisher_of(trained)
    publisher._publish()
    update(store, np.arange(3, dtype=np.uint64), np.ones((3, 3)))
    begin, take = store.begin_changes, store.take_changes

    def failing(*args):
        store.take_changes = take
        raise RuntimeError("disk")

    store.take_changes = failing
    publisher._publish_or_warn()
    assert "disk" in publisher.status.error
    store.begin_changes = begin
    publisher._publish_or_warn()
    assert not publisher.status.error
    assert "0000000001-snapshot.json" in os.listdir(trained.path())
