"""Callbacks of the user: what they get, where they run, and what happens if they fail."""

import pytest
import torch

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import ConfigError, PersiaError
from persia.metrics import MetricsResult
from persia.modes import Sync
from support.switching_samples import SCHEMA, Net, adam, batches


class Recorded(persia.Callback):
    """Keeps what it gets, and may fail at an event."""

    def __init__(self, fails_at=None):
        self.events, self.fails_at = [], fails_at

    def note(self, name, *values):
        self.events.append((name, *values))
        if name == self.fails_at:
            raise ValueError("no route to host")

    def on_fit_begin(self, trainer):
        self.note("begin", trainer.global_step)

    def on_progress(self, step, values):
        assert {"train/loss", "train/rows_per_second", "train/progressive_auc"} <= values.keys()
        self.note("progress", step)

    def on_evaluation(self, step, result):
        assert isinstance(result, MetricsResult)
        self.note("evaluation", step)

    def on_checkpoint(self, path):
        CheckpointReader(path).verify()
        self.note("checkpoint", int(path[-12:]))

    def on_fit_end(self, result):
        self.note("end", result.global_step)

    def steps(self, name):
        return [event[1] for event in self.events if event[0] == name]


def trainer(*callbacks, **options):
    return persia.Trainer(
        Net(torch.float32),
        SCHEMA,
        optimizer=adam,
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=Sync(),
        options=persia.TrainerOptions(progress=False, **options),
        callbacks=callbacks,
    )


def test_callbacks_get_all_events_in_order(tmp_path):
    one, two = Recorded(), Recorded()
    t = trainer(one, two, checkpoint_dir=str(tmp_path), checkpoint_every_steps=10, eval_every_steps=10, keep_last=9)
    result = t.fit(batches(25), batches(3))
    assert one.events == two.events
    assert one.events[0] == ("begin", 0)
    assert one.events[-1] == ("end", 25)
    assert one.steps("evaluation") == [10, 20, 25]
    written = [entry.step for entry in list_checkpoints(tmp_path)]  # A slow disk leaves one out.
    assert one.steps("checkpoint") == written
    assert written[-1] == 25
    assert one.steps("progress") == [1, 2, 4, 8, 16, 25]
    assert result.evaluation is not None
    t.fit(batches(25), batches(3), max_steps=1)
    assert one.steps("begin") == [0, 25]


@pytest.mark.parametrize("event", ["progress", "evaluation", "checkpoint"])
def test_a_failing_callback_ends_fit_with_its_state_saved(tmp_path, event):
    made = Recorded(event)
    t = trainer(made, checkpoint_dir=str(tmp_path), checkpoint_every_steps=5, eval_every_steps=5)
    with pytest.raises(PersiaError, match=rf"Recorded.on_{event} has failed .*ValueError: no route to host") as error:
        t.fit(batches(60), batches(2))
    assert isinstance(error.value.__cause__, ValueError)
    assert len(made.steps(event)) == 1
    assert made.steps("end") == []
    assert 0 < t.global_step < (61 if event == "checkpoint" else 60)  # The disk may be slow.
    assert CheckpointReader(tmp_path).manifest.global_step == t.global_step
    made.fails_at = None
    assert t.fit(batches(60), batches(2)).global_step == 60


def test_a_callback_that_fails_at_the_beginning_trains_nothing(tmp_path):
    t = trainer(Recorded("begin"), checkpoint_dir=str(tmp_path))
    with pytest.raises(PersiaError, match=r"Recorded\.on_fit_begin has failed at global step 0"):
        t.fit(batches(5))
    assert t.global_step == 0
    assert list_checkpoints(tmp_path) == []


def test_a_callback_that_fails_at_the_end_has_all_trained(tmp_path):
    t = trainer(Recorded("end"), checkpoint_dir=str(tmp_path))
    with pytest.raises(PersiaError, match=r"on_fit_end has failed at global step 5"):
        t.fit(batches(5))
    assert t.finished
    assert CheckpointReader(tmp_path).manifest.global_step == 5


def test_a_callback_may_stop_training():
    class Stopping(persia.Callback):
        def on_fit_begin(self, trainer):
            self.trainer = trainer

        def on_evaluation(self, step, result):
            if step >= 10:
                self.trainer.stop()

    t = trainer(Stopping(), eval_every_steps=5)
    assert t.fit(batches(50), batches(2)).global_step == 10


def test_callbacks_are_checked():
    for wrong in (print, [print], persia.Callback):
        with pytest.raises(ConfigError, match=r"instances of persia\.Callback"):
            trainer(*(wrong if isinstance(wrong, list) else [wrong]))
