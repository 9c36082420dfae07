"""From click to served row: clicks go to Kafka, training follows them, a server follows training, and clients ask it.

    python examples/online/run.py            # two minutes; `make demo-online` is the same

Four programs: this one sends clicks and asks for predictions, `train.py` trains in `Hybrid("auto")` and publishes its
changes, `persia serve` answers over HTTP, and Kafka is KAFKA_BOOTSTRAP, or librdkafka's mock cluster in this process.
It sends the clicks of globo_ctr if PERSIA_DATA has the data set, and generated clicks otherwise.

It prints the AUC of the server's predictions for clicks before they are sent, next to the AUC of a model that stays as
it was at the beginning, and the time from a click until a prediction uses the row that the click changed. It stops
sending clicks while training lags behind by more than the mock cluster keeps.
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
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

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

PARTITIONS = 4
"""Of the topic; the mock cluster has no other number."""

LAG_BYTES = 3 << 20
"""Of each partition, by which training may lag behind. The mock cluster deletes all but the last 5 MiB."""

LAG_SECONDS = 60.0
"""Maximum wait for training."""

KINDS = ("known", "new")
"""Of users whose clicks are watched."""

WATCH_SECONDS = 0.2
"""Between two users of a kind who are watched."""

SAME = 1e-6
"""Maximum difference of two answers with the same network and rows: batches of other sizes are computed otherwise."""


class Training:
    """Follows what the training program prints, until it ends.

    Args:
        process: runs `train.py`.

    Attributes:
        started: whether training has finished the clicks of the days before.
        waited: seconds that `await_lag` has waited.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._rows = 0
        """Clicks of the stream that were read."""
        self.started = False
        self.waited = 0.0
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.partition(" ")
            if word == "read":
                self._rows = int(rest)
            else:
                print(line, end="", flush=True)
            self.started |= word == "trained"

    def await_lag(self, rows: int, size: int) -> None:
        """Waits until training lags behind by `LAG_BYTES` of each partition at most.

        Args:
            rows: clicks that were sent.
            size: bytes of their messages.

        Raises:
            SystemExit: training has ended, or lags behind for `LAG_SECONDS`.
        """
        began = time.monotonic()
        while (rows - self._rows) * size > PARTITIONS * LAG_BYTES * rows:
            if self._process.poll() is not None:
                raise SystemExit("Training has ended early; see its messages above.")
            if time.monotonic() - began > LAG_SECONDS:
                raise SystemExit(
                    f"Training has read {self._rows:,} of {rows:,} clicks, and comes no nearer within "
                    f"{LAG_SECONDS:g} s. See its messages above, or send fewer: --rate."
                )
            time.sleep(0.05)
        self.waited += time.monotonic() - began


class Watched(NamedTuple):
    """A user whose click is to be served.

    Attributes:
        kind: "known", if clicks of the user were trained before the stream; else "new".
        probe: the click.
        row: of the user in the server before it was sent; zeros if there was none.
        answer: prediction for the click before it was sent.
        since: when it was sent.
    """

    kind: str
    probe: pa.Table
    row: np.ndarray
    answer: float
    since: float


class Freshness:
    """Measures the time from a click of a user to a `/predict` that has used the row that it has changed.

    Users are watched from their first click in the stream on, so that no earlier click changes their row meanwhile.
    Once the server has another row of the user than before the click, it is asked about the click itself. The answer
    has used that row, as rows of a server do not go back; it counts if it differs from the one before the click.

    Use it as a context manager, which ends its thread.

    Args:
        client: asks the server.
        known: users whose clicks were trained before.

    Attributes:
        seconds: by kind of user; infinite for clicks that were not served within 10 s of the last one.
    """

    def __init__(self, client: Client, known: np.ndarray) -> None:
        self._client = client
        self._known = set(known.tolist())
        self._clicked: set[int] = set()
        """Users who have come in the stream."""
        self._lock = threading.Lock()
        self._waiting: dict[int, Watched] = {}
        self._last = dict.fromkeys(KINDS, 0.0)
        """Time of the last click that is watched."""
        self.seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self._failure: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Freshness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def sending(self, part: pa.Table) -> None:
        """Notes clicks that are about to be sent, and watches some users of them whose first click this is."""
        now = time.monotonic()
        users = set(part["user_id"].to_numpy().tolist()) - self._clicked
        self._clicked |= users
        unseen = {}
        for kind, those in (("known", users & self._known), ("new", users - self._known)):
            if those and now - self._last[kind] >= WATCH_SECONDS:
                self._last[kind] = now
                with suppress(OverloadedError):  # Another one, then.
                    unseen[min(those)] = self._before(kind, min(those), part)
        now = time.monotonic()
        with self._lock:
            self._waiting |= {user: each._replace(since=now) for user, each in unseen.items()}

    def _before(self, kind: str, user: int, part: pa.Table) -> Watched:
        """Asks for the row of a user, and about the click."""
        probe = part.slice(part["user_id"].to_numpy().tolist().index(user), 1)
        row = self._client.embeddings("user_id", [user]).rows[0]
        answer = float(self._client.predict(news.columns(probe)).probabilities[0, 0])
        return Watched(kind, probe, row, answer, 0.0)

    def _watch(self) -> None:
        try:
            while not self._stop.wait(0.05):
                with suppress(OverloadedError):  # Later, then.
                    self._ask()
        except BaseException as error:
            self._failure = error

    def _ask(self) -> None:
        """Asks for the rows of all users that are watched, and about the clicks of those whose row has changed."""
        with self._lock:
            waiting = dict(self._waiting)
        if not waiting:
            return
        rows = self._client.embeddings("user_id", list(waiting))
        changed = {
            user: each
            for (user, each), there, row in zip(waiting.items(), rows.found, rows.rows, strict=True)
            if there and not np.array_equal(row, each.row)
        }
        if not changed:
            return
        probes = pa.concat_tables([each.probe for each in changed.values()])
        answers = self._client.predict(news.columns(probes)).probabilities[:, 0]
        now = time.monotonic()
        for (user, each), answer in zip(changed.items(), answers.tolist(), strict=True):
            if abs(answer - each.answer) > SAME:
                with self._lock:
                    del self._waiting[user]
                self.seconds[each.kind].append(now - each.since)

    def end(self) -> None:
        """Waits up to 10 s for the users that are watched."""
        deadline = time.monotonic() + 10
        while self._waiting and self._failure is None and time.monotonic() < deadline:
            time.sleep(0.1)
        self._stop.set()
        self._thread.join(30)
        if self._failure is not None:
            raise self._failure
        for each in self._waiting.values():
            self.seconds[each.kind].append(math.inf)


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
        for done in admin.create_topics([NewTopic(topic, num_partitions=PARTITIONS)]).values():
            done.result(timeout=30)
    producer.list_topics(topic, timeout=10)


@contextmanager
def program(words: list[str], name: str, output: int) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program of this example until the end of the block."""
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen([sys.executable, *words], env=environment, stdout=output, text=True)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
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
    frozen: Predictor, freshness: Freshness, training: Training,
) -> dict[str, Any]:  # fmt: skip
    """Sends clicks at a constant rate, and asks for predictions of some of them first. Returns the measurements.

    It waits while training lags behind, and then sends the missed clicks immediately.
    """
    intervals: list[dict[str, Any]] = []
    whole = [AUC(), AUC()]
    began, sent, size, refused = time.monotonic(), 0, 0, 0
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
            for which, probabilities in enumerate(both):
                scores = probabilities.clip(1e-6, 1 - 1e-6)
                logits = np.log(scores) - np.log1p(-scores)
                now["aucs"][which].update(logits, labels)
                whole[which].update(logits, labels)
            now["asked"] += len(part) if both else 0
        training.await_lag(sent, size)
        message = news.message(part)
        freshness.sending(part)
        producer.produce(topic, message, partition=number % PARTITIONS)
        producer.poll(0)
        now["sent"] += len(part)
        sent, size = sent + len(part), size + len(message)
        time.sleep(max(0.0, began + sent / arguments.rate - time.monotonic()))
    seconds = time.monotonic() - began
    producer.flush(30)
    freshness.end()
    return {
        "clicks": sent,
        "clicks_per_s": sent / seconds,
        "waited_s": training.waited,
        "refused": refused,
        "auc_served": whole[0].result(),
        "auc_frozen": whole[1].result(),
        "freshness_s": {kind: sorted(seconds) for kind, seconds in freshness.seconds.items()},
        "intervals": [{**each, "aucs": [one.result() for one in each["aucs"]]} for each in intervals if each["asked"]],
    }


def show(results: dict[str, Any], interval: float) -> None:
    table = Table(title="Clicks, asked about before they are trained on")
    for column in ("from", "clicks", "asked", "AUC served", "AUC of the frozen model"):
        table.add_column(column, justify="right")
    for place, each in enumerate(results["intervals"]):
        served, frozen = each["aucs"]
        table.add_row(
            f"{place * interval:.0f} s", f"{each['sent']:,}", f"{each['asked']:,}", f"{served:.4f}", f"{frozen:.4f}"
        )
    console = Console()
    console.print(table)
    gain = results["auc_served"] - results["auc_frozen"]
    console.print(
        f"{results['clicks']:,} clicks at {results['clicks_per_s']:,.0f}/s: "
        f"AUC {results['auc_served']:.4f} served, {gain:+.4f} over the frozen model"
    )
    if results["refused"]:
        console.print(f"The server had too much to do for {results['refused']:,} more.")
    if results["waited_s"] > 1:
        console.print(f"No clicks were sent for {results['waited_s']:.0f} s, as training lagged behind.")
    for kind, fresh in results["freshness_s"].items():
        if fresh:
            median, p99 = np.quantile(fresh, [0.5, 0.99], method="higher")  # Not between a number and infinity.
            console.print(
                f"From a click to a prediction with its row: median {median:.1f} s, 99th percentile {p99:.1f} s "
                f"({len(fresh)} {kind} users)"
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
        trainer = used.enter_context(program(words, "training", subprocess.PIPE))
        training = Training(trainer)
        wait_for("Training", trainer, lambda: training.started, 600.0)
        port = free_port()
        words = ["-m", "persia", "serve", log, "--model", "news:Model", "--port", str(port), "--poll-seconds", "0.5"]
        server = used.enter_context(program(words, "the server", subprocess.DEVNULL))
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
        freshness = used.enter_context(Freshness(client, before["user_id"].to_numpy()))
        results = send(arguments, stream, producer, topic, client, frozen, freshness, training)
        if trainer.poll() is not None:
            raise SystemExit("Training has ended early; see its messages above.")
    show(results, arguments.interval)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main()
