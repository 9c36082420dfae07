"""Programs and commands that get signals, as a terminal or a scheduler sends them."""

import shlex
import signal
import time

import pytest

from persia.checkpoint import list_checkpoints
from support.signalled import Command, resume_line

pytestmark = pytest.mark.processes

CONFIG = """
[data]
kind = "synthetic"
batch_size = 100
options = { rows = ROWS, id_features = 3, ids_per_feature = 50, days = 3 }

[mode]
MODE

[trainer]
progress = false
checkpoint_every_steps = 5
"""
MODES = {"sync": 'kind = "sync"', "gba": 'kind = "gba"\nglobal_batch_size = 200'}
ENDLESS = 100_000_000

PROGRAM = """
import os, sys, threading, torch, persia

schema = persia.data.synthetic(100, id_features=2, ids_per_feature=50, batch_size=10).schema

class Data:
    def batches(self, epoch=0, start=0):
        data = persia.data.synthetic(10**8, id_features=2, ids_per_feature=50, batch_size=10)
        for number, batch in enumerate(data.batches(epoch, start), start):
            if number == 40:
                open("begun", "w").close()
                if BLOCKS:
                    threading.Event().wait()
            yield batch

    def __iter__(self):
        return self.batches()

def optimizer(parameters):
    return torch.optim.Adam(parameters, 1e-3)

model = persia.nn.models.FFNN(schema, hidden=(4,))

if __name__ == "__main__":
    trainer = persia.Trainer(
        model,
        schema,
        optimizer=optimizer,
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=MODE,
        options=persia.TrainerOptions(progress=False, checkpoint_dir=DIRECTORY),
    )
    trainer.fit(Data())
"""


def command(line):
    """As printed, as arguments of this interpreter."""
    words = shlex.split(line)
    assert words[0] == "persia"
    return ["-m", *words]


def saved(directory):
    return [entry.step for entry in list_checkpoints(str(directory))]


def config_of(tmp_path, rows, mode="sync"):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.replace("ROWS", str(rows)).replace("MODE", MODES[mode]))
    return str(path)


@pytest.mark.parametrize(("number", "status", "mode"), [(signal.SIGINT, 130, "sync"), (signal.SIGTERM, 143, "gba")])
def test_a_stopped_command_saves_and_prints_how_to_resume(number, status, mode, tmp_path, forks):
    config = config_of(tmp_path, ENDLESS, mode)
    words = ["-m", "persia", "train", config, "--output", "out dir", "--set", "train.max_steps=1000000"]
    out = tmp_path / "out dir"
    with Command(forks, words, tmp_path) as running:
        running.until(lambda: saved(out), "a checkpoint")
        running.signal(number)
        assert running.end() == status
    assert "Traceback" not in running.text
    step = saved(out)[-1]
    assert f"Stopped by {number.name} after step {step}. Step {step} is saved in out dir." in running.text
    line = resume_line(running.text, "persia train")
    assert line == f"persia train {config} --resume 'out dir' --set train.max_steps={1_000_000 - step}"
    with Command(forks, [*command(line), "--set", "train.max_steps=3"], tmp_path) as resumed:
        assert resumed.end() == 0, resumed.text
    assert saved(out)[-1] == step + 3


WAITING = """
import time
from pathlib import Path
import persia

class Net(persia.nn.models.FFNN):
    batches = 0

    def forward(self, dense, embeddings):
        self.batches += self.training
        while self.batches >= 100 and not Path("signalled").exists():
            time.sleep(0.01)
        return super().forward(dense, embeddings)
"""
"""A network that trains no further than 100 batches before the test has sent its signal."""


def test_days_go_on_with_the_same_command(tmp_path, forks):
    config = config_of(tmp_path, 90_000)
    with open(config, "a") as file:
        file.write('\n[model]\nkind = "waiting:Net"\noptions = { hidden = [4] }\n')
    (tmp_path / "waiting.py").write_text(WAITING)
    out = tmp_path / "out"
    words = ["continual", config, "--days", "0..1", "--output", "out"]
    with Command(forks, ["-m", "persia", *words], tmp_path) as running:
        running.until(lambda: saved(out), "a checkpoint")
        running.signal(signal.SIGINT)
        (tmp_path / "signalled").touch()
        assert running.end() == 130
    line = resume_line(running.text, "persia continual")
    assert shlex.split(line) == ["persia", *words]
    assert saved(out)[-1] < 110  # In the middle of the first day.
    with Command(forks, command(line), tmp_path) as resumed:
        assert resumed.end() == 0, resumed.text
    assert saved(out)[-1] == 600


BEGUN = """
from pathlib import Path
import persia

class Net(persia.nn.models.FFNN):
    batches = 0

    def forward(self, dense, embeddings):
        self.batches += self.training
        if self.batches == 3:
            Path("begun").touch()
        return super().forward(dense, embeddings)
"""
"""A network that says when it has trained two batches."""


def test_a_command_without_a_directory_saves_in_its_own_folder(tmp_path, forks):
    config = config_of(tmp_path, ENDLESS).replace("run.toml", "bare.toml")
    text = (tmp_path / "run.toml").read_text().replace("checkpoint_every_steps = 5", "")
    (tmp_path / "bare.toml").write_text(text + '\n[model]\nkind = "begun:Net"\noptions = { hidden = [4] }\n')
    (tmp_path / "begun.py").write_text(BEGUN)
    with Command(forks, ["-m", "persia", "train", config], tmp_path) as running:
        running.until((tmp_path / "begun").exists, "it trains")
        running.signal(signal.SIGTERM)
        assert running.end() == 143
    assert "Traceback" not in running.text
    line = resume_line(running.text, "persia train")
    folder = (tmp_path / "runs" / "bare" / "latest").resolve()
    assert shlex.split(line)[3:5] == ["--resume", str(folder)]
    assert f"Step {saved(folder)[-1]} is saved in {folder}." in running.text


def program(forks, tmp_path, directory="out", mode="persia.modes.Sync()", blocks=False):
    text = PROGRAM.replace("DIRECTORY", repr(directory)).replace("MODE", mode).replace("BLOCKS", str(blocks))
    (tmp_path / "program.py").write_text(text)
    return Command(forks, ["program.py"], tmp_path)


@pytest.mark.parametrize("mode", ["persia.modes.Sync()", "persia.modes.Gba(20)"])
def test_a_program_ends_with_the_signal_and_prints_how_to_resume(mode, tmp_path, forks):
    with program(forks, tmp_path, mode=mode) as running:
        running.until((tmp_path / "begun").exists, "batch 40 is read")
        running.signal(signal.SIGINT)
        assert running.end() == -signal.SIGINT  # A shell makes 130 of it.
    (step,) = saved(tmp_path / "out")
    line = resume_line(running.text, "trainer = persia.Trainer.resume(")
    code = f"from program import *\n{line}\ntrainer.fit(Data(), max_steps=2)\nassert trainer.global_step == {step + 2}"
    done = forks.run(["-c", code], tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_second_signal_ends_a_program_that_waits(tmp_path, forks):
    with program(forks, tmp_path, blocks=True) as running:
        running.until((tmp_path / "begun").exists, "the source blocks")
        running.signal(signal.SIGTERM)
        running.until(lambda: "A second signal" in running.text, "it has seen the first signal")
        began = time.monotonic()
        running.signal(signal.SIGTERM)
        assert running.end() == 143
    assert time.monotonic() - began < 20.0
    assert "Stopped immediately by SIGTERM" in running.text
    assert "Nothing was saved: there is no checkpoint in out yet." in running.text
