"""A log of events in a configuration: the part to train, and the part to evaluate."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from persia.cli.earlier_run import Command
from persia.cli.train import _next_commands
from persia.serve import Predictor, Retriever
from support.command import persia

ITEMS, USERS, EVENTS = 20, 150, 6

CONFIG = """
[data]
kind = "event_log"
path = "log.parquet"
batch_size = 50

[data.options]
owner = "who"
time = "when"
labels = { chosen = "item is not None" }
min_history = 1
leave_one_out = "train"
newest_only = true

[eval_data]
kind = "event_log"
path = "log.parquet"
options = { leave_one_out = "validation" }

[schema]
labels = ["chosen"]

[[schema.id_features]]
name = "item"
dim = 8

[[schema.id_features]]
name = "history"
table = "item"
pooling = "none"
keep = "last"
max_length = 4

[model]
kind = "next_item"
options = { backbone = "gru", layers = 1 }

[optimizer]
lr = 0.01

[mode]
kind = "sync"

[train]
epochs = 2

[trainer]
progress = false
eval_every_epochs = 1
keep_best = "retrieval_hr@5"
retrieval_leave_out = ["history"]
"""


def test_parts_of_a_log(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = np.random.default_rng(0).integers(0, ITEMS, USERS)
    items = (first[:, None] + np.arange(EVENTS)) % ITEMS
    whose, when = np.repeat(np.arange(USERS), EVENTS), np.tile(np.arange(EVENTS), USERS)
    pq.write_table(pa.table({"who": whose, "when": when, "item": items.reshape(-1)}), "log.parquet")
    Path("run.toml").write_text(CONFIG)
    text = persia("train", "run.toml", "--output", "out", "--json", "result.json")
    result = json.loads(Path("result.json").read_text())
    assert result["rows"] == 2 * USERS  # A sample per user.
    assert result["watched"] == "retrieval_hr@5"
    assert result["evaluation"]["retrieval"]["rows"] == USERS
    assert f"the items of {USERS} samples, ranked among {ITEMS} items" in text
    assert "log-loss" not in text  # Logits of a softmax among sampled items.
    assert f"Best on held-out rows: step {result['best_step']}, retrieval_hr@5 {result['best']:.4f}. To find" in text
    publish, serve = (line.split()[1:] for line in text.splitlines() if line.startswith("    persia "))
    assert serve == ["serve", "out/changes", "--retrieve"]
    assert "published to out/changes as epoch 0" in persia(*publish)
    with Predictor(serve[1]) as predictor, Retriever(predictor) as retriever:
        assert retriever.state().step == result["best_step"]
    plain = persia("evaluate", "run.toml", "--checkpoint", "out")
    assert "AUC. With --retrieval, each sample's item is ranked among all items." in plain
    command = "evaluate", "run.toml", "--checkpoint", "out", "--step", "best", "--retrieval", "--at", "5"
    text = persia(*command, "--leave-out", "history", "--json", "found.json")
    assert f"retrieval at step {result['best_step']}" in text
    assert json.loads(Path("found.json").read_text())["retrieval"]["hit_rate"]["5"] == result["best"]
    test = "--set", "eval_data.options.leave_one_out=test"
    assert f"the items of {USERS} samples" in persia(*command, *test, "--json", "found.json")
    refused = persia(*command, "--set", "eval_data.options={}", ok=False)  # Would evaluate the training data, too.
    assert "Set eval_data.options.leave_one_out to 'validation' or 'test'" in refused


def test_a_server_of_a_class_of_ones_own_imports_it():
    _, (_, serve) = _next_commands("retrieval_hr@10", Command("run.toml", None), "s3://runs/a/", "model:Model")
    assert serve == "persia serve s3://runs/a/changes --retrieve --import model"
