"""`POST /retrieve` of a prediction server, with an index whose answers can be checked by hand."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from persia.errors import ConfigError
from persia.serve.http.app import create_app
from persia.serve.http.codecs.codec import ARROW, MSGPACK
from persia.serve.http.keys import ClientKeys
from persia.serve.http.limits import ServeLimits
from support.served import FakePredictor, FakeRetriever

BODY = {"users": {"features": {"user": [1, 2]}, "dense": {"age": [0.5, 2]}}, "k": 3}
IDS = [2**63, 2**63 + 1, 2**63 + 2]
SCORES = [[0.5, -0.5, -1.5], [2, 1, 0]]
KEY = "0123456789abcdef-key"


async def until(condition):
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


def run(test, retriever=None, **options):
    """Runs a test against a server; returns the retriever and the server."""
    retriever = retriever or FakeRetriever()
    options.setdefault("limits", ServeLimits(deadline_ms=30_000))  # Other work must not make answers late.

    async def main():
        app = create_app(FakePredictor(), retriever=retriever, **options)
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app, raise_app_exceptions=True)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:

                async def ready():
                    found = await client.get("/health")
                    return found.status_code == 200

                await until(ready)
                await test(client)
        return app.state.server

    return retriever, asyncio.run(main())


async def built(client):
    async def index_is_there():
        return "step" in (await client.get("/health")).json()["index"]

    await until(index_is_there)


def test_the_nearest_items_in_all_forms():
    async def test(client):
        await built(client)
        answer = await client.post("/retrieve", json=BODY)
        assert answer.json() == {"ids": [IDS, IDS], "scores": SCORES, "step": 11}
        assert answer.headers["Persia-Step"] == "11"
        assert "Persia-Epoch" not in answer.headers
        records = {"users": [{"user": 1, "age": 0.5}, {"user": 2, "age": 2}], "k": 3}
        assert (await client.post("/retrieve", json=records)).json() == answer.json()
        found = (await client.post("/retrieve", json={"users": BODY["users"]})).json()
        assert np.shape(found["ids"]) == np.shape(found["scores"]) == (2, 6)  # Of 10; there are no more.

        packed = msgspec.msgpack.encode(BODY)
        answer = await client.post("/retrieve", content=packed, headers={"Content-Type": MSGPACK})
        found = msgspec.msgpack.decode(answer.content)
        assert (found["ids"]["dtype"], found["ids"]["shape"], found["step"]) == ("uint64", [2, 3], 11)
        np.testing.assert_array_equal(np.frombuffer(found["ids"]["data"], "<u8").reshape(2, 3), [IDS, IDS])

        answer = await client.post("/retrieve", json=BODY, headers={"Accept": ARROW})
        table = pa.ipc.open_stream(answer.content).read_all()
        assert table.schema.metadata == {b"persia.step": b"11"}
        assert (table["ids"].to_pylist(), table["scores"].to_pylist()) == ([IDS, IDS], SCORES)

    retriever, _ = run(test)
    assert retriever.stopped.is_set()
    assert retriever.closed


def users(features=None, dense=None):
    return {"features": {"user": [1]} if features is None else features, "dense": dense or {"age": [1]}}


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "not valid JSON"),
        ({}, 422, "required field `users`"),
        ({"users": users(), "k": 0}, 422, "`int` >= 1"),
        ({"users": users(), "k": 2.5}, 422, "Expected `int`"),
        ({"users": users(), "more": 1}, 422, "unknown field"),
        ({"users": users(), "k": 21}, 422, "k = 21; the server finds at most 20 items (--max-k)"),
        (
            {"users": users({"user": [1] * 6}, {"age": [1] * 6}), "k": 20},
            422,
            "20 items for each of 6 users are more than 100",
        ),
        ({"users": users({"user": [1] * 9}, {"age": [1] * 9})}, 422, "has 9 rows; the server takes 8"),
        ({"users": users({"user": [1], "tags": [[1]]})}, 422, "'tags' is not a feature of the user"),
        ({"users": users({"user": [1], "none": [1]})}, 422, "The model has no feature 'none'"),
        ({"users": users({})}, 422, "Feature 'user' of the user is missing"),
        ({"users": {"features": {"user": [1]}}}, 422, "Feature 'age' of the user is missing"),
        ({"users": users(dense={"age": [1, 2]})}, 422, "age"),
        ({"users": users(dense={"age": ["x"]})}, 422, "age"),
        (b" " * 3000, 413, "takes 2000"),
    ],
)
def test_requests_that_are_refused(body, status, said):
    async def test(client):
        await built(client)
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        answer = await client.post("/retrieve", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == status, answer.text
        assert said in answer.json()["message"]

    limits = ServeLimits(max_rows=8, max_k=20, max_values=100, max_body_bytes=2000, deadline_ms=30_000)
    run(test, limits=limits)


def test_until_the_index_is_built_other_routes_answer():
    retriever = FakeRetriever()
    retriever.go.clear()

    async def test(client):
        assert (await client.get("/health")).json()["index"] == {"problem": "it is being built"}
        answer = await client.post("/retrieve", json=BODY)
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "being built" in answer.json()["message"]
        assert (await client.post("/embeddings", json={"table": "user", "ids": [1]})).status_code == 200
        retriever.go.set()
        await built(client)
        health = (await client.get("/health")).json()
        assert health["index"] == {"step": 11, "items": 6, "waiting": 1, "problem": ""}
        assert (await client.post("/retrieve", json=BODY)).status_code == 200

    run(test, retriever)


def test_an_index_that_is_being_built_is_given_up_at_the_end():
    retriever = FakeRetriever()
    retriever.go.clear()

    async def test(client):
        assert (await client.get("/health")).json()["index"] == {"problem": "it is being built"}

    _, server = run(test, retriever)
    assert retriever.closed
    assert server.failed is None


def test_an_index_that_cannot_be_built_ends_the_server():
    retriever = FakeRetriever()
    retriever.fails = ConfigError("no towers")

    async def test(client):
        server = client._transport.app.state.server

        async def has_failed():
            return server.failed is not None

        await until(has_failed)

    _, server = run(test, retriever)
    assert isinstance(server.failed, ConfigError)


def test_the_document_names_the_features_of_users():
    async def test(client):
        document = (await client.get("/openapi.json")).json()
        operation = document["paths"]["/retrieve"]["post"]
        samples = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]["users"]
        assert list(samples["properties"]["features"]["properties"]) == ["user"]
        assert list(samples["properties"]["dense"]["properties"]) == ["age"]
        assert "/retrieve" in (await client.get("/docs")).text
        assert "/retrieve" in (await client.get("/x")).json()["message"]
        assert 'route="/retrieve"' in (await client.get("/metrics")).text

    run(test)


def test_the_index_is_in_the_metrics():
    retriever = FakeRetriever()
    retriever.go.clear()

    async def test(client):
        assert "persia_serve_items" not in (await client.get("/metrics")).text
        retriever.go.set()
        await built(client)
        metrics = (await client.get("/metrics")).text
        for name, value in {"": 6, "_step": 11, "_waiting": 1, "_failing": 0}.items():
            assert f'persia_serve_items{name}{{rank="0",role="server"}} {value}.0\n' in metrics
        retriever.current = retriever.current._replace(problem="cannot be read")
        assert 'persia_serve_items_failing{rank="0",role="server"} 1.0\n' in (await client.get("/metrics")).text

    run(test, retriever)


def test_keys_are_needed():
    async def test(client):
        assert (await client.post("/retrieve", json=BODY)).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}

        async def answers():
            return (await client.post("/retrieve", json=BODY, headers=headers)).status_code == 200

        await until(answers)

    run(test, keys=ClientKeys([KEY]))


def test_a_server_without_an_index_has_no_route():
    async def main():
        app = create_app(FakePredictor())
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            answer = await client.post("/retrieve", json=BODY)
            assert answer.status_code == 404
            assert "/retrieve," not in answer.json()["message"]
            assert "index" not in (await client.get("/health")).json()

    asyncio.run(main())
