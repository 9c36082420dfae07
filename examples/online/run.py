"""From click to served row: clicks go to Kafka, training follows them, a server follows training, and clients ask it.

    python examples/online/run.py            # two minutes; `make demo-online` is the same

Four programs: this one sends clicks and asks for predictions, `train.py` trains in `Hybrid("auto")` and publishes its
changes, `persia serve` answers over HTTP, and Kafka is KAFKA_BOOTSTRAP, or librdkafka's mock cluster in this process.
Clicks are those of globo_ctr if PERSIA_DATA has it, else made up.

It prints the AUC of what the server answers about clicks before they are sent, beside that of a model that stays as it
was at the beginning, and the time from a click to the row that the server has of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import news
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console
from rich.table import Table

import persia
from persia.errors import OverloadedError, PersiaError
from persia.metrics import AUC
from persia.serve import Client, Predictor, ServeOptions

SMALL = "PERSIA_EXAMPLE_SMALL" in os.environ
HERE = Path(__file__).parent
ROWS = 200
"""Clicks of a message."""

WATCH_SECONDS = 0.2
"""Between two users whose row is waited for."""


class Freshness:
    """Measures the time from the first click of a user to the row that the server has of that user.

    From then on each `/predict` uses the row.

    Args:
        client: asks the server.
        known: users whose clicks were trained before.
    """

    def __init__(self, client: Client, known: np.ndarray) -> None:
        self._client = client
        self._known = set(known.tolist())
        self._lock = threading.Lock()
        self._waiting: dict[int, float] = {}
        self._watched = 0.0
        """Time of the last click that is watched."""
        self.seconds: list[float] = []
        """Infinite for users who were not served within 10 s of the last click."""
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def sending(self, part: pa.Table) -> None:
        """Notes clicks that are about to be sent, and watches one user of them whose first click this is."""
        now = time.monotonic()
        users = set(part["user_id"].to_numpy().tolist()) - self._known
        self._known |= users
        if users and now - self._watched >= WATCH_SECONDS:
            self._watched = now
            with self._lock:
                self._waiting[min(users)] = now

    def _watch(self) -> None:
        try:
            while not self._stop.wait(0.05):
                with self._lock:
                    waiting = dict(self._waiting)
                if not waiting:
                    continue
                try:
                    found = self._client.embeddings("user_id", list(waiting)).found
                except OverloadedError:  # Later, then.
                    continue
                now = time.monotonic()
                for (user, since), there in zip(waiting.items(), found, strict=True):
                    if there:
                        with self._lock:
                            del self._waiting[user]
                        self.seconds.append(now - since)
        except BaseException as error:
            self._failure = error

    def end(self) -> None:
        """Waits up to 10 s for the users that are watched."""
        deadline = time.monotonic() + 10
        while self._waiting and self._failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure
        self.seconds += [math.inf] * len(self._waiting)


def connect() -> tuple[Producer, str]:
    """Returns a producer, and the address of its brokers."""
    configured = os.environ.get("KAFKA_BOOTSTRAP")
    mock = {} if configured else {"test.mock.num.brokers": 1}
    producer = Producer({"bootstrap.servers": configured or "mock", "log_level": 2, "linger.ms": 5, **mock})
    brokers = producer.list_topics(timeout=10).brokers.values()
    return producer, configured or ",".join(f"{broker.host}:{broker.port}" for broker in brokers)


def create(topic: str, producer: Producer, bootstrap: str) -> None:
    """Creates a topic; the mock cluster does so when it is asked for one."""
    if "KAFKA_BOOTSTRAP" in os.environ:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        for done in admin.create_topics([NewTopic(topic, num_partitions=4)]).values():
            done.result(timeout=30)
    producer.list_topics(topic, timeout=10)


@contextmanager
def program(words: list[str], name: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program of this example until the end of the block."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, *words], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            print(f"{name} did not end within 60 s", file=sys.stderr)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(what: str, process: subprocess.Popen[str], ready: Any, seconds: float = 120.0) -> None:
    """Waits until `ready()`; fails if the program has ended."""
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{what} did not begin; see its messages above.")
        time.sleep(0.2)


def send(
    arguments: argparse.Namespace, stream: Iterator[pa.Table], producer: Producer, topic: str, client: Client,
    frozen: Predictor, freshness: Freshness,
) -> dict[str, Any]:  # fmt: skip
    """Sends clicks at a constant rate, and asks about some of them before. Returns what was measured."""
    intervals: list[dict[str, Any]] = []
    whole = [AUC(), AUC()]
    began, sent, refused = time.monotonic(), 0, 0
    asked_every = max(1, round(arguments.rate / ROWS / arguments.asks))
    for number, part in enumerate(stream):
        place = int((time.monotonic() - began) / arguments.interval)
        if time.monotonic() - began >= arguments.seconds:
            break
        while len(intervals) <= place:
            intervals.append({"sent": 0, "asked": 0, "aucs": [AUC(), AUC()]})
        now = intervals[place]
        if number % asked_every == 0:
            columns, labels = news.columns(part), part["label"].to_numpy().astype(np.float32)
            batch = persia.Batch.from_columns(frozen.schema, columns, require_labels=False)
            try:
                both = client.predict(columns).probabilities[:, 0], frozen.predict(batch).probabilities[:, 0]
            except OverloadedError:
                both, refused = (), refused + len(part)
            for which, found in enumerate(both):
                scores = found.clip(1e-6, 1 - 1e-6)
                logits = np.log(scores) - np.log1p(-scores)
                now["aucs"][which].update(logits, labels)
                whole[which].update(logits, labels)
            now["asked"] += len(part) if both else 0
        freshness.sending(part)
        producer.produce(topic, news.message(part), partition=number % 4)
        producer.poll(0)
        now["sent"] += len(part)
        sent += len(part)
        time.sleep(max(0.0, began + sent / arguments.rate - time.monotonic()))
    seconds = time.monotonic() - began
    producer.flush(30)
    freshness.end()
    return {
        "clicks": sent,
        "clicks_per_s": sent / seconds,
        "refused": refused,
        "auc_served": whole[0].result(),
        "auc_frozen": whole[1].result(),
        "freshness_s": sorted(freshness.seconds),
        "intervals": [{**each, "aucs": [one.result() for one in each["aucs"]]} for each in intervals if each["asked"]],
    }


def show(found: dict[str, Any], interval: float) -> None:
    table = Table(title="Clicks, asked about before they are trained on")
    for column in ("from", "clicks", "asked", "AUC served", "AUC of the frozen model"):
        table.add_column(column, justify="right")
    for place, each in enumerate(found["intervals"]):
        served, frozen = each["aucs"]
        table.add_row(
            f"{place * interval:.0f} s", f"{each['sent']:,}", f"{each['asked']:,}", f"{served:.4f}", f"{frozen:.4f}"
        )
    console = Console()
    console.print(table)
    gain = found["auc_served"] - found["auc_frozen"]
    console.print(
        f"{found['clicks']:,} clicks at {found['clicks_per_s']:,.0f}/s: "
        f"AUC {found['auc_served']:.4f} served, {gain:+.4f} over the frozen model"
    )
    if found["refused"]:
        console.print(f"The server had too much to do for {found['refused']:,} more.")
    fresh = found["freshness_s"]
    if fresh:
        console.print(
            f"From a click to its row in the server: median {np.median(fresh):.1f} s, "
            f"99th percentile {np.quantile(fresh, 0.99):.1f} s ({len(fresh)} new users)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rate", type=float, default=2_000 if SMALL else 4_000, help="clicks a second (%(default)s)")
    add("--seconds", type=float, default=4 if SMALL else 60, help="length of the stream (%(default)s)")
    add("--interval", type=float, default=2 if SMALL else 10, help="seconds of a line of the table (%(default)s)")
    add("--before", type=int, default=4_000 if SMALL else 230_000, help="clicks to train before (%(default)s)")
    add("--first-day", type=int, default=0, help="of globo_ctr (%(default)s)")
    add("--asks", type=float, default=4, help="requests for predictions a second (%(default)s)")
    add("--publish-seconds", type=float, default=0.5 if SMALL else 2.0, help="between two increments (%(default)s)")
    add("--ps", type=int, default=0, help="embedding PSs on Ray; 0: all roles of training in one process")
    add("--json", help="file for the measurements", metavar="FILE")
    arguments = parser.parse_args()
    with ExitStack() as used:
        folder = Path(used.enter_context(tempfile.TemporaryDirectory()))
        log, yesterday, topic = str(folder / "log"), folder / "yesterday.parquet", f"clicks-{uuid.uuid4().hex[:8]}"
        stream = news.parts(news.clicks(arguments.first_day), ROWS)
        before = pa.concat_tables(islice(stream, arguments.before // ROWS))
        pq.write_table(before, yesterday)
        producer, bootstrap = connect()
        create(topic, producer, bootstrap)
        words = [str(HERE / "train.py"), str(yesterday), bootstrap, topic, log]
        words += ["--ps", str(arguments.ps), "--seconds", str(arguments.publish_seconds)]
        trainer = used.enter_context(program(words, "training"))
        assert trainer.stdout is not None
        line = trainer.stdout.readline().strip()
        if not line:
            raise SystemExit("Training has failed; see its messages above.")
        print(line)
        port = free_port()
        words = ["-m", "persia", "serve", log, "--model", "news:Model", "--port", str(port), "--poll-seconds", "0.5"]
        server = used.enter_context(program(words, "the server"))
        frozen = used.enter_context(Predictor(log, news.Model, ServeOptions(poll_seconds=1e8)))
        client = used.enter_context(Client(f"http://127.0.0.1:{port}"))

        def streaming() -> bool:
            """Whether all serve the epoch of the stream: each call of `fit` begins one."""
            frozen.refresh()
            return frozen.state().epoch >= 1

        def served() -> bool:
            try:
                return bool(client.health().get("epoch") == frozen.state().epoch)
            except PersiaError:  # Its port is not open yet, or it starts.
                return False

        wait_for("Training on the stream", trainer, streaming)
        wait_for("The server", server, served)
        print(f"http://127.0.0.1:{port}/docs answers predictions for {arguments.seconds:g} s")
        freshness = Freshness(client, before["user_id"].to_numpy())
        found = send(arguments, stream, producer, topic, client, frozen, freshness)
        if trainer.poll() is not None:
            raise SystemExit("Training has ended early; see its messages above.")
    show(found, arguments.interval)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
