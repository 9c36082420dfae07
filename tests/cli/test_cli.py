"""The commands, as a user types them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from persia import __version__
from persia.serve import Predictor
from support.command import persia

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


@pytest.fixture
def persia_process(forks, tmp_path):
    """Runs a command in a process of its own."""

    def run(*arguments, ok=True):
        done = forks.run(["-m", "persia", *arguments], tmp_path)
        assert (done.returncode == 0) == ok, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.processes
def test_version_is_that_of_the_package():
    expected = f"persia {__version__}\n"
    for command in ([str(Path(sys.executable).with_name("persia"))], [sys.executable, "-m", "persia"]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (0, expected), done.stderr


@pytest.mark.processes
def test_help_fits_a_terminal_of_80_columns(tmp_path, forks):
    done = forks.run(["-m", "persia", "--help"], tmp_path, env={**os.environ, "COLUMNS": "80"})
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "Show the health of every process of a cluster, or of a server." in done.stdout


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return str(path)


@pytest.mark.processes
def test_train_evaluate_predict_inspect_resume(config, tmp_path, persia_process):
    out, result = str(tmp_path / "out"), tmp_path / "result.json"
    text = persia_process("train", config, "--output", out, "--json", str(result))
    assert "progressive AUC" in text
    record = json.loads(result.read_text())
    assert record["global_step"] == 10
    assert record["evaluation"]["rows"] == 500

    assert "AUC" in persia("evaluate", config, "--checkpoint", out)
    scores = tmp_path / "scores.json"
    text = persia(*f"evaluate {config} --checkpoint {out} --group-by id_0 --at 1 --at 5 --json {scores}".split())
    assert "recall@5" in text
    scored = json.loads(scores.read_text())
    assert list(scored["grouped"]["click"]["ndcg"]) == ["1", "5"]
    assert sum(bucket["rows"] for bucket in scored["buckets"]["click"]) == scored["rows"] == 500
    predictions = str(tmp_path / "new" / "p.parquet")
    persia("predict", config, "--checkpoint", out, "--output", predictions)
    assert pq.read_table(predictions).num_rows == 500
    persia("predict", config, "--checkpoint", out, "--output", str(tmp_path / "p.csv"))
    assert "id_0" in persia("checkpoint", "inspect", out)

    persia_process("train", config, "--resume", out, "--json", str(result), "--set", "train.epochs=2")
    assert json.loads(result.read_text())["global_step"] == 20


def test_a_directory_with_another_run_is_refused(config, tmp_path):
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    short = ("--set", "train.max_steps=2")
    persia("train", config, "--output", one, *short)
    persia("train", config, "--output", two, *short)
    before = sorted(path.name for path in (tmp_path / "one").rglob("*"))
    for arguments in (
        ("--output", one),
        ("--set", f"trainer.checkpoint_dir={one}"),
        ("--output", one, "--resume", two),
    ):
        text = persia("train", config, *arguments, ok=False)
        assert "holds another run, trained to step 2" in text
        assert f"--resume {one}" in text
        assert "Traceback" not in text
    assert sorted(path.name for path in (tmp_path / "one").rglob("*")) == before
    # The run itself goes on, there or elsewhere.
    persia("train", config, "--resume", f"{tmp_path}/./one", "--output", one, *short)
    persia("train", config, "--resume", one, "--output", str(tmp_path / "three"))
    assert "step 4" in persia("checkpoint", "inspect", one)
    assert "step 10" in persia("checkpoint", "inspect", str(tmp_path / "three"))


SHUFFLED = """
[data]
kind = "parquet"
path = "{path}"
batch_size = 64
options = {{ shuffle_rows = 300, drop_last = true }}

[schema]
id_features = [{{ name = "item", dim = 4 }}]
labels = ["label"]

[trainer]
progress = false
"""


def test_predictions_are_in_source_order_despite_shuffling(tmp_path):
    items = np.repeat(np.arange(6), 50)
    pq.write_table(pa.table({"item": items, "label": items % 2}), tmp_path / "clicks.parquet")
    config = tmp_path / "run.toml"
    config.write_text(SHUFFLED.format(path=tmp_path / "clicks.parquet"))
    out, predictions = str(tmp_path / "out"), str(tmp_path / "p.parquet")
    persia("train", str(config), "--output", out)
    persia("predict", str(config), "--checkpoint", out, "--output", predictions)
    p = pq.read_table(predictions)["label"].to_numpy()
    assert len(p) == 300
    # Equal ids have equal predictions, and different ones different.
    assert np.count_nonzero(np.diff(p)) == 5
    assert len(np.unique(p)) == 6
    persia("evaluate", str(config), "--checkpoint", out, "--json", str(tmp_path / "e.json"))
    assert json.loads((tmp_path / "e.json").read_text())["rows"] == 300

    # A failure leaves the predictions of before, and nothing else.
    pq.write_table(pa.table({"label": items % 2}), tmp_path / "other.parquet")
    other = ("--data", str(tmp_path / "other.parquet"))
    assert "item" in persia("predict", str(config), "--checkpoint", out, *other, "--output", predictions, ok=False)
    np.testing.assert_array_equal(pq.read_table(predictions)["label"].to_numpy(), p)
    assert not list(tmp_path.glob("*.part"))

    # Data without labels can be predicted, not evaluated.
    pq.write_table(pa.table({"item": items}), tmp_path / "clicks.parquet")
    bare = ("--checkpoint", out, "--set", "data.options.require_labels=false")
    persia("predict", str(config), *bare, "--output", predictions)
    np.testing.assert_array_equal(pq.read_table(predictions)["label"].to_numpy(), p)
    assert "predict" in persia("evaluate", str(config), *bare, ok=False)


def test_another_file_is_scored_whole(tmp_path):
    """The split and the filter of the training data are not those of rows that come later."""
    items = np.repeat(np.arange(6), 50)
    pq.write_table(pa.table({"item": items, "label": items % 2}), tmp_path / "clicks.parquet")
    part = 'where = "label is not None", split = { part = "test", test = 0.1 }'
    config = tmp_path / "run.toml"
    config.write_text(SHUFFLED.format(path=tmp_path / "clicks.parquet").replace("drop_last = true", part))
    out, predictions, found = str(tmp_path / "out"), str(tmp_path / "p.parquet"), str(tmp_path / "e.json")
    persia("train", str(config), "--output", out)
    pq.write_table(pa.table({"item": items, "label": [*(items[1:] % 2), None]}), tmp_path / "later.parquet")
    pq.write_table(pa.table({"item": items}), tmp_path / "bare.parquet")
    arguments = (str(config), "--checkpoint", out, "--data")
    for file in ("later.parquet", "bare.parquet"):
        persia("predict", *arguments, str(tmp_path / file), "--output", predictions)
        assert pq.read_table(predictions).num_rows == 300
    persia("evaluate", *arguments, str(tmp_path / "later.parquet"), "--json", found)
    assert json.loads(Path(found).read_text())["rows"] == 299
    assert "label" in persia("evaluate", *arguments, str(tmp_path / "bare.parquet"), ok=False)


RATED = """
[data]
kind = "{kind}"
path = "{path}"
batch_size = 50
options = {{ labels = {{ rating = "rating >= 3" }}, split = {{ part = "test", test = 0.5 }}, shuffle_rows = 100 }}

[schema]
id_features = [{{name = "item", dim = 4}}]
labels = ["rating"]

[trainer]
progress = false
"""


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_columns_are_kept_beside_predictions(kind, tmp_path):
    items = np.repeat(np.arange(6), 30)
    rows = [{"item": int(item), "rating": int(item), "key": f"row {i}"} for i, item in enumerate(items)]
    table, path = pa.Table.from_pylist(rows), tmp_path / f"rated.{kind}"
    if kind == "csv":
        pyarrow.csv.write_csv(table, path)
    elif kind == "parquet":
        pq.write_table(table, path, row_group_size=40)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = tmp_path / "run.toml"
    config.write_text(RATED.format(kind=kind, path=path))
    out, predictions = str(tmp_path / "out"), str(tmp_path / "p.parquet")
    persia("train", str(config), "--output", out)
    command = ("predict", str(config), "--checkpoint", out, "--keep", "key", "--keep", "rating", "--output")
    persia(*command, predictions)
    found = pq.read_table(predictions)
    assert found.column_names == ["key", "rating", "rating >= 3"]
    # Half of the rows, each beside its own prediction, which depends on the item alone.
    assert 50 < len(found) < 130
    number = {row["key"]: row["item"] for row in rows}
    by_item = {}
    for key, rating, score in zip(*(column.to_pylist() for column in found.columns), strict=True):
        assert int(rating) == number[key]
        by_item.setdefault(number[key], set()).add(score)
    assert len(by_item) == 6
    assert all(len(scores) == 1 for scores in by_item.values())

    persia(*command, str(tmp_path / "all.csv"), "--data", str(path))
    lines = pyarrow.csv.read_csv(tmp_path / "all.csv")
    assert lines["key"].to_pylist() == [row["key"] for row in rows]
    if kind != "csv":
        return
    for output, more, message in (
        ("p.txt", (), "p.txt is of no known format; give a name that ends in .csv or .parquet"),
        ("p.csv", ("--keep", "nothing"), "has no column 'nothing'"),
        ("p.csv", ("--keep", "rating >= 3"), "has the name of the predicted column"),
        ("p.csv", ("--keep", "key"), "--keep names 'key' twice"),
    ):
        text = persia(*command, str(tmp_path / output), *more, ok=False)
        assert message in text
        assert "Traceback" not in text
        assert not (tmp_path / output).exists()


def test_another_file_needs_a_reader_of_files(config, tmp_path):
    out = str(tmp_path / "out")
    persia("train", config, "--output", out, "--set", "train.max_steps=1")
    text = persia(
        "predict", config, "--checkpoint", out, "--data", "x.csv", "--output", str(tmp_path / "p.csv"), ok=False
    )
    assert "synthetic" in text
    assert "Traceback" not in text


def test_help_teaches():
    for command in (
        (),
        ("train",),
        ("continual",),
        ("evaluate",),
        ("predict",),
        ("checkpoint",),
        ("checkpoint", "inspect"),
    ):
        assert "Usage" in persia(*command, "--help")


def test_the_dumped_configuration_is_complete_and_can_be_read(config, tmp_path):
    hybrid, gba = '{kind = "hybrid", staleness = "unbounded"}', '{kind = "gba", global_batch_size = 512}'
    schedule = f'[[0, {{kind = "sync"}}], [50, {hybrid}], [90, {gba}]]'
    settings = ("mode.kind=hybrid", "mode.staleness=3", f"trainer.mode_schedule={schedule}")
    dumped = persia("train", config, "--dump-config", *(word for one in settings for word in ("--set", one)))
    path = tmp_path / "dumped.toml"
    path.write_text(dumped)
    assert persia("train", str(path), "--dump-config") == dumped
    assert "staleness = 3" in dumped
    assert '[50, {kind = "hybrid", staleness = "unbounded"' in dumped
    assert "accumulation_steps = 1" in dumped


def test_a_mode_without_a_kind_is_hybrid(config):
    dumped = persia("train", config, "--dump-config", "--set", "mode={staleness = 4}")
    assert 'kind = "hybrid"\nstaleness = 4' in dumped


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


@pytest.mark.processes
def test_a_missing_file_is_one_line(tmp_path, persia_process):
    text = persia_process("train", str(tmp_path / "none.toml"), ok=False)
    assert "cannot be read" in text
    assert "Traceback" not in text


def test_a_file_of_data_is_no_configuration(tmp_path):
    path = tmp_path / "my clicks.csv"
    path.write_text("user,item,click\n1,2,1\n")
    text = persia("train", str(path), ok=False)
    assert f"persia init '{path}'" in text
    assert "TOML" not in text


def test_checkpoint_tools(config, tmp_path):
    out = str(tmp_path / "out")
    settings = ("--set", "trainer.checkpoint_every_steps=4", "--set", "trainer.checkpoint_increments=5")
    persia("train", config, "--output", out, *settings, "--set", "trainer.keep_last=9")
    assert "is intact" in persia("checkpoint", "verify", out)
    persia("checkpoint", "compact", out)
    other = str(tmp_path / "other")
    assert "step-000000000010" in persia("checkpoint", "reshard", out, other, "--ps", "3")
    for kind, expected in (("bfloat16", "bfloat16"), ("table", "float32")):
        target = tmp_path / kind
        persia("checkpoint", "reshard", out, str(target), "--dtype", kind)
        tables = json.loads((target / "step-000000000010" / "manifest.json").read_bytes())["tables"]
        assert {table["dtype"] for table in tables.values()} == {expected}
        assert "is intact" in persia("checkpoint", "verify", str(target))
    refused = persia("checkpoint", "reshard", out, str(tmp_path / "none"), "--dtype", "bf16", ok=False)
    assert "expected one of: table, float32, bfloat16, float16" in " ".join(refused.split())
    text = persia("checkpoint", "diff", out, other)
    assert "changed" in text
    assert "id_0" in text
    files = persia("checkpoint", "export", out, str(tmp_path / "files"), "--table", "id_0").split()
    assert pq.read_table(files[-1]).num_rows > 0
    persia("checkpoint", "export", out, str(tmp_path / "files"), "--format", "npy")
    assert np.load(tmp_path / "files" / "id_1.embeddings.npy").shape[1] == 16
    assert "expected parquet, npy, safetensors" in persia(
        "checkpoint", "export", out, str(tmp_path), "--format", "x", ok=False
    )
    assert "AUC" in persia("evaluate", config, "--checkpoint", other)
    log = str(tmp_path / "log")
    assert "as epoch 0" in persia("checkpoint", "publish", other, "--output", log)
    with Predictor(log) as predictor:  # The checkpoint says what the model is.
        assert predictor.state().network_step == 10
        persia("checkpoint", "publish", out, "--output", log, "--dtype", "int8", "--config", config)
        predictor.refresh()
        assert predictor.state().epoch == 1
    refused = persia("checkpoint", "publish", out, "--output", log, "--dtype", "int4", ok=False)
    assert "expected one of: float32, float16, int8" in " ".join(refused.split())
