"""A CSV of reviews, from `persia init` to a served answer for a raw row, without a line of code for features."""

from __future__ import annotations

import csv
import json
import re
import runpy
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest

from cli.test_serve_cli import served
from support.command import persia

EXAMPLE = Path(__file__).parents[2] / "examples" / "reviews.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with reviews, their configuration, a trained run, and new rows as a request would have them."""
    folder = tmp_path_factory.mktemp("reviews")
    runpy.run_path(str(EXAMPLE))["write"](folder / "reviews.csv", 2500)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        persia("init", "reviews.csv", "--yes")
        persia(
            "train", "reviews_model/config.toml", "--set", "trainer.progress=false", "--json", str(folder / "run.json")
        )
        (folder / "new.csv").write_text("\n".join((folder / "reviews.csv").read_text().splitlines()[:40]) + "\n")
        yield folder
    sys.modules.pop("model", None)


def test_declarations_of_the_columns(folder):
    schema = tomllib.loads((folder / "reviews_model" / "config.toml").read_text())["schema"]
    assert schema["labels"] == [{"name": "rating", "kind": "regression"}]
    assert schema["sample_weight"] == "weight"
    assert schema["dense_features"] == [
        {"name": "price", "fill": "mean", "missing_indicator": True, "log": True, "scale": "standard"}
    ]
    features = {each.pop("name"): each for each in schema["id_features"]}
    assert features["created_at_hour"]["time"] == {"column": "created_at", "part": "hour"}
    assert features["created_at_weekday"]["time"] == {"column": "created_at", "part": "weekday"}
    assert features["tags"]["split"] == "|"
    assert features["review"]["tokens"] == {"column": "review", "ngrams": [1]}
    assert set(features) == {"user_id", "item_id", "created_at_hour", "created_at_weekday", "tags", "review"}


def test_the_run_learns_ratings(folder):
    rmse = json.loads((folder / "run.json").read_text())["evaluation"]["labels"]["rating"]["rmse"]
    with open(folder / "reviews.csv") as file:
        ratings = np.array([float(row["rating"]) for row in csv.DictReader(file)])
    assert rmse < 0.8 * ratings.std()


def answered(request):
    """Asks again for as long as the server says that it is overloaded, as it may be beside other tests."""
    for _ in range(60):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise
            time.sleep(float(error.headers["Retry-After"]))
    raise AssertionError("the server was overloaded for a minute")


@pytest.mark.processes
def test_a_served_raw_row_has_the_bits_of_predict(folder):
    config, run = "reviews_model/config.toml", "reviews_model/runs/config/latest"
    persia("evaluate", config, "--checkpoint", run)
    # One batch, as the request: the last bits depend on its size.
    new = ["--data", "new.csv", "--set", "eval_data.batch_size=64"]
    persia("predict", config, "--checkpoint", run, *new, "--output", "predictions.csv")
    with open(folder / "predictions.csv") as file:
        wanted = [np.float32(row["rating"]) for row in csv.DictReader(file)]
    with open(folder / "new.csv") as file:
        rows = [{name: text for name, text in row.items() if name != "review_id"} for row in csv.DictReader(file)]
    assert any(row["price"] == "" for row in rows)
    assert any(row["price"].startswith("$") for row in rows)
    persia("checkpoint", "publish", run, "--output", "reviews_model/runs/changes")
    with served("ready: ", "runs/changes", "--import", "model", cwd=folder / "reviews_model") as lines:
        address = re.search(r"INFO (http://127.0.0.1:\d+) serves", "".join(lines))[1]
        body = json.dumps(rows).encode()
        request = urllib.request.Request(f"{address}/predict", body, {"Content-Type": "application/json"})
        found = json.loads(answered(request))["predictions"]["rating"]
    assert found["kind"] == "value"
    np.testing.assert_array_equal(np.float32(found["values"]), np.array(wanted))
