"""`Trainer.stop`, and SIGINT and SIGTERM during `fit`, in this process."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

import persia
from persia.checkpoint import list_checkpoints
from persia.errors import StoreError
from persia.modes import Async, Bsp, Gba, HopBw, Hybrid, Sync
from persia.testing import Threads
from support.switching_samples import DEADLINE, ROWS, Net, assert_same, batches, trainer

STATUS = {signal.SIGINT: KeyboardInterrupt, signal.SIGTERM: SystemExit}
MODES = [Sync(), Hybrid(2, warmup=0), Async(), Bsp(3), HopBw(0), Gba(4 * ROWS)]


class Source:
    """Batches, and something to be done when one of them is read."""

    def __init__(self, count, at, action):
        self.list, self.at, self.action = batches(count), at, action
        self.begun = self.read = 0

    def batches(self, epoch=0, start=0):
        for number in range(start, len(self.list)):
            if number == self.at:
                self.begun += 1
                self.action()
            self.read += 1
            yield self.list[number]

    def __iter__(self):
        return self.batches()

    def fingerprint(self):
        return self.list.fingerprint()


def send(number):
    return lambda: os.kill(os.getpid(), number)


def adam(params):
    return torch.optim.Adam(params, 1e-2)


@pytest.fixture
def default_handlers():
    """As in a program that has none of its own; after the test they are as they were."""
    before = {n: signal.signal(n, h) for n, h in DEFAULT.items()}
    yield
    assert {n: signal.getsignal(n) for n in DEFAULT} == DEFAULT
    for number, handler in before.items():
        signal.signal(number, handler)


DEFAULT = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@pytest.mark.usefixtures("default_handlers")
@pytest.mark.parametrize("mode", MODES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("number", STATUS, ids=lambda n: n.name)
def test_a_signal_ends_fit_after_its_step_with_a_checkpoint(mode, number, tmp_path, capsys):
    count, out = 20, str(tmp_path / "out")
    t = trainer(mode, checkpoint_dir=out)
    with pytest.raises(STATUS[number]) as ended:
        t.fit(Source(count, 6, send(number)))
    if number == signal.SIGTERM:
        assert ended.value.code == 143
    assert 0 < t.position < count
    assert not t.finished
    (entry,) = list_checkpoints(out)
    assert entry.step == t.global_step
    told = capsys.readouterr().err
    assert f"{number.name}: training ends after this step and is saved to {out}" in told
    assert f"Stopped by {number.name} after step {t.global_step}. Step {t.global_step} is saved in {out}." in told
    line = f"persia.Trainer.resume({out!r}, model, optimizer=optimizer)"
    assert line in told
    # The printed line, and this trainer, both go on without a gap.
    resumed = eval(line, {"persia": persia, "model": Net(torch.float32), "optimizer": adam})
    left = (count - t.position) * ROWS
    assert resumed.fit(batches(count)).rows == left
    assert t.fit(batches(count)).rows == left
    assert t.finished


@pytest.mark.usefixtures("default_handlers")
def test_a_stopped_run_in_sync_mode_is_one_that_was_not_stopped():
    whole, stopped = trainer(Sync()), trainer(Sync())
    whole.fit(batches(30))
    with pytest.raises(KeyboardInterrupt):
        stopped.fit(Source(30, 10, send(signal.SIGINT)))
    stopped.fit(batches(30))
    assert_same(whole, stopped, 0)


@pytest.mark.usefixtures("default_handlers")
def test_without_a_directory_nothing_is_saved_and_that_is_said(capsys):
    t = trainer(Sync())
    with pytest.raises(KeyboardInterrupt):
        t.fit(Source(30, 10, send(signal.SIGINT)))
    told = capsys.readouterr().err
    assert "training ends after this step and is not saved (no checkpoint_dir)" in told
    assert "Nothing was saved: give a directory for checkpoints" in told


@pytest.mark.usefixtures("default_handlers")
def test_a_second_signal_ends_fit_at_once(tmp_path, capsys, monkeypatch):
    """The source blocks for good, so no step comes to its end; nor is a checkpoint in the background waited for."""
    release = threading.Event()

    def twice():
        send(signal.SIGTERM)()
        end = time.monotonic() + DEADLINE
        while not t.stopping:
            assert time.monotonic() < end
            time.sleep(0.001)
        send(signal.SIGINT)()
        release.wait(DEADLINE)

    t = trainer(Sync(), checkpoint_dir=str(tmp_path))
    t.fit(batches(30), max_steps=6)
    monkeypatch.setattr(t.checkpointing, "wait", lambda: release.wait(DEADLINE))
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        t.fit(Source(30, 10, twice))
    assert time.monotonic() - began < DEADLINE / 2
    release.set()
    told = capsys.readouterr().err
    lost = "Stopped immediately by SIGINT; steps since the last checkpoint are lost."
    assert f"{lost} Step 6 is saved in {tmp_path}" in told
    assert [entry.step for entry in list_checkpoints(str(tmp_path))] == [6]


@pytest.mark.usefixtures("default_handlers")
def test_a_final_evaluation_is_cut_short_and_the_last_step_saved(tmp_path):
    source = Source(400, 5, send(signal.SIGINT))
    for best in (None, "auc"):
        t = trainer(Sync(), checkpoint_dir=str(tmp_path / str(best)), keep_best=best)
        with pytest.raises(KeyboardInterrupt):
            t.fit(batches(10), eval_data=source)
        assert [entry.step for entry in list_checkpoints(str(tmp_path / str(best)))] == [10]
        assert t.finished
    assert source.begun == 2
    assert source.read < 200


def test_handlers_of_the_program_stay(capsys):
    """It may call `stop` from them: `fit` then returns as at `max_steps`."""
    t = trainer(Gba(2 * ROWS))
    before = signal.signal(signal.SIGTERM, lambda *_: t.stop())
    try:
        mine = signal.getsignal(signal.SIGTERM)
        result = t.fit(Source(60, 20, send(signal.SIGTERM)))
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert 0 < result.rows < 60 * ROWS
    assert t.stopping
    assert not t.finished
    assert capsys.readouterr().err == ""
    assert t.fit(batches(60)).rows == 60 * ROWS - result.rows


@pytest.mark.parametrize("mode", [Sync(), Gba(2 * ROWS)], ids=lambda m: type(m).__name__)
def test_stopping_one_nn_worker_stops_all_at_the_same_batch(mode):
    """They are threads, so no handler is set; the source of the second one tells it."""
    trainers, told = {}, threading.Event()

    def work(member):
        t = trainers[member.rank] = trainer(mode, member)

        def stop():
            t.stop()
            told.set()

        # The first one leaves batches to the second, however late that is.
        source = Source(160, 21, stop) if member.rank == 1 else Source(160, 100, lambda: told.wait(DEADLINE))
        return t.fit(source), t.fit(batches(160))

    before = {n: signal.getsignal(n) for n in DEFAULT}
    results = Threads(nn_workers=2, timeout=DEADLINE).run(work)
    assert {n: signal.getsignal(n) for n in DEFAULT} == before
    for first, second in results:
        assert first.global_step == results[0][0].global_step
        assert 0 < first.rows < 160 * ROWS
        assert first.rows + second.rows == 160 * ROWS


def test_data_without_a_batch_are_an_error_unless_expected(caplog):
    for mode in (Sync(), Gba(2 * ROWS)):
        t = trainer(mode)
        with pytest.raises(persia.errors.DataError, match="train_data are empty: epoch 0 has no batch"):
            t.fit([], epochs=2)
        assert t.fit(batches(4)).rows == 4 * ROWS  # It is as it was.
        with pytest.raises(persia.errors.DataError, match="empty"):
            t.fit([])
        lenient = trainer(mode, allow_empty=True)
        caplog.clear()
        result = lenient.fit([], epochs=3)
        assert (result.rows, result.steps, lenient.epoch) == (0, 0, 3)
        assert np.isnan(result.progressive.auc)
        (record,) = caplog.records
        assert (record.levelname, "train_data are empty" in record.getMessage()) == ("WARNING", True)
        assert lenient.fit(batches(4)).rows == 4 * ROWS


def test_a_run_at_the_end_of_its_data_says_so(tmp_path, caplog):
    data = batches(10)
    for steps in (None, 10):  # After the end of the pass, and after its last batch.
        first = trainer(Sync())
        first.fit(data, max_steps=steps)
        first.save(tmp_path / str(steps))
        second = persia.Trainer.resume(str(tmp_path / str(steps)), Net(torch.float32), optimizer=adam)
        caplog.clear()
        assert second.fit(data).steps == 0
        assert second.finished
        assert "Nothing was left to train: at step 10, 1 of 1 passes over these data are done" in caplog.text
        assert second.fit(data, again=True).steps == 10


def test_a_loop_of_calls_that_ends_with_the_data_does_not_warn(tmp_path, caplog):
    """As in examples/tuning.py: the last call has no batch left, which nobody could know."""
    data = batches(10)
    first = trainer(Sync())
    while not first.finished:
        first.fit(data, max_steps=5)
    assert first.global_step == 10
    assert "Nothing was left" not in caplog.text
    first.save(tmp_path / "a")
    second = persia.Trainer.resume(str(tmp_path / "a"), Net(torch.float32), optimizer=adam)
    second.fit(data, max_steps=5)
    assert "Nothing was left to train" in caplog.text


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0)])
def test_a_push_that_fails_in_the_last_step_is_raised_unsaved(mode, tmp_path, monkeypatch):
    """The loop is left without a further draw, which would raise the failure."""
    t = trainer(mode=mode, checkpoint_dir=str(tmp_path))
    worker = t.embeddings.connection.worker
    push, pushes = worker.push, []

    def fail_in_step_3(header, contributions):
        pushes.append(header.step)
        if len(pushes) == 3:
            raise StoreError("The store is full.")
        return push(header, contributions)

    monkeypatch.setattr(worker, "push", fail_in_step_3)
    apply = t.step.apply

    def apply_and_stop():
        if t.global_step == 3:
            t.stop()
        return apply()

    monkeypatch.setattr(t.step, "apply", apply_and_stop)
    with pytest.raises(StoreError, match="is full"):
        t.fit(batches(10))
    assert list_checkpoints(str(tmp_path)) == []
