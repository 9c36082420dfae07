"""The OpenAPI document holds for whatever schemathesis makes of it: no undocumented answer, no failure."""

from __future__ import annotations

import time

import pytest
from hypothesis import HealthCheck, given, settings

from support.served import FakePredictor, FakeRetriever

schemathesis = pytest.importorskip("schemathesis")

from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import positive_data_acceptance  # noqa: E402
from schemathesis.python import asgi  # noqa: E402

from persia.serve.http.app import create_app  # noqa: E402
from persia.serve.http.keys import ClientKeys  # noqa: E402
from persia.serve.http.limits import ServeLimits  # noqa: E402

KEY = "a-key-of-some-length"


OPERATIONS = [
    ("/predict", "POST"),
    ("/rank", "POST"),
    ("/embeddings", "POST"),
    ("/retrieve", "POST"),
    ("/health", "GET"),
    ("/metrics", "GET"),
]


@pytest.fixture
def document():
    limits, retriever = ServeLimits(max_rows=50, deadline_ms=60_000), FakeRetriever()
    app = create_app(FakePredictor(), limits=limits, keys=ClientKeys([KEY]), retriever=retriever)
    authorization = {"Authorization": f"Bearer {KEY}"}
    with asgi.get_client(app) as client:
        deadline = time.monotonic() + 30
        while client.get("http://testserver/health").status_code != 200:
            assert time.monotonic() < deadline
        while retriever.state() is None:
            assert time.monotonic() < deadline
    yield schemathesis.openapi.from_asgi("/openapi.json", app, headers=authorization)
    asgi.shutdown_lifespans()


def allows_little(header):
    try:
        return 0 < float(header) < 60_000
    except (TypeError, ValueError):
        return False


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_answers_are_as_documented(document, path, method, mode):
    operation = document[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        return  # There is nothing to get wrong.

    @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
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
