"""The console scripts as they are installed: unlike `python -m`, they do not import from the working directory."""

import os
import sys
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.processes

SCRIPTS = [entry.name for entry in metadata.distribution("persia-recsys").entry_points.select(group="console_scripts")]
PERSIA = Path(sys.executable).with_name("persia")

CONFIG = """
imports = ["my_modes"]

[data]
kind = "parquet"
path = "clicks.parquet"
batch_size = 50

[schema]
id_features = [{ name = "user", dim = 4 }, { name = "item", dim = 4 }]
labels = ["click"]

[model]
kind = "my_model:Net"

[mode]
kind = "all_of_them"

[trainer]
progress = false
publish = { url = "changes" }
"""

MODEL = """
import persia

class Net(persia.nn.models.FFNN):
    def __init__(self, schema):
        super().__init__(schema, hidden=(4,))
"""

MODES = """
from persia.modes import Sync, register

@register
class AllOfThem(Sync, frozen=True, tag="all_of_them"):
    pass
"""


@pytest.fixture
def persia(forks):
    """Runs the script as a shell does, in a working directory."""

    def run(*arguments, folder, ok=True):
        done = forks.run([PERSIA, *arguments], folder, env={**os.environ, "COLUMNS": "80"})
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    return run


@pytest.fixture
def project(tmp_path):
    """A folder with a configuration, and a model beside it; the mode is in the working directory."""
    folder, here = tmp_path / "project", tmp_path / "here"
    folder.mkdir()
    here.mkdir()
    ids = np.arange(200)
    pq.write_table(pa.table({"user": ids % 7, "item": ids % 11, "click": ids % 2}), folder / "clicks.parquet")
    (folder / "run.toml").write_text(CONFIG)
    (folder / "my_model.py").write_text(MODEL)
    (here / "my_modes.py").write_text(MODES)
    return here


def test_every_script_is_installed():
    assert SCRIPTS == ["persia"]
    assert os.access(PERSIA, os.X_OK)
    assert "import" in PERSIA.read_text(encoding="utf-8")


def test_a_run_from_its_configuration_to_its_predictions(project, persia):
    config, latest = "../project/run.toml", "../project/runs/run/latest"
    text = persia("train", config, "--json", "r.json", folder=project)
    assert "Saved in " in text
    persia("train", config, "--resume", latest, "--set", "train.epochs=2", folder=project)
    persia("predict", config, "--checkpoint", latest, "--output", "p.csv", folder=project)
    assert len((project / "p.csv").read_text().splitlines()) == 201
    assert "step 8" in persia("checkpoint", "inspect", latest, folder=project)
    assert {path.name for path in project.iterdir()} - {"__pycache__"} == {"my_modes.py", "p.csv", "r.json"}


def test_a_module_of_the_working_directory_is_imported(project, persia):
    words = ("control", "switch", "tcp://127.0.0.1:9", "nonsense")
    assert "all_of_them" in persia(*words, "--import", "my_modes", folder=project, ok=False)  # Among the modes.
    assert "Cannot import 'not_there'" in persia(*words, "--import", "not_there", folder=project, ok=False)


def test_init_writes_what_the_script_trains(project, persia):
    rng = np.random.default_rng(0)
    columns = {"user_id": rng.integers(0, 50, 400), "price": rng.random(400), "click": rng.integers(0, 2, 400)}
    pq.write_table(pa.table(columns), project / "shop.parquet")
    text = persia("init", "shop.parquet", "--yes", folder=project)
    for line in text.splitlines():
        if line.startswith(("  persia train ", "  persia evaluate ")):
            persia(*line.split()[1:], folder=project)


def test_an_error_is_one_line_with_status_1(project, persia):
    text = persia("train", "none.toml", folder=project, ok=False)
    assert text == "persia: The configuration none.toml cannot be read: No such file or directory.\n"
