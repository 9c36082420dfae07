"""Commands fit the rules of features before training, and keep what a checkpoint has."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from persia.checkpoint import CheckpointReader
from persia.cli.app import app

CONFIG = """
[data]
kind = "csv"
path = "rows.csv"
batch_size = 64
[schema]
id_features = [{name = "u", dim = 4}]
dense_features = [{name = "price", fill = "mean", log = true, scale = "standard"}]
labels = [{name = "dear", rule = "price > 5"}]
[model]
options = {hidden = [4]}
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.csv").write_text("u,price,at\n" + "".join(f"{i % 5},{i % 10},0\n" for i in range(200)))
    (tmp_path / "more.csv").write_text("u,price,at\n" + "".join(f"{i % 5},{i % 100},0\n" for i in range(200)))
    (tmp_path / "run.toml").write_text(CONFIG)

    def run(*words, code=0):
        result = CliRunner().invoke(app, [*words])
        assert result.exit_code == code, (result.output, result.exception)
        return result.output + str(result.exception or "")

    return run


def fitted(directory="out"):
    return CheckpointReader(directory).schema.dense[0].fitted


def test_train_fits_and_a_continued_run_keeps_it(run):
    assert "fill=mean, scale=standard" in run("train", "run.toml", "--output", "out")
    first = fitted()
    assert first.mean == 4.5
    assert "scale=standard" not in run("train", "run.toml", "--resume", "out", "--set", 'data.path="more.csv"')
    assert fitted() == first
    run("evaluate", "run.toml", "--checkpoint", "out")
    run("train", "run.toml", "--resume", "out", "--refit", "--set", 'data.path="more.csv"', "--set", "train.epochs=2")
    assert fitted().mean == 49.5


def test_days_keep_what_the_inherited_step_has(run):
    run("train", "run.toml", "--output", "out")
    first = fitted()
    run("train", "run.toml", "--resume", "out", "--refit", "--set", 'data.path="more.csv"', "--set", "train.epochs=2")
    assert fitted() != first
    run("continual", "run.toml", "--days", "0..0", "--output", "days", "--inherit", "out", "--step", "4",
        "--set", 'data.options.day="at"')  # fmt: skip
    assert fitted("days") == first


def test_fit_rows_bounds_the_pass(run):
    run("train", "run.toml", "--output", "out", "--set", "train.fit_rows=5")
    assert fitted().rows == 5
    assert fitted().mean == 2


def test_a_changed_rule_is_refused(run):
    run("train", "run.toml", "--output", "out")
    features = 'schema.dense_features=[{name="price", fill="mean", log=true, scale="standard", clip=[0, 5]}]'
    assert "has clip (0.0, 5.0)" in run("train", "run.toml", "--resume", "out", "--set", features, code=1)
