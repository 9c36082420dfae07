"""A server on sockets: slow and large requests, many clients, keys and TLS, and its end."""

from __future__ import annotations

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest

from persia.errors import ClosedError, ConfigError, DataError, DeadlineError, OverloadedError, PersiaError, ServeError
from persia.serve import Client
from persia.serve.http.limits import ServeLimits
from persia.serve.http.options import HttpOptions
from persia.serve.http.run import _listener, run_server
from support.ports import lasting_port
from support.served import FakePredictor, FakeRetriever, expected

pytestmark = pytest.mark.processes

KEY = "a-key-of-some-length"
SECONDS = 60.0
LIMITS = ServeLimits(deadline_ms=1000 * SECONDS)
"""Other work must not make answers late."""


def client_of(url, key=None, **options):
    """Returns a client that allows the server as much time as `LIMITS` do."""
    return Client(url, key, **{"timeout": SECONDS, **options})


def columns(*users):
    count = len(users)
    return {
        "user": np.array(users, np.uint64),
        "tags": (np.arange(2 * count), np.arange(0, 2 * count + 1, 2)),
        "code": [7] * count,
        "price": np.full(count, 0.5, np.float32),
        "age": [1.0] * count,
    }


@contextlib.contextmanager
def serving(predictor, *, limits=None, wait=True, ca_file=None, retriever=None, **options):
    """Runs a server in a thread; yields its URL."""
    opened, failures, found = threading.Event(), [], []

    def listening(at):
        found.append(at)
        opened.set()

    def run():
        try:
            run_server(predictor, HttpOptions(port=0, limits=limits or LIMITS, **options), listening, retriever)
        except BaseException as error:
            failures.append(error)
        opened.set()

    thread = threading.Thread(target=run)
    thread.start()
    assert opened.wait(60)
    if failures:
        raise failures[0]
    try:
        if wait:
            until(lambda: client_of(found[0].url, ca_file=ca_file).health()["status"] == "ready")
        yield found[0].url
    finally:
        predictor.go.set()
        found[0].stop()
        thread.join(60)
        assert not thread.is_alive()
        assert predictor.closed


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def raw(url, *parts, wait=None):
    """Sends bytes, and returns all that comes back until the server closes the connection."""
    host, port = url.rpartition("/")[2].split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        assert connection.family == socket.AF_INET
        with contextlib.suppress(ConnectionError):
            for part in parts:
                connection.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while more := connection.recv(1 << 16):
                answer += more
        return answer


def answer_to(url, *parts):
    """As `raw`, again if there is no answer: the connection may have ended before the head was sent."""
    found = []
    until(lambda: found.append(raw(url, *parts)) or found[-1])
    return found[-1]


HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_slow_and_large_requests_end_and_others_are_answered():
    limits = msgspec.structs.replace(LIMITS, head_seconds=1.5, body_seconds=1.5, max_body_bytes=1000)
    with serving(FakePredictor(), limits=limits) as url, ThreadPoolExecutor(8) as threads:
        slow_head = threads.submit(raw, url, b"POST /predict HTT")
        silent = threads.submit(raw, url)
        second_head = threads.submit(answer_to, url, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        slow_body = threads.submit(answer_to, url, HEAD + b"Content-Length: 100\r\n\r\n{")
        slow_chunks = threads.submit(answer_to, url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
        large = threads.submit(answer_to, url, HEAD + b"Content-Length: 1000000000000\r\n\r\n")
        chunk = b"400\r\n" + b"x" * 1024 + b"\r\n"  # Sent with the head, as a later one could be too late.
        chunks = threads.submit(answer_to, url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunk)
        with client_of(url) as client:
            until(lambda: predicts(client))
        assert slow_head.result(60) == silent.result(60) == b""
        assert second_head.result(60).count(b"HTTP/1.1 200 OK") == 1
        for late in (slow_body, slow_chunks):
            assert late.result(60).startswith(b"HTTP/1.1 408")
            assert b"--body-seconds" in late.result()
        for refused in (large, chunks):
            assert refused.result(60).startswith(b"HTTP/1.1 413")
            assert b"connection: close" in refused.result().lower()
        assert answer_to(url, b"\x16\x03\x01 what is this?\r\n\r\n").startswith(b"HTTP/1.1 400")


def predicts(client):
    """Whether a prediction succeeds; its head or body may be late."""
    with contextlib.suppress(ServeError):
        return client.predict(columns(1)).step == 12
    return False


def test_an_endless_head_is_cut_off():
    with serving(FakePredictor(), limits=msgspec.structs.replace(LIMITS, head_seconds=3600)) as url:
        assert raw(url, b"GET /health HTTP/1.1\r\n", *[b"X: " + b"x" * 10_000 + b"\r\n"] * 1000) == b""
        assert raw(url, b"GET /" + b"x" * 1_000_000) == b""


def test_connections_are_limited_and_idle_ones_lock_nobody_out():
    limits = msgspec.structs.replace(LIMITS, max_connections=1, head_seconds=3600)
    predictor = FakePredictor()
    with (
        serving(predictor, limits=limits) as url,
        client_of(url) as client,
        contextlib.ExitStack() as opened,
        ThreadPoolExecutor(1) as threads,
    ):
        host, port = url.rpartition("/")[2].split(":")
        for _ in range(10):
            opened.enter_context(socket.create_connection((host, int(port))))
        assert client.predict(columns(1)).step == 12
        with client_of(url) as other:
            assert other.predict(columns(1)).step == 12
        predictor.go.clear()
        asked = threads.submit(client.predict, columns(1))
        assert predictor.computing.wait(60)  # What is being answered is kept.
        with pytest.raises(OverloadedError, match="answered with status 503"):
            client_of(url).health()
        predictor.go.set()
        assert asked.result(60).step == 12


def test_a_pipelining_client_that_does_not_read_blocks_nobody():
    limits = msgspec.structs.replace(LIMITS, max_connections=1, body_seconds=0.5)
    with serving(FakePredictor(), limits=limits) as url:
        host, port = url.rpartition("/")[2].split(":")

        def answered():
            with client_of(url) as client:
                try:
                    return client.health()["status"] == "ready"
                except PersiaError:
                    return False

        until(answered)
        ids = {"table": "user", "ids": list(range(1_000_000, 1_008_192, 2))}
        body = msgspec.json.encode(ids)
        request = HEAD.replace(b"predict", b"embeddings") + b"Content-Length: %d\r\n\r\n" % len(body) + body
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            until(lambda: not connection.connect_ex((host, int(port))))
            connection.settimeout(20)
            with pytest.raises(ConnectionError):  # Not TimeoutError: the server ends the connection.
                while True:
                    connection.sendall(request)
            until(answered)


def test_small_answers_do_not_wait_for_acknowledgements():
    with _listener(HttpOptions(port=0)) as listener:  # Asyncio turns Nagle's algorithm off where it sees the protocol.
        assert listener.proto == socket.IPPROTO_TCP


def test_many_clients_are_joined_and_get_their_own_answers():
    predictor = FakePredictor()
    limits = msgspec.structs.replace(LIMITS, max_wait_ms=20)
    with serving(predictor, limits=limits) as url, client_of(url) as client:

        def ask(start):
            for user in range(start, start + 10):
                found = client.predict(columns(user, user + 1))
                np.testing.assert_array_equal(found.probabilities, expected([user, user + 1], [0.5] * 2), strict=True)
                assert found[1:] == ("probabilities", ("click", "buy"), 12, 3, ())

        with ThreadPoolExecutor(12) as threads:
            list(threads.map(ask, range(0, 1200, 100)))
        ranked = client.rank(
            {"user": [3], "tags": [[1, 2]], "age": np.float32([2])}, {"code": [1, 2], "price": [0.1, 0.2]}
        )
        np.testing.assert_array_equal(ranked.scores, expected([3, 3], [0.1, 0.2]))
        with pytest.raises(ServeError, match="has scores, not probabilities"):
            _ = ranked.probabilities
        with pytest.raises(ServeError, match="has probabilities, not scores"):
            _ = client.predict(columns(1)).scores
        predictor.are_log_odds = False
        np.testing.assert_array_equal(client.predict(columns(1, 2)).scores, expected([1, 2], [0.5] * 2))
        rows = client.embeddings("user", np.array([3, 4], np.uint64))
        np.testing.assert_array_equal(rows.found, [False, True], strict=True)
        np.testing.assert_array_equal(rows.rows, np.float32([[0] * 4, [4] * 4]), strict=True)
        assert (rows.step, rows.epoch) == (13, 3)
    assert max(predictor.sizes) > 2


def test_errors_reach_the_client_with_their_kind():
    limits = msgspec.structs.replace(LIMITS, max_rows=3, max_body_bytes=2000)
    with serving(FakePredictor(), limits=limits) as url, client_of(url) as client:
        with pytest.raises(DataError, match=r"'tags' .* is missing") as error:
            client.predict({"user": [1]})
        assert error.value.fields == {"column": "tags", "status": 422, "url": url}
        with pytest.raises(DataError, match="takes 3"):
            client.predict(columns(1, 2, 3, 4))
        with pytest.raises(ServeError, match="--max-body-bytes") as error:
            client.predict(columns(*range(1000)))
        assert error.value.fields["status"] == 413
        with pytest.raises(DataError, match="complex128"):
            client.predict({"user": np.array([1j])})
        with pytest.raises(ServeError, match="There is no '/x/predict'"):
            client_of(f"{url}/x").predict(columns(1))
        assert client.predict(columns(1)).step == 12
    with pytest.raises(ClosedError):
        client.predict(columns(1))
    for bad in ("127.0.0.1:80", "ftp://x", "http://"):
        with pytest.raises(ConfigError):
            Client(bad)


def test_overload_is_refused_and_ends():
    predictor = FakePredictor()
    with (
        serving(predictor, limits=msgspec.structs.replace(LIMITS, max_queue=2)) as url,
        ThreadPoolExecutor(20) as threads,
    ):
        predictor.go.clear()
        client = client_of(url)
        asked = [threads.submit(client.predict, columns(0))]
        assert predictor.computing.wait(60)
        asked += [threads.submit(client.predict, columns(user)) for user in range(1, 20)]
        until(lambda: sum(each.done() for each in asked) >= 17)
        refused = [each.exception() for each in asked if each.done()]
        assert all(isinstance(error, OverloadedError) for error in refused)
        assert refused[0].fields["status"] == 503
        assert refused[0].fields["retry_after"] >= 1
        predictor.go.set()
        done = [each for each in asked if each.exception(60) is None]
        assert len(done) == 20 - len(refused)
        assert client.predict(columns(5)).step == 12


def test_a_call_ends_with_its_timeout_and_retries_connecting():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(DeadlineError, match=r"did not answer /predict within 0.3 s"):
            Client(url, timeout=0.3).predict(columns(1))
    port = lasting_port()
    client = Client(f"http://127.0.0.1:{port}", timeout=0.2)
    with pytest.raises(ServeError, match=r"cannot be reached: .*refused"):
        client.health()
    client = client_of(f"http://127.0.0.1:{port}")

    class Late(FakePredictor):
        pass

    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(client.health)
        predictor, stop = Late(), []
        runs = threading.Thread(target=run_server, args=(predictor, HttpOptions(port=port), stop.append))
        runs.start()
        assert early.result(60)["status"] in ("loading", "ready")
        until(lambda: client.health()["status"] == "ready")
        stop[0].stop()  # The connection that the client keeps is closed.
        runs.join(60)
        assert not runs.is_alive()
        predictor = FakePredictor()
        runs = threading.Thread(target=run_server, args=(predictor, HttpOptions(port=port), stop.append))
        runs.start()
        assert client.health()["status"] in ("loading", "ready")
        until(lambda: len(stop) == 2)
        stop[1].stop()
        runs.join(60)
        assert not runs.is_alive()


def test_requests_that_have_begun_are_answered_before_the_end():
    predictor = FakePredictor()
    with ThreadPoolExecutor(4) as threads:
        with serving(predictor) as url:
            predictor.go.clear()
            asked = threads.submit(client_of(url).predict, columns(3))
            assert predictor.computing.wait(60)
        assert asked.result(60).step == 12


def test_other_hosts_need_a_key():
    with (
        pytest.raises(ConfigError, match="lets other hosts in without a key"),
        serving(FakePredictor(), host="0.0.0.0"),
    ):
        pass
    with serving(FakePredictor(), host="0.0.0.0", insecure=True) as url:
        assert client_of(url).predict(columns(1)).step == 12
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = HttpOptions(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"Cannot listen on 127.0.0.1 port"):
            run_server(FakePredictor(), options)


def test_keys_and_tls(tmp_path):
    cert, key, keys = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "keys"))
    made = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    names = ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(["openssl", *made, *names], check=True, capture_output=True)
    (tmp_path / "keys").write_text(KEY)
    (tmp_path / "keys").chmod(0o600)
    options = {"tls_cert": cert, "tls_key": key, "key_file": keys}
    with serving(FakePredictor(), ca_file=cert, **options) as url:
        assert url.startswith("https://")
        assert client_of(url, KEY, ca_file=cert).predict(columns(1)).step == 12
        assert "rows" not in client_of(url, ca_file=cert).health()
        with pytest.raises(ServeError, match="The key is missing or wrong") as error:
            client_of(url, "another-key", ca_file=cert).predict(columns(1))
        assert error.value.fields["status"] == 401
        with pytest.raises(ServeError, match="cannot be reached") as error:
            client_of(url, KEY).predict(columns(1))
        assert isinstance(error.value.__cause__, ssl.SSLError)
    with pytest.raises(ConfigError, match="give tls_cert and tls_key"):
        HttpOptions(tls_cert=cert)
    (tmp_path / "key.pem").chmod(0o604)
    with pytest.raises(ConfigError, match=f"chmod 600 {key}"):
        HttpOptions(tls_cert=cert, tls_key=key)
    (tmp_path / "key.pem").chmod(0o600)
    with (
        pytest.raises(ConfigError, match="Cannot use the certificate"),
        serving(FakePredictor(), tls_cert=key, tls_key=key),
    ):
        pass


def test_a_predictor_that_cannot_start_ends_the_server():
    for failure, kind in ((ConfigError("a bad option"), ConfigError), (ZeroDivisionError(), RuntimeError)):
        predictor = FakePredictor()
        predictor.may_start = [failure]
        with pytest.raises(kind) as error:
            run_server(predictor, HttpOptions(port=0))
        assert failure in (error.value, error.value.__cause__)


def test_an_answer_of_something_else_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            # Closed and said so: a client could take a connection that is being closed for one that goes on.
            hi = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi"
            for body in (hi, b"what?\r\n\r\n", b""):
                connection, _ = server.accept()
                with connection:
                    connection.recv(1 << 16)
                    connection.sendall(body)

        thread = threading.Thread(target=answer)
        thread.start()
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}")
        for message in ("cannot be read", "cannot be reached", "cannot be reached"):
            with pytest.raises(ServeError, match=message):
                client.health()
        thread.join(60)
        assert not thread.is_alive()


def test_a_request_on_a_closing_connection_is_sent_again():
    answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}"

    def answer_once_and_close_at_the_next(server):
        first, _ = server.accept()
        with first:
            first.recv(1 << 16)
            first.sendall(answer)
            first.recv(1 << 16)  # The second request: the connection ends without an answer.
        for body in (answer[:-1], answer):  # An answer that has begun is not asked for again.
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(body)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        server.settimeout(60)
        answered = threads.submit(answer_once_and_close_at_the_next, server)
        client = Client(f"http://127.0.0.1:{server.getsockname()[1]}")
        assert client.health() == {}
        with pytest.raises(ServeError, match="cannot be read"):
            client.health()
        assert client.health() == {}
        answered.result(60)


def test_the_key_of_a_client_is_not_in_its_repr_or_errors():
    client = Client("http://127.0.0.1:9", KEY, timeout=0.1)
    assert KEY not in repr(client)
    with pytest.raises(ServeError) as error:
        client.predict(columns(1))
    assert KEY not in str(error.value) + msgspec.json.encode(error.value.fields).decode()


def test_a_client_retrieves_items():
    retriever = FakeRetriever()
    with serving(FakePredictor(), retriever=retriever) as url, client_of(url) as client:
        until(lambda: retriever.state() is not None)
        found = client.retrieve({"user": [1, 2], "age": np.float32([0.5, 2])}, k=2)
        np.testing.assert_array_equal(found.ids, np.full((2, 2), 2**63, np.uint64) + np.uint64([0, 1]))
        np.testing.assert_array_equal(found.scores, np.float32([[0.5, -0.5], [2, 1]]))
        assert (found.scores.dtype, found.step) == (np.float32, 11)
        with pytest.raises(DataError, match="'user' of the user is missing"):
            client.retrieve({"age": [1]})


def test_a_client_that_is_open_when_python_ends_says_nothing():
    program = """
import builtins
from persia.serve import Client

builtins.client = Client("http://127.0.0.1:1")  # Ends after the names of modules are gone.
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_client_ends_without_the_names_of_its_module(monkeypatch):
    client = Client("http://127.0.0.1:1")
    monkeypatch.setattr("persia.serve.client.contextlib", None)
    client.__del__()
    Client.__del__(object.__new__(Client))
    with pytest.raises(ClosedError):
        client.health()
