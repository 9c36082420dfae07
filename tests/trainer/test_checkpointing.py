"""Checkpoints that are written while training goes on, and what they are loaded into."""

import contextlib
import functools
import logging
import os
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_resume import adam, assert_same_rows, assert_same_training, model, reader, schema_of, trainer

import persia
from persia.batching import owners
from persia.checkpoint import MOST_SHARDS, CheckpointReader, CheckpointWriter, ReshardOptions, list_checkpoints, reshard
from persia.checkpoint import throttle as throttling
from persia.checkpoint.row_files import RowFiles
from persia.checkpoint.storage import Storage
from persia.checkpoint.throttle import REST_SECONDS, Throttle
from persia.errors import CheckpointError, ConfigError, StaleMapError
from persia.modes import Hybrid, Sync
from persia.optim import Adagrad, Adam
from persia.ps import EmbeddingServer
from persia.trainer import checkpointing as saving
from persia.trainer import loading
from persia.trainer.retrieval_evaluation import RetrievalEvaluator
from persia.types import BucketMap
from support import moved_rows
from support.several_ps import Several
from support.threads_of_driver import ThreadsOfDriver

DEADLINE = 60.0


def several(schema, count, optimizer=None, embedding_optimizer=None, **options):
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=optimizer or adam,
        embedding_optimizer=embedding_optimizer or Adagrad(lr=0.1),
        mode=Sync(),
        cluster=Several(count),
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


@pytest.fixture
def held(monkeypatch):
    """Writing rows in the background waits until training has gone on, so that the two certainly overlap."""
    go = threading.Event()
    write = RowFiles.rows

    def late(files, *arguments):
        if threading.current_thread().name == "persia-checkpoint":
            assert go.wait(DEADLINE)
        return write(files, *arguments)

    monkeypatch.setattr(RowFiles, "rows", late)
    return go


class Letting:
    """The batches of a reader; at the given one the writer may go on."""

    def __init__(self, source, number, event):
        self.source, self.number, self.event = source, number, event

    def batches(self, epoch=0, start=0):
        for i, batch in enumerate(self.source.batches(epoch, start), start):
            if i == self.number:
                self.event.set()
            yield batch

    def fingerprint(self):
        return self.source.fingerprint()


def ids_and_values(path, table, step=None):
    found = {}
    for _, arrays in CheckpointReader(path, step).rows(table):
        assert arrays["last_step"].dtype == np.uint32
        found.update(zip(arrays["ids"].tolist(), arrays["embeddings"][:, 0].tolist(), strict=True))
    return found


def spy_snapshots(monkeypatch):
    """Whether each snapshot was live."""
    live = []
    begin = EmbeddingServer.begin_snapshot

    def noted(server, name, since, directory, is_live=False):
        live.append(is_live)
        return begin(server, name, since, directory, is_live)

    monkeypatch.setattr(EmbeddingServer, "begin_snapshot", noted)
    return live


@pytest.mark.parametrize("mode", [Sync(), Hybrid(4, warmup=0)])
def test_a_checkpoint_is_of_its_step_though_training_goes_on(tmp_path, held, mode):
    schema = schema_of()
    torch.manual_seed(1)
    t = trainer(schema, mode, checkpoint_dir=str(tmp_path), checkpoint_every_steps=6, keep_last=9)
    t.fit(Letting(reader(), 18, held))
    steps = [entry.step for entry in list_checkpoints(tmp_path)]
    assert steps[0] == 6
    assert steps[-1] == 20
    first = CheckpointReader(tmp_path, 6)
    assert first.manifest.span == (6, 6)
    first.verify()
    assert all(p.steps is None or p.steps[1] < 6 for p in first.manifest.parts if p.__class__.__name__ == "RowsPart")
    if mode == Sync():  # Bit for bit what a run that stops there has, so also what it becomes.
        torch.manual_seed(1)
        twin = trainer(schema)
        twin.fit(reader(), max_steps=6)
        (tmp_path / "LATEST").write_text("step-000000000006\n")
        back = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
        assert_same_training(twin, back)
        back.fit(reader())
        assert_same_training(t, back)


def test_without_consistency_the_span_has_the_steps_of_rows(tmp_path, held, monkeypatch):
    live = spy_snapshots(monkeypatch)
    options = {"checkpoint_consistent": False, "checkpoint_every_steps": 6, "keep_last": 9}
    t = trainer(schema_of(), Hybrid(2, warmup=0), checkpoint_dir=str(tmp_path), **options)
    t.fit(Letting(reader(), 18, held))
    first, last = CheckpointReader(tmp_path, 6).manifest.span
    assert first == 6
    assert last >= 12
    CheckpointReader(tmp_path, 6).verify()
    assert live[0]


def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_writing_is_throttled_to_a_share_of_the_processors():
    rests = Throttle(0.25 / len(os.sched_getaffinity(0)), threading.Event())
    begin, worked = time.monotonic(), time.thread_time()
    for _ in range(20):
        work(0.002)
        rests()
    assert time.thread_time() - worked < 0.3 * (time.monotonic() - begin)


def test_writing_is_not_throttled_on_all_processors_or_in_haste():
    class Hurry(threading.Event):
        """Keeps the seconds of the rests."""

        def wait(self, seconds):
            rests.append(seconds)
            return super().wait(seconds)

    rests, hurry = [], Hurry()
    all_processors = Throttle(1.0, hurry)
    work(0.002)
    all_processors()
    assert rests == [0.0]
    in_a_hurry = Throttle(1e-9, hurry)
    hurry.set()
    work(0.002)
    in_a_hurry()
    assert rests[1] == REST_SECONDS  # Else for days.


def test_a_throttled_checkpoint_continues_when_awaited(tmp_path, monkeypatch):
    rested = threading.Event()
    rest = Throttle.__call__

    def noted(rests):
        rested.set()
        rest(rests)

    monkeypatch.setattr(Throttle, "__call__", noted)
    monkeypatch.setattr(throttling, "REST_SECONDS", 3600.0)  # Unless it is in a hurry.
    t = trainer(schema_of(), checkpoint_dir=str(tmp_path), checkpoint_every_steps=6, checkpoint_share=1e-9, keep_last=9)
    t.fit(reader())
    assert rested.is_set()
    assert [entry.step for entry in list_checkpoints(tmp_path)] == [6, 20]  # Others were due while it rested.
    rested.clear()
    t.save(tmp_path / "other")  # Does not rest.
    assert not rested.is_set()


def test_files_are_removed_once_pss_have_stopped_writing(tmp_path, monkeypatch):
    calls = []
    end, abort = EmbeddingServer.end_snapshot, CheckpointWriter.abort
    monkeypatch.setattr(EmbeddingServer, "end_snapshot", lambda *a: calls.append("end") or end(*a))
    monkeypatch.setattr(CheckpointWriter, "abort", lambda *a: calls.append("abort") or abort(*a))
    monkeypatch.setattr(RowFiles, "removed", lambda *_: (_ for _ in ()).throw(CheckpointError("full")))
    monkeypatch.setattr(RowFiles, "rows", lambda *_: (_ for _ in ()).throw(CheckpointError("full")))
    t = several(reader().schema, 2)
    t.fit(reader(), max_steps=1)
    with pytest.raises(CheckpointError, match="full"):
        t.save(str(tmp_path))
    assert calls[:3] == ["end", "end", "abort"]


def test_checkpoints_due_too_early_are_skipped_with_one_warning(tmp_path, held, caplog):
    t = trainer(schema_of(), checkpoint_dir=str(tmp_path), checkpoint_every_steps=4, keep_last=9)
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        t.fit(Letting(reader(), 18, held))
    assert [one.message.split(",")[0] for one in caplog.records] == ["Step 8: checkpoint skipped"]
    steps = [entry.step for entry in list_checkpoints(tmp_path)]
    assert 4 in steps
    assert 8 not in steps
    assert 12 not in steps  # It was due while the same one was written.
    assert steps[-1] == 20


def test_by_time(tmp_path):
    t = trainer(schema_of(), checkpoint_dir=str(tmp_path), checkpoint_every_seconds=1e-3, keep_last=99)
    t.fit(reader(), epochs=2)
    steps = [entry.step for entry in list_checkpoints(tmp_path)]
    assert steps[-1] == 40
    assert len(steps) >= 2


def test_an_error_of_training_is_not_hidden_by_one_of_saving(tmp_path, monkeypatch):
    def full(*_):
        raise CheckpointError("full")

    monkeypatch.setattr(RowFiles, "rows", full)
    t = trainer(schema_of(), checkpoint_dir=str(tmp_path), checkpoint_every_steps=4)
    batches = list(reader())[:6]
    batches.append(persia.Batch({}, batches[0].dense, batches[0].labels))
    with pytest.raises(persia.errors.DataError):
        t.fit(batches)
    monkeypatch.undo()
    t.save(str(tmp_path))
    assert CheckpointReader(tmp_path).manifest.global_step == t.global_step


# --- incremental ------------------------------------------------------------------------------------------------


def test_increments_add_up(tmp_path):
    """id_0 evicts, so rows go as well as come."""
    schema = schema_of(capacity=120)
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 2, "checkpoint_increments": 3}
    t = trainer(schema, keep_last=99, **options)
    for _ in range(7):  # Each call ends with its checkpoint written, so none is left out.
        t.fit(reader(), max_steps=2)
    kinds = [CheckpointReader(tmp_path, entry.step).manifest.base for entry in list_checkpoints(tmp_path)]
    assert [base.step if base else None for base in kinds] == [None, 2, 4, 6, None, 10, 12]
    reference = tmp_path / "whole"
    t.save(str(reference))
    for table in ("id_0", "id_1", "id_2"):
        assert ids_and_values(tmp_path, table) == ids_and_values(reference, table)
    back = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert back.embeddings.statistics()["id_0"]["rows"] == t.embeddings.statistics()["id_0"]["rows"]
    t.fit(reader())
    back.fit(reader())
    assert back.global_step == t.global_step == 20


def test_a_failed_increment_is_followed_by_a_full_one(tmp_path, monkeypatch):
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_increments": 9, "keep_last": 99}
    t = trainer(schema_of(), **options)
    t.fit(reader(), max_steps=2)
    t.fit(reader(), max_steps=2)
    assert CheckpointReader(tmp_path).manifest.base is not None
    with monkeypatch.context() as patch:
        patch.setattr(Storage, "sync", lambda _: (_ for _ in ()).throw(CheckpointError("power")))
        with pytest.raises(CheckpointError, match="power"):
            t.fit(reader(), max_steps=2)
    t.fit(reader(), max_steps=2)
    assert CheckpointReader(tmp_path).manifest.global_step == 8
    assert CheckpointReader(tmp_path).manifest.base is None


# --- the best -----------------------------------------------------------------------------------------------------


def test_keep_best(tmp_path):
    t = trainer(schema_of(), checkpoint_dir=str(tmp_path), keep_last=1, keep_best="log_loss")
    with pytest.raises(ConfigError, match="eval_data"):
        t.fit(reader(), max_steps=1)
    scores = {}
    for _ in range(4):
        result = t.fit(reader(), reader(1000), max_steps=2)
        scores[result.global_step] = result.evaluation.log_loss
        assert CheckpointReader(tmp_path).extra["score"] == -result.evaluation.log_loss
    best = min(scores, key=scores.get)
    assert {best, 8} == {entry.step for entry in list_checkpoints(tmp_path)}


# --- another shape ------------------------------------------------------------------------------------------------


@functools.cache
def of_one_server():
    """A run that was never stopped."""
    whole = several(reader().schema, 1)
    torch.manual_seed(1)
    whole.fit(reader(), epochs=2)
    return whole


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2), (2, 1), (2, 2)])
def test_another_number_of_servers(tmp_path, before, after):
    """In Sync, without evictions or random admission, the number of PSs changes nothing, before or after a resume."""
    schema, whole = reader().schema, of_one_server()
    first = several(schema, before)
    torch.manual_seed(1)
    first.fit(reader(), epochs=2, max_steps=25)
    first.save(str(tmp_path))
    second = several(schema, after)
    second.load(str(tmp_path))
    second.fit(reader(), epochs=2)
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    one, two = tmp_path / "one", tmp_path / "two"
    whole.save(str(one))
    second.save(str(two))
    for table in schema.resolved_tables():
        assert ids_and_values(one, table) == ids_and_values(two, table)


def test_the_same_shape_goes_on_bit_for_bit(tmp_path):
    schema = schema_of()
    first = several(schema, 2)
    first.fit(reader(), max_steps=9)
    first.save(str(tmp_path))
    second = several(schema, 2)
    second.load(str(tmp_path))
    assert_same_rows(first, second)
    for one, two in zip(first.embeddings.connection.servers, second.embeddings.connection.servers, strict=True):
        for mine, theirs in zip(one.export_state(), two.export_state(), strict=True):
            assert any(piece.array == "sketch" for piece in mine)
            for a, b in zip(mine, theirs, strict=True):
                if a.array == "clocks":  # The second one counts the snapshots of this process, such as that of `save`.
                    np.testing.assert_array_equal(a.values[[0, 2]], b.values[[0, 2]])
                    continue
                np.testing.assert_array_equal(a.values, b.values, err_msg=f"{a.table} {a.shard} {a.array}")


def test_recency_survives_resharding(tmp_path):
    """What was used last is evicted last, whatever shard it came from."""
    table = persia.Table("id_0", 16, capacity=400)
    base = reader().schema
    schema = persia.Schema(base.id_features, base.dense_features, base.labels, [table])
    first = several(schema, 2)
    first.fit(reader())
    first.save(str(tmp_path))
    recent = list(reader())[-1].id_features["id_0"].values
    for step in (None, "offline"):
        source = str(tmp_path)
        if step:
            source = str(tmp_path / "offline")
            reshard(tmp_path, source, ReshardOptions(3))
        small = persia.Schema(
            base.id_features, base.dense_features, base.labels, [persia.Table("id_0", 16, capacity=60)]
        )
        second = several(small, 1)
        second.load(source)
        kept = set()
        for chunk in second.embeddings.connection.servers[0].export_rows():
            if chunk.table == "id_0":
                kept |= set(chunk.arrays["ids"].tolist())
        assert len(kept) == 60
        last_two = {int(i) for i in recent}
        assert len(kept & last_two) >= min(60, len(last_two)) * 0.9


def test_offline_reshard_sorts_rows_by_server(tmp_path):
    schema = schema_of()
    first = several(schema, 2)
    first.fit(reader(), max_steps=10)
    first.save(str(tmp_path / "a"))
    counted = []
    reshard(tmp_path / "a", tmp_path / "b", ReshardOptions(3), progress=counted.append)
    result = CheckpointReader(tmp_path / "b")
    result.verify()
    for table in ("id_0", "id_1", "id_2"):
        assert ids_and_values(tmp_path / "a", table) == ids_and_values(tmp_path / "b", table)
        for part in result.parts(table):
            arrays = result.read_part(part)
            assert (owners(table, arrays["ids"], BucketMap.even(3)) == part.shard // MOST_SHARDS).all()
    assert sum(counted) == sum(t.rows for t in result.manifest.tables.values())
    second = several(schema, 3)
    second.load(str(tmp_path / "b"))
    second.fit(reader())
    assert second.global_step == 20
    with pytest.raises(CheckpointError, match="another target"):
        reshard(tmp_path / "a", tmp_path / "a", ReshardOptions(3))


@pytest.mark.parametrize("memory", [0, 64 << 20])
def test_states_are_of_their_step_held_or_written_immediately(tmp_path, held, monkeypatch, memory):
    monkeypatch.setattr("persia.trainer.ps_snapshots.HELD_BYTES", memory)
    torch.manual_seed(1)
    base = schema_of()
    tables = [persia.Table("id_0", 16, capacity=300, admission=persia.AdmitMinFrequency(3))]
    schema = persia.Schema(base.id_features, base.dense_features, base.labels, tables)
    t = trainer(schema, checkpoint_dir=str(tmp_path), checkpoint_every_steps=6, keep_last=9)
    t.fit(Letting(reader(), 18, held))
    torch.manual_seed(1)
    twin = trainer(schema)
    twin.fit(reader(), max_steps=6)
    back = trainer(schema)
    back.load(str(tmp_path), step=6)
    assert_same_training(twin, back)
    back.fit(reader())
    assert_same_training(t, back)


def test_the_parts_are_called_as_the_format_page_says(tmp_path):
    page = Path(__file__).parents[2] / "docs" / "reference" / "checkpoint.md"
    section = page.read_text().split("## What the parts of a training run are called")[1].split("## ")[0]
    documented = set(re.findall(r"^\| (\w+ `.*?`) \|", section, re.MULTILINE))
    t = several(schema_of(), 2)
    t.fit(reader(), max_steps=2)
    t.save(str(tmp_path))
    kinds = {"TensorsPart": "tensors", "StatePart": "state"}
    parts = CheckpointReader(tmp_path).manifest.parts
    named = {(kinds[type(p).__name__], p.name) for p in parts if type(p).__name__ in kinds}
    written = {f"{kind} `{re.sub(r'-[0-9]+[.][0-9]+$', '-<p>.<k>', name)}`" for kind, name in named}
    assert written == documented
    assert ("state", "server-1.0") in named


def test_small_checkpoints_for_prediction(tmp_path, caplog):
    schema = schema_of()
    first = several(schema, 2)
    first.fit(reader(), max_steps=10)
    first.save(str(tmp_path / "a"))
    reshard(tmp_path / "a", tmp_path / "b", ReshardOptions(1, ("id_1", "id_2"), "float16", state=False))
    result = CheckpointReader(tmp_path / "b")
    assert set(result.manifest.tables) == {"id_1", "id_2"}
    assert result.manifest.tables["id_1"].dtype == "float16"
    whole, half = (ids_and_values(tmp_path / name, "id_1") for name in "ab")
    assert whole.keys() == half.keys()
    np.testing.assert_allclose(list(whole.values()), [half[id_] for id_ in whole], rtol=1e-3, atol=1e-6)
    assert 3 * sum(p.bytes for p in result.parts("id_1")) < sum(
        p.bytes for p in CheckpointReader(tmp_path / "a").parts("id_1")
    )
    second = several(schema, 1)
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        loaded = second.load_rows(str(tmp_path / "b"))
    assert set(loaded) == {"id_1", "id_2"}
    assert not loaded["id_1"].state
    assert "is reset" in caplog.text
    assert second.embeddings.statistics()["id_1"]["rows"] == len(whole)
    assert second.embeddings.statistics()["id_0"]["rows"] == 0
    second.fit(reader(), max_steps=2)
    with pytest.raises(CheckpointError, match="no table 'id_9'"):
        second.load_rows(str(tmp_path / "b"), ["id_9"])


def test_rows_with_state_into_another_model(tmp_path):
    schema = schema_of()
    first = several(schema, 1)
    first.fit(reader(), max_steps=10)
    first.save(str(tmp_path))
    second = several(schema, 2)
    assert second.load_rows(str(tmp_path), ["id_1"])["id_1"].state
    ids = np.array(list(ids_and_values(tmp_path, "id_1")), np.uint64)
    rows = [server.lookup({"id_1": ids}, False)["id_1"] for server in second.embeddings.connection.servers]
    np.testing.assert_array_equal(sum(rows)[:, 0], list(ids_and_values(tmp_path, "id_1").values()))


@pytest.mark.parametrize(
    ("saved", "mine", "found"),
    [
        ("auto", "text", False),
        ("text", "number", False),
        ("auto", "number", True),
    ],
)
def test_rows_whose_values_have_other_ids_are_refused(tmp_path, saved, mine, found):
    def trainer(kind, *others):
        schema = persia.Schema([persia.IdFeature("item", dim=2, kind=kind), *others])
        return several(schema, 1)

    first = trainer(saved)
    columns = {"item": np.arange(100), "label": np.zeros(100)}
    first.fit([persia.Batch.from_columns(first.schema, columns)])
    first.save(str(tmp_path))
    if found:
        assert trainer(mine).load_rows(str(tmp_path))["item"].rows == 100
        return
    with pytest.raises(CheckpointError, match=rf"table 'item' have other ids: feature 'item' .*{mine}"):
        trainer(mine).load_rows(str(tmp_path))
    # A feature beside it that finds them is enough.
    beside = persia.IdFeature("past", table="item", kind=saved)
    assert trainer(mine, beside).load_rows(str(tmp_path))["item"].rows == 100


def test_an_increment_after_rows_were_loaded_has_them(tmp_path):
    """Loaded rows count as changed."""
    schema = schema_of()
    other = several(schema, 1)
    other.fit(reader(), max_steps=10)
    other.save(str(tmp_path / "other"))
    t = several(schema, 2, checkpoint_increments=5)
    t.fit(reader(), max_steps=2)
    t.save(str(tmp_path / "t"))
    t.load_rows(str(tmp_path / "other"), ["id_1"])
    t.fit(reader(), max_steps=1)
    t.save(str(tmp_path / "t"))
    assert CheckpointReader(tmp_path / "t").manifest.base is not None
    saved = ids_and_values(tmp_path / "t", "id_1")
    assert saved.keys() >= ids_and_values(tmp_path / "other", "id_1").keys()
    for server in t.embeddings.connection.servers:
        for chunk in server.export_rows():
            if chunk.table == "id_1":
                rows = zip(chunk.arrays["ids"].tolist(), chunk.arrays["embeddings"][:, 0].tolist(), strict=True)
                assert all(saved[id_] == value for id_, value in rows)


def test_the_state_of_another_optimizer_is_reset_with_a_warning(tmp_path, caplog):
    schema = reader().schema
    first = several(schema, 1)
    first.fit(reader(), max_steps=10)
    first.save(str(tmp_path))
    others = {"embedding_optimizer": Adam(lr=0.01), "optimizer": lambda p: torch.optim.SGD(p, 0.1)}
    second = several(schema, 1, **others)
    with pytest.raises(CheckpointError, match="Adam"):
        second.load(str(tmp_path))
    with caplog.at_level(logging.WARNING, "persia.checkpoint"):
        second.load(str(tmp_path), new_optimizer=True)
    assert "Table 'id_1': the optimizer's state is reset" in caplog.text
    assert "Adam with groups" in caplog.text
    for chunk in second.embeddings.connection.servers[0].export_rows():
        assert not chunk.arrays["state"].any()
        assert not chunk.arrays["update_count"].any()
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    second.fit(reader())
    assert second.global_step == 20


@pytest.mark.parametrize("call", ["save", "load", "load_rows"])
def test_rows_of_some_pss_of_a_map_are_neither_saved_nor_loaded(tmp_path, monkeypatch, call):
    """A process may not know yet that others have joined, and rows moved to them."""
    first, second = several(schema_of(), 2), several(schema_of(), 2)
    first.fit(reader(), max_steps=1)
    first.save(str(tmp_path))
    run = first if call == "save" else second
    after = BucketMap.even(2).moved(3)
    for server in run.embeddings.connection.servers:
        monkeypatch.setattr(server, "buckets", lambda: after)
    with pytest.raises(CheckpointError, match="Bucket map 1 has 3 embedding PSs, and this process knows 2"):
        getattr(run, call)(str(tmp_path / "other" if call == "save" else tmp_path))
    assert list_checkpoints(tmp_path / "other") == []
    assert sum(table["rows"] for table in second.embeddings.statistics().values()) == 0


def test_a_driver_saves_and_loads_while_rows_are_kept(tmp_path, monkeypatch):
    kept, seen = [], []

    @contextlib.contextmanager
    def keeping_rows():
        kept.append(True)
        yield
        kept.pop()

    def trainer():
        cluster = ThreadsOfDriver(1)
        cluster.keeping_rows = keeping_rows
        return moved_rows.make_trainer(cluster, Sync())

    def noted(owner, name):
        call = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: (seen.append(list(kept)), call(*given, **named))[1])

    first = trainer()
    first.fit(moved_rows.EndlessBatches(pause=0.0), max_steps=1)
    noted(saving, "begin_snapshots")
    noted(saving, "held_states")
    noted(loading, "_import_rows")
    first.save(str(tmp_path))
    second = trainer()
    second.load(str(tmp_path))
    second.load_rows(str(tmp_path))
    assert (seen, kept) == ([[True]] * 4, [])
    monkeypatch.setattr(RetrievalEvaluator, "evaluate", lambda *given: seen.append(list(kept)))
    second.evaluate_retrieval([])  # It reads the ids of all rows.
    assert (seen, kept) == ([[True]] * 5, [])


def test_a_ps_that_gets_another_map_before_it_reads_its_rows_says_so(tmp_path, monkeypatch):
    """Also if it owns none of them by that map, so that it imports none."""
    first, second = several(schema_of(), 2), several(schema_of(), 2)
    first.fit(reader(), max_steps=1)
    first.save(str(tmp_path))
    after = BucketMap.even(2).emptied([1])
    monkeypatch.setattr(second.embeddings.connection.servers[1], "buckets", lambda: after)
    with pytest.raises(StaleMapError):
        second.load_rows(str(tmp_path))


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_no_checkpoint_begins_while_pss_have_different_maps(tmp_path, monkeypatch, when):
    """Its rows would be those of one map at some PSs, and of another one at others."""
    t = several(schema_of(), 2, checkpoint_dir=str(tmp_path))
    t.fit(reader(), max_steps=1)
    first, second = t.embeddings.connection.servers
    current = first.buckets()
    following = current.reassigned(0, 1)

    def adopt(server):
        monkeypatch.setattr(server, "buckets", lambda: following)

    if when == "before":
        adopt(second)
    else:
        begin = second.begin_snapshot
        second.begin_snapshot = lambda *arguments: (begin(*arguments), adopt(first), adopt(second))[0]
    with pytest.raises(CheckpointError, match="bucket maps 0 and 1: rows are moving to other PSs"):
        t.save(str(tmp_path / "other"))
    assert not first._snapshots.reading
    assert not second._snapshots.reading
    assert list_checkpoints(tmp_path / "other") == []
