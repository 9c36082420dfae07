"""A run that is saved and resumed goes on as if nothing had happened."""

import errno
import functools
import itertools
import os
import resource
import shutil
import signal
import threading
import time

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileOpener

import persia
from persia.checkpoint import list_checkpoints
from persia.cluster import Embedded
from persia.errors import (
    CheckpointError,
    DataError,
    DeadlineError,
    PeerRestartedError,
    PersiaError,
    StoreError,
    WireError,
)
from persia.modes import Hybrid, Sync, encode
from persia.nn.gate import StalenessGate
from persia.optim import SGD, Adagrad, Adam
from persia.ps import EmbeddingServer
from persia.trainer import checkpointing as saving
from persia.trainer.loading import recorded
from support.waiting import wait_until


def reader(rows=4_000):
    return persia.data.synthetic(rows, id_features=3, ids_per_feature=400, dense_features=1, batch_size=200)


def schema_of(optimizer=None, capacity=300, data=None):
    base = (data or reader()).schema
    tables = [persia.Table("id_0", 16, optimizer=optimizer, capacity=capacity, admission=persia.AdmitProbability(0.5))]
    return persia.Schema(base.id_features, base.dense_features, base.labels, tables)


def model(schema, dropout=0.3):
    torch.manual_seed(0)
    return persia.nn.models.FFNN(schema, hidden=(16,), dropout=dropout)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def trainer(schema, mode=None, **options):
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode or Sync(),
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


def stored(t):
    result = {}
    for server in t.embeddings.connection.servers:
        for chunk in server.export_rows():
            result.setdefault(chunk.table, {}).setdefault(chunk.shard, []).append(chunk.arrays)
    return result


def assert_same_rows(one, two):
    one, two = stored(one), stored(two)
    assert one.keys() == two.keys()
    for table in one:
        for shard in one[table]:
            for a, b in zip(one[table][shard], two[table][shard], strict=True):
                for name in a:
                    np.testing.assert_array_equal(a[name], b[name], err_msg=f"{table} {name}")


@pytest.mark.parametrize("optimizer", [None, Adam(lr=0.01), SGD(lr=0.1, momentum=0.9)])
def test_resuming_in_sync_mode_is_bit_identical(tmp_path, optimizer):
    schema = schema_of(optimizer)
    whole = trainer(schema)
    torch.manual_seed(1)
    expected = whole.fit(reader(), epochs=2)

    first = trainer(schema)
    torch.manual_seed(1)
    first.fit(reader(), epochs=2, max_steps=27)
    first.save(str(tmp_path))
    torch.manual_seed(99)
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    result = second.fit(reader(), epochs=2)

    assert result.global_step == expected.global_step == 40
    assert result.history.auc == expected.history.auc
    assert result.history.log_loss == pytest.approx(expected.history.log_loss, rel=1e-12)  # Sums, in parts.
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_same_rows(whole, second)


def test_a_resumed_run_saves_where_it_was_resumed_from(tmp_path):
    """Not where the run was that this is a copy of."""
    schema, first, copied = schema_of(), tmp_path / "first", tmp_path / "copied"
    trainer(schema, checkpoint_dir=str(first)).fit(reader(), max_steps=2)
    shutil.copytree(first, copied)
    persia.Trainer.resume(str(copied), model(schema), optimizer=adam).fit(reader(), max_steps=2)
    assert [entry.step for entry in list_checkpoints(copied)] == [2, 4]
    assert [entry.step for entry in list_checkpoints(first)] == [2]


def test_periodic_checkpoints_do_not_disturb_sync(tmp_path):
    schema = schema_of()
    plain, saving = (
        trainer(schema),
        trainer(schema, checkpoint_dir=str(tmp_path), checkpoint_every_steps=6, keep_last=2),
    )
    results = []
    for t in (plain, saving):
        torch.manual_seed(1)
        results.append(t.fit(reader()).progressive)
    assert results[0] == results[1]
    assert_same_rows(plain, saving)
    assert len(list(tmp_path.glob("step-*"))) == 2


def test_what_is_counted_goes_on_over_a_resume(tmp_path):
    schema = schema_of()
    first = trainer(schema, Hybrid(3, warmup=0, refresh=False))

    def look_up_ahead(*_):
        if first.global_step == 0:
            wait_until(lambda: first.embeddings.ready == 3)

    first.model.register_forward_pre_hook(look_up_ahead)
    before = first.fit(reader(), max_steps=9)
    assert before.absent_rows > 0
    assert before.staleness_max == 3
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    after = second.fit(reader(), max_steps=1)
    assert after.absent_rows > before.absent_rows
    assert after.staleness_max == 3
    assert after.staleness_mean == pytest.approx(before.staleness_mean * 9 / 10)


@pytest.mark.parametrize("near", [False, True])
def test_the_depth_of_auto_is_restored(near, monkeypatch):
    """Not with rows in memory of the process, where a depth has to prove itself."""
    connect = Embedded.connect
    monkeypatch.setattr(Embedded, "connect", lambda *arguments: connect(*arguments)._replace(near=near))
    t = trainer(schema_of(), Hybrid(4, warmup=0))
    state = t.state.state_dict() | {"mode": encode(Hybrid("auto", warmup=0)), "depth": 7}
    t.state.load_state_dict(state, trains_in_other_processes=False)
    assert t.mode == Hybrid("auto", warmup=0)
    assert t.embeddings.gate.depth == (0 if near else 7)


@pytest.mark.parametrize("mode", [Hybrid(4, warmup=0), Hybrid("auto", warmup=0)])
def test_resuming_in_hybrid_mode_goes_on(tmp_path, mode):
    schema = schema_of()
    first = trainer(schema, mode)
    first.fit(reader(), max_steps=9)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert second.mode == mode
    assert second.fit(reader()).global_step == 20


def test_a_resumed_run_does_not_warm_up_again(tmp_path, monkeypatch):
    """It goes on in the warm-up, or behind it, as does the next pass of one run."""
    opened, opening = [], StalenessGate.open

    def spied(gate, step=0):
        opened.append((step, gate.mode.depth_at(gate.depth, step)))
        opening(gate, step)

    monkeypatch.setattr(StalenessGate, "open", spied)
    schema = schema_of()
    first = trainer(schema, Hybrid(3, warmup=12))
    first.fit(reader(), max_steps=4)
    first.fit(reader(), max_steps=4)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    second.fit(reader(), max_steps=8)
    second.save(str(tmp_path))
    third = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    third.fit(reader(), max_steps=4)
    assert opened == [(0, 0), (4, 1), (8, 2), (16, 3)]


def test_schedules_scaler_and_options_are_restored(tmp_path):
    schema = schema_of()
    options = {"precision": "fp16", "schedule": persia.Schedule(warmup_steps=100), "seed": 5}
    first = trainer(schema, **options)
    first.fit(reader(), max_steps=10)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert second.options == first.options
    assert second.step.optimizer.param_groups[0]["lr"] == first.step.optimizer.param_groups[0]["lr"]
    assert second.step.scaler.state_dict() == first.step.scaler.state_dict()


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    schema = schema_of()
    first = trainer(schema)
    first.fit(reader(), max_steps=3)
    path = first.save(str(tmp_path))

    other = persia.Schema([persia.IdFeature("id_0", dim=8), *reader().schema.id_features[1:]], ["dense_0"], ["click"])
    fresh = trainer(other)
    with pytest.raises(CheckpointError, match="dim"):
        fresh.load(str(tmp_path))

    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match="tensor"):
        persia.Trainer.resume(str(tmp_path), persia.nn.models.FFNN(schema, hidden=(17,)), optimizer=adam)
    with pytest.raises(CheckpointError, match="SGD"):
        persia.Trainer.resume(str(tmp_path), model(schema), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    with pytest.raises(CheckpointError, match="seed"):
        persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam, options=persia.TrainerOptions(seed=7))
    with pytest.raises(PersiaError, match="fresh"):
        first.load(str(tmp_path))

    part = sorted((tmp_path / path.rsplit("/", 1)[1]).rglob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-5])
    fresh = trainer(schema)
    before = [p.clone() for p in fresh.model.parameters()]
    with pytest.raises(CheckpointError):
        fresh.load(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.model.parameters(), strict=True))
    assert not any(t["rows"] for t in fresh.embeddings.statistics().values())
    with pytest.raises(CheckpointError):
        persia.Trainer.resume(str(tmp_path / "nothing"), model(schema), optimizer=adam)


def assert_same_training(one, two):
    assert one.global_step == two.global_step
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    mine, theirs = one.metrics.result(), two.metrics.result()
    assert (mine.rows, mine.auc) == (theirs.rows, theirs.auc)
    assert mine.log_loss == pytest.approx(theirs.log_loss, rel=1e-12)  # Sums, in parts.
    assert_same_rows(one, two)


def accumulating(precision):
    options = {"accumulation_steps": 3, "precision": precision, "clip_norm": 1.0}
    options["schedule"] = persia.Schedule(warmup_steps=4, decay="linear", total_steps=14)
    return trainer(schema_of(), **options)


@functools.cache
def accumulated(precision):
    """A run that was never stopped."""
    whole = accumulating(precision)
    torch.manual_seed(1)
    whole.fit(reader(), epochs=2)
    assert whole.global_step == 14
    return whole


@pytest.mark.parametrize(
    ("stop", "precision"),
    [*itertools.product([5, 6, 7, 9, 14], ["float32", "fp16"]), (6, "bf16")],  # bf16 has the state of float32.
)
def test_resuming_around_the_remainder_of_an_accumulation(tmp_path, stop, precision):
    """20 batches in groups of 3 leave 2: step 7 is smaller than the others, step 8 begins a new epoch and group."""
    whole, first = accumulated(precision), accumulating(precision)
    torch.manual_seed(1)
    first.fit(reader(), epochs=2, max_steps=stop)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(first.schema), optimizer=adam)
    if stop < 14:
        second.fit(reader(), epochs=2)
    assert_same_training(whole, second)
    assert second.step.optimizer.param_groups[0]["lr"] == whole.step.optimizer.param_groups[0]["lr"]
    if precision == "fp16":
        assert second.step.scaler.state_dict() == whole.step.scaler.state_dict()


class Corrected(list):
    """Batches of which a bad one is corrected: those before it are the same data."""

    def fingerprint(self):
        return "clicks"


def test_resuming_after_an_error_amid_a_group(tmp_path):
    """The part of the group before the error is a step of its own; the next group begins behind it."""
    schema = schema_of()
    batches = list(reader())
    bad = persia.Batch({}, batches[0].dense, batches[0].labels)
    first = trainer(schema, accumulation_steps=3, precision="fp16")
    torch.manual_seed(1)
    with pytest.raises(DataError):
        first.fit(Corrected([*batches[:10], bad, *batches[11:]]))
    assert (first.global_step, first.position) == (4, 10)
    first.save(str(tmp_path))
    torch.manual_seed(2)
    first.fit(Corrected(batches))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    torch.manual_seed(2)
    second.fit(Corrected(batches))
    assert second.global_step == 4 + 4
    assert_same_training(first, second)


class FullDisk:
    """The local file system has room for so many writes more."""

    def __init__(self, patch, room):
        self.room = room
        write = LocalFileOpener.write

        def limited(file, data):
            self.room -= 1
            if self.room < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write(file, data)

        patch.setattr(LocalFileOpener, "write", limited, raising=False)


def save_error(t, directory):
    try:
        t.save(directory)
    except CheckpointError as error:
        return error
    return None


def test_a_full_disk_leaves_checkpoint_and_trainer_usable(tmp_path, monkeypatch):
    data = persia.data.synthetic(2_400, id_features=2, ids_per_feature=400, dense_features=1, batch_size=200)
    schema = schema_of(data=data)
    torch.manual_seed(1)
    undisturbed = trainer(schema)
    undisturbed.fit(data, max_steps=9)
    undisturbed.fit(data)

    torch.manual_seed(1)
    t = trainer(schema)
    t.fit(data, max_steps=4)
    t.save(str(tmp_path))
    t.fit(data, max_steps=5)
    attempts, full = 0, True
    while full:
        with monkeypatch.context() as patch:
            FullDisk(patch, attempts)
            error = save_error(t, str(tmp_path))
        full = error is not None
        if full:
            attempts += 1
            assert "free space" in error.message
            assert error.fields["errno"] == errno.ENOSPC
            latest = persia.checkpoint.CheckpointReader(str(tmp_path))
            latest.verify()
            assert latest.manifest.global_step == 4
            # The attempt was removed, unless only the very last write, that of LATEST, has failed.
            listed = [entry.step for entry in persia.checkpoint.list_checkpoints(str(tmp_path))]
            assert len(list(tmp_path.glob("step-*"))) == len(listed)
    assert attempts > 10
    assert persia.checkpoint.CheckpointReader(str(tmp_path)).manifest.global_step == 9
    t.fit(data)
    assert_same_training(undisturbed, t)


def test_the_checkpoint_at_the_end_waits_for_room(tmp_path, monkeypatch, caplog):
    schema = schema_of()
    monkeypatch.setattr(saving, "RETRY_SECONDS", 0.01)
    t = trainer(schema, checkpoint_dir=str(tmp_path))
    t.fit(reader(), max_steps=1)  # A disk that is full from the start is found before the first step.
    with monkeypatch.context() as patch:
        disk = FullDisk(patch, 0)

        def make_room():
            try:
                wait_until(lambda: "retrying" in caplog.text)
                time.sleep(0.1)  # For several attempts.
            finally:
                disk.room = 10_000

        room = threading.Thread(target=make_room)
        room.start()
        t.fit(reader(), max_steps=3)
        room.join()
    assert persia.checkpoint.CheckpointReader(str(tmp_path)).manifest.global_step == 4
    assert caplog.text.count("The last checkpoint has failed; retrying") == 1

    monkeypatch.setattr(saving, "LAST_SECONDS", 0.0)
    with monkeypatch.context() as patch, pytest.raises(CheckpointError, match="free space"):
        FullDisk(patch, 0)
        t.fit(reader(), max_steps=4)
    assert persia.checkpoint.CheckpointReader(str(tmp_path)).manifest.global_step == 4


@pytest.mark.parametrize("method", ["export_state", "begin_snapshot", "write_snapshot"])
@pytest.mark.parametrize("kind", [StoreError, WireError, PeerRestartedError, DeadlineError])
def test_a_ps_restart_during_a_checkpoint_costs_that_checkpoint(tmp_path, monkeypatch, caplog, method, kind):
    t = trainer(schema_of())
    t.fit(reader(), max_steps=3)
    answer, calls = getattr(EmbeddingServer, method), []

    def started_again(server, *arguments, **named):
        calls.append(None)
        if len(calls) == 1:
            raise kind("There is no such snapshot: this PS has been started again.")
        return answer(server, *arguments, **named)

    monkeypatch.setattr(EmbeddingServer, method, started_again)
    lost = "The checkpoint of step 3 is lost, training is unharmed: There is no such snapshot"
    begun = t.checkpointing.begin(str(tmp_path), t.checkpointing.capture())
    assert begun == (method == "write_snapshot")
    if begun:
        with pytest.raises(CheckpointError, match=lost):
            t.checkpointing.wait()
    else:
        assert lost in caplog.text
    assert t.checkpointing.begin(str(tmp_path), t.checkpointing.capture())
    t.checkpointing.wait()
    assert [entry.step for entry in persia.checkpoint.list_checkpoints(str(tmp_path))] == [3]
    persia.checkpoint.CheckpointReader(str(tmp_path)).verify()


@pytest.mark.parametrize("slow", [False, True])
def test_a_file_size_limit_during_fit_leaves_the_old_checkpoint(tmp_path, monkeypatch, slow):
    """With a slow writer, that of step 10 is at work until the end of `fit`, and the last checkpoint fails as well."""
    schema = schema_of()
    options = {"checkpoint_dir": str(tmp_path), "checkpoint_every_steps": 5}
    t = trainer(schema, **options)
    t.fit(reader(), max_steps=5)
    if slow:
        write, waited_for = saving.write_rows, t.checkpointing._hurry
        monkeypatch.setattr(saving, "write_rows", lambda *a, **named: waited_for.wait(60) and write(*a, **named))
    else:
        begin = t.checkpointing.begin
        monkeypatch.setattr(
            t.checkpointing,
            "begin",
            lambda *a, **named: begin(*a, **named) and t.checkpointing._thread.join(60) is None,
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, hard))
        with pytest.raises(CheckpointError, match="free space"):
            t.fit(reader())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    # Else those of steps 10 and 15 have failed, as is known when the next one is due; a warning told of the first.
    assert (t.global_step, t.epoch, t.position) == (20, 1, 0) if slow else (20, 0, 20)
    monkeypatch.undo()
    old = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert old.global_step == 5
    t.fit(reader())
    assert t.global_step == 20
    new = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert_same_training(t, new)


@pytest.mark.parametrize("kind", [Adagrad, persia.optim.RowwiseAdagrad])
def test_rows_that_began_with_another_accumulator(tmp_path, caplog, kind):
    first = trainer(schema_of(kind(lr=0.1, initial_accumulator=0.01)))
    first.fit(reader(), max_steps=2)
    first.save(str(tmp_path))
    resumed = persia.Trainer.resume(str(tmp_path), model(first.schema), optimizer=adam)
    assert resumed.schema.resolved_tables()["id_0"].optimizer.initial_accumulator == 0.01
    for same in (kind(lr=0.1, initial_accumulator=0.01), kind(lr=0.1, initial_accumulator=0.5)):
        trainer(schema_of(same)).load(str(tmp_path))
    assert "initial_accumulator" not in caplog.text  # The second one was set on purpose.

    default = trainer(schema_of(kind(lr=0.1)))
    default.load(str(tmp_path))
    assert "initial_accumulator 0.01 (tables id_0). New rows begin with the default, 1e-06" in caplog.text
    caplog.clear()
    trainer(schema_of(kind(lr=0.1))).load_rows(str(tmp_path), ["id_0"])
    assert "set initial_accumulator=0.01" in caplog.text


def test_a_resumed_run_keeps_a_recorded_accumulator(tmp_path):
    """The optimizer of all tables, too, is the recorded one."""
    schema = reader().schema
    options = persia.TrainerOptions(progress=False)
    old = Adagrad(lr=0.1, initial_accumulator=0.01)
    first = persia.Trainer(model(schema), schema, optimizer=adam, embedding_optimizer=old, mode=Sync(), options=options)
    first.fit(reader(), max_steps=2)
    first.save(str(tmp_path))
    resumed = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    tables = resumed.embeddings.connection.servers[0].tables().values()
    assert {table.optimizer for table in tables} == {old}


def test_a_declared_mode_that_a_checkpoint_overrules_is_said(tmp_path, caplog):
    first = trainer(schema_of(), Hybrid(3, warmup=0))
    first.fit(reader(), max_steps=2)
    first.save(str(tmp_path))
    declared = trainer(schema_of(), Sync())
    declared.load(str(tmp_path))
    assert declared.mode == Hybrid(3, warmup=0)
    assert "Training goes on in the mode of the checkpoint" in caplog.text


def test_a_resumed_run_keeps_a_recorded_device(tmp_path):
    trainer(schema_of(), device="cpu").save(str(tmp_path))
    assert recorded(str(tmp_path)).options.device == "cpu"
