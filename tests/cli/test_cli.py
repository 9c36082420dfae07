"""The commands, as a user types them."""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

CONFIG = """
[data]
kind = "synthetic"
batch_size = 200
options = { rows = 2000, id_features = 3, ids_per_feature = 50 }

[eval_data]
kind = "synthetic"
options = { rows = 500, id_features = 3, ids_per_feature = 50 }

[mode]
kind = "sync"

[trainer]
progress = false
"""


def persia(*arguments, ok=True):
    done = subprocess.run([sys.executable, "-m", "persia", *arguments], capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


def test_train_evaluate_predict_inspect_resume(config, tmp_path):
    out, result = str(tmp_path / "out"), tmp_path / "result.json"
    text = persia("train", config, "--output", out, "--json", str(result))
    assert "progressive AUC" in text
    record = json.loads(result.read_text())
    assert record["global_step"] == 10
    assert record["evaluation"]["rows"] == 500

    assert "AUC" in persia("evaluate", config, "--checkpoint", out)
    predictions = str(tmp_path / "p.parquet")
    persia("predict", config, "--checkpoint", out, "--output", predictions)
    assert pq.read_table(predictions).num_rows == 500
    persia("predict", config, "--checkpoint", out, "--output", str(tmp_path / "p.csv"))
    assert "id_0" in persia("checkpoint", "inspect", out)

    persia("train", config, "--resume", out, "--json", str(result), "--set", "train.epochs=2")
    assert json.loads(result.read_text())["global_step"] == 20


def test_help_teaches():
    for command in ((), ("train",), ("evaluate",), ("predict",), ("checkpoint",), ("checkpoint", "inspect")):
        assert "Usage" in persia(*command, "--help")


def test_the_dumped_configuration_is_complete_and_can_be_read(config, tmp_path):
    dumped = persia("train", config, "--dump-config", "--set", "mode.kind=hybrid", "--set", "mode.staleness=3")
    path = tmp_path / "dumped.toml"
    path.write_text(dumped)
    assert persia("train", str(path), "--dump-config") == dumped
    assert "staleness = 3" in dumped
    assert "accumulation_steps = 1" in dumped


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("mode.kind=nonsense", "mode.kind"),
        ("mode.speed=3", "mode"),
        ("data.batch_size=many", "data.batch_size"),
        ("data.options.colour=1", "data.options.colour"),
        ("model.options.hiden=[3]", "model.options.hiden"),
        ("trainer.accumulation_steps=0", "accumulation_steps"),
        ("embedding_optimizer.kind=magic", "embedding_optimizer.kind"),
        ("nonsense", "a.b=value"),
        ("optimizer.lr=-1", "optimizer.options"),
        ("trainer.device=banana", "banana"),
        ("trainer.clip_norm=-1", "clip_norm"),
        ("train.epochs=0", "epochs"),
    ],
)
def test_a_wrong_configuration_is_one_line_that_names_the_field(config, change, named):
    text = persia("train", config, "--set", change, ok=False)
    assert named in text
    assert "Traceback" not in text


def test_a_missing_file_is_one_line(tmp_path):
    text = persia("train", str(tmp_path / "none.toml"), ok=False)
    assert "cannot be read" in text
    assert "Traceback" not in text
