"""`persia train --sweep`."""

import contextlib
import json
import tomllib

import pytest

from persia.checkpoint import CheckpointReader
from persia.cli.run_config import Range, RunConfig, SweepConfig
from persia.config import convert
from persia.data import fit as fitting
from persia.errors import ConfigError

pytest.importorskip("optuna", reason="needs the extra optuna")

from persia.cli.sweep import Sweep, with_values
from support.command import persia

CONFIG = """
[data]
kind = "synthetic"
batch_size = 100
options = { rows = 800, id_features = 2, ids_per_feature = 20, dim = 4 }

[mode]
kind = "sync"

[trainer]
progress = false
checkpoint_dir = "unused"
checkpoint_every_steps = 2

"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_lists_are_tried_in_all_combinations(folder):
    sweep = '[sweep.values]\n"optimizer.lr" = [1e-3, 1e-9]\n"embedding_optimizer.lr" = [0.5, 1e-9]\n'
    (folder / "run.toml").write_text(CONFIG + sweep)
    output = persia("train", "run.toml", "--sweep", "--output", "out", "--json", "all.json")
    records = json.loads((folder / "all.json").read_text())
    pairs = {(r["values"]["optimizer.lr"], r["values"]["embedding_optimizer.lr"]) for r in records}
    assert pairs == {(1e-3, 0.5), (1e-3, 1e-9), (1e-9, 0.5), (1e-9, 1e-9)}
    assert {r["state"] for r in records} == {"done"}
    best = max(records, key=lambda r: r["metric"])
    assert f"trained in out/trial-{best['number']:03}/checkpoint" in output
    assert [p.parent.name for p in (folder / "out").glob("*/checkpoint")] == [f"trial-{best['number']:03}"]
    kept = tomllib.loads((folder / "out" / "best.toml").read_text())
    assert kept["optimizer"]["lr"] == best["values"]["optimizer.lr"]
    assert kept["embedding_optimizer"]["lr"] == best["values"]["embedding_optimizer.lr"]
    assert not (folder / "unused").exists()
    checkpoint = f"out/trial-{best['number']:03}/checkpoint"
    assert "AUC" in persia("evaluate", "out/best.toml", "--checkpoint", checkpoint)
    assert "out is not empty" in persia("train", "run.toml", "--sweep", "--output", "out", ok=False)


def test_trials_stop_early_and_keep_their_best(folder):
    steered = 'eval_every_steps = 2\npatience = 2\nkeep_best = "log_loss"\n\n[train]\nepochs = 20\n'
    held_out = '[eval_data]\nkind = "synthetic"\noptions = { rows = 200, seed = 3 }\n'
    sweep = 'metric = "log_loss"\n[sweep.values]\n"embedding_optimizer.lr" = [1.0, 5.0]\n'
    (folder / "run.toml").write_text(CONFIG.rstrip() + "\n" + steered + held_out + "[sweep]\n" + sweep)
    persia("train", "run.toml", "--sweep", "--output", "out", "--json", "all.json")
    records = json.loads((folder / "all.json").read_text())
    assert all(record["rows"] < 20 * 800 for record in records)
    best = min(records, key=lambda record: record["metric"])
    checkpoint = f"out/trial-{best['number']:03}/checkpoint"
    assert (folder / checkpoint / "BEST").read_text().endswith(f" {best['metric']!r} log_loss\n")
    words = ("evaluate", "out/best.toml", "--checkpoint", checkpoint, "--step", "best", "--json", "scores.json")
    persia(*words)
    assert json.loads((folder / "scores.json").read_text())["log_loss"] == pytest.approx(best["metric"], abs=1e-6)


@pytest.mark.parametrize("interval", ["checkpoint_every_seconds = 600.0", "checkpoint_every_steps = 2", ""])
def test_trials_write_no_checkpoints_while_they_train(folder, monkeypatch, interval):
    """Not even those that a cluster of processes writes by default."""
    made = []
    build = RunConfig.build_trainer
    monkeypatch.setattr(RunConfig, "build_trainer", lambda *a, **o: made.append(build(*a, **o)) or made[-1])
    evaluated = (
        'keep_best = "auc"\n[eval_data]\nkind = "synthetic"\nbatch_size = 100\n'
        "options = { rows = 200, id_features = 2, ids_per_feature = 20, dim = 4 }\n"
    )
    text = CONFIG.replace("checkpoint_every_steps = 2\n", f"{interval}\n{evaluated}")
    tree = tomllib.loads(text + '[sweep.values]\n"optimizer.lr" = [1e-3]\n')
    Sweep(tree, "out", lambda _: contextlib.nullcontext()).run(lambda _: None)
    (options,) = [trainer.options for trainer in made]
    assert options.checkpoint_dir == "out/trial-000/checkpoint"
    assert options.checkpoint_every_steps is options.checkpoint_seconds(in_processes=True) is None


def test_a_user_model_is_copied_next_to_the_best_configuration(folder):
    (folder / "mine").mkdir()
    (folder / "mine" / "swept_model.py").write_text(
        "from persia.nn.models import FFNN\n\n\nclass Own(FFNN):\n    pass\n"
    )
    sweep = '[model]\nkind = "swept_model:Own"\n[sweep.values]\n"optimizer.lr" = [1e-3, 1e-9]\n'
    (folder / "mine" / "run.toml").write_text(CONFIG + sweep)
    persia("train", "mine/run.toml", "--sweep", "--output", "out")
    assert (folder / "out" / "swept_model.py").is_file()


def test_hopeless_trials_stop_early(folder):
    values = '"embedding_optimizer.lr" = [0.5, 0.4, 0.3, 0.2, 1e-9]\n'
    (folder / "run.toml").write_text(CONFIG + f"[sweep]\nprune_every_steps = 4\nseed = 5\n[sweep.values]\n{values}")
    persia("train", "run.toml", "--sweep", "--output", "out", "--json", "all.json")
    records = json.loads((folder / "all.json").read_text())
    pruned = [r for r in records if r["state"] == "pruned"]
    assert pruned
    assert all(r["rows"] < 800 for r in pruned)
    assert all(r["rows"] == 800 for r in records if r["state"] == "done")


def test_a_diverged_trial_does_not_end_the_sweep(folder):
    sweep = '[sweep.values]\n"optimizer.lr" = [1e30, 1e-3]\n'
    (folder / "run.toml").write_text(CONFIG + sweep)
    persia("train", "run.toml", "--sweep", "--output", "out", "--json", "all.json")
    states = {r["values"]["optimizer.lr"]: r["state"] for r in json.loads((folder / "all.json").read_text())}
    assert states == {1e30: "diverged", 1e-3: "done"}


def test_ranges_are_drawn(folder):
    sweep = '[sweep]\ntrials = 3\nmetric = "log_loss"\n[sweep.values]\n'
    ranges = '"optimizer.lr" = { low = 1e-4, high = 1e-2, log = true }\n"train.epochs" = { low = 1, high = 2 }\n'
    (folder / "run.toml").write_text(CONFIG + sweep + ranges)
    output = persia("train", "run.toml", "--sweep", "--output", "out", "--json", "all.json")
    records = json.loads((folder / "all.json").read_text())
    assert len({r["values"]["optimizer.lr"] for r in records}) == 3
    assert all(1e-4 <= r["values"]["optimizer.lr"] <= 1e-2 for r in records)
    assert {r["values"]["train.epochs"] for r in records} <= {1, 2}
    assert all(r["rows"] == 800 * r["values"]["train.epochs"] for r in records)
    least = min(records, key=lambda r: r["metric"])
    assert f"trial-{least['number']:03}/checkpoint" in output


RULES = """
[data]
kind = "csv"
path = "rows.csv"
batch_size = 64
[schema]
id_features = [{ name = "user", dim = 4 }, { name = "band", dim = 4, bucketize = { column = "price", quantiles = 4 } }]
dense_features = [{ name = "price", scale = "standard" }]
labels = ["click"]
[model]
options = { hidden = [4] }
[trainer]
progress = false
[sweep.values]
"""


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        ('"schema.id_features.user.dim" = [4, 8]\n"data.batch_size" = [32, 64]\n', [2]),
        ('"schema.id_features.band.bucketize.quantiles" = [4, 8]\n"optimizer.lr" = [1e-3, 1e-2]\n', [2, 1]),
        ('"train.fit_rows" = [10, 20]\n"optimizer.lr" = [1e-3, 1e-2]\n', [2, 2]),
    ],
)
def test_rules_are_fitted_once_for_equal_rules_and_rows(folder, monkeypatch, values, fits):
    fitted = []

    def fit(schema, reader, rows):
        fitted.append(len(schema.needs_fit))
        return fit_features(schema, reader, rows)

    fit_features = fitting.fit_features
    monkeypatch.setattr(fitting, "fit_features", fit)
    (folder / "rows.csv").write_text("user,price,click\n" + "".join(f"{i % 5},{i},{i % 2}\n" for i in range(200)))
    (folder / "run.toml").write_text(RULES + values)
    persia("train", "run.toml", "--sweep", "--output", "out", "--json", "all.json")
    records = json.loads((folder / "all.json").read_text())
    assert [record["state"] for record in records] == ["done"] * 4
    assert fitted == fits
    (checkpoint,) = (folder / "out").glob("*/checkpoint")
    best = tomllib.loads((folder / "out" / "best.toml").read_text())
    schema = CheckpointReader(str(checkpoint)).schema
    assert schema.dense[0].fitted.rows == best.get("train", {}).get("fit_rows", 200)
    edges = schema.id_features[1].bucketize.fitted
    assert len(edges) == best["schema"]["id_features"][1]["bucketize"]["quantiles"] - 1


def test_paths_lead_through_named_records():
    tree = {"schema": {"id_features": [{"name": "a", "dim": 4}, {"name": "b", "dim": 4}]}}
    one = with_values(tree, {"schema.id_features.b.dim": 8})
    assert [f["dim"] for f in one["schema"]["id_features"]] == [4, 8]
    every = with_values(tree, {"schema.id_features.*.dim": 8})
    assert [f["dim"] for f in every["schema"]["id_features"]] == [8, 8]
    assert [f["dim"] for f in tree["schema"]["id_features"]] == [4, 4]
    with pytest.raises(ConfigError, match="there is no 'c'"):
        with_values(tree, {"schema.id_features.c.dim": 8})


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        (None, r"Missing \[sweep\.values\]"),
        ({"values": {"optimizer.rate": [1]}}, r"sweep\.values\.'optimizer\.rate' = 1: optimizer: .*unknown field"),
        ({"values": {"optimizer.lr": ["a"]}}, r"sweep\.values\.'optimizer\.lr' = 'a'"),
        ({"values": {"optimizer.lr": []}}, "is an empty list"),
        ({"values": {"optimizer.lr": {"low": 2, "high": 1}}}, "Invalid range from 2 to 1"),
        ({"values": {"optimizer.lr": {"low": 0, "high": 1, "log": True}}}, "low > 0 with log"),
        (
            {"values": {"model.options.hidden": [[16], "x"]}},
            r"hidden' = 'x': model.options: Invalid width in hidden = 'x'",
        ),
        (
            {"values": {"model.kind": ["ffnn", "din"]}},
            r"'model\.kind' = 'din': model.options: This model needs a history",
        ),
        ({"values": {"optimizer.lr": [0.1]}, "metric": "retrieval_hr@5"}, "where trainer.keep_best watches it"),
        ({"values": {"data.kind": ["synthetic", "taobao"]}}, r"'data\.kind' = 'taobao': "),
        (
            {"values": {"model.kind": ["dcn_v2", "ffnn"], "model.options.cross_layers": [2, 3]}},
            "'ffnn': Unknown option model.options.cross_layers",
        ),
    ],
)
def test_wrong_sweeps_are_refused_before_a_trial(tmp_path, sweep, message):
    tree = tomllib.loads(CONFIG) | ({"sweep": sweep} if sweep else {})
    with pytest.raises(ConfigError, match=message):
        Sweep(tree, str(tmp_path / "out"), contextlib.nullcontext)


def test_options_of_the_command(folder):
    (folder / "run.toml").write_text(CONFIG)
    assert "--sweep needs --output" in persia("train", "run.toml", "--sweep", ok=False)
    assert convert({"values": {"a": {"low": 1, "high": 2}}}, SweepConfig, "s").values == {"a": Range(1, 2)}
