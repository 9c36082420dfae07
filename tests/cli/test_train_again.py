"""`persia train` and `persia continual` that are run again: on the same data, new files, and another file."""

import functools
import json

import pytest

from persia.checkpoint import CheckpointReader, list_checkpoints
from support import command

CONFIG = """
[data]
kind = "csv"
path = "{data}"
batch_size = 10
options = {{ day = "day" }}

[schema]
labels = ["click"]
id_features = [{{ name = "item", dim = 4, kind = "number" }}]

[model]
options = {{ hidden = [4] }}

[mode]
kind = "sync"

[trainer]
progress = false
"""


persia = functools.partial(command.persia, errors=False)
"""Only stdout is looked at: a job reads its last line."""


def write(path, day, rows=40):
    lines = [f"{item % 7},{item % 2},{day}\n" for item in range(rows)]
    path.write_text("item,click,day\n" + "".join(lines))


@pytest.fixture
def config(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "0.csv", 0)
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(data=tmp_path / "data"))
    return str(path)


@pytest.fixture
def resume(config, tmp_path):
    """Trains once; returns a function that resumes, and returns what was printed and the rows that were trained."""
    folder, result = str(tmp_path / "run"), str(tmp_path / "result.json")
    persia("train", config, "--output", folder)

    def run(*options, ok=True):
        printed = persia("train", config, "--resume", folder, "--json", result, *options, ok=ok)
        found = json.loads((tmp_path / "result.json").read_text() or "{}") if ok else {}
        return printed, found.get("rows"), list_checkpoints(folder)[-1].step

    return run


def test_a_run_that_has_nothing_left_says_so_in_its_last_line(resume):
    for _ in range(2):
        printed, rows, step = resume()
        assert (rows, step) == (0, 4)
        assert printed.splitlines()[-1].startswith(
            "Nothing was left to train: at step 4, 1 of 1 passes over these data are done. To train on, raise `epochs` "
            "(`train.epochs`)"
        )
        assert "AUC" not in printed  # Of rows of other days.
    printed, rows, step = resume("--set", "train.epochs=2")
    assert (rows, step) == (40, 8)
    assert "Nothing" not in printed
    assert resume("--again")[1:] == (40, 12)


def test_each_day_trains_what_is_new(resume, tmp_path):
    write(tmp_path / "data" / "1.csv", 1)
    assert resume()[1:] == (40, 8)
    assert resume()[1:] == (0, 8)
    for old in ("0.csv", "1.csv"):
        (tmp_path / "data" / old).unlink()
    write(tmp_path / "data" / "2.csv", 2, 60)
    assert resume()[1:] == (60, 14)


def test_a_supervisor_repeats_one_command(config, tmp_path):
    """It starts the run, continues it once there are new data, and has nothing to do without."""
    folder, result = str(tmp_path / "run"), tmp_path / "result.json"
    command = ("train", config, "--output", folder, "--continue", "--json", str(result))
    persia(*command)
    assert (json.loads(result.read_text())["rows"], list_checkpoints(folder)[-1].step) == (40, 4)
    write(tmp_path / "data" / "1.csv", 1, 30)
    persia(*command)
    assert (json.loads(result.read_text())["rows"], list_checkpoints(folder)[-1].step) == (30, 7)
    assert persia(*command).startswith("Nothing was left to train: at step 7")


@pytest.mark.parametrize("options", [(), ("--output", "a", "--overwrite"), ("--output", "a", "--resume", "b")])
def test_to_continue_needs_one_directory(config, options, capfd):
    persia("train", config, "--continue", *options, ok=False)
    assert "--continue needs --output, and does not go with --resume or --overwrite" in capfd.readouterr().err


def test_changed_learning_rates_take_effect(resume, tmp_path, caplog):
    rates = ("--set", "optimizer.lr=0.0005", "--set", "embedding_optimizer={kind='adagrad', lr=0.01}")
    resume("--set", "train.epochs=2", *rates)
    changed = "optimizer.lr: 0.001 before, 0.0005 now; embedding_optimizer.lr: 0.05 before, 0.01 now"
    assert caplog.text.count(changed) == 1
    (group,) = CheckpointReader(tmp_path / "run").state("training")["optimizer"]["param_groups"]
    assert group["lr"] == 0.0005
    caplog.clear()
    resume("--set", "train.epochs=3", *rates)
    assert "before" not in caplog.text


def test_a_change_of_the_batch_size_names_both_ways(resume, tmp_path, capfd):
    write(tmp_path / "data" / "0.csv", 0, 80)
    assert resume("--set", "train.max_steps=3")[1:] == (30, 7)
    resume("--set", "data.batch_size=20", ok=False)
    message = capfd.readouterr().err
    assert "batch_size changed in the middle of a pass, at batch 3 of epoch 0" in message
    assert "(batch_size was 10)" in message
    assert "`--restart-data` of persia train and continual" in message
    assert resume("--set", "data.batch_size=20", "--restart-data")[1:] == (80, 11)


def test_continual_takes_another_optimizer(config, tmp_path, capfd, caplog):
    folder = str(tmp_path / "days")
    persia("continual", config, "--days", "0..0", "--output", folder)
    write(tmp_path / "data" / "1.csv", 1)
    again = ("continual", config, "--days", "1..1", "--output", folder, "--set", "optimizer.kind=sgd")
    persia(*again, ok=False)
    assert "`--new-optimizer` of persia train and continual" in " ".join(capfd.readouterr().err.split())
    persia(*again, "--new-optimizer")
    assert "The optimizer's state is reset" in caplog.text


def test_continual_with_nothing_left_says_so_in_its_last_line(config, tmp_path):
    folder = str(tmp_path / "days")
    persia("continual", config, "--days", "0..0", "--output", folder)
    printed = persia("continual", config, "--days", "0..0", "--output", folder)
    assert "Nothing was left to train: days 0..0 are trained" in printed.replace("\n", " ").split("│")[-1]
