"""`persia serve`, from a log of changes to answers over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

import persia
from persia.cli.app import app
from persia.errors import ConfigError
from persia.publish import PublishOptions
from persia.serve import Client
from support.written_log import WrittenLog

INSTALLED = str(Path(sys.executable).with_name("persia"))
"""The console script, whose `sys.path` lacks the working directory that `python -m persia` has."""


def publishing_trainer(network, schema, url):
    return persia.Trainer(
        network,
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.05)),
    )


@contextlib.contextmanager
def served(ready, *arguments, cwd=None):
    """Runs `persia serve` until SIGTERM ends it; yields its log, at first up to `ready`."""
    command = [INSTALLED, "serve", *arguments, "--port", "0", "--threads", "1"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=cwd) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if ready in line:
                break
        try:
            yield lines
        finally:
            process.send_signal(signal.SIGTERM)
            lines += process.stderr
        assert process.wait(60) == 0
    assert "Traceback" not in "".join(lines)


@pytest.mark.processes
def test_a_server_predicts_as_the_trainer_until_sigterm(tmp_path):
    url = str(tmp_path / "log")
    data = persia.data.synthetic(600, id_features=2, dense_features=2, dim=4, batch_size=200)
    torch.manual_seed(0)
    trainer = publishing_trainer(persia.nn.models.FFNN(data.schema), data.schema, url)
    trainer.fit(data)
    with served("ready: ", url, "--model", "persia.nn.models:FFNN") as lines:
        address = re.search(rf"INFO (http://127.0.0.1:\d+) serves {re.escape(url)}\n", "".join(lines))[1]
        with Client(address, timeout=60) as client:
            batch = next(iter(data))
            columns = {name: column.values for name, column in batch.id_features.items()}
            columns |= dict(zip(data.schema.dense_features, batch.dense.T, strict=True))
            found = client.predict(columns)
            np.testing.assert_allclose(found.probabilities, next(iter(trainer.predict([batch]))), rtol=0, atol=1e-6)
            assert found.step == trainer.global_step == 3
            rows = client.embeddings("id_0", batch.id_features["id_0"].values)
            np.testing.assert_array_equal(rows.rows, trainer.embeddings.rows("id_0", columns["id_0"]).values)
            assert rows.found.all()
            ranked = client.rank(
                {"id_0": columns["id_0"][:1], "dense_0": batch.dense[:1, 0]},
                {"id_1": columns["id_1"], "dense_1": batch.dense[:, 1]},
            )
            columns["id_0"] = np.repeat(columns["id_0"][:1], len(batch))
            columns["dense_0"] = np.repeat(batch.dense[:1, 0], len(batch))
            same = client.predict(columns).probabilities
            np.testing.assert_allclose(1 / (1 + np.exp(-ranked.scores)), same, rtol=0, atol=1e-6)
    assert "SIGTERM: answering requests in progress" in "".join(lines)


MODEL = """
import torch

class Steps(torch.nn.Module):
    def __init__(self, schema):
        super().__init__()
        self.step = torch.nn.Parameter(torch.zeros(1))

    def forward(self, dense, embeddings):
        return embeddings["item"][:, :1] - self.step
"""


@pytest.fixture
def log_of_a_class(tmp_path):
    """URL of a log whose network is a class of `steps.py` in the directory of the test."""
    (tmp_path / "steps.py").write_text(MODEL)
    log = WrittenLog(tmp_path / "log", model=("steps:Steps", {}))
    log.begin(3)
    return log.url


@pytest.mark.processes
def test_a_server_imports_modules_of_the_working_directory(tmp_path, log_of_a_class):
    with served("ready: ", log_of_a_class, "--import", "steps", cwd=tmp_path) as lines:
        address = re.search(r"INFO (http://127.0.0.1:\d+) serves", "".join(lines))[1]
        with Client(address, timeout=60) as client:
            assert client.predict({"item": [1, 2], "user": [3, 4]}).probabilities.tolist() == [[0.5], [0.5]]


@pytest.mark.processes
def test_an_export_imports_modules_of_the_working_directory(tmp_path, log_of_a_class, forks):
    pytest.importorskip("onnxscript", reason='onnxscript is not installed: pip install "persia-recsys[onnx]"')
    done = forks.run([INSTALLED, "export-onnx", log_of_a_class, "steps.onnx", "--import", "steps"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "steps.onnx: the network of step 3" in done.stdout
    assert (tmp_path / "steps.onnx").stat().st_size > 0


def shows(rows):
    """Writes rows of a file with lists in texts and missing numbers."""
    return "".join(f"{user},{genres},{age}{label}\n" for user, genres, age, label in rows)


@pytest.mark.processes
def test_a_file_becomes_a_server_that_takes_its_rows_as_they_are(tmp_path, forks):
    genres = ["drama|comedy", "comedy", "news|drama|sport", "sport", "news|comedy"]
    rows = [
        (f"u{n % 37}", genres[n % 5], "" if n % 9 == 0 else 20 + n * 7 % 41, f",{int(n % 5 in (0, 2))}")
        for n in range(600)
    ]
    new = [("u3", "drama|comedy", "", ""), ("u4", "news", 33, ""), ("u5", "", "NA", ""), ("new", "sport|other", 50, "")]
    (tmp_path / "shows.csv").write_text("user,genres,age,watched\n" + shows(rows))
    (tmp_path / "new.csv").write_text("user,genres,age\n" + shows(new))
    config = "shows_model/config.toml"
    for command in (
        ["init", "shows.csv", "--label", "watched", "--yes"],
        ["train", config, "--output", "run"],
        ["predict", config, "--checkpoint", "run", "--data", "new.csv", "--output", "found.csv"],
        ["checkpoint", "publish", "run", "--output", "changes"],
    ):
        done = forks.run([INSTALLED, *command], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / config).read_text()
    assert 'split = "|"' in text
    assert "fill = " in text
    wanted = np.loadtxt(tmp_path / "found.csv", delimiter=",", skiprows=1, ndmin=2)[:, -1]
    records = [
        {"user": user, "genres": genre or None, "age": None if age in ("", "NA") else age}
        for user, genre, age, _ in new
    ]
    with served("ready: ", str(tmp_path / "changes"), "--import", "model", cwd=tmp_path / "shows_model") as lines:
        address = re.search(r"INFO (http://127.0.0.1:\d+) serves", "".join(lines))[1]
        request = urllib.request.Request(
            f"{address}/predict", json.dumps(records).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)["probabilities"]["watched"]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    assert len(set(found)) == len(new)


TOWERS = """
import persia

def network(schema):
    return persia.nn.models.TwoTower(schema, item=["id_1", "dense_1"], hidden=(8,), dim=8)
"""


@pytest.mark.processes
def test_a_server_with_items_answers_retrieve(tmp_path):
    pytest.importorskip("usearch", reason='usearch is not installed: pip install "persia-recsys[usearch]"')
    url = str(tmp_path / "log")
    data = persia.data.synthetic(600, id_features=2, dense_features=2, ids_per_feature=50, dim=4, batch_size=200)
    network = persia.nn.models.TwoTower(data.schema, item=["id_1", "dense_1"], hidden=(8,), dim=8)
    trainer = publishing_trainer(network, data.schema, url)
    trainer.fit(data)
    batch = next(iter(data))
    ids, places = np.unique(batch.id_features["id_1"].values, return_index=True)
    pq.write_table(pa.table({"id_1": ids, "dense_1": batch.dense[places, 1]}), tmp_path / "items.parquet")
    (tmp_path / "towers.py").write_text(TOWERS)
    items = ["--items", "items.parquet", "--item-key", "id_1"]
    with served("index: ", url, "--model", "towers:network", *items, cwd=tmp_path) as lines:
        assert f"index: {len(ids)} items, with the network of step 3" in lines[-1]
        address = re.search(r"INFO (http://127.0.0.1:\d+) serves", "".join(lines))[1]
        with Client(address, timeout=60) as client:
            users = {"id_0": batch.id_features["id_0"].values[:4], "dense_0": batch.dense[:4, 0]}
            found = client.retrieve(users, 5)
            assert client.health()["index"]["items"] == len(ids)
    for row in range(4):  # As `predict` orders them.
        user = batch.take(np.full(len(ids), row))
        features = {"id_0": user.id_features["id_0"], "id_1": persia.IdColumn(ids)}
        dense = np.stack([user.dense[:, 0], batch.dense[places, 1]], 1)
        (scores,) = trainer.predict([persia.Batch(features, dense, user.labels)])
        assert set(found.ids[row]) == set(ids[np.argsort(-scores[:, 0])[:5]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "lets other hosts in without a key"),
        (["--model", "persia.nn.models"], "expected MODULE:NAME"),
        (["--model", "persia.nn.models:Nothing"], "no class or function 'Nothing'"),
        (["--model", "no_such_module:Model"], "Cannot import 'no_such_module'"),
        (["--import", "no_such_module"], "Cannot import 'no_such_module'"),
        (["--max-batch", "0"], "Invalid max_batch = 0"),
        (["--max-body-bytes", "much"], "Invalid max_body_bytes = 'much'"),
        (["--key-file", "nowhere"], "The keys of clients in nowhere cannot be read"),
        (["--tls-cert", "cert.pem"], "TLS needs a certificate and its key"),
        (["--item-key", "item"], "--item-key needs --items"),
        (["--items", "items.parquet", "--rows", "tcp://127.0.0.1:1"], "--items needs the rows in this process"),
        (["--retrieve", "--items", "items.parquet"], "leave one out"),
        (["--retrieve", "--rows", "tcp://127.0.0.1:1"], "--retrieve needs the rows in this process"),
        (["--max-k", "0"], "Invalid max_k = 0"),
        (["--poll-seconds", "0"], "Invalid poll_seconds"),
        (["--compile", "maybe"], "Invalid compile = 'maybe'; expected one of: false, auto, true."),
    ],
)
def test_bad_options_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.delenv("PERSIA_SERVE_KEYS", raising=False)
    result = CliRunner().invoke(app, ["serve", str(tmp_path), "--port", "0", *arguments])
    assert isinstance(result.exception, ConfigError)
    assert message in str(result.exception)


def test_items_make_a_retriever(tmp_path, monkeypatch):
    given = {}

    def run_server(predictor, options, listening, retriever):
        given.update(predictor=predictor, options=options, retriever=retriever)

    monkeypatch.setattr("persia.serve.http.run.run_server", run_server)
    arguments = ["serve", str(tmp_path), "--items", "items.parquet", "--item-key", "item", "--max-k", "50"]
    assert CliRunner().invoke(app, arguments).exception is None
    found = given["retriever"]
    assert (found._predictor, found._items, found._key) == (given["predictor"], "items.parquet", "item")
    assert given["options"].limits.max_k == 50
    assert CliRunner().invoke(app, ["serve", str(tmp_path), "--retrieve", "--item-key", "item"]).exception is None
    assert (given["retriever"]._items, given["retriever"]._key) == (None, "item")
    assert CliRunner().invoke(app, ["serve", str(tmp_path)]).exception is None
    assert given["retriever"] is None


@pytest.mark.parametrize(("arguments", "how"), [([], False), (["--compile", "auto"], "auto")])
def test_whether_the_network_is_compiled_is_an_option(tmp_path, monkeypatch, arguments, how):
    given = []
    monkeypatch.setattr("persia.serve.http.run.run_server", lambda predictor, *_: given.append(predictor))
    assert CliRunner().invoke(app, ["serve", str(tmp_path), *arguments]).exception is None
    assert given[0]._options.compile == how


@pytest.mark.slow
def test_a_server_answers_from_compiled_code(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    url, cache = str(tmp_path / "log"), tmp_path / "cache"
    data = persia.data.synthetic(400, id_features=2, dense_features=2, dim=4, batch_size=200)
    trainer = publishing_trainer(persia.nn.models.FFNN(data.schema, hidden=(8,)), data.schema, url)
    trainer.fit(data)
    (tmp_path / "narrow.py").write_text(NARROW)
    compiling = ["--model", "narrow:network", "--compile", "true", "--cache-dir", str(cache)]
    batch = next(iter(data))
    columns = {name: column.values for name, column in batch.id_features.items()}
    columns |= dict(zip(data.schema.dense_features, batch.dense.T, strict=True))
    for already in (False, True):
        with served("ready: ", url, *compiling, cwd=tmp_path) as lines:
            assert ("Compiling the network" in "".join(lines)) != already
            assert "runs eagerly" not in "".join(lines)
            assert [path.suffix for path in (cache / "compiled").iterdir()] == [".pt2"]
            address = re.search(r"INFO (http://127.0.0.1:\d+) serves", "".join(lines))[1]
            with Client(address, timeout=60) as client:
                found = client.predict(columns).probabilities
        np.testing.assert_allclose(found, next(iter(trainer.predict([batch]))), rtol=0, atol=1e-6)


NARROW = """
import persia

def network(schema):
    return persia.nn.models.FFNN(schema, hidden=(8,))
"""
