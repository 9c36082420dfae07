"""The OpenAPI document holds for whatever schemathesis makes of it: no undocumented answer, no failure."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from support.served import CODEC, SCHEMA, FakePredictor, FakeRetriever
from support.trained_logs import SCHEMAS, Services, serve

schemathesis = pytest.importorskip(
    "schemathesis", reason='schemathesis is not installed: pip install "persia-recsys[dev]"'
)

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import positive_data_acceptance  # noqa: E402
from schemathesis.python import asgi  # noqa: E402

from persia.serve.http.app import create_app  # noqa: E402
from persia.serve.http.bodies import Bodies  # noqa: E402
from persia.serve.http.codecs.codec import JSON  # noqa: E402
from persia.serve.http.keys import ClientKeys  # noqa: E402
from persia.serve.http.limits import ServeLimits  # noqa: E402
from persia.serve.http.openapi import openapi  # noqa: E402
from support.examples import examples  # noqa: E402

KEY = "a-key-of-some-length"
NEGATIVE = GenerationMode.NEGATIVE
OPERATIONS = [
    ("/predict", "POST"),
    ("/rank", "POST"),
    ("/embeddings", "POST"),
    ("/retrieve", "POST"),
    ("/health", "GET"),
    ("/live", "GET"),
    ("/metrics", "GET"),
]
CASES = [(*each, mode) for each in OPERATIONS for mode in GenerationMode if (each[1], mode) != ("GET", NEGATIVE)]
"""There is nothing to get wrong with GET."""


@pytest.fixture(params=["fake", *SCHEMAS])
def document(request, trained_logs):
    limits = ServeLimits(max_rows=50, deadline_ms=60_000)
    predictor, retriever = Services(FakePredictor(), FakeRetriever())
    if request.param != "fake":
        predictor, retriever = serve(SCHEMAS[request.param], trained_logs[request.param])
    app = create_app(predictor, limits=limits, keys=ClientKeys([KEY]), retriever=retriever)
    authorization = {"Authorization": f"Bearer {KEY}"}
    with asgi.get_client(app) as client:
        deadline = time.monotonic() + 30
        while client.get("http://testserver/health").status_code != 200:
            assert time.monotonic() < deadline
        while retriever is not None and retriever.state() is None:
            assert time.monotonic() < deadline
    yield schemathesis.openapi.from_asgi("/openapi.json", app, headers=authorization)
    asgi.shutdown_lifespans()


def allows_little(header):
    try:
        return 0 < float(header) < 60_000
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize(("path", "method", "mode"), CASES)
def test_answers_are_as_documented(document, path, method, mode):
    if path not in document.raw_schema["paths"]:
        return  # A server without items.
    operation = document[path][method]

    @settings(max_examples=examples(15), deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(operation.as_strategy(generation_mode=mode))
    def check(case):
        if allows_little(case.headers.get("Persia-Deadline-Ms")):
            del case.headers["Persia-Deadline-Ms"]  # Answered with 503, rightly, where the machine is slow.
        # Columns of different lengths fit the document, which cannot tell, and are refused.
        answer = case.call_and_validate(
            headers={"Authorization": f"Bearer {KEY}"}, excluded_checks=[positive_data_acceptance]
        )
        statuses.add(answer.status_code)

    statuses = set()
    check()
    assert statuses


def samples(**changes):
    columns = {"user": [1], "tags": [[1]], "code": [5], "price": [0.5], "age": [1], **changes}
    return {"features": {n: columns[n] for n in ("user", "tags", "code")}, "dense": {n: columns[n] for n in DENSE}}


DENSE = ("price", "age")
TAKEN = [
    ("/predict", samples(user=[0.5])),
    ("/predict", samples(code=["5"])),
    ("/predict", samples(tags=[[0.5, "a"]])),
    ("/predict", samples(tags=[[1, None]], code=[[None]])),
    ("/predict", samples(price=["-0.5"])),
    ("/predict", [{"user": 0.5, "tags": [1], "code": "5", "price": "0.5", "age": 1}]),
    ("/embeddings", {"table": "user", "ids": [0.5]}),
    ("/embeddings", {"table": "user", "ids": [["a"]]}),
    ("/embeddings", {"table": "code", "ids": ["5"]}),
]


@pytest.mark.parametrize(("path", "body"), TAKEN)
def test_what_is_taken_is_documented(path, body):
    """Cases that generated bodies rarely have."""
    jsonschema = pytest.importorskip("jsonschema")
    form = openapi(SCHEMA, ServeLimits(), False)["paths"][path]["post"]["requestBody"]["content"][JSON]["schema"]
    jsonschema.validate(body, form)
    bodies = Bodies(SCHEMA, ServeLimits())
    assert (bodies.samples if path == "/predict" else bodies.ids)(CODEC[JSON], msgspec.json.encode(body))
