"""Routes of a prediction server, in process: statuses, forms, keys, and no traceback whatever comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time

import httpx
import msgspec
import numpy as np
import pyarrow as pa
import pytest

from persia.errors import ConfigError, DeadlineError, PublishError
from persia.serve.http.app import create_app
from persia.serve.http.codecs.codec import ARROW, JSON, MSGPACK
from persia.serve.http.keys import ClientKeyFile, ClientKeys, read_keys
from persia.serve.http.lag import Lag
from persia.serve.http.limits import ServeLimits
from support.served import SCHEMA, FakePredictor, FakeRetriever, State, expected

BODY = {
    "features": {"user": [1, 2], "tags": [[1, 2], []], "code": [3, 4]},
    "dense": {"price": [0.5, 1.0], "age": [1, 2]},
}
KEY = "0123456789abcdef-key"
TYPE = {"Content-Type": JSON}


@contextlib.asynccontextmanager
async def serving(predictor, *, wait=True, host="127.0.0.1", **options):
    options.setdefault("limits", ServeLimits(deadline_ms=30_000))  # Other work must not make answers late.
    app = create_app(predictor, **options)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as client:
            deadline = time.monotonic() + 30
            while wait and (await client.get("/health", headers={"Host": "localhost"})).status_code != 200:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
            yield client


def run(test, *arguments, **options):
    async def main():
        async with serving(*arguments, **options) as client:
            return await test(client)

    return asyncio.run(main())


def test_predictions_in_all_forms():
    async def test(client):
        wanted = expected([1, 2], [0.5, 1.0])
        answer = await client.post("/predict", json=BODY)
        assert answer.status_code == 200
        found = answer.json()
        assert (found["step"], found["epoch"]) == (12, 3)
        assert (answer.headers["Persia-Step"], answer.headers["Persia-Epoch"]) == ("12", "3")
        for label, column in zip(SCHEMA.labels, wanted.T, strict=True):
            np.testing.assert_array_equal(np.float32(found["probabilities"][label]), column)

        packed = msgspec.msgpack.encode(BODY)
        answer = await client.post("/predict", content=packed, headers={"Content-Type": "application/x-msgpack"})
        assert answer.headers["Content-Type"] == MSGPACK
        found = msgspec.msgpack.decode(answer.content)
        values = found["probabilities"]["values"]
        assert (found["step"], found["probabilities"]["labels"], values["shape"]) == (12, ["click", "buy"], [2, 2])
        np.testing.assert_array_equal(np.frombuffer(values["data"], "<f4").reshape(2, 2), wanted)

        answer = await client.post("/predict", json=BODY, headers={"Accept": f"text/html, {ARROW};q=0.5, {JSON};q=0.1"})
        assert answer.headers["Content-Type"] == ARROW
        table = pa.ipc.open_stream(answer.content).read_all()
        assert table.schema.metadata == {b"persia.step": b"12", b"persia.epoch": b"3"}
        np.testing.assert_array_equal(np.stack([c.to_numpy() for c in table.columns], axis=1), wanted)

    run(test, FakePredictor())


def test_a_model_without_probabilities_answers_scores():
    async def test(client):
        answer = await client.post("/predict", json=BODY)
        assert answer.json().keys() == {"scores", "step", "epoch"}
        np.testing.assert_array_equal(np.float32(answer.json()["scores"]["buy"]), expected([1, 2], [0.5, 1.0])[:, 1])

    predictor = FakePredictor()
    predictor.are_log_odds = False
    run(test, predictor)


def test_rankings_and_embeddings():
    async def test(client):
        user = {"features": {"user": [5], "tags": [[1]]}, "dense": {"age": [2]}}
        items = {"features": {"code": [1, 2, 3]}, "dense": {"price": [0.1, 0.2, 0.3]}}
        answer = await client.post("/rank", json={"user": user, "items": items})
        assert answer.json()["step"] == 12
        np.testing.assert_array_equal(
            np.float32(answer.json()["scores"]["buy"]), expected([5] * 3, [0.1, 0.2, 0.3])[:, 1]
        )
        answer = await client.post("/embeddings", json={"table": "code", "ids": [3, 4]})
        assert answer.json() == {
            "table": "code", "found": [False, True], "rows": [[0, 0], [4, 4]], "step": 13, "epoch": 3
        }  # fmt: skip
        answer = await client.post("/embeddings", json={"table": "code", "ids": []}, headers={"Accept": ARROW})
        assert pa.ipc.open_stream(answer.content).read_all().num_rows == 0

    run(test, FakePredictor())


REFUSED = [
    ("POST", "/predict", TYPE, b"{", 400, "not valid JSON"),
    ("POST", "/predict", TYPE, b"{}", 422, "required field `features`"),
    ("POST", "/predict", {**TYPE, "Persia-Deadline-Ms": "soon"}, b"{}", 400, "Persia-Deadline-Ms: 'soon'"),
    ("POST", "/predict", {**TYPE, "Persia-Deadline-Ms": "-1"}, b"{}", 400, "expected milliseconds above 0"),
    ("POST", "/predict", {**TYPE, "Persia-Deadline-Ms": "nan"}, b"{}", 400, "expected milliseconds above 0"),
    ("POST", "/predict", {"Content-Type": "text/plain"}, b"{}", 415, "send one of: application/json"),
    ("POST", "/predict", {}, b"{}", 415, "'none' is not supported"),
    ("POST", "/rank", {"Content-Type": ARROW}, b"", 415, "not supported by /rank"),
    ("POST", "/predict", {**TYPE, "Content-Encoding": "gzip"}, b"", 415, "Content-Encoding 'gzip'"),
    ("POST", "/predict", {**TYPE, "Accept": "text/html"}, b"{}", 406, "accept one"),
    ("POST", "/predict", {**TYPE, "Content-Length": "2000000"}, b"{}", 413, "takes 1000000"),
    ("POST", "/predict", TYPE, b" " * 1_000_001, 413, "--max-body-bytes"),
    ("POST", "/embeddings", TYPE, b'{"table": "' + b"x" * 10_000 + b'", "ids": []}', 422, "no table 'xxx"),
    ("GET", "/predict", {}, b"", 405, "does not accept GET"),
    ("DELETE", "/health", {}, b"", 405, "does not accept DELETE"),
    ("GET", "/x", {}, b"", 404, "there are /docs, /embeddings"),
    ("POST", "/retrieve", TYPE, b"{}", 404, "/rank. Start `persia serve` with --retrieve or --items for it."),
]


def test_refusals_say_what_is_wrong():
    async def test(client):
        for method, path, headers, body, status, message in REFUSED:
            answer = await client.request(method, path, headers=headers, content=body)
            assert answer.status_code == status, (path, headers, answer.text)
            problem = answer.json()
            assert message in problem["message"]
            assert len(answer.content) < 5000
            assert answer.headers["Content-Type"] == JSON
            assert ("Allow" in answer.headers) == (status == 405)
            assert (answer.headers.get("Connection") == "close") == (status == 413)

    run(test, FakePredictor(), limits=ServeLimits(max_body_bytes=1_000_000, deadline_ms=30_000))


def test_a_failing_predictor_is_no_traceback(caplog):
    class Failing(FakePredictor):
        def predict(self, batch):
            raise KeyError("a secret of the code")

        def table_rows(self, table, ids):
            raise PublishError("The log is damaged; wait for the next snapshot.")

    async def test(client):
        answer = await client.post("/predict", json=BODY)
        assert (answer.status_code, answer.json()["error"]) == (500, "ServeError")
        assert "secret" not in answer.text
        assert "KeyError" in answer.json()["message"]
        answer = await client.post("/embeddings", json={"table": "code", "ids": [1]})
        assert (answer.status_code, answer.headers["Retry-After"]) == (503, "1")
        assert "damaged" in answer.json()["message"]

    run(test, Failing())
    assert "a secret of the code" in caplog.text


class StartsWhenTold(FakePredictor):
    """Waits for `told` once it could start."""

    def __init__(self):
        super().__init__()
        self.told = threading.Event()

    def start(self, timeout):
        super().start(timeout)
        assert self.told.wait(60)


def test_health_tells_until_and_after_it_is_ready(caplog, monkeypatch):
    monkeypatch.setattr("persia.serve.http.app.START_SECONDS", 0.02)
    predictor = StartsWhenTold()
    predictor.may_start = [DeadlineError("There was nothing to serve in s3://logs.")]

    async def test(client):
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "loading")
        for path in ("/predict", "/docs", "/openapi.json"):
            answer = await (client.post(path, json=BODY) if path == "/predict" else client.get(path))
            assert (answer.status_code, answer.json()["error"]) == (503, "OverloadedError")
            assert "not ready" in answer.json()["message"]
            assert "s3://" not in answer.text
        assert "persia_serve_ready{" in (await client.get("/metrics")).text
        assert (await client.get("/live")).status_code == 200
        predictor.told.set()
        deadline = time.monotonic() + 30
        while (answer := await client.get("/health")).status_code != 200:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        predictor.current = State(problem="The log is damaged.", drift={"user": 0.3}, inputs={"user": {"missing": 0.5}})
        found = (await client.get("/health")).json()
        assert found == {
            "status": "ready", "epoch": 3, "network_step": 12, "row_step": 13, "rows_age_seconds": 0.5,
            "network_age_seconds": 0.25, "rows": 26, "problem": "The log is damaged.",
            "psi": {"user": 0.3}, "inputs": {"user": {"missing": 0.5}},
        }  # fmt: skip

        metrics = (await client.get("/metrics")).text
        assert 'persia_serve_psi{feature="user",rank="0",role="server"} 0.3' in metrics
        assert 'persia_serve_input_share{column="user",rank="0",role="server",what="missing"} 0.5' in metrics

    with caplog.at_level(logging.INFO, "persia.serve"):
        run(test, predictor, wait=False)
    assert predictor.closed
    assert "not ready: There was nothing to serve in s3://logs." in caplog.text
    assert "ready: epoch 3, network of step 12" in caplog.text


class Clock:
    """The clock of requests. It stands still until a test moves it, so that no request is late before it waits.

    A batch that waits for more samples (`max_wait_ms`) would wait for ever.
    """

    def __init__(self):
        self.now = time.monotonic()

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    for module in ("app", "batcher", "conversion"):
        monkeypatch.setattr(f"persia.serve.http.{module}.time", found)
    monkeypatch.setattr(Lag, "start", lambda lag: None)
    return found


def test_a_queued_request_is_given_up_at_its_deadline(clock):
    predictor = FakePredictor()

    async def test(client):
        predictor.go.clear()
        first = asyncio.create_task(client.post("/predict", json=BODY))
        assert await asyncio.to_thread(predictor.computing.wait, 30)
        answer = await client.post("/predict", json=BODY, headers={"Persia-Deadline-Ms": "5"})
        assert (answer.status_code, answer.json()["error"]) == (503, "OverloadedError")
        assert "deadline of the request passed" in answer.json()["message"]
        assert int(answer.headers["Retry-After"]) >= 1
        clock.now += 0.01
        waiting = [asyncio.create_task(client.post("/predict", json=BODY)) for _ in range(5)]
        answers = []
        while len(answers) < 3:  # Two fit the queue; one was given up there, and leaves it with the next computation.
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            answers = [task.result() for task in waiting if task.done()]
        assert {answer.status_code for answer in answers} == {503}
        predictor.go.set()
        assert [(await task).status_code for task in (first, *waiting)].count(200) == 3
        assert (await client.post("/predict", json=BODY)).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'persia_serve_expired_total{rank="0",role="server"} 1.0' in metrics
        assert 'persia_serve_overloaded_total{rank="0",role="server"} 3.0' in metrics
        assert 'persia_serve_held_bytes{rank="0",role="server"} 0.0' in metrics
        assert 'persia_serve_requests_total{rank="0",role="server",route="/predict",status="200"} 4.0' in metrics

    run(test, predictor, limits=ServeLimits(max_queue=3, max_wait_ms=0, deadline_ms=60_000))
    assert sum(predictor.sizes) == 8


class SlowTable(FakePredictor):
    """Looks rows up once it is let to; requests of one row are told apart by it."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def table_rows(self, table, ids):
        self.asked.append(ids[0])
        self.computing.set()
        assert self.go.wait(60)
        return super().table_rows(table, ids)


@pytest.mark.parametrize("path", ["/embeddings", "/predict"])
def test_conversions_have_a_queue_with_a_limit_and_deadlines(path, clock):
    predictor = SlowTable()

    def ask(client, number, deadline=60_000):
        headers = {"Persia-Deadline-Ms": str(deadline), "Content-Type": JSON}
        content = msgspec.json.encode({"table": "user", "ids": [number]})
        if path == "/predict" and number:
            content = msgspec.json.encode(BODY) + b" " * (1 << 17)
        return client.post(path if number else "/embeddings", content=content, headers=headers)

    async def test(client):
        predictor.go.clear()
        first = asyncio.create_task(ask(client, 0))
        assert await asyncio.to_thread(predictor.computing.wait, 30)
        late = asyncio.create_task(ask(client, 1, deadline=200))
        server = client._transport.app.state.server
        while len(server._conversion._pending) < 2:
            await asyncio.sleep(0.001)
        answer = await ask(client, 2)
        assert (answer.status_code, answer.json()["error"]) == (503, "OverloadedError")
        assert "are waiting for conversion" in answer.json()["message"]
        clock.now += 0.25  # Past the deadline of the second one, which is in the queue.
        predictor.go.set()
        assert (await first).status_code == 200
        assert (await late).status_code == 503
        assert "deadline of the request passed" in (await late).json()["message"]
        assert (predictor.asked, predictor.sizes) == ([0], [])
        assert (await ask(client, 3)).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'persia_serve_expired_total{rank="0",role="server"} 1.0' in metrics
        assert 'persia_serve_overloaded_total{rank="0",role="server"} 1.0' in metrics

        # What pending conversions take is asked for before the body is read.
        predictor.go.clear()
        predictor.computing.clear()
        first = asyncio.create_task(ask(client, 0))
        assert await asyncio.to_thread(predictor.computing.wait, 30)
        server._conversion._times._seconds = dict.fromkeys(range(64), 1e9)
        answer = await ask(client, 4)
        assert answer.status_code == 503
        assert "the conversion of the body would end in" in answer.json()["message"]
        predictor.go.set()
        assert (await first).status_code == 200

    run(test, predictor, limits=ServeLimits(max_queue=2, max_wait_ms=0, deadline_ms=60_000))


def test_bodies_that_are_held_are_limited():
    predictor = FakePredictor()
    size = len(httpx.Request("POST", "http://x", json=BODY).content)

    async def test(client):
        predictor.go.clear()
        first = asyncio.create_task(client.post("/predict", json=BODY))
        assert await asyncio.to_thread(predictor.computing.wait, 30)
        answer = await client.post("/predict", json=BODY)
        assert (answer.status_code, answer.json()["error"]) == (503, "OverloadedError")
        assert f"it holds {size} bytes" in answer.json()["message"]
        predictor.go.set()
        assert (await first).status_code == 200
        assert (await client.post("/predict", json=BODY)).status_code == 200

    run(test, predictor, limits=ServeLimits(max_held_bytes=size + 10, deadline_ms=30_000))


def test_a_server_that_stops_is_live_but_not_ready():
    """So that Kubernetes sends it no more requests, and does not kill it while it answers the last ones."""

    async def test(client):
        assert (await client.get("/health")).status_code == 200
        client._transport.app.state.server.stopping = True
        answer = await client.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, "stopping")
        assert (await client.get("/live")).status_code == 200

    run(test, FakePredictor())


def test_a_key_is_needed_for_all_but_the_state():
    async def test(client):
        paths = ("/metrics", "/docs", "/openapi.json", "/x")
        for header in ({}, {"Authorization": f"Bearer {KEY}x"}, {"Authorization": f"Basic {KEY}"}):
            for path in paths:
                answer = await client.get(path, headers=header)
                assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert (await client.post("/predict", json=BODY, headers=header)).status_code == 401
            assert (await client.get("/health", headers=header)).json() == {"status": "ready"}
            assert (await client.get("/live", headers=header)).json() == {"status": "live"}
        good = {"Authorization": f"bearer {KEY}"}
        assert (await client.post("/predict", json=BODY, headers=good)).status_code == 200
        assert (await client.get("/health", headers=good)).json()["rows"] == 26
        document = (await client.get("/openapi.json", headers=good)).json()
        assert document["paths"]["/predict"]["post"]["security"] == [{"key": []}]

    run(test, FakePredictor(), keys=ClientKeys(["another-key-of-some-length", KEY]))


def test_keys_come_from_a_file_or_the_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("PERSIA_SERVE_KEYS", raising=False)
    assert read_keys(None) is None
    path = tmp_path / "keys"
    path.write_text(f"# of the shop\n{KEY}\n\n")
    path.chmod(0o644)
    with pytest.raises(ConfigError, match=f"chmod 600 {path}"):
        read_keys(str(path))
    path.chmod(0o600)
    assert read_keys(str(path)).accept(f"Bearer {KEY}")
    monkeypatch.setenv("PERSIA_SERVE_KEYS", f"{KEY},{KEY[::-1]}")
    assert read_keys(None).accept(f"Bearer {KEY[::-1]}")
    assert not read_keys(None).accept(None)
    for bad in ("short", "", f"{KEY}\u00e9"):
        path.write_text(bad)
        with pytest.raises(ConfigError) as error:
            read_keys(str(path))
        assert bad not in error.value.message or not bad
    with pytest.raises(ConfigError, match=r"none cannot be read: .*No such file"):
        read_keys(str(tmp_path / "none"))


def test_keys_change_while_the_server_runs(tmp_path, caplog):
    now, path = [0.0], tmp_path / "keys"
    path.touch(0o600)
    path.write_text(KEY)
    keys = ClientKeyFile(str(path), lambda: now[0])
    path.write_text(f"{KEY[::-1]}\n{KEY}")
    assert not keys.accept(f"Bearer {KEY[::-1]}")  # It looks once a second.
    now[0] = 1.0
    assert keys.accept(f"Bearer {KEY[::-1]}")
    assert keys.accept(f"Bearer {KEY}")
    path.write_text(KEY[::-1])
    assert keys.accept(f"Bearer {KEY}")
    now[0] = 2.0
    assert not keys.accept(f"Bearer {KEY}")
    path.write_text("short")
    for now[0] in (3.0, 4.0):
        assert keys.accept(f"Bearer {KEY[::-1]}")
    path.unlink()
    path.mkdir()
    for now[0] in (5.0, 6.0):
        assert keys.accept(f"Bearer {KEY[::-1]}")
    warnings = [record.getMessage() for record in caplog.records]
    assert ["Key 1 has 5 characters" in text for text in warnings] == [True, False]
    assert "Is a directory" in warnings[1]
    assert all(text.endswith("Until then the earlier keys are accepted.") for text in warnings)
    assert KEY[::-1] not in caplog.text


def test_a_name_of_another_site_is_refused():
    async def test(client):
        for host, status in (
            ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("127.0.0.1:80", 200), ("[::1]:8", 200), ("[", 403)
        ):  # fmt: skip
            assert (await client.get("/health", headers={"Host": host})).status_code == status, host

    run(test, FakePredictor(), local=True)


def test_the_page_loads_nothing_and_runs_nothing():
    async def test(client):
        answer = await client.get("/docs")
        assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        text = answer.text.replace("http://127.0.0.1", "")
        assert all(word not in text for word in ("http:", "https:", "<script", "src=", "@import", "url("))
        assert "curl" in text
        assert "code" in text
        document = (await client.get("/openapi.json")).json()
        examples = document["paths"]["/predict"]["post"]["requestBody"]["content"][JSON]["examples"]
        for example in examples.values():
            assert (await client.post("/predict", json=example["value"])).status_code == 200
        assert "$ref" not in json.dumps(document)

    run(test, FakePredictor())


def test_a_late_event_loop_refuses_requests_that_would_expire():
    async def behind():
        lag = Lag()
        lag.start()
        time.sleep(0.2)
        while lag.seconds == 0:
            await asyncio.sleep(0)
        lag.stop()
        return lag.seconds

    assert asyncio.run(behind()) >= 0.1

    async def test(client):
        server = client._transport.app.state.server
        server._lag.seconds = 1e6
        answer = await client.post("/predict", json=BODY)
        assert (answer.status_code, answer.json()["error"]) == (503, "OverloadedError")
        server._lag.seconds = 0
        assert (await client.post("/predict", json=BODY)).status_code == 200

    run(test, FakePredictor())


OVERFLOW = {
    "features": {"user": [1, 2, 3], "tags": [[], [], []], "code": [3, 4, 5]},
    "dense": {"price": [0.5, 3.4e38, 1.0], "age": [1, 2, 3]},
}


@pytest.mark.parametrize("accept", [JSON, MSGPACK, ARROW])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_no_answer_lacks_its_numbers(accept, value):
    class Overflowing(FakePredictor):
        def predict(self, batch):
            found = super().predict(batch)
            found.values[batch.dense[:, 0] > 1e38, 1] = value
            return found

        def rank(self, user, items):
            found = super().rank(user, items)
            return found._replace(scores=np.full_like(found.scores, value))

    async def test(client):
        headers = {"Accept": accept}
        alone, joined = await asyncio.gather(
            client.post("/predict", json=OVERFLOW, headers=headers), client.post("/predict", json=BODY, headers=headers)
        )
        assert (alone.status_code, joined.status_code) == (422, 200)
        problem = alone.json()
        assert problem["message"].startswith("The prediction of row 1 is not a number: a dense feature there")
        assert problem["fields"] == {"row": 1}
        user = {"features": {"user": [5], "tags": [[1]]}, "dense": {"age": [2]}}
        items = {"features": {"code": [1, 2]}, "dense": {"price": [0.1, 0.2]}}
        answer = await client.post("/rank", json={"user": user, "items": items}, headers=headers)
        assert (answer.status_code, answer.json()["fields"]) == (422, {"row": 0})

    run(test, Overflowing())


def test_no_scores_of_items_lack_their_numbers():
    class Overflowing(FakeRetriever):
        def search(self, users, k):
            found = super().search(users, k)
            return found._replace(scores=found.scores * np.float32("nan"))

    async def test(client):
        retriever.start()
        users = {"features": {"user": [5]}, "dense": {"age": [2]}}
        answer = await client.post("/retrieve", json={"users": users, "k": 2})
        assert (answer.status_code, answer.json()["fields"]) == (422, {"row": 0})
        assert "The score of row 0 is not a number" in answer.json()["message"]

    retriever = Overflowing()
    run(test, FakePredictor(), retriever=retriever)
