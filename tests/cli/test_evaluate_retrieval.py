"""`persia evaluate --retrieval`, for models of configurations."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.serve import Predictor, Retriever
from support.command import persia

ITEMS = 30

CONFIG = """
[data]
kind = "parquet"
path = "train.parquet"
batch_size = 100

[eval_data]
kind = "parquet"
path = "test.parquet"

[schema]
labels = ["chosen"]

[[schema.id_features]]
name = "item"
dim = 8

[[schema.id_features]]
name = "history"
table = "item"
pooling = "none"
max_length = 4

[mode]
kind = "sync"

[trainer]
progress = false
publish = { url = "changes" }
"""


def write(path, seed, rows=1000, **more):
    """Item i is followed by i + 1."""
    rng = np.random.default_rng(seed)
    last = rng.integers(0, ITEMS, rows)
    history = [[int(rng.integers(ITEMS)), int(item)] for item in last]
    columns = {"item": (last + 1) % ITEMS, "history": history, "chosen": np.ones(rows)}
    pq.write_table(pa.table(columns | {name: make(columns["item"]) for name, make in more.items()}), path)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def evaluated(*arguments):
    text = persia("evaluate", "run.toml", "--checkpoint", "out", "--retrieval", *arguments, "--json", "found.json")
    with open("found.json") as file:
        return text, json.load(file)["retrieval"]


def test_next_item(folder):
    (folder / "run.toml").write_text(
        CONFIG
        + '[model]\nkind = "next_item"\noptions = { backbone = "gru" }\n[optimizer]\nlr = 0.01\n[train]\nepochs = 5\n'
    )
    write("train.parquet", 0)
    write("test.parquet", 1, 200)
    persia("train", "run.toml", "--output", "out")
    text, found = evaluated("--at", "1", "--at", "10")
    assert f"the items of 200 samples, ranked among {ITEMS} items" in text
    assert list(found["hit_rate"]) == list(found["ndcg"]) == list(found["coverage"]) == ["1", "10"]
    assert found["hit_rate"]["10"] > 0.9
    assert found["mrr"] > 0.5
    assert f"MRR {found['mrr']:.4f}" in text
    # As `persia serve changes --retrieve` does, without code.
    with Predictor("changes") as predictor, Retriever(predictor) as retriever:
        history = IdColumn(np.array([3, 4], np.uint64), np.array([0, 2]))
        user = Batch({"history": history}, np.empty((1, 0), np.float32), np.empty((1, 0), np.float32))
        assert 5 in retriever.search(user, 5).ids
        assert retriever.state().items == ITEMS
    # The item before the last one does not compete, nor does the last one.
    assert evaluated("--leave-out", "history")[1]["mrr"] > found["mrr"]


def test_two_towers_with_items_of_a_file(folder):
    config = CONFIG.replace('pooling = "none"\nmax_length = 4', 'pooling = "mean"')
    config = config.replace("labels =", 'dense_features = ["price"]\nlabels =')
    (folder / "run.toml").write_text(config + '[model]\nkind = "two_tower"\noptions = { item = ["item", "price"] }\n')
    price = {"price": lambda item: item / ITEMS}
    write("train.parquet", 0, **price)
    write("test.parquet", 1, 200, **price)
    persia("train", "run.toml", "--output", "out")
    ids = np.arange(1, ITEMS + 5)  # Without 0; and four without a row.
    pq.write_table(pa.table({"item": ids, "price": ids / ITEMS}), "items.parquet")
    _, found = evaluated("--items", "items.parquet", "--item-key", "item")
    assert (found["items"], found["rows"]) == (ITEMS - 1, 200)
    zeros = int((pq.read_table("test.parquet")["item"].to_numpy() == 0).sum())
    assert found["missing"] == zeros > 0
    assert 0 < found["hit_rate"]["10"] < 1
    command = "evaluate", "run.toml", "--checkpoint", "out"
    assert "give `items`" in persia(*command, "--retrieval", ok=False)
    assert "--items needs --retrieval" in persia(*command, "--items", "items.parquet", ok=False)
    assert "--by does not fit --retrieval" in persia(*command, "--retrieval", "--by", "item", ok=False)
    assert "--max-values does not fit --retrieval" in persia(*command, "--retrieval", "--max-values", "5", ok=False)
