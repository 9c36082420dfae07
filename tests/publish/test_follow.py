"""A follower has the rows of the log, whatever is missing, damaged, repeated or out of order in it."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

import persia
from persia.errors import PublishError
from persia.publish import ModelDescription, Replica, RowsUpdate, follow
from persia.publish.epochs import begin_epoch
from persia.publish.format import EPOCH_FILE, MAX_MODEL_BYTES, MODEL_FILE, LogEntry, epoch_name
from persia.types import BucketMap
from support.change_log import ChangeLog, advance, assert_equal_rows, everywhere

pytestmark = pytest.mark.processes

SCHEMA = persia.Schema([persia.IdFeature("item", 3), persia.IdFeature("user", 2, pooling=None, max_length=4)])


@pytest.fixture
def replica(log):
    found = Replica(follow(log.url))
    found.refresh()
    assert_equal_rows(found, log)
    return found


def outgrow(log):
    """Publishes until there is another snapshot."""
    publisher = log.publishers[0]
    before = publisher._writer.snapshot_bytes
    while publisher._writer.snapshot_bytes == before:
        advance(log)


@everywhere()
@pytest.mark.parametrize("servers", [1, 2])
def test_it_follows_snapshots_and_increments(url, servers):
    log = ChangeLog(url, servers)
    log.train(3)
    log.begin()
    replica = Replica(follow(log.url))
    for _ in range(12):  # More than one snapshot, and more ids than the store has room for.
        replica.refresh()
        assert_equal_rows(replica, log)
        assert replica.steps == dict.fromkeys(range(servers), log.step)
        assert replica.network.step == log.step
        np.testing.assert_array_equal(replica.network.tensors["weight"].numpy(), [log.step] * 2)
        assert not replica.problem
        advance(log)
    late = Replica(follow(log.url))
    late.refresh()
    replica.refresh()
    assert late.rows("item").keys() == replica.rows("item").keys()
    assert_equal_rows(late, log)


def test_a_lookup_says_which_ids_have_a_row(log, replica):
    id_, row = next(iter(log.rows(0).items()))
    found, rows = replica.lookup("item", [id_, 10**6], 3)
    np.testing.assert_array_equal(found, [True, False])
    np.testing.assert_array_equal(rows, [row, [0, 0, 0]])


@everywhere(pytest.mark.slow)
def test_removed_rows_are_gone_after_the_next_increment(log, replica):
    gone: set[int] = set()
    for _ in range(20):
        before = set(log.rows(0))
        advance(log)
        replica.refresh()
        gone = (gone | before) - set(log.rows(0))
        assert not gone & set(replica.rows("item"))
    assert gone


@everywhere()
def test_an_empty_place_and_one_that_has_not_begun(url):
    replica = Replica(follow(url))
    replica.refresh()
    assert "no epoch" in replica.problem
    assert replica.epoch == -1
    log = ChangeLog(url)
    log.train()
    log.begin()
    log.storage.remove(log.place("0000000000-snapshot.json"))
    replica.refresh()
    assert replica.epoch == -1


def damage(log, path, how):
    data = bytearray(log.read(path))
    if how == "missing":
        log.storage.remove(path)
        return
    if how == "truncated":
        data = data[: len(data) // 2]
    elif how == "flipped":
        data[len(data) // 2] ^= 4
    elif how == "empty":
        data = bytearray()
    log.storage.put(path, bytes(data))


def change(log, path, fields):
    log.storage.put(path, msgspec.json.encode({**msgspec.json.decode(log.read(path)), **fields}))


@pytest.mark.parametrize("how", ["missing", "truncated", "flipped", "empty"])
@pytest.mark.parametrize("file", ["0000000001-increment.json", "0000000001.00000.safetensors"])
def test_a_damaged_increment_is_replaced_by_the_next_snapshot(log, replica, file, how):
    kept = {id_: row.copy() for id_, row in replica.rows("item").items()}
    advance(log, 2)
    damage(log, log.place(file), how)
    replica.refresh()
    assert replica.problem
    assert replica.steps == {0: 3}  # It serves on what it had.
    assert {id_: row.tobytes() for id_, row in replica.rows("item").items()} == {
        id_: row.tobytes() for id_, row in kept.items()
    }
    outgrow(log)
    replica.refresh()
    assert_equal_rows(replica, log)
    replica.refresh()
    assert not replica.problem


@everywhere(pytest.mark.slow)
@pytest.mark.parametrize("how", ["missing", "truncated", "flipped", "empty"])
def test_a_damaged_snapshot_is_replaced_by_the_one_before(log, how):
    outgrow(log)
    snapshots = [name for name in log.names() if name.endswith("snapshot.json")]
    assert len(snapshots) == 2
    damage(log, log.place(snapshots[-1].replace("-snapshot.json", ".00000.safetensors")), how)
    replica = Replica(follow(log.url))
    replica.refresh()
    assert replica.problem
    assert replica.steps == {0: log.step - 1}
    outgrow(log)
    replica.refresh()
    assert_equal_rows(replica, log)


def test_a_repeated_increment_is_not_applied_twice(log, replica):
    advance(log)
    replica.refresh()
    for name in ("0000000001.00000.safetensors", "0000000001-increment.json"):
        log.storage.put(log.place(name.replace("01", "02", 1)), log.read(log.place(name)))
    replica.refresh()
    assert "belongs elsewhere" in replica.problem
    assert replica.steps == {0: 4}


def test_increments_in_the_wrong_order_are_refused(log, replica):
    advance(log, 2)
    first, second = (log.place(f"000000000{n}-increment.json") for n in (1, 2))
    contents = log.read(first), log.read(second)
    log.storage.put(first, contents[1])
    log.storage.put(second, contents[0])
    replica.refresh()
    assert "belongs elsewhere" in replica.problem
    assert replica.steps == {0: 3}


def test_files_of_another_run_are_refused(log, replica):
    advance(log)
    change(log, log.place("0000000001-increment.json"), {"run": "f" * 32})
    replica.refresh()
    assert "belongs elsewhere" in replica.problem


@everywhere()
def test_a_new_epoch_replaces_everything_at_once(url):
    log = ChangeLog(url, 2)
    log.train(3)
    log.begin()
    replica = Replica(follow(log.url))
    replica.refresh()
    log.train(3)
    log.publish()
    undone = set(log.rows(0))
    # Training goes back: the stores are those of another past.
    log.stores = [log.new_store() for _ in range(2)]
    log.step = 1
    log.train(1)
    log.begin()
    parts = {
        name: log.read(log.place(name, 1)) for name in ("0000000000.00000.safetensors", "0000000000-snapshot.json")
    }
    for name in reversed(parts):
        log.storage.remove(log.place(name, 1))
    replica.refresh()
    assert replica.epoch == 0
    assert set(replica.rows("item")) == undone
    for name, data in parts.items():
        log.storage.put(log.place(name, 1), data)
    replica.refresh()
    assert replica.epoch == 1
    assert replica.steps == {0: 2, 1: 2}
    assert_equal_rows(replica, log)
    log.storage.remove(epoch_name(0))
    advance(log)
    replica.refresh()
    assert_equal_rows(replica, log)
    assert not replica.problem


def test_an_update_that_was_not_read_comes_again(log):
    follower = follow(log.url)
    for _ in range(2):
        first = next(follower.updates())
        assert isinstance(first, RowsUpdate)
        assert (first.sequence, first.whole) == (0, True)
    updates = follower.updates()
    assert sum(len(change.ids) for change in next(updates).changes) > 0
    list(updates)
    assert not list(follower.updates())


HOSTILE = [
    {"version": 2},
    {"tables": [{"name": "item", "dim": 1 << 20, "rows": 0, "removed": 0}]},
    {"parts": [{"bytes": -1, "checksum": "crc32:00000000"}]},
    {"parts": [{"bytes": 1 << 50, "checksum": "crc32:00000000"}]},
    {"stream": "../../etc"},
    {"sequence": 1.5},
    {"more": 1},
    {"tables": []},
    {"dtype": "int8"},
]


@pytest.mark.parametrize("fields", HOSTILE)
def test_hostile_manifests_are_refused(log, replica, fields):
    advance(log)
    change(log, log.place("0000000001-increment.json"), fields)
    replica.refresh()
    assert replica.problem
    assert replica.steps == {0: 3}


def test_rows_that_the_manifest_does_not_announce_are_refused(log, replica):
    advance(log)
    path = log.place("0000000001-increment.json")
    entry = msgspec.json.decode(log.read(path), type=LogEntry)
    tables = [msgspec.structs.replace(table, rows=table.rows + 1) for table in entry.tables]
    change(log, path, {"tables": msgspec.to_builtins(tables)})
    replica.refresh()
    assert "its manifest says" in replica.problem


@everywhere()
@pytest.mark.parametrize("data", [b"{}", b""])
def test_a_damaged_epoch_file_leaves_the_reader_where_it_is(log, replica, data):
    log.begin()
    log.storage.put(f"{epoch_name(1)}/{EPOCH_FILE}", data)
    replica.refresh()
    assert "epoch.json" in replica.problem
    assert replica.epoch == 0


@everywhere()
@pytest.mark.parametrize("writes", [0, 1])
def test_an_epoch_whose_writer_is_killed_before_it_begins_is_ignored(log, replica, monkeypatch, writes):
    """The number of the epoch is not used again: its directory may have files of the killed writer."""
    put, written = type(log.storage).put, []

    def killed(self, path, data):
        if len(written) == writes:
            raise KeyboardInterrupt
        written.append(path)
        put(self, path, data)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(log.storage), "put", killed)
        begin_epoch(log.storage, BucketMap.even(1), SCHEMA)
    assert log.names(epoch_name(1)) == [MODEL_FILE][:writes]
    advance(log)
    for reader in (replica, Replica(follow(log.url))):
        reader.refresh()
        assert not reader.problem
        assert reader.epoch == 0
        assert_equal_rows(reader, log)
    assert begin_epoch(log.storage, BucketMap.even(1), SCHEMA).epoch == 1 + writes
    assert log.names(epoch_name(1 + writes)) == [EPOCH_FILE, MODEL_FILE]


def test_an_update_that_is_skipped_counts_as_read(log):
    follower = follow(log.url)
    for update in follower.updates():
        if isinstance(update, RowsUpdate):
            update.changes.skip()
    assert not list(follower.updates())
    assert not follower.problem


def test_a_rejected_update_is_replaced_by_the_next_snapshot(log):
    follower = follow(log.url)
    for update in follower.updates():
        if isinstance(update, RowsUpdate):
            list(update.changes)
    advance(log)
    for update in follower.updates():
        if isinstance(update, RowsUpdate):
            update.changes.reject("of no use")
            assert not list(update.changes)
    assert follower.problem == "of no use"
    outgrow(log)
    sequences = []
    for update in follower.updates():
        if isinstance(update, RowsUpdate):
            list(update.changes)
            sequences.append((update.sequence, update.whole))
    assert sequences[-1][1]
    assert sequences[-1][0] > 1


@everywhere()
def test_the_description_of_an_epoch(log):
    follower = follow(log.url)
    assert follower.description() is None
    list(follower.updates())
    with pytest.raises(PublishError, match=r"model\.json is missing"):
        follower.description()
    number = begin_epoch(log.storage, BucketMap.even(1), SCHEMA, "bf16", ModelDescription("din", {"hidden": [8]})).epoch
    epoch = epoch_name(number)
    for stream in ("rows-0", "network"):
        for name in log.names(f"{epoch_name(0)}/{stream}"):
            log.storage.put(f"{epoch}/{stream}/{name}", log.read(f"{epoch_name(0)}/{stream}/{name}"))
    list(follower.updates())
    found = follower.description()
    assert (found.precision, found.model.kind, found.model.options) == ("bf16", "din", {"hidden": [8]})
    assert msgspec.json.encode(found.schema) == msgspec.json.encode(SCHEMA)
    for data, said in (
        ({"more": 1}, "unknown field"),
        ({"run": "f" * 32}, "belongs to epoch"),
        ({"schema": {"id_features": [{"name": "a/b", "dim": 1}]}}, "Invalid IdFeature name"),
        ({"model": {"kind": 1}}, "model"),
    ):
        whole = msgspec.json.encode(found)
        log.storage.put(f"{epoch}/{MODEL_FILE}", msgspec.json.encode({**msgspec.json.decode(whole), **data}))
        late = follow(log.url)
        list(late.updates())
        with pytest.raises(PublishError, match=said):
            late.description()
    log.storage.put(f"{epoch}/{MODEL_FILE}", b" " * (MAX_MODEL_BYTES + 1))
    late = follow(log.url)
    list(late.updates())
    with pytest.raises(PublishError, match="more than"):
        late.description()
