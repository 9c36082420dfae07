"""`--step best`, the lines about the best step, and options that steer training, on the command line."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from persia.checkpoint import CheckpointReader, list_checkpoints
from support.command import persia

CONFIG = """
[data]
kind = "synthetic"
batch_size = 50
options = { rows = 1000, id_features = 2, ids_per_feature = 20, dim = 4, days = 2 }

[eval_data]
kind = "synthetic"
options = { rows = 300, seed = 3 }

[embedding_optimizer]
kind = "adagrad"
lr = 3.0

[mode]
kind = "sync"

[train]
epochs = 30

[trainer]
progress = false
eval_every_steps = 10
patience = 3
keep_best = "log_loss"
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a configuration, and a run that stopped early; and what the command has printed."""
    folder = tmp_path_factory.mktemp("best")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("run.toml").write_text(CONFIG)
        return folder, persia("train", "run.toml", "--output", "out", "--json", "result.json")


@pytest.fixture
def run(trained, tmp_path, monkeypatch):
    """A copy of that folder, and the result of the run."""
    folder, text = trained
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path, text, json.loads((tmp_path / "result.json").read_text())


def test_a_run_stops_early_and_names_the_best(run):
    folder, text, result = run
    step = result["best_step"]
    assert 0 < step < result["global_step"] == step + 30 < 600
    assert result["stopped_early"] == text.splitlines()[-1]
    assert text.splitlines()[-1].startswith(f"Stopped early at step {result['global_step']}: in 3 evaluations in a row")
    assert f"Best on held-out rows: step {step}, log_loss {result['best']:.4f}" in text
    words = next(line.split()[1:] for line in text.splitlines() if line.strip().startswith("persia predict"))
    persia(*words)
    assert (folder / "predictions.csv").exists()
    assert (step, True) in [(entry.step, entry.best) for entry in list_checkpoints("out")]

    assert f"evaluation at step {result['global_step']:,}" in text  # Of the last step, not of the best one.
    scores = persia("evaluate", "run.toml", "--checkpoint", "out", "--step", "best", "--json", "best.json")
    assert f"evaluation at step {step:,}" in scores
    assert json.loads((folder / "best.json").read_text())["log_loss"] == pytest.approx(result["best"], abs=1e-9)
    persia("evaluate", "run.toml", "--checkpoint", "out", "--json", "last.json")
    assert json.loads((folder / "last.json").read_text())["log_loss"] > result["best"]

    inspected = persia("checkpoint", "inspect", "out")
    assert f"best: step {step}, log_loss {result['best']:.6g}" in inspected
    assert "this one" in persia("checkpoint", "inspect", "out", "--step", "best")
    persia("export", "out", "rows", "--step", "best")
    persia("checkpoint", "publish", "out", "--output", "changes", "--step", "best")
    assert persia("checkpoint", "diff", "out", "out", "--step", "best", "--second-step", "latest")
    for name in ("best", str(step), "latest"):
        persia("predict", "run.toml", "--checkpoint", "out", "--step", name, "--output", f"{name}.parquet")
    best, same, last = (pq.read_table(f"{name}.parquet") for name in ("best", str(step), "latest"))
    assert best.equals(same)
    assert not best.equals(last)

    assert "Nothing was left to train. Stopped early" in persia("train", "run.toml", "--resume", "out")
    persia("train", "run.toml", "--resume", "out", "--step", "best", "--output", "more", "--set", "train.max_steps=1")
    assert CheckpointReader("more").manifest.global_step == step + 1

    days = ("continual", "run.toml", "--days", "0..0", "--output", "days")
    assert "--step names the checkpoint of --inherit" in persia(*days, "--step", "best", ok=False)
    assert "Invalid --step most" in persia(*days, "--inherit", "out", "--step", "most", ok=False)
    persia(*days, "--inherit", "out", "--step", "best", "--json", "days.json", "--set", "train.epochs=1")
    assert json.loads((folder / "days.json").read_text())[0]["step"] == step


def test_wrong_steps_are_refused(run):
    for words in (
        ("evaluate", "run.toml", "--checkpoint", "out", "--step", "good"),
        ("checkpoint", "inspect", "out", "--step", "-1"),
    ):
        assert "expected a step, best or latest" in persia(*words, ok=False)
    assert "--step names the checkpoint of --resume" in persia("train", "run.toml", "--step", "best", ok=False)
    (run[0] / "out" / "BEST").unlink()
    assert "there is no BEST" in persia("evaluate", "run.toml", "--checkpoint", "out", "--step", "best", ok=False)
    text = persia("train", "run.toml", "--output", "x", "--set", "trainer.keep_best=rmse", ok=False)
    assert "click has auc, log_loss, normalized_entropy, calibration" in text


def test_overwriting_a_run_removes_its_best(run):
    folder, _, _ = run
    words = ("--set", "train.max_steps=2", "--set", "trainer.patience=9")
    persia("train", "run.toml", "--output", "out", "--overwrite", *words)
    assert (folder / "out" / "BEST").read_text().startswith("step-000000000002 ")


def test_continual_training_ignores_options_that_steer(run):
    text = persia("continual", "run.toml", "--days", "0..1", "--output", "days", "--set", "train.epochs=1")
    ignored = "ignores trainer.keep_best, trainer.eval_every_steps, trainer.patience"
    assert ignored in " ".join(text.split())


def test_the_dump_has_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(CONFIG)
    text = persia("train", "run.toml", "--dump-config")
    for line in ("eval_every_steps = 10", "patience = 3", 'keep_best = "log_loss"', "# eval_every_epochs is not set"):
        assert line in text
