"""`persia serve`, from a log of changes to answers over HTTP."""

from __future__ import annotations

import contextlib
import re
import shutil
import signal
import subprocess
import sys

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
    command = [sys.executable, "-m", "persia", "serve", *arguments, "--port", "0", "--threads", "1"]
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
def test_a_server_answers_what_the_trainer_predicts_and_ends_with_sigterm(tmp_path):
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
    assert "SIGTERM: requests that have begun are answered" in "".join(lines)


TOWERS = """
import persia

def network(schema):
    return persia.nn.models.TwoTower(schema, item=["id_1", "dense_1"], hidden=(8,), dim=8)
"""


@pytest.mark.processes
def test_a_server_with_items_answers_retrieve(tmp_path):
    pytest.importorskip("usearch", reason='usearch is not installed: pip install "persia[usearch]"')
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
    with served("finds ", url, "--model", "towers:network", *items, cwd=tmp_path) as lines:
        assert f"finds {len(ids)} items, with the network of step 3" in lines[-1]
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
        (["--max-batch", "0"], "Invalid max_batch = 0"),
        (["--max-body-bytes", "much"], "Invalid max_body_bytes = 'much'"),
        (["--key-file", "nowhere"], "Cannot read the keys in nowhere"),
        (["--tls-cert", "cert.pem"], "TLS needs a certificate and its key"),
        (["--item-key", "item"], "--item-key needs --items"),
        (["--items", "items.parquet", "--rows", "tcp://127.0.0.1:1"], "--items needs the rows in this process"),
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
