"""Where `persia train` saves, what it does with a directory that holds a run, and what paths are relative to."""

import json
import os
import re
import shlex
from pathlib import Path
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia.checkpoint import list_checkpoints
from persia.cli.configured_run import load_config
from persia.cli.run_config import RunConfig
from persia.cli.run_folder import RunFolder
from persia.config import convert
from persia.errors import ConfigError
from support.command import persia

CONFIG = """
[data]
kind = "parquet"
path = "data/clicks.parquet"
batch_size = 50

[schema]
id_features = [{ name = "user", dim = 4 }, { name = "item", dim = 4 }]
labels = ["click"]

[model]
kind = "ffnn"
options = { hidden = [4] }

[mode]
kind = "sync"

[trainer]
progress = false
"""
FOLDER = re.compile(r"\d{4}-\d\d-\d\d-\d{6}(-\d+)?")


def commands(text):
    """The commands that a message offers, as arguments."""
    return [shlex.split(line)[1:] for line in text.splitlines() if line.startswith("    persia ")]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with a configuration and its data, in a working directory that is another one."""
    folder = tmp_path / "project"
    (folder / "data").mkdir(parents=True)
    ids = np.arange(200)
    table = pa.table({"user": ids % 7, "item": ids % 11, "shop": ids % 5, "click": ids % 2})
    pq.write_table(table, folder / "data" / "clicks.parquet")
    (folder / "run.toml").write_text(CONFIG)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return folder


def folders(project):
    return sorted(path.name for path in (project / "runs" / "run").iterdir() if not path.is_symlink())


# --- folders ------------------------------------------------------------------------------------------------------


def test_each_run_gets_a_folder_and_latest_leads_to_the_last_one(project):
    text = persia("train", "../project/run.toml")
    (first,) = folders(project)
    assert FOLDER.fullmatch(first)
    runs = project / "runs" / "run"
    assert text.splitlines()[-1] == f"Saved in {runs / first}"
    assert os.readlink(runs / "latest") == first
    edited = CONFIG.replace("hidden = [4]", "hidden = [8]").replace('{ name = "item", dim = 4 }', "")
    (project / "run.toml").write_text(edited)
    persia("train", "../project/run.toml")  # Nothing to resume, nothing to remove.
    (second,) = set(folders(project)) - {first}
    assert os.readlink(runs / "latest") == second
    assert list_checkpoints(runs / "latest")[-1].step == 4
    assert "AUC" in persia("evaluate", "../project/run.toml", "--checkpoint", runs / "latest")
    assert os.listdir() == []


def test_runs_of_the_same_second_have_their_own_folders(project, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda layout: "2026-11-27-142530")
    made = [RunFolder(str(project / "run.toml")).path.name for _ in range(3)]
    assert made == ["2026-11-27-142530", "2026-11-27-142530-2", "2026-11-27-142530-3"]


def test_a_resumed_run_stays_in_its_folder_though_latest_moves(project):
    persia("train", project / "run.toml", "--set", "train.max_steps=1")
    (first,) = folders(project)
    latest = project / "runs" / "run" / "latest"
    text = persia("train", project / "run.toml", "--resume", latest, "--set", "train.max_steps=1")
    assert text.splitlines()[-1] == f"Saved in {latest.parent / first}"
    assert folders(project) == [first]
    assert list_checkpoints(latest)[-1].step == 2


def test_a_run_that_saves_nothing_leaves_no_folder(project):
    def broken(*arguments, **options):
        assert os.readlink(project / "runs" / "run" / "latest") != first
        raise ConfigError("It broke before the first checkpoint.")

    def unlinked(*arguments, **options):
        raise ConfigError("It broke before the first checkpoint.")

    with mock.patch("persia.trainer.trainer.FitCall", unlinked):
        persia("train", project / "run.toml", ok=False)
    assert not (project / "runs").exists()
    persia("train", project / "run.toml", "--set", "data.path=none.parquet", ok=False)
    assert not (project / "runs").exists()
    persia("train", project / "run.toml")
    (first,) = folders(project)
    with mock.patch("persia.trainer.trainer.FitCall", broken):
        persia("train", project / "run.toml", ok=False)
    assert folders(project) == [first]
    assert os.readlink(project / "runs" / "run" / "latest") == first


def test_a_folder_that_cannot_be_made_names_the_option(project):
    (project / "runs").touch()
    text = persia("train", project / "run.toml", ok=False)
    assert "Give another directory with --output" in text
    persia("train", project / "run.toml", "--output", "out")


def test_a_file_named_latest_stays(project):
    (project / "runs" / "run").mkdir(parents=True)
    (project / "runs" / "run" / "latest").write_text("mine")
    persia("train", project / "run.toml")
    assert (project / "runs" / "run" / "latest").read_text() == "mine"


# --- a directory that holds a run ---------------------------------------------------------------------------------


def test_the_refusal_of_a_resumable_run_names_working_commands(project):
    persia("train", project / "run.toml", "--output", "out", "--set", "train.max_steps=2")
    text = persia("train", project / "run.toml", "--output", "out", "--set", "train.max_steps=1", ok=False)
    assert "out holds another run, trained to step 2" in text
    elsewhere, replace, resume = commands(text)
    config, short = str(project / "run.toml"), ["--set", "train.max_steps=1"]
    assert elsewhere == ["train", config, "--output", "out-2", *short]
    assert replace == ["train", config, "--output", "out", "--overwrite", *short]
    assert resume == ["train", config, "--resume", "out", *short]
    for line, step in ((elsewhere, 1), (resume, 3), (replace, 1)):
        persia(*line)
        assert list_checkpoints(line[3])[-1].step == step


@pytest.mark.parametrize(
    ("section", "why"),
    [
        ('[optimizer]\nkind = "sgd"', "SGD"),
        ('[embedding_optimizer]\nkind = "adam"\nlr = 0.01', "trained by Adam, in the checkpoint by Adagrad"),
    ],
)
def test_the_refusal_of_another_optimizer_names_working_commands(project, section, why):
    persia("train", project / "run.toml", "--output", "out")
    (project / "run.toml").write_text(CONFIG.replace("[mode]", f"{section}\n[mode]"))
    for option in ("--output", "--resume"):
        text = persia("train", project / "run.toml", option, "out", ok=False)
        assert why in text
        lines = commands(text)
        assert [line[0] for line in lines[-3:]] == ["export", "import", "train"]
        assert lines[-4] == ["train", str(project / "run.toml"), "--resume", "out", "--new-optimizer"]
    assert "reset its state with new_optimizer=True (`--new-optimizer` of persia train" in text
    persia(*lines[-4], "--set", "train.epochs=2")
    assert list_checkpoints("out")[-1].step == 8


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('{ name = "item", dim = 4 }', '{ name = "item", dim = 4 }, { name = "shop", dim = 4 }', "shop"),
        ('{ name = "item", dim = 4 }', '{ name = "item", dim = 8 }', "'item' has dim 8"),
        ("hidden = [4]", "hidden = [8]", "tensor"),
    ],
)
def test_the_refusal_of_other_runs_names_working_commands(project, old, new, why):
    persia("train", project / "run.toml", "--output", "out")
    assert old in CONFIG
    (project / "run.toml").write_text(CONFIG.replace(old, new))
    for option in ("--output", "--resume"):
        text = persia("train", project / "run.toml", option, "out", ok=False)
        assert why in text
        lines = commands(text)
        assert [line[0] for line in lines[-3:]] == ["export", "import", "train"]
        assert ["--resume", "out"] not in [line[2:4] for line in lines]
    for line in lines[-3:]:
        persia(*line)
    assert lines[-1][2] == "--resume"
    assert list_checkpoints(lines[-1][3])


def test_a_damaged_run_is_not_offered_for_export(project):
    persia("train", project / "run.toml", "--output", "out")
    (manifest,) = Path("out").glob("step-*/manifest.json")
    manifest.write_text("{}")
    text = persia("train", project / "run.toml", "--output", "out", ok=False)
    assert [line[-1] for line in commands(text)] == ["out-2", "--overwrite"]


def test_overwrite_removes_the_run_and_nothing_else(project):
    persia("train", project / "run.toml", "--output", "out", "--set", "train.epochs=3")
    Path("out/notes.txt").write_text("mine")
    curve = len(json.loads(Path("out/run.json").read_text())["curve"])
    persia("train", project / "run.toml", "--output", "out", "--overwrite", "--set", "train.max_steps=1")
    assert [entry.step for entry in list_checkpoints("out")] == [1]
    assert Path("out/notes.txt").read_text() == "mine"
    assert len(json.loads(Path("out/run.json").read_text())["curve"]) < curve
    persia("train", project / "run.toml", "--output", "new", "--overwrite")  # There is nothing to remove.


def test_overwrite_keeps_the_run_if_training_cannot_begin(project):
    persia("train", project / "run.toml", "--output", "out")
    for change in ("data.path=none.parquet", "trainer.keep_best=auc", "model.options.hiden=[3]"):
        persia("train", project / "run.toml", "--output", "out", "--overwrite", "--set", change, ok=False)
        assert list_checkpoints("out")[-1].step == 4
    for resumed in (["--output", "out"], []):
        text = persia("train", project / "run.toml", *resumed, "--resume", "out", "--overwrite", ok=False)
        assert "--overwrite would remove the run of --resume" in text
    assert list_checkpoints("out")[-1].step == 4


# --- outputs ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ("--output", "file/out"),
        ("--json", "file/result.json"),
        ("--json", "folder"),
        ("--set", "trainer.checkpoint_dir=file/out"),
        ("--set", "trainer.log_dir=file/logs"),
        ("--set", "trainer.record_dir=file/records"),
        ("--set", "trainer.publish.url=file/changes"),
        ("--set", "trainer.keep_best=auc"),
    ],
)
def test_an_unwritable_output_is_found_before_data_are_opened(project, words):
    Path("file").write_text("mine")
    Path("folder").mkdir()
    with mock.patch.object(RunConfig, "reader", side_effect=AssertionError("the data are opened")):
        text = persia("train", project / "run.toml", *words, ok=False)
    assert "cannot be written" in text or "[eval_data]" in text
    assert sorted(os.listdir()) == ["file", "folder"]
    assert Path("file").read_text() == "mine"
    assert not (project / "runs").exists()


def test_a_result_that_fails_leaves_no_empty_file(project):
    persia("train", project / "run.toml", "--json", "r.json", "--set", "data.path=none.parquet", ok=False)
    assert not Path("r.json").exists()
    Path("r.json").write_text("mine")
    persia("train", project / "run.toml", "--json", "r.json", "--set", "data.path=none.parquet", ok=False)
    assert Path("r.json").read_text() == "mine"


@pytest.mark.parametrize(
    "words",
    [
        ("evaluate", "RUN", "--checkpoint", "out", "--json", "file/e.json"),
        ("predict", "RUN", "--checkpoint", "out", "--output", "file/p.csv"),
        ("continual", "RUN", "--days", "0..1", "--output", "days", "--json", "file/days.json"),
        ("plan", "RUN", "--json", "file/plan.json"),
        ("bench", "rates", "RUN", "--save", "file/rates.json"),
        ("bench", "modes", "--json", "file/modes.json"),
        ("health", "tcp://127.0.0.1:9", "--json", "file/health.json"),
        ("trace", "tcp://127.0.0.1:9", "--output", "file/trace.json"),
    ],
)
def test_other_commands_try_their_file_first(project, words):
    Path("file").touch()
    text = persia(*(str(project / "run.toml") if word == "RUN" else word for word in words), ok=False)
    assert f"{words[-1]} cannot be written" in text


def test_import_tries_its_directory_before_it_reads_rows(project):
    Path("file").touch()
    with mock.patch("persia.interop.import_rows", side_effect=AssertionError("rows are read")):
        text = persia("import", project / "run.toml", "rows", "--output", "file/out", ok=False)
    assert "Cannot write" in text


# --- paths and options --------------------------------------------------------------------------------------------


def test_paths_in_a_file_are_relative_to_the_file(project):
    (project / "run.toml").write_text(
        """
[data]
kind = "parquet"
path = "data/*.parquet"
[eval_data]
kind = "csv"
path = "../other/test.csv"
[trainer]
checkpoint_dir = "runs/a"
log_dir = "./logs"
record_dir = "~/records"
publish = { url = "changes" }
trackers = [{ kind = "wandb", directory = "wandb" }, { kind = "mlflow", uri = "sqlite:///m.db" }]
[sweep.values]
"data.path" = ["a.parquet", "s3://bucket/b.parquet"]
"optimizer.lr" = [0.1]
"""
    )
    for config in (project / "run.toml", "../project/run.toml"):
        tree = load_config(str(config), ["data.path=here/*.parquet"])
        assert tree["data"]["path"] == "here/*.parquet"
        tree = load_config(str(config), [])
        assert tree["data"]["path"] == f"{project}/data/*.parquet"
        assert tree["eval_data"]["path"] == f"{project.parent}/other/test.csv"
        trainer = tree["trainer"]
        assert trainer["checkpoint_dir"] == f"{project}/runs/a"
        assert trainer["log_dir"] == f"{project}/logs"
        assert trainer["record_dir"] == os.path.expanduser("~/records")
        assert trainer["publish"]["url"] == f"{project}/changes"
        assert [t.get("directory") for t in trainer["trackers"]] == [f"{project}/wandb", None]
        assert trainer["trackers"][1]["uri"] == "sqlite:///m.db"
        assert tree["sweep"]["values"]["data.path"] == [f"{project}/a.parquet", "s3://bucket/b.parquet"]
        assert load_config(str(config), [], "out")["trainer"]["checkpoint_dir"] == "out"


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ('kind = "kafka"\npath = "clicks,views"', "clicks,views"),
        ('kind = "parquet"\npath = "s3://bucket/x"', "s3://bucket/x"),
        ('kind = "parquet"\npath = "/data/x"', "/data/x"),
        ('kind = "parquet"\npath = 3', 3),
        ('kind = "parquet"\npath = ""', ""),
    ],
)
def test_topics_urls_and_wrong_values_stay(project, section, path):
    (project / "run.toml").write_text(f"[data]\n{section}\n")
    assert load_config(str(project / "run.toml"), [])["data"]["path"] == path


@pytest.mark.parametrize(
    "text", ["data = 3", "trainer = [1]", "[trainer]\npublish = 1\ntrackers = 2", "[sweep]\nvalues = 1"]
)
def test_sections_of_the_wrong_type_are_refused_by_name(project, text):
    (project / "run.toml").write_text(text)
    assert "run.toml" in persia("train", project / "run.toml", ok=False)


def test_a_dumped_configuration_reads_the_same_files(project):
    dumped = persia("train", project / "run.toml", "--dump-config")
    Path("dumped.toml").write_text(dumped)
    assert persia("train", "dumped.toml", "--dump-config") == dumped


def test_columns_of_any_name_survive_a_dump(project):
    rename = {"user": 'Kunde "Nr." \x1b\x7f\x9b', "item": "Artikel, 東京 🙂", "click": "a.b"}
    options = ", ".join(f"{name} = {json.dumps(column)}" for name, column in rename.items())
    odd = '{ "Preis (€)" = 1.5, "a\\u001bb" = 2.5 }'
    (project / "run.toml").write_text(
        CONFIG.replace("batch_size = 50", "batch_size = 50\noptions = { fill = " + odd + ", rename = RENAME }").replace(
            "RENAME", "{ " + options.replace("\\ud83d\\ude42", "🙂") + " }"
        )
    )
    dumped = persia("train", project / "run.toml", "--dump-config")
    assert "\x1b" not in dumped
    assert "\x9b" not in dumped
    Path("dumped.toml").write_text(dumped)
    tree = load_config("dumped.toml", [])
    assert tree["data"]["options"] == {"fill": {"Preis (€)": 1.5, "a\x1bb": 2.5}, "rename": rename}


def config_of(data, evaluation):
    run = convert({"data": data, "eval_data": evaluation}, RunConfig, "test")
    again = convert(run.dump(), RunConfig, "test")
    assert again == run
    return run.eval_data.options


def test_eval_data_inherit_columns_but_not_rows():
    columns = {"rename": {"click": "clicked"}, "fill": {"price": 0.0}, "where": "click is not None", "day": "day"}
    columns["tokens_per_batch"] = 5_000  # Evaluation needs the same memory.
    rows = {"split": {"part": "train", "test": 0.1}, "shuffle_rows": 1000, "drop_last": True, "shard": [0, 2]}
    rows["similar_lengths"] = True
    data = {"kind": "csv", "path": "a.csv", "options": columns | rows}
    assert config_of(data, {"kind": "csv", "path": "b.csv"}) == columns
    own = {"fill": {"price": 1.0}, "split": {"part": "test", "test": 0.1}}
    assert config_of(data, {"kind": "csv", "path": "b.csv", "options": own}) == columns | own
    assert config_of(data, {"kind": "parquet", "path": "b.parquet"}) == {}
    stream = {"bootstrap": "h:1", "group": "g", "start": "latest", "dead_letters": "d", "values": "json"}
    tested = config_of({"kind": "kafka", "path": "t", "options": stream}, {"kind": "kafka", "path": "t"})
    assert tested == {"bootstrap": "h:1", "values": "json"}


def test_inherited_options_read_the_evaluation(project):
    """Columns that the reader renames are renamed in `eval_data`, too."""
    text = CONFIG.replace('labels = ["click"]', 'labels = ["bought"]').replace(
        "batch_size = 50", 'batch_size = 50\noptions = { rename = { bought = "click" }, shuffle_rows = 100 }'
    )
    (project / "run.toml").write_text(text + '\n[eval_data]\nkind = "parquet"\npath = "data/clicks.parquet"\n')
    persia("train", project / "run.toml", "--json", "r.json")
    assert json.loads(Path("r.json").read_text())["evaluation"]["rows"] == 200
