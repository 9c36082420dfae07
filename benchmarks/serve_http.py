"""Prediction over HTTP: latency compared with a predictor in process, and behaviour at three times the highest rate.

    python -m benchmarks 'serve.http*' 'serve.overload*' [--preset smoke|laptop|full] [--json FILE]

26 features of dim 16, 13 dense ones, MLP 256-128, requests of 256 samples, one thread for the network. The server
is `persia serve` in a process of its own, held to one core, and so is the predictor that is measured in process; the
clients have the other cores. Clients send msgpack over connections that stay open, at Poisson times that do not wait
for answers.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import math
import os
import re
import signal
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
import numpy as np
import torch

import persia
from benchmarks import runner
from benchmarks.elsewhere import start_python
from benchmarks.publish import FEATURES, folder, trainer_of
from persia.publish import PublishOptions
from persia.serve import Predictor
from persia.serve.client import _samples
from persia.serve.http.app import INLINE_BYTES
from persia.serve.http.codecs.codec import MSGPACK

BATCH = {"smoke": 16, "laptop": 256, "full": 256}
SECONDS = {"smoke": 0.3, "laptop": 20.0, "full": 60.0}
"""Of each load."""

ROUNDS = 5
LOAD = 0.7
"""Share of the highest rate at which latencies are measured."""

OVERLOAD = 3.0
OFFERED = 2.5
"""Times the highest rate that clients must have sent, for the load to count as one of `OVERLOAD`."""

LARGE_ROWS = 2048
"""Samples of a request whose body is converted in a thread."""

GOODPUT = 0.7
"""Share of the highest rate at which an overloaded server still answers in time."""

DEADLINE = 1.0
"""Seconds within which an accepted request must be answered; `deadline_ms` of the server."""

HIDDEN = (256, 128)
CLIENTS = 8
OVERLOAD_CLIENTS = {"smoke": 32, "laptop": 512, "full": 512}
"""Enough that those that wait for an answer do not keep others from asking."""


def network(schema: persia.Schema) -> torch.nn.Module:
    """The network, for `persia serve --model`."""
    return persia.nn.models.FFNN(schema, hidden=HIDDEN)


class Answer(NamedTuple):
    """An answer to a request.

    Attributes:
        status: of HTTP.
        latency: seconds since the request was due.
        seconds: since it was sent.
    """

    status: int
    latency: float
    seconds: float


class Server:
    """`persia serve` in a separate process.

    Args:
        url: of the log of changes.
        core: that the process is held to; None for all.
    """

    def __init__(self, url: str, core: int | None) -> None:
        program = ["-m", "persia", "serve", url, "--model", "benchmarks.serve_http:network"]
        options = ["--threads", "1", "--port", "0", "--deadline-ms", str(1000 * DEADLINE)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = start_python([*program, *options], environment)
        while "ready:" not in self.process.err.read_text() and self.process.wait(0.02) is None:
            pass
        said = self.process.err.read_text()
        match = re.search(r"http://[\d.]+:(\d+) serves", said)
        if match is None:
            raise RuntimeError(said)
        self.port = int(match[1])
        if core is not None:
            for thread in os.listdir(f"/proc/{self.process.pid}/task"):
                os.sched_setaffinity(int(thread), {core})

    def memory(self) -> int:
        """Returns the bytes of memory that the process holds."""
        with open(f"/proc/{self.process.pid}/statm", encoding="ascii") as counts:
            return int(counts.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def close(self) -> None:
        os.kill(self.process.pid, signal.SIGTERM)
        self.process.wait(60)
        self.process.end()


@contextlib.contextmanager
def served(preset: str) -> Iterator[tuple[str, list[persia.Batch]]]:
    """Trains a little and publishes; yields the URL of the log and batches to ask for."""
    reader = persia.data.synthetic(
        4 * 4096 if preset != "smoke" else 256,
        id_features=FEATURES,
        ids_per_feature=100_000,
        dense_features=13,
        batch_size=BATCH[preset],
    )
    batches = list(reader)
    with folder() as path:
        url = str(path / "log")
        trainer_of(reader.schema, PublishOptions(url, seconds=0.2)).fit(batches)
        yield url, batches[:16]


def cores() -> tuple[int | None, set[int]]:
    """Returns the core of the server, and the cores of the clients."""
    allowed = sorted(os.sched_getaffinity(0))
    return (allowed[0], set(allowed[1:])) if len(allowed) > 1 else (None, set(allowed))


@contextlib.contextmanager
def pinned_to(cores: set[int]) -> Iterator[None]:
    """Holds this thread, and threads that it starts, to some cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def body_of(batch: persia.Batch, schema: persia.Schema) -> bytes:
    columns = {
        name: column.values if column.offsets is None else (column.values, column.offsets)
        for name, column in batch.id_features.items()
    }
    columns |= {name: batch.dense[:, i] for i, name in enumerate(schema.dense_features)}
    return msgspec.msgpack.encode(_samples(columns))


def arrivals(rate: float, seconds: float) -> np.ndarray:
    """Times of a Poisson process."""
    gaps = np.random.default_rng(0).exponential(1 / rate, max(8, int(rate * seconds)))
    return np.cumsum(gaps)


def ask(port: int, bodies: list[bytes], times: np.ndarray, clients: int) -> list[Answer]:
    """Sends a request at each of these times, whether or not others have been answered, if a client is free."""
    answers: list[Answer] = []
    lock = threading.Lock()
    numbers = iter(range(len(times)))
    began = time.perf_counter() + 0.05

    def run() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.connect()
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own_answers = []
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                break
            due = began + times[number]
            if (wait := due - time.perf_counter()) > 0:
                time.sleep(wait)
            sent = time.perf_counter()
            connection.request("POST", "/predict", bodies[number % len(bodies)], {"Content-Type": MSGPACK})
            response = connection.getresponse()
            response.read()
            end = time.perf_counter()
            own_answers.append(Answer(response.status, end - due, end - sent))
        connection.close()
        with lock:
            answers.extend(own_answers)

    threads = [threading.Thread(target=run) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def waited(answer: Answer) -> float:
    """Returns the latency of an answer. A refused request counts at least its deadline, as it does for its client."""
    return answer.latency if answer.status == 200 else max(answer.latency, DEADLINE)


def highest_rate(port: int, bodies: list[bytes], seconds: float) -> float:
    """Returns the requests/s that the server answers while there is always another one."""
    elapsed, count, began = 0.0, 0, time.perf_counter()
    while elapsed < seconds or not count:  # On a busy machine all of the first ones may miss their deadline.
        if elapsed > 60.0:
            raise RuntimeError("The server has answered no request within 60 s.")
        answers = ask(port, bodies, np.zeros(4 * CLIENTS), CLIENTS)
        count += sum(answer.status == 200 for answer in answers)
        elapsed = time.perf_counter() - began
    return count / elapsed


def in_process(predict: Callable[[persia.Batch], object], batches: list[persia.Batch], seconds: float) -> list[float]:
    """Returns the latencies of a predictor at `LOAD` of its highest rate, one request after another."""
    count, began = 0, time.perf_counter()
    while count < 16 or time.perf_counter() - began < seconds / 4:
        predict(batches[count % len(batches)])
        count += 1
    times = arrivals(LOAD * count / (time.perf_counter() - began), seconds)
    latencies, began = [], time.perf_counter()
    for number, due in enumerate(times):
        if (wait := began + due - time.perf_counter()) > 0:
            time.sleep(wait)
        predict(batches[number % len(batches)])
        latencies.append(time.perf_counter() - began - due)
    return latencies


@runner.measures("serve.http_p99")
def http_p99(preset: str) -> runner.Measure:
    """The 99th percentile of latencies over HTTP, over that in process, each at 70 % of its highest rate."""
    core, others = cores()
    seconds = SECONDS[preset] / ROUNDS
    ratios, details, refused = [], [], 0
    with served(preset) as (url, batches), Predictor(url, network) as predictor:
        bodies = [body_of(batch, predictor.schema) for batch in batches]
        torch.set_num_threads(1)
        server = Server(url, core)
        try:
            for _ in range(ROUNDS):
                with pinned_to({core} if core is not None else others):
                    inside = float(np.percentile(in_process(predictor.predict, batches, seconds), 99))
                with pinned_to(others):
                    rate = highest_rate(server.port, bodies, seconds / 4)
                    answers = ask(server.port, bodies, arrivals(LOAD * rate, seconds), 4 * CLIENTS)
                outside = float(np.percentile([waited(answer) for answer in answers], 99))
                refused += sum(answer.status != 200 for answer in answers)
                ratios.append(outside / inside)
                details.append((1000 * inside, 1000 * outside, rate))
        finally:
            server.close()
    inside, outside, rate = (statistics.median(each) for each in zip(*details, strict=True))
    said = {
        "of": "p99 of latencies, HTTP over in process, each at 70 % of its highest rate",
        "in_process_ms": inside,
        "http_ms": outside,
        "http_requests_per_s": rate,
        "refused": refused,
        "samples": BATCH[preset],
    }
    return runner.quantity("serve.http_p99", ratios, "ratio", at_most=3.0, details=said)


@runner.measures("serve.overload", "serve.overload_memory")
def overload(preset: str) -> Iterator[runner.Measure]:
    """Requests at three times the highest rate: those accepted that are answered in time, and memory that is kept."""
    core, others = cores()
    seconds = SECONDS[preset]
    with served(preset) as (url, batches):
        with Predictor(url, network) as predictor:
            bodies = [body_of(batch, predictor.schema) for batch in batches]
        server = Server(url, core)
        try:
            with pinned_to(others):
                rate = highest_rate(server.port, bodies, seconds / 4)
                times = arrivals(OVERLOAD * rate, seconds)
                ask(server.port, bodies, times, OVERLOAD_CLIENTS[preset])  # Buffers of connections are there after it.
                before = server.memory()
                load = offered(server.port, bodies, times, OVERLOAD_CLIENTS[preset])
                after = server.memory()
                recovered = highest_rate(server.port, bodies, seconds / 4)
        finally:
            server.close()
    said = {**said_of(load, rate), "rate_afterwards": recovered}
    yield runner.Measure("serve.overload", in_time(load, rate, preset), "fraction", at_least=0.99, details=said)
    grown = {"of": "memory of the server after an overload, over that after another one before", "bytes": after}
    yield runner.Measure("serve.overload_memory", after / before, "ratio", at_most=1.02, details=grown)


@runner.measures("serve.overload_large_bodies", "serve.overload_large_bodies_rate")
def overload_large_bodies(preset: str) -> Iterator[runner.Measure]:
    """The same with bodies that are converted in a thread; and the rate of answers in time, over the highest one."""
    core, others = cores()
    seconds = SECONDS[preset]
    with served(preset) as (url, batches):
        large = persia.Batch.concat(list(itertools.islice(itertools.cycle(batches), LARGE_ROWS // BATCH[preset])))
        with Predictor(url, network) as predictor:
            bodies = [body_of(large, predictor.schema)]
        assert len(bodies[0]) > INLINE_BYTES
        server = Server(url, core)
        try:
            with pinned_to(others):
                rate = highest_rate(server.port, bodies, seconds / 4)
                times = arrivals(OVERLOAD * rate, seconds)
                load = offered(server.port, bodies, times, OVERLOAD_CLIENTS[preset])
        finally:
            server.close()
    said = {**said_of(load, rate), "bytes": len(bodies[0])}
    share = in_time(load, rate, preset)
    yield runner.Measure("serve.overload_large_bodies", share, "fraction", at_least=0.99, details=said)
    good = sum(answer.status == 200 and answer.seconds <= DEADLINE for answer in load.answers) / load.seconds
    yield runner.Measure(
        "serve.overload_large_bodies_rate", good / rate, "ratio",
        at_least=None if preset == "smoke" else GOODPUT, details=said | {"of": "answers/s in time, over the highest"},
    )  # fmt: skip


class Load(NamedTuple):
    """Answers to an overload.

    Attributes:
        answers: those that came.
        seconds: from the first request to the last answer.
    """

    answers: list[Answer]
    seconds: float


def offered(port: int, bodies: list[bytes], times: np.ndarray, clients: int) -> Load:
    """Returns what `ask` does, and how long it took."""
    began = time.perf_counter()
    answers = ask(port, bodies, times, clients)
    return Load(answers, time.perf_counter() - began)


def said_of(load: Load, rate: float) -> dict[str, object]:
    """Returns the details of an overload."""
    accepted = [answer.seconds for answer in load.answers if answer.status != 503]
    return {
        "of": "answers within the deadline, of requests that were not refused with 503",
        "deadline_s": DEADLINE,
        "requests_per_s": len(load.answers) / load.seconds,
        "highest_rate": rate,
        "offered": len(load.answers) / load.seconds / rate,
        "accepted": len(accepted) / len(load.answers),
        "p99_ms": 1000 * float(np.percentile(accepted, 99)) if accepted else math.nan,
    }


def in_time(load: Load, rate: float, preset: str) -> float:
    """Returns the share of accepted requests that were answered in time; NaN, which fails, if it was no overload."""
    accepted = [answer for answer in load.answers if answer.status != 503]
    if not accepted or (preset != "smoke" and len(load.answers) / load.seconds < OFFERED * rate):
        return math.nan
    return sum(answer.status == 200 and answer.seconds <= DEADLINE for answer in accepted) / len(accepted)
