"""`persia importance RUN`."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia.checkpoint import CheckpointReader
from persia.cli.run_folder import config_of
from persia.errors import ConfigError
from support.command import persia

CONFIG = """
[data]
kind = "parquet"
path = "clicks.parquet"
batch_size = 50

[schema]
id_features = [{ name = "user", dim = 4 }, { name = "noise", dim = 4 }]
labels = ["click"]

[model]
kind = "ffnn"
options = { hidden = [8] }

[optimizer]
lr = 0.01

[mode]
kind = "sync"

[trainer]
progress = false
"""


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    user = rng.integers(0, 20, 2_000)
    click = (rng.random(2_000) < np.where(user % 2, 0.9, 0.1)).astype(np.int64)
    pq.write_table(
        pa.table({"user": user, "noise": rng.integers(0, 20, 2_000), "click": click}), tmp_path / "clicks.parquet"
    )
    (tmp_path / "run.toml").write_text(CONFIG)
    persia("train", tmp_path / "run.toml")
    return tmp_path


def test_a_run_shows_its_importance_and_its_report_has_it(folder):
    run = folder / "runs" / "run" / "latest"
    before = CheckpointReader(str(run)).manifest
    shown = persia("importance", run, "--rows", "1000", "--repeats", "3", "--json", folder / "i.json")
    assert "AUC" in shown
    assert "1,000 rows" in shown
    assert shown.index("user") < shown.index("noise")
    record = json.loads((folder / "i.json").read_text())
    assert (record["metric"], record["rows"], record["repeats"]) == ("auc", 1_000, 3)
    assert record["features"][0]["name"] == "user"
    assert record["features"][0]["permuted"]["low"] > 0.1
    assert CheckpointReader(str(run)).manifest == before
    persia("report", run)
    assert "Importance: AUC" in (run / "report.html").read_text()


def test_a_run_elsewhere_needs_its_configuration(folder):
    persia("train", folder / "run.toml", "--output", folder / "other")
    with pytest.raises(ConfigError, match="give it with --config"):
        config_of(str(folder / "other"))
    assert persia("importance", folder / "other", ok=False).strip().endswith("give it with --config.")
    arguments = ("--config", folder / "run.toml", "--metric", "log_loss", "--data", folder / "clicks.parquet")
    assert "log-loss" in persia("importance", folder / "other", *arguments, "--repeats", "1")
