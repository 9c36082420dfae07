"""Answers for labels of several kinds: of a predictor, in all forms of HTTP, of the client, and in the document."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest

import persia
from persia.errors import ConfigError, ServeError
from persia.metrics import answers_of
from persia.schema import NO_RULES, Label
from persia.schema.losses import JRC
from persia.serve import Client, Prediction
from persia.serve.http.app import create_app
from persia.serve.http.codecs.codec import ARROW, JSON, MSGPACK
from persia.serve.http.limits import ServeLimits
from persia.serve.http.openapi import openapi
from support.served import FakePredictor

LABELS = (
    "click",
    Label("watch", "regression", unit="s"),
    Label("genre", "multiclass", classes=("rock", "jazz", "folk")),
    Label("stars", "ordinal", classes=3),
)
SCHEMA = persia.Schema([persia.IdFeature("user", dim=4)], ["age"], labels=LABELS)
LOGITS = np.array([[0, 12.5, 1, 2, 3, 4, 0], [40, -1, 0, 0, 0, 1, 2]], np.float32)
VALUES = answers_of(SCHEMA).answers(LOGITS)
BODY = {"features": {"user": [1, 2]}, "dense": {"age": [1, 2]}}


class Mixed(FakePredictor):
    """Returns `LOGITS`."""

    def __init__(self, schema=SCHEMA, logits=LOGITS, log_odds=True):
        super().__init__()
        self.schema, self.logits, self.log_odds = schema, logits, log_odds

    def predict(self, batch):
        return Prediction(self.logits[: len(batch)], 12, 3, self.log_odds, self.schema)

    def rank(self, user, items):
        return self.predict(items)


def post(path, content, kind=JSON, accept="*/*", predictor=None):
    async def main():
        app = create_app(predictor or Mixed(), limits=ServeLimits(deadline_ms=60_000))
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.001)
                answer = await client.post(path, content=content, headers={"Content-Type": kind, "Accept": accept})
                assert answer.status_code == 200, answer.text
                return answer.content

    return asyncio.run(main())


def test_json_names_label_kind_unit_and_classes():
    found = msgspec.json.decode(post("/predict", msgspec.json.encode(BODY)))
    assert (found.pop("step"), found.pop("epoch"), list(found)) == (12, 3, ["predictions"])
    assert found["predictions"] == {
        "click": {"kind": "probability", "values": [0.5, 1]},
        "watch": {"kind": "value", "unit": "s", "values": [12.5, -1]},
        "genre": {"kind": "classes", "classes": ["rock", "jazz", "folk"], "values": VALUES[:, 2:5].tolist()},
        "stars": {"kind": "classes", "classes": ["0", "1", "2"], "values": VALUES[:, 5:].tolist()},
    }


def test_msgpack_and_the_client_have_the_same_values():
    body = post("/predict", msgspec.msgpack.encode(BODY), MSGPACK)
    client = Client("http://127.0.0.1:1")
    client._call = lambda path, content, form: msgspec.msgpack.decode(body, type=form)
    found = client.predict({"user": [1, 2], "age": [1, 2]})
    assert (found.name, found.labels, found.step, found.epoch) == (
        "predictions",
        ("click", "watch", "genre", "stars"),
        12,
        3,
    )
    np.testing.assert_array_equal(found.values, VALUES, strict=True)
    assert found.answers == answers_of(SCHEMA).of
    np.testing.assert_array_equal(found.by_label["genre"], VALUES[:, 2:5])
    np.testing.assert_array_equal(found.by_label["watch"], [12.5, -1])
    with pytest.raises(ServeError, match="has predictions, not probabilities; use `by_label`"):
        _ = found.probabilities


def test_arrow_has_a_column_for_each_label():
    table = pa.ipc.open_stream(post("/predict", msgspec.json.encode(BODY), accept=ARROW)).read_all()
    assert table.schema.metadata == {b"persia.step": b"12", b"persia.epoch": b"3"}
    assert table.column_names == ["click", "watch", "genre", "stars"]
    assert table.schema.field("watch").metadata == {b"persia.kind": b"value", b"persia.unit": b"s"}
    assert table.schema.field("genre").type == pa.list_(pa.float32(), 3)
    assert table.schema.field("genre").metadata[b"persia.classes"] == b'["rock", "jazz", "folk"]'
    assert np.array(table["stars"].to_pylist(), np.float32).tolist() == VALUES[:, 5:].tolist()


def test_a_ranking_has_scores_for_probabilities():
    user, items = {"features": {"user": [1]}}, {"features": {}, "dense": {"age": [1, 2]}}
    found = msgspec.json.decode(post("/rank", msgspec.json.encode({"user": user, "items": items})))["predictions"]
    assert found["click"] == {"kind": "score", "values": [0, 40]}
    assert found["watch"] == {"kind": "value", "unit": "s", "values": [12.5, -1]}
    schema = msgspec.structs.replace(SCHEMA, labels=["click", Label("like", loss=JRC())], group="user")
    predictor = Mixed(schema, np.array([[1, 2, 5], [3, 4, 0]], np.float32))
    body = msgspec.json.encode({"user": user, "items": items})
    found = msgspec.json.decode(post("/rank", body, predictor=predictor))
    assert found == {"scores": {"click": [1, 3], "like": [3, -4]}, "step": 12, "epoch": 3}
    found = msgspec.json.decode(post("/predict", msgspec.json.encode(BODY), predictor=predictor))
    assert list(found) == ["probabilities", "step", "epoch"]
    assert found["probabilities"]["like"] == [pytest.approx(0.952574), pytest.approx(0.017986, abs=1e-6)]


def test_the_document_describes_the_answers():
    jsonschema = pytest.importorskip("jsonschema")
    document = openapi(SCHEMA, ServeLimits(), False, None, NO_RULES)
    for path, content in (
        ("/predict", BODY),
        ("/rank", {"user": {"features": {"user": [1]}}, "items": {"features": {}, "dense": {"age": [1, 2]}}}),
    ):
        form = document["paths"][path]["post"]["responses"]["200"]["content"][JSON]["schema"]
        found = msgspec.json.decode(post(path, msgspec.json.encode(content)))
        jsonschema.validate(found, form)
        found["predictions"]["watch"]["unit"] = "ms"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found, form)
        found["predictions"]["watch"]["unit"] = "s"
        found["predictions"]["genre"]["values"][0].pop()
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(found, form)


def test_a_prediction_knows_its_answers():
    prediction = Mixed().predict([1, 2])
    assert [each.kind for each in prediction.answers.of] == ["probability", "value", "classes", "classes"]
    np.testing.assert_array_equal(prediction.values, VALUES)
    np.testing.assert_array_equal(prediction.by_label["stars"], VALUES[:, 5:])
    assert prediction.ranking.by_label["click"].tolist() == [0, 40]
    with pytest.raises(ConfigError, match=r"click: probability, watch: value, .* use `by_label`"):
        _ = prediction.probabilities
    plain = Prediction(LOGITS[:, :1], 12, 3)
    assert plain.probabilities.tolist() == [[0.5], [1]]
    with pytest.raises(ConfigError, match="no schema"):
        _ = plain.values
