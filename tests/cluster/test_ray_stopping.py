"""Signals to a program that trains on Ray: its NN workers stop together, and nothing is left over."""

import os
import shlex
import signal
from pathlib import Path

import pytest
import torch

import persia
from persia.checkpoint import list_checkpoints
from support.signalled import Command, resume_line

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import make_trainer, options, reader

pytestmark = pytest.mark.processes

HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]),
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
NOISE = (".cc:", "C++", "*** SIG", "Fatal Python", "core dumped", "unhandled exception")
"""What the trace of a process of Ray would have in it."""

CONFIG = """
[data]
kind = "synthetic"
batch_size = 64
options = { rows = 100_000_000, id_features = 2, ids_per_feature = 50 }

[mode]
kind = "gba"
global_batch_size = 128

[cluster]
kind = "ray"
threads = 1
nn_workers = 2

[trainer]
progress = false
checkpoint_every_seconds = 1
"""


def saved(directory):
    return [entry.step for entry in list_checkpoints(str(directory))]


def program(forks, tmp_path, *words):
    return Command(forks, [HERE / "stopped_program.py", *words], tmp_path, **ENVIRONMENT)


@pytest.mark.usefixtures("ray_here")
def test_a_terminal_interrupts_a_program_on_ray_and_it_goes_on(tmp_path, forks):
    """The terminal's SIGINT goes to every process of the group. What goes on is not interrupted, so it runs here."""
    out = tmp_path / "out"
    with program(forks, tmp_path, "sync", "out") as running:
        running.until(lambda: saved(out), "a checkpoint")
        running.signal(signal.SIGINT)
        assert running.end() == -signal.SIGINT
    step = saved(out)[-1]
    assert f"Stopped by SIGINT after step {step}. Step {step} is saved in out." in running.text
    line = resume_line(running.text, "trainer =")
    assert line == "trainer = persia.Trainer.resume('out', model, optimizer=optimizer, cluster=cluster)"
    assert not [word for word in NOISE if word in running.text], running.text
    model, optimizer = make_trainer(None).model, lambda params: torch.optim.Adam(params, 1e-2)
    with persia.cluster.Ray(1, 1, 1, 2, options()) as cluster:
        trainer = persia.Trainer.resume(str(out), model, optimizer=optimizer, cluster=cluster)
        trainer.fit(reader(1_000_000), max_steps=2)
    assert saved(out)[-1] == step + 2


@pytest.mark.slow
def test_a_second_signal_ends_a_program_on_ray_at_once(tmp_path, forks):
    out = tmp_path / "out"
    with program(forks, tmp_path, "blocked", "out") as running:
        running.until(lambda: saved(out) and (tmp_path / "blocked").exists(), "it waits for data")
        running.signal(signal.SIGTERM, group=False)
        running.until(lambda: "A second signal" in running.text, "it has seen the first signal")
        running.signal(signal.SIGTERM, group=False)
        assert running.end() == 143
    assert "Stopped immediately by SIGTERM" in running.text
    assert f"Step {saved(out)[-1]} is saved in out." in running.text
    assert not [word for word in NOISE if word in running.text], running.text
    assert not list((tmp_path / "regions").iterdir())


@pytest.mark.slow
def test_an_asynchronous_command_on_ray_saves_and_resumes(tmp_path, forks):
    (tmp_path / "run.toml").write_text(CONFIG)
    out = tmp_path / "out"
    with Command(forks, ["-m", "persia", "train", "run.toml", "--output", "out"], tmp_path, **ENVIRONMENT) as running:
        running.until(lambda: saved(out), "a checkpoint")
        running.signal(signal.SIGTERM, group=False)
        assert running.end() == 143
    assert "Traceback" not in running.text
    assert not [word for word in NOISE if word in running.text], running.text
    step = saved(out)[-1]
    words = shlex.split(resume_line(running.text, "persia train"))
    assert words == ["persia", "train", "run.toml", "--resume", "out"]
    done = forks.run(["-m", *words, "--set", "train.max_steps=3"], tmp_path, env={**os.environ, **ENVIRONMENT})
    assert done.returncode == 0, done.stderr
    assert saved(out)[-1] == step + 3
