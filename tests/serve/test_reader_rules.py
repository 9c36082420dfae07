"""A row of a file and the same row in a request give the same bits: the reader's rules are part of the model."""

from __future__ import annotations

import asyncio
import csv
import io

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia.errors import CheckpointError, ClosedError, DataError
from persia.nn.item_catalogue import TowerFeatures
from persia.publish import PublishOptions, follow, publish_checkpoint
from persia.schema import InputRules, WrittenNumbers, input_rules_of
from persia.serve import Predictor, Retriever, ServeOptions
from persia.serve.http.app import create_app
from persia.serve.http.bodies import Bodies
from persia.serve.http.codecs.codec import ARROW, JSON, MSGPACK
from persia.serve.http.limits import ServeLimits
from persia.serve.http.openapi import openapi
from persia.serve.item_files import read_items
from support.served import CODEC
from support.trained_logs import TOWERS
from support.trained_logs import serve as trained_logs_served

SCHEMA = persia.Schema(
    [
        persia.IdFeature("shop", 4, kind="text"),
        persia.IdFeature("tags", 4),
        persia.IdFeature("user", 4, kind="number"),
        persia.IdFeature("shop_user", 4, cross=("shop", "user")),
    ],
    ["age", "price"],
    ["buy"],
)
NAMES = ("shop", "tags", "user", "age", "price")
ROWS = [
    ("harbour", "espresso|fair trade", "7", "31", "2.5"),
    ("?", "espresso", "8", "", "3.5"),
    ("station", "", "?", "NA", "1e1"),
    ("harbour", "tea|espresso|cake", "-1", "?", "4"),
    ("station", "fair trade", "9", "45", "?"),
]
RULES = InputRules(fill={"age": 38.5, "price": 3.0}, lists={"tags": "|"}, null_values=("?", "-1"))


def written(path, rows=ROWS, times=1):
    with open(path, "w", newline="") as stream:
        out = csv.writer(stream)
        out.writerow((*NAMES, "buy"))
        for i, row in enumerate(rows * times):
            out.writerow((*row, i % 2))
    return path


def reader(path, **options):
    return persia.data.csv(
        path, SCHEMA, 64, lists=RULES.lists, fill={**RULES.fill, "buy": 0}, null_values=RULES.null_values, **options
    )


def network(schema):
    return persia.nn.models.FFNN(schema, hidden=(8,))


def predictor_of(url):
    return Predictor(url, network, ServeOptions(poll_seconds=3600.0))


def trainer_of(**options):
    torch.manual_seed(0)
    return persia.Trainer(
        network(SCHEMA),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(progress=False, **options),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """URL of a log, directory of a checkpoint, and the probabilities of `ROWS` in a file."""
    folder = tmp_path_factory.mktemp("rules")
    url, runs = str(folder / "log"), str(folder / "runs")
    trainer = trainer_of(publish=PublishOptions(url, seconds=0.05), checkpoint_dir=runs)
    trainer.fit(reader(written(folder / "train.csv", times=40)), epochs=2)
    found = next(iter(trainer.predict(reader(written(folder / "new.csv")))))
    assert len(np.unique(found)) == len(ROWS)  # Rows that differ have predictions that differ.
    return url, runs, found


def values(row):
    """A row as a client has it: numbers where it can, and no value where there is none."""
    shop, tags, user, age, price = row
    number = [None if text in ("", "?", "NA") else float(text) for text in (age, price)]
    return shop, tags or None, user, *number


def record(row):
    return {name: value for name, value in zip(NAMES, values(row), strict=True) if value is not None}


def as_json(columns):
    dense = {name: columns[name] for name in SCHEMA.dense_features}
    return msgspec.json.encode({"features": {n: c for n, c in columns.items() if n not in dense}, "dense": dense})


def as_arrow(columns):
    table = pa.table({name: pa.array(column) for name, column in columns.items()})
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as out:
        out.write_table(table)
    return sink.getvalue()


TEXTS = {name: list(column) for name, column in zip(NAMES, zip(*ROWS, strict=True), strict=True)}
VALUES = {name: list(column) for name, column in zip(NAMES, zip(*map(values, ROWS), strict=True), strict=True)}
BODIES = {
    "texts": (JSON, as_json(TEXTS)),
    "values": (JSON, as_json(VALUES)),
    "records": (JSON, msgspec.json.encode([record(row) for row in ROWS])),
    "msgpack": (MSGPACK, msgspec.msgpack.encode({"features": VALUES})),
    "arrow": (ARROW, as_arrow(VALUES)),
    "arrow texts": (ARROW, as_arrow(TEXTS)),
}


async def _answers(url, requests):
    app = create_app(predictor_of(url), limits=ServeLimits(deadline_ms=30_000))
    async with app.router.lifespan_context(app):
        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.001)
        found = [
            await client.post(path, content=body, headers={"Content-Type": kind, "Accept": JSON})
            for path, kind, body in requests
        ]
        document = (await client.get("/openapi.json")).json()
        await client.aclose()
    return found, document


def test_a_file_and_requests_give_the_same_bits(trained):
    url, _, wanted = trained
    answers, document = asyncio.run(_answers(url, [("/predict", *body) for body in BODIES.values()]))
    for name, answer in zip(BODIES, answers, strict=True):
        assert answer.status_code == 200, (name, answer.text)
        np.testing.assert_array_equal(np.float32(answer.json()["probabilities"]["buy"]), wanted[:, 0], err_msg=name)
    schema = document["paths"]["/predict"]["post"]["requestBody"]["content"][JSON]["schema"]["oneOf"][0]["properties"]
    age = schema["dense"]["properties"]["age"]["items"]["anyOf"]
    assert {"enum": [None, "", "?", "-1"], "description": "Missing: 38.5 in its place."} in age
    tags = schema["features"]["properties"]["tags"]["items"]["anyOf"]
    assert {"type": "string", "description": "Several, separated by '|'."} in tags


def test_a_predictor_gives_the_same_bits(trained):
    url, _, wanted = trained
    with predictor_of(url) as predictor:
        assert predictor.input_rules == RULES
        for columns in (TEXTS, VALUES, pa.table(VALUES)):
            np.testing.assert_array_equal(predictor.predict(columns).probabilities, wanted)
        np.testing.assert_array_equal(predictor.predict(predictor.batch(TEXTS)).probabilities, wanted)
        with pytest.raises(DataError, match=r"'user'.* is missing"):
            predictor.predict({name: TEXTS[name] for name in NAMES if name != "user"})


def test_a_ranking_applies_the_rules_to_both_parts(trained):
    url, _, wanted = trained
    rows = [
        {"user": {"features": {"user": [v["user"]], "tags": [v["tags"]]}, "dense": {"age": [v["age"]]}},
         "items": {"features": {"shop": [v["shop"]]}, "dense": {"price": [v["price"]]}}}
        for v in (dict(zip(NAMES, values(row), strict=True)) for row in ROWS)
    ]  # fmt: skip
    answers, _ = asyncio.run(_answers(url, [("/rank", JSON, msgspec.json.encode(row)) for row in rows]))
    scores = np.array([answer.json()["scores"]["buy"][0] for answer in answers])
    found = 1 / (1 + np.exp(-scores))
    np.testing.assert_allclose(found, wanted[:, 0], rtol=1e-6)  # Another size of the batch.


def test_the_checkpoint_passes_the_rules_to_log_and_resumed_run(trained, tmp_path):
    _, runs, wanted = trained
    publish_checkpoint(runs, tmp_path / "log")
    with predictor_of(str(tmp_path / "log")) as predictor:
        np.testing.assert_array_equal(predictor.predict(TEXTS).probabilities, wanted)
    resumed = persia.Trainer.resume(
        runs, network(SCHEMA), optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2)
    )
    assert resumed.state.input_rules == RULES
    batches = [next(iter(reader(written(tmp_path / "more.csv"))))]
    resumed.fit(batches, epochs=9)  # Batches declare no rules: the last ones stay.
    assert resumed.state.input_rules == RULES
    resumed.fit(persia.data.csv(written(tmp_path / "full.csv", ROWS[:1]), SCHEMA))
    assert resumed.state.input_rules == InputRules()


def test_a_log_or_checkpoint_without_rules_has_none(tmp_path):
    url, runs = str(tmp_path / "log"), str(tmp_path / "runs")
    trainer_of(publish=PublishOptions(url, seconds=0.05), checkpoint_dir=runs).fit(
        [next(iter(reader(written(tmp_path / "train.csv"))))]
    )
    follower = follow(url)
    list(follower.updates())
    assert follower.description().input_rules == InputRules()


def test_rules_of_a_checkpoint_that_are_none_are_refused(trained, tmp_path, monkeypatch):
    _, runs, _ = trained
    from persia.checkpoint import CheckpointReader

    config = CheckpointReader(runs).config
    for rules in ({"fill": {"age": "x"}}, {"lists": {"tags": ""}}, 3):
        monkeypatch.setattr(CheckpointReader, "config", {**config, "input_rules": rules})
        with pytest.raises(CheckpointError, match="the rules of its reader are not valid"):
            publish_checkpoint(runs, tmp_path / "log")


def test_readers_of_readers_pass_the_rules_on(tmp_path):
    source = reader(written(tmp_path / "train.csv"))
    assert source.input_rules == source.shard(0, 2).input_rules == RULES
    assert persia.data.negatives(source, ["user"], 2).input_rules == RULES
    assert persia.data.Span(source, 64, 0, 5).input_rules == RULES
    frame = persia.data.arrow(pa.table({"shop": ["a"]}), SCHEMA, fill={"age": 1, "buy": 0})
    assert frame.input_rules == InputRules(fill={"age": 1.0})
    growing = persia.data.growing(tmp_path, SCHEMA, fill={"age": 1})
    assert input_rules_of(growing) == InputRules(fill={"age": 1.0})
    assert input_rules_of([]) is None


def test_items_of_files_are_read_by_the_rules(tmp_path):
    rows = {name: VALUES[name] for name in ("shop", "tags", "price")}
    pq.write_table(pa.table(rows), tmp_path / "items.parquet")
    (found,) = read_items(tmp_path / "items.parquet", SCHEMA, TowerFeatures(("shop", "tags"), ("price",)), RULES)
    assert found.dense[:, 1].tolist() == [2.5, 3.5, 10.0, 4.0, 3.0]
    assert np.diff(found.id_features["tags"].offsets).tolist() == [2, 1, 0, 3, 1]
    assert np.diff(found.id_features["shop"].offsets).tolist() == [1, 0, 1, 1, 1]


def test_a_retriever_reads_the_files_of_its_items_by_the_rules(trained_logs, monkeypatch):
    def read(paths, schema, features, rules=None):
        found.append(rules)
        raise ClosedError("This is enough.")

    found = []
    monkeypatch.setattr("persia.serve.retriever.read_items", read)
    with trained_logs_served(TOWERS, trained_logs["two_towers"]).predictor as predictor:
        predictor.current().network.input_rules = RULES
        with pytest.raises(ClosedError, match="enough"):
            Retriever(predictor, "items.parquet").start()
    assert found == [RULES]


@pytest.mark.parametrize("kind", [JSON, ARROW])
def test_the_parts_of_a_text_count_before_they_are_made(kind):
    bodies = Bodies(SCHEMA, ServeLimits(max_values=10), RULES)
    columns = {name: VALUES[name][:1] for name in NAMES} | {"tags": ["x" + "|x" * 10]}
    with pytest.raises(DataError, match="'tags' has 11 values"):
        bodies.samples(CODEC[kind], as_json(columns) if kind == JSON else as_arrow(columns))


def test_written_numbers_are_in_the_document():
    schema = persia.Schema([persia.IdFeature("user", 4)], ["price", persia.DenseFeature("share", fill=0)], [])
    rules = InputRules(numbers={"price": WrittenNumbers(thousands=",", unit="$"), "share": WrittenNumbers(unit="%")})
    document = openapi(schema, ServeLimits(), False, rules=rules)
    body = document["paths"]["/predict"]["post"]["requestBody"]["content"][JSON]["schema"]["oneOf"][0]["properties"]
    forms = {name: str(column["items"]) for name, column in body["dense"]["properties"].items()}
    assert "such as '$1,234.5'." in forms["price"]
    assert "such as '1234.5 %'." in forms["share"]
    rows = [{"user": 1, "price": "$1,234.50", "share": "17 %"}, {"user": 1, "price": 2, "share": None}]
    batch = Bodies(schema, ServeLimits(), rules).samples(CODEC[JSON], msgspec.json.encode(rows))
    assert batch.dense.tolist() == [[1234.5, 17], [2, 0]]


def test_missing_values_are_refused_without_a_rule():
    document = openapi(SCHEMA, ServeLimits(), False)
    schema = document["paths"]["/predict"]["post"]["requestBody"]["content"][JSON]["schema"]["oneOf"][0]["properties"]
    assert not any("enum" in kind for kind in schema["dense"]["properties"]["age"]["items"]["anyOf"])
    with pytest.raises(DataError, match="missing value at row 1"):
        Bodies(SCHEMA, ServeLimits()).samples(
            CODEC[JSON], as_json({name: column[:2] for name, column in VALUES.items()})
        )
