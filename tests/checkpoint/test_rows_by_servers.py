"""Each PS writes and reads its own rows of a checkpoint: the same as if one process did it for all."""

import logging
import re
import threading
import uuid
import zlib
from contextlib import closing, nullcontext
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import batching, rpc
from persia.checkpoint import CheckpointReader, CheckpointWriter, list_checkpoints
from persia.checkpoint import throttle as throttling
from persia.checkpoint.owned import Owned
from persia.checkpoint.parts import PartReader
from persia.checkpoint.row_files import RowFiles
from persia.checkpoint.row_reading import ServerReading
from persia.checkpoint.row_writing import write_rows, write_states
from persia.checkpoint.servers import by_problem, server_pieces
from persia.checkpoint.storage import Storage
from persia.checkpoint.throttle import Throttle
from persia.errors import CheckpointError, PersiaError, StaleMapError, StoreError, WireError
from persia.ps import snapshots
from persia.ps.ownership import Ownership
from persia.services import EmbeddingPS
from persia.types import BucketMap, RowsToRead, RowsToWrite, TableToRead
from support.bucket_maps import bucket_maps
from support.examples import examples
from support.rows_by_servers import (
    NO_GAPS,
    OPTIMIZER,
    blind,
    clocks_of,
    contents,
    load,
    rows_of,
    save,
    schema_of,
    servers_of,
    train,
)

FOUR = BucketMap.even(4)
DEADLINE = 60.0


def of_servers(path):
    """The files of rows in a directory, by PS."""
    found = {}
    for file in Path(path).rglob("*.safetensors"):
        if file.parent.parent.name == "rows":
            found.setdefault(int(file.name.partition("-")[0]) // 1024, []).append(file)
    return found


@given(
    written_by=bucket_maps(4),
    read_by=bucket_maps(4),
    batches=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 150)), min_size=1, max_size=4),
    data=st.data(),
)
@settings(max_examples=examples(12), deadline=None)
def test_the_same_as_through_one_process(tmp_path_factory, written_by, read_by, batches, data):
    """For any maps of the PSs that write and that read, and chains of increments with evictions."""
    path = tmp_path_factory.mktemp("run")
    schema = schema_of(capacity=200)  # Evicts.
    direct, through = servers_of(written_by, schema), servers_of(written_by, schema)
    for server in through:
        blind(server)
    state = {"direct": (None, None), "through": (None, None)}
    for step, (first, count) in enumerate(batches):
        for name, servers in (("direct", direct), ("through", through)):
            train(servers, range(first, first + count), step)
            state[name] = save(servers, path / name, step + 1, *state[name])
        assert contents(path / "direct") == contents(path / "through")
    tables = [CheckpointReader(path / name).manifest.tables for name in ("direct", "through")]
    assert tables[0] == tables[1]
    one, two = servers_of(read_by, schema), servers_of(read_by, schema)
    for rank in data.draw(st.sets(st.integers(0, read_by.servers - 1))):
        blind(two[rank])
    assert load(one, path / "direct") == load(two, path / "direct")
    assert rows_of(one) == rows_of(two)


def test_each_ps_writes_its_own_files(tmp_path):
    servers = servers_of(FOUR)
    train(servers, range(400), 0)
    writers = {}

    def noted(number, parts):
        for part in parts:
            writers[part.path] = number
            yield part

    for number, server in enumerate(servers):
        write = server.write_snapshot
        server.write_snapshot = lambda *order, n=number, write=write: noted(n, write(*order))
    save(servers, tmp_path, 1)
    reader = CheckpointReader(tmp_path)
    reader.verify()
    assert not list(tmp_path.rglob("*mark-*"))
    parts = [part for table in ("item", "user") for part in reader.parts(table)]
    assert writers == {part.path: part.shard // 1024 for part in parts}
    assert set(writers.values()) == {0, 1, 2, 3} == set(of_servers(tmp_path))
    for table in ("item", "user"):
        for shard, arrays in reader.rows(table):
            assert set(batching.owners(table, arrays["ids"], FOUR)) == {shard // 1024}


def test_files_of_another_attempt_have_other_names(tmp_path):
    """So a PS that finishes a file too late replaces none that is valid."""
    servers = servers_of(BucketMap.even(2))
    train(servers, range(50), 0)
    save(servers, tmp_path, 1)
    first = {part.path for part in CheckpointReader(tmp_path).parts("item")}
    save(servers, tmp_path, 1)
    second = {part.path for part in CheckpointReader(tmp_path).parts("item")}
    assert {Path(path).name for path in first}.isdisjoint(Path(path).name for path in second)
    assert all(path.startswith("rewrite-1/") for path in second)
    CheckpointReader(tmp_path).verify()


def test_a_warning_names_each_problem_once():
    problems = dict.fromkeys((7, 0, 3), "on host a: no key") | {1: "on host b: no disk"}
    assert by_problem(problems) == "PS 0, 3, 7 on host a: no key; PS 1 on host b: no disk"
    assert by_problem({n: f"{n}" for n in range(9)}).endswith("; PS 3 3; and 5 other problems")


def test_a_ps_that_does_not_see_the_place_sends_its_rows(tmp_path, caplog):
    servers = servers_of(FOUR)
    blind(servers[2])
    train(servers, range(400), 0)
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        save(servers, tmp_path, 1)
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith(f"1 of 4 embedding PSs cannot write to {tmp_path}")
    assert "PS 2 on host host-b: it is not there" in warning
    assert sorted(of_servers(tmp_path)) == [0, 1, 2, 3]
    caplog.clear()
    others = servers_of(FOUR)
    blind(others[1])
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        assert load(others, tmp_path) == {"item": 400, "user": 400}
    (warning,) = [record.message for record in caplog.records]
    assert warning.startswith("1 of 4 embedding PSs do not see")
    assert warning.endswith("PS 1 it is not there")
    assert rows_of(servers) == rows_of(others)


class Vault(MemoryFileSystem):
    """A file system whose URLs may have a password, which is no part of its paths."""

    protocol = "vault"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(re.sub("^vault://([^/]*@)?", "", path))


def test_no_message_has_the_password_of_a_url(monkeypatch, caplog):
    fsspec.register_implementation("vault", Vault, clobber=True)
    url = f"vault://me:secret@{uuid.uuid4().hex}/run"
    servers = servers_of(BucketMap.even(2))
    train(servers, range(50), 0)
    blind(servers[1])
    save(servers, url, 1)
    load(servers, url)
    assert "cannot write to vault://" in caplog.text
    assert "do not see vault://" in caplog.text
    monkeypatch.setattr(RowFiles, "rows", _refused)
    with pytest.raises(CheckpointError, match=r"its part to vault://.*/run: the file") as caught:
        save(servers, url, 2)
    with pytest.raises(PersiaError) as unknown:
        CheckpointReader("vlt://me:secret@host/run")
    assert not any("secret" in text for text in (caplog.text, str(caught.value), str(unknown.value)))


@pytest.mark.parametrize("sees", [True, False])
def test_the_state_besides_rows_comes_back(tmp_path, sees):
    servers, others = servers_of(FOUR), servers_of(FOUR)
    for step in range(3):
        train(servers, range(400), step)
    save(servers, tmp_path, 1)
    if not sees:
        blind(others[1])
    load(others, tmp_path, state=True)
    # The third one counts snapshots, of this process as well.
    assert [[clocks[:2] for clocks in own] for own in clocks_of(others)] == [
        [clocks[:2] for clocks in own] for own in clocks_of(servers)
    ]


@pytest.mark.parametrize("sees", [True, False])
def test_each_ps_writes_its_own_state(tmp_path, sees):
    servers = servers_of(FOUR)
    train(servers, range(400), 0)
    if not sees:
        blind(servers[2])
    with CheckpointWriter(tmp_path, 1) as writer:
        write_states(writer, servers)
        writer.commit(schema=schema_of(), optimizer=OPTIMIZER, buckets=FOUR)
    reader = CheckpointReader(tmp_path)
    reader.verify()
    found = [(number, piece) for number, pieces in server_pieces(reader) for piece in pieces]
    expected = [(n, piece) for n, server in enumerate(servers) for pieces in server.export_state() for piece in pieces]
    assert len(found) == len(expected)
    for (number, piece), (of, state) in zip(found, expected, strict=True):
        assert (number, repr(piece)) == (of, repr(state._asdict()))


def test_state_that_has_gone_is_noticed(tmp_path):
    servers = servers_of(BucketMap.even(2))
    with CheckpointWriter(tmp_path, 1) as writer:
        write_states(writer, servers)
        next(tmp_path.rglob("server-1.0.*")).unlink()
        with pytest.raises(CheckpointError, match="that embedding PS 1 wrote"):
            writer.commit(schema=schema_of(), optimizer=OPTIMIZER)


def test_an_error_of_state_names_the_ps(tmp_path):
    servers = servers_of(BucketMap.even(2))

    def full(_):
        raise CheckpointError("no space there")
        yield

    servers[1].write_state = full
    with (
        CheckpointWriter(tmp_path, 1) as writer,
        pytest.raises(CheckpointError, match=r"Embedding PS 1 on host .* its"),
    ):
        write_states(writer, servers)
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("how", ["missing", "other", "read-only"])
def test_a_place_is_checked_by_what_the_writer_has_put_there(tmp_path, monkeypatch, how):
    server = servers_of(BucketMap.even(1))[0]
    with CheckpointWriter(tmp_path / "a", 1) as writer:
        with writer.mark() as (path, checksum):
            assert server.check_place(str(tmp_path / "a"), path, checksum).problem == ""
            if how == "missing":  # As where nothing is mounted.
                problem = server.check_place(str(tmp_path / "b"), path, checksum).problem
                assert problem == f"{tmp_path}/b/{path} does not exist there."
                assert not (tmp_path / "b").exists()
            elif how == "other":
                problem = server.check_place(str(tmp_path / "a"), path, "crc32:00000000").problem
                assert problem.endswith("is another file there.")
                (tmp_path / "a" / "large").write_bytes(bytes(17))  # It is not even read.
                problem = server.check_place(str(tmp_path / "a"), "large", f"crc32:{zlib.crc32(bytes(17)):08x}").problem
                assert problem.endswith("is another file there.")
            else:
                monkeypatch.setattr("persia.checkpoint.storage.Storage.put", _refused)
                assert "read-only" in server.check_place(str(tmp_path / "a"), path, checksum).problem
        assert not list((tmp_path / "a" / path).parent.iterdir())


def _refused(*_, **__):
    raise CheckpointError("the file system is read-only")


def test_an_error_names_the_ps_its_host_and_the_place(tmp_path, monkeypatch):
    servers = servers_of(FOUR)
    train(servers, range(400), 0)
    save(servers, tmp_path, 1)
    write = RowFiles.rows

    def full(files, table, shard, arrays):
        if shard // 1024 == 3:
            raise CheckpointError("no space there", errno=28)
        return write(files, table, shard, arrays)

    monkeypatch.setattr(RowFiles, "rows", full)
    servers[3].check_place = lambda *a: type(servers[3]).check_place(servers[3], *a)._replace(host="host-d")
    with pytest.raises(CheckpointError) as caught:
        save(servers, tmp_path, 2)
    assert caught.value.message == f"Embedding PS 3 on host host-d cannot write its part to {tmp_path}: no space there"
    assert caught.value.fields["errno"] == 28
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    assert CheckpointReader(tmp_path).verify() > 0


def test_nothing_is_written_after_a_snapshot_has_ended(tmp_path, monkeypatch):
    """`end_snapshot` waits for the file that is being written; the next one is refused."""
    server = servers_of(BucketMap.even(1))[0]
    train([server], range(200), 0)
    begun, go = threading.Event(), threading.Event()
    write = RowFiles.rows

    def slow(files, *arguments):
        if not begun.is_set():
            begun.set()
            assert go.wait(DEADLINE)
        return write(files, *arguments)

    monkeypatch.setattr(RowFiles, "rows", slow)
    server.begin_snapshot("a", {}, "")
    parts = server.write_snapshot("a", RowsToWrite(str(tmp_path), 1, 0, "0" * 8, 0, 0.5))
    found, ended = [], threading.Event()
    writer = threading.Thread(target=lambda: found.append(next(parts)))
    writer.start()
    assert begun.wait(DEADLINE)
    ender = threading.Thread(target=lambda: (server.end_snapshot("a"), ended.set()))
    ender.start()
    assert not ended.wait(0.2)
    go.set()
    assert ended.wait(DEADLINE)
    writer.join()
    ender.join()
    with pytest.raises(StoreError, match="no snapshot 'a'"):
        next(parts)
    assert [part.path for part in found] == [
        str(file.relative_to(tmp_path / "step-000000000001"))
        for file in (tmp_path / "step-000000000001").rglob("*.safetensors")
    ]


def test_rows_that_were_read_before_a_snapshot_ended_are_not_written(tmp_path, monkeypatch):
    server = servers_of(BucketMap.even(1))[0]
    train([server], range(200), 0)
    server.begin_snapshot("a", {}, "")
    make = snapshots.row_chunk

    def ended(*arguments):
        server.end_snapshot("a")
        return make(*arguments)

    monkeypatch.setattr(snapshots, "row_chunk", ended)
    with pytest.raises(StoreError, match="no snapshot 'a'"):
        next(server.write_snapshot("a", RowsToWrite(str(tmp_path), 1, 0, "0" * 8, 0, 0.5)))
    assert not list(tmp_path.iterdir())


def test_a_snapshot_has_the_rows_that_were_owned_when_it_began():
    """Whatever the PS owns when they are read: else a checkpoint would miss those that have left meanwhile."""
    (server,) = servers_of(BucketMap.even(1))
    train([server], range(200), 0)
    server.begin_snapshot("a", {}, "")
    server._owned.ownership = Ownership(BucketMap.even(1).moved(2), others=True)
    assert sum(len(chunk.arrays["ids"]) for chunk in server.snapshot_rows("a")) == 400
    server.begin_snapshot("b", {}, "")
    assert 0 < sum(len(chunk.arrays["ids"]) for chunk in server.snapshot_rows("b")) < 400


def test_pauses_end_in_a_hurry(tmp_path, monkeypatch):
    monkeypatch.setattr(throttling, "REST_SECONDS", 10 * DEADLINE)
    resting = threading.Event()
    rest = Throttle.__call__
    monkeypatch.setattr(Throttle, "__call__", lambda throttle: (resting.set(), rest(throttle)))
    server = servers_of(BucketMap.even(1))[0]
    train([server], range(200), 0)
    server.begin_snapshot("a", {}, "")
    parts = server.write_snapshot("a", RowsToWrite(str(tmp_path), 1, 0, "0" * 8, 0, 1e-12))
    writer = threading.Thread(target=lambda: list(parts), daemon=True)
    writer.start()
    assert resting.wait(DEADLINE)
    server.hurry_snapshot("another")
    writer.join(0.2)
    assert writer.is_alive()
    server.hurry_snapshot("a")
    writer.join(DEADLINE)
    assert not writer.is_alive()


def test_only_the_work_of_the_thread_that_writes_counts(monkeypatch):
    """Each file may be written by another thread of the PS's server."""
    rests = []
    throttle = Throttle(1e-9, threading.Event())
    monkeypatch.setattr(throttle._hurry, "wait", rests.append)
    seconds = iter([50.0, 50.0, 50.0])
    monkeypatch.setattr("time.thread_time", lambda: next(seconds))
    throttle.resume()
    throttle()
    assert rests == [0.0]


def test_each_file_counts_its_own_work(tmp_path, monkeypatch):
    resumed = []
    monkeypatch.setattr(Throttle, "resume", lambda throttle: resumed.append(None))
    monkeypatch.setattr(Throttle, "__call__", lambda throttle: None)
    server = servers_of(BucketMap.even(1))[0]
    train([server], range(200), 0)
    server.begin_snapshot("a", {}, "")
    parts = list(server.write_snapshot("a", RowsToWrite(str(tmp_path), 1, 0, "0" * 8, 0, 0.5)))
    assert len(resumed) == 1 + len(parts) > 2


def test_a_checkpoint_is_not_committed_without_files_that_a_ps_has_written(tmp_path):
    """The storage of its host was another one meanwhile."""
    servers = servers_of(BucketMap.even(2))
    train(servers, range(50), 0)
    for server in servers:
        server.begin_snapshot("a", {}, "")
    with CheckpointWriter(tmp_path, 1) as writer:
        write_rows(writer, servers, "a")
        of_servers(tmp_path)[1][0].unlink()
        with pytest.raises(CheckpointError, match=r"is missing or does not have the \d+ bytes that embedding PS 1 wr"):
            writer.commit(schema=schema_of(), optimizer=None)
    assert list_checkpoints(tmp_path) == []
    assert not list(tmp_path.glob("step-*"))


@pytest.mark.parametrize("known", ["listed", "looked up", "never"])
def test_what_pss_have_written_is_checked_as_far_as_sizes_are_known(tmp_path, monkeypatch, known):
    """There are file systems whose listings have no sizes, and such as have none at all."""
    size = Storage.size
    if known != "listed":
        monkeypatch.setattr(Storage, "sizes", lambda *_: {})
    if known == "never":
        monkeypatch.setattr(Storage, "size", lambda storage, path: None if "rows" in path else size(storage, path))
    servers = servers_of(BucketMap.even(2))
    train(servers, range(50), 0)
    save(servers, tmp_path, 1)
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    for step, damage in ((2, "truncated"), (3, "missing")):
        for server in servers:
            server.begin_snapshot(damage, {}, "")
        with CheckpointWriter(tmp_path, step) as writer:
            write_rows(writer, servers, damage)
            file = of_servers(tmp_path / f"step-{step:012}")[1][0]
            file.write_bytes(b"") if damage == "truncated" else file.unlink()
            noticed = damage == "missing" or known != "never"
            with pytest.raises(CheckpointError, match="that embedding PS 1 wrote") if noticed else nullcontext():
                writer.commit(schema=schema_of(), optimizer=None)


@pytest.mark.parametrize("wrong", [{"claim": "../../.."}, {"claim": ""}, {"step": -1}, {"rewrite": -1}, {"server": -1}])
def test_an_order_cannot_name_files(tmp_path, wrong):
    server = servers_of(BucketMap.even(1))[0]
    train([server], range(50), 0)
    order = RowsToWrite(str(tmp_path), 1, 0, "0" * 8, 0, 1.0)
    with rpc.serve(server, protocol=EmbeddingPS) as served:
        stub = rpc.connect(served.address, EmbeddingPS, timeout=DEADLINE)
        stub.begin_snapshot("a", {}, "")
        with pytest.raises(WireError):
            list(stub.write_snapshot("a", order._replace(**wrong)))
        assert not list(tmp_path.iterdir())
        assert list(stub.write_snapshot("a", order))
        (tmp_path / "secret").write_bytes(b"")
        marks = ["secret", "../secret", f"{tmp_path}/secret", "step-000000000001/mark-", "step-000000000001/mark-0\n"]
        for path in [*marks, "step-000000000001/../mark-0", "step-000000000001/rewrite-/mark-0"]:
            with pytest.raises(WireError):
                stub.check_place(str(tmp_path), path, "crc32:00000000")
        for rewrite in range(2):
            with CheckpointWriter(tmp_path, 2) as writer:
                with writer.mark() as mark:
                    assert ("rewrite-1" in mark[0]) == bool(rewrite)
                    assert stub.check_place(str(tmp_path), *mark).problem == ""
                writer.commit(schema=schema_of(), optimizer=None)
        rpc.close(stub)


@pytest.mark.parametrize("restarts", [False, True])
def test_a_ps_that_is_lost_while_it_writes(tmp_path, monkeypatch, restarts):
    """The checkpoint before stays the latest one, and nothing is left of this one."""
    servers = servers_of(BucketMap.even(2))
    train(servers, range(200), 0)
    save(servers, tmp_path, 1)
    write, begun, go = RowFiles.rows, threading.Event(), threading.Event()

    def noted(files, table, shard, arrays):
        if shard // 1024 == 1 and not begun.is_set():
            begun.set()
            assert go.wait(DEADLINE)
        return write(files, table, shard, arrays)

    monkeypatch.setattr(RowFiles, "rows", noted)
    with rpc.serve(servers[0], protocol=EmbeddingPS) as first:
        second = rpc.serve(servers[1], protocol=EmbeddingPS)
        timeout = DEADLINE if restarts else 2.0  # Calls to one that is gone last as long.
        stubs = [rpc.connect(served.address, EmbeddingPS, timeout=timeout) for served in (first, second)]
        for stub in stubs:
            stub.export_state = lambda: iter(())
        errors = []

        def attempt():
            try:
                save(stubs, tmp_path, 2)
            except PersiaError as error:
                errors.append(error)

        saving = threading.Thread(target=attempt)
        saving.start()
        assert begun.wait(DEADLINE)
        ending = threading.Thread(target=second.close, args=(0.0,))  # Waits for the file.
        ending.start()
        go.set()
        ending.join(DEADLINE)
        again = servers_of(BucketMap.even(2))[1]
        with rpc.serve(again, second.address, protocol=EmbeddingPS) if restarts else nullcontext():
            saving.join(DEADLINE)
        assert not saving.is_alive()
        for stub in stubs:
            rpc.close(stub)
    (error,) = errors
    assert ("is gone" if restarts else "is late") in error.message
    assert not (tmp_path / "step-000000000002").exists()
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [1]
    assert CheckpointReader(tmp_path).manifest.global_step == 1
    CheckpointReader(tmp_path).verify()


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def read(monkeypatch):
    """The files of rows that were read."""
    paths = []
    rows = PartReader.rows
    monkeypatch.setattr(PartReader, "rows", lambda reader, part: paths.append(part) or rows(reader, part))
    return paths


@pytest.mark.parametrize(
    ("servers", "rank", "writers"), [(4, 2, {2}), (8, 5, {2}), (3, 1, {1, 2}), (1, 0, {0, 1, 2, 3})]
)
def test_a_ps_reads_what_it_needs(tmp_path, read, servers, rank, writers):
    writing = servers_of(FOUR)
    train(writing, range(400), 0)
    save(writing, tmp_path, 1)
    reading = servers_of(BucketMap.even(servers))
    reader = CheckpointReader(tmp_path)
    tables = [TableToRead(name, name, True, *NO_GAPS) for name in ("item", "user")]
    order = RowsToRead(*reader.address, reader.manifest.checksum, rank, 0, tables, False)
    rows = list(reading[rank].read_own_rows(order))
    assert {part.shard // 1024 for part in read} == writers
    assert len(read) == len({part.path for part in read})
    assert 0 < sum(each.rows for each in rows) <= 800


def test_rows_of_a_table_of_another_name(tmp_path, read):
    """Ids are hashed with the name of their table, so any PS may have written them."""
    writing, reading = servers_of(FOUR), servers_of(FOUR)
    train(writing, range(100), 0)
    save(writing, tmp_path, 1)
    reader = CheckpointReader(tmp_path)
    renamed = RowsToRead(
        *reader.address, reader.manifest.checksum, 0, 0, [TableToRead("item", "user", True, *NO_GAPS)], False
    )
    with pytest.raises(StoreError):  # Of another dim; so all of them have been read.
        list(reading[0].read_own_rows(renamed))
    assert {part.shard // 1024 for part in CheckpointReader(tmp_path).parts("user")} == {0, 1, 2, 3}
    owned = Owned("item", FOUR, [0])
    assert len(reader.parts("user", owned)) == len(reader.parts("user"))
    assert {part.shard // 1024 for part in reader.parts("item", owned)} == {0}


def test_each_file_is_checked_once(tmp_path, monkeypatch):
    servers = servers_of(FOUR)
    train(servers, range(100), 0)
    numbers, base = save(servers, tmp_path, 1)
    train(servers, range(50, 150), 1)
    save(servers, tmp_path, 2, numbers, base)
    checked = []
    problem = PartReader.problem
    monkeypatch.setattr(
        PartReader, "problem", lambda reader, part: checked.append(reader.full(part)) or problem(reader, part)
    )
    reader = CheckpointReader(tmp_path)
    ServerReading(reader, servers, range(4)).verify()
    assert sorted(checked) == sorted(link._part_reader.full(part) for link, part in reader.all_parts())


@pytest.mark.parametrize("sees", [True, False])
def test_damage_is_found_before_anything_changes(tmp_path, sees):
    servers = servers_of(FOUR)
    train(servers, range(400), 0)
    save(servers, tmp_path, 1)
    files = [of_servers(tmp_path)[number][0] for number in (1, 3)]
    for file in files:
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    reading = servers_of(FOUR)
    if not sees:
        blind(reading[0])
    with pytest.raises(CheckpointError) as caught:
        load(reading, tmp_path)
    assert len(caught.value.fields["problems"]) == 2
    assert all(str(file) in caught.value.message for file in files)
    assert all(not rows for rows in rows_of(reading))


def test_a_ps_refuses_another_map_and_another_checkpoint(tmp_path):
    servers = servers_of(BucketMap.even(1))
    train(servers, range(50), 0)
    save(servers, tmp_path, 1)
    reader = CheckpointReader(tmp_path)
    tables = [TableToRead("item", "item", True, *NO_GAPS)]
    order = RowsToRead(*reader.address, reader.manifest.checksum, 0, 0, tables, False)
    with pytest.raises(StaleMapError):
        list(servers[0].read_own_rows(order._replace(map_version=1)))
    with pytest.raises(CheckpointError, match=r"^on host .*: .* is another checkpoint than the one to load"):
        list(servers[0].read_own_rows(order._replace(checksum="crc32:00000000")))
    with pytest.raises(CheckpointError, match=r"^on host .*: .* is another checkpoint than the one to load"):
        next(servers[0].check_row_parts(*reader.address, "crc32:00000000", 0, 1))
    with closing(servers[0].read_own_rows(order)) as reads:
        assert next(reads).table == ""  # The checkpoint is open.
        assert next(reads).table == "item"


def test_each_part_of_the_state_is_an_item(tmp_path):
    """So that the deadline of an item is for one file."""
    servers = servers_of(BucketMap.even(1))
    train(servers, range(50), 0)
    pieces = [piece for pieces in servers[0].export_state() for piece in pieces]
    servers[0].export_state = lambda: iter([piece] for piece in pieces)
    save(servers, tmp_path, 1)
    reader = CheckpointReader(tmp_path)
    (reading,) = servers_of(BucketMap.even(1))
    imported = []
    reading.import_state = lambda pieces: imported.append(pieces)
    order = RowsToRead(*reader.address, reader.manifest.checksum, 0, 0, [], True)
    counts = []
    for read in reading.read_own_rows(order):
        assert read == ("", 0)
        counts.append(len(imported))
    assert counts == list(range(len(pieces) + 1))
    assert len(pieces) > 1


def test_a_directory_of_a_single_step_is_read_as_well(tmp_path):
    servers = servers_of(BucketMap.even(2))
    train(servers, range(50), 0)
    save(servers, tmp_path, 1)
    (tmp_path / "step-000000000001").rename(tmp_path / "copied")
    reading = servers_of(BucketMap.even(2))
    assert load(reading, tmp_path / "copied") == {"item": 50, "user": 50}
    assert rows_of(reading) == rows_of(servers)


def test_shares_of_one_host_add_up(tmp_path):
    servers = servers_of(BucketMap.even(3))
    train(servers, range(50), 0)
    shares = {}
    for number, server in enumerate(servers):
        host = "a" if number < 2 else "b"
        check, write = server.check_place, server.write_snapshot
        server.check_place = lambda *a, check=check, host=host: check(*a)._replace(host=host)
        server.write_snapshot = lambda name, order, write=write: (
            shares.update({order.server: order.share}) or write(name, order)
        )
        server.begin_snapshot("a", {}, "")
    with CheckpointWriter(tmp_path, 1) as writer:
        write_rows(writer, servers, "a", share=0.5)
    assert shares == {0: 0.25, 1: 0.25, 2: 0.5}
