"""Clicks of a stream that are trained, while every role, the server and the broker fail: each once, or counted.

    python -m benchmarks 'online.exactly_once*' [--preset smoke|laptop|full] [--json FILE]

Each click has a number, which is an id of a table of its own, so its row counts how often it was trained. Training runs
on Ray, publishes to a directory, and `persia serve` follows. Clicks come from librdkafka's mock cluster, a process of
its own that is paused and refuses connections, or from KAFKA_BOOTSTRAP, which is left alone. At the end the stream is
drained. A click that was never trained must be in a batch that is counted as lost; one that was trained several times,
in steps that a restart has repeated from its recovery point. One that was trained must be served: of 2,000 of them, all
are in the server within two minutes.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np

from benchmarks import runner
from persia.errors import MissingExtraError, PersiaError

try:
    import ray  # noqa: F401
    from confluent_kafka import Producer  # noqa: F401
except ImportError as error:
    raise MissingExtraError(
        'online.exactly_once needs Kafka and Ray: pip install "persia-recsys[kafka,ray]"', extra="kafka"
    ) from error

from benchmarks.cluster import ray_here
from benchmarks.exactly_once_broker import PARTITIONS, Broker
from benchmarks.exactly_once_count import Deviations, deviations, lost_batches
from benchmarks.exactly_once_faults import KINDS, ON_BROKER, Server, Storm, draw
from benchmarks.exactly_once_training import (
    MODES,
    Clicks,
    WatchedRay,
    configured,
    make_trainer,
    reader,
    say,
    times_trained,
)  # fmt: skip
from persia.modes import Auto, Dense
from persia.trainer.progress import FitResult


class Plan(NamedTuple):
    """One run of a mode.

    Attributes:
        seconds: over which faults are made.
        faults: how many.
        per_second: batches sent a second.
    """

    seconds: float
    faults: int
    per_second: float = 20.0


PLANS = {"smoke": Plan(4, 2), "laptop": Plan(120, 9), "full": Plan(450, 30)}
COUNTS = {"ps": 2, "embedding_workers": 2, "data_loaders": 2, "nn_workers": 2}
SMOKE_COUNTS = {"ps": 2, "embedding_workers": 1, "data_loaders": 1, "nn_workers": 1}
SMOKE_MODES = ("hybrid",)
SMOKE_FAULTS = ("embedding_ps", "embedding_worker")
SERVED_SECONDS = 120.0
"""Within which the server must have the last clicks; it may have to start again."""


@runner.measures(*(f"online.exactly_once.{name}" for name in MODES), "online.exactly_once")
def exactly_once(preset: str, selected: set[str]) -> Iterator[runner.Measure]:
    """Clicks missing or trained twice beyond what is counted, or trained and not served, in each mode and in all."""
    whole = "online.exactly_once" in selected
    measures = []
    with ray_here(preset, log_to_driver=False):
        for seed, name in enumerate(SMOKE_MODES if preset == "smoke" else MODES):
            if whole or f"online.exactly_once.{name}" in selected:
                measures.append(measured(name, PLANS[preset], seed, preset == "smoke"))
                yield measures[-1]
    if whole:
        names = ("clicks", "missing", "twice", "unserved", "untrained", "repeated", "restarts", "faults")
        total = {name: sum(each.details[name] for each in measures) for name in names}
        yield runner.Measure(
            "online.exactly_once", sum(each.value for each in measures), "rows", at_most=0, details=total
        )


def measured(name: str, plan: Plan, seed: int, smoke: bool) -> runner.Measure:
    """Trains in one mode through the faults of a plan."""
    mode = MODES[name]
    from_dense_ps = not isinstance(mode, Auto) and mode.dense() is Dense.SERVER  # In Auto, only now and then.
    kinds = tuple(kind for kind in KINDS if from_dense_ps or kind != "dense_ps")
    if configured() is not None:
        kinds = tuple(kind for kind in kinds if kind not in ON_BROKER)
    with ExitStack() as used:
        log = used.enter_context(tempfile.TemporaryDirectory(prefix="persia-exactly-once-"))
        broker = used.enter_context(Broker(configured()))
        topic = broker.create()
        cluster = used.enter_context(WatchedRay(topic, **(SMOKE_COUNTS if smoke else COUNTS)))
        clicks = Clicks(broker, topic, plan.per_second)
        server = used.enter_context(Server(log))
        trainer = make_trainer(cluster, mode, log)

        def after() -> None:
            try:
                clicks.end()
            finally:
                trainer.stop()

        faults = draw(seed, plan.faults, SMOKE_FAULTS if smoke else kinds)
        storm = Storm(cluster, clicks, broker, server, plan.seconds, faults, after)
        say(f"{name}: {', '.join(faults)}")
        clicks.start()
        storm.start()
        try:
            first = trainer.fit(reader(broker, topic))
        finally:
            storm.give_up()
            storm.join()
        if storm.failure is not None:
            raise storm.failure
        last = trainer.fit(reader(broker, topic, until="now"))
        batches = clicks.sent
        ends = {partition: len(range(partition, batches, PARTITIONS)) for partition in range(PARTITIONS)}
        if trainer.state.offsets[topic] != ends:
            raise RuntimeError(f"The stream ends at {ends}, but training did at {trainer.state.offsets[topic]}.")
        times = times_trained(trainer, batches)
        numbers = np.arange(batches)
        lost = lost_batches(last, mode)
        counted = deviations(times, numbers % PARTITIONS, numbers // PARTITIONS, cluster.repeats, lost)
        return _measure(name, counted, storm, server, (first, last), lost, times, len(cluster.repeats))


def _measure(
    name: str,
    deviations: Deviations,
    storm: Storm,
    server: Server,
    results: tuple[FitResult, FitResult],
    lost: int,
    times: Any,
    repeats: int,
) -> runner.Measure:
    first, last = results
    report = last.asynchronous
    lacking = unserved(server, np.flatnonzero(times.ravel() > 0))
    details = {
        "missing": deviations.missing,
        "twice": deviations.twice,
        "clicks": times.size,
        "untrained": deviations.untrained,
        "repeated": deviations.repeated,
        "incomplete_batches": deviations.batches,
        "counted_batches": lost,
        "lost_batches": last.lost_batches,
        "lost_gradients": last.lost_gradients,
        "abandoned": report.abandoned + report.lost_batches if report is not None else 0,
        "restarts": first.failures + last.failures,
        "restarts_from_recovery_points": repeats,
        "faults": len(storm.made),
        "faults_by_kind": dict(Counter(storm.made)),
        "predictions": server.answered,
        "unanswered": server.unanswered,
        "unserved": lacking,
    }
    say(f"{name}: {details}")
    return runner.Measure(
        f"online.exactly_once.{name}",
        deviations.missing + deviations.twice + lacking,
        "rows",
        at_most=0,
        details=details,
    )


def unserved(server: Server, clicks: Any, sample: int = 2_000) -> int:
    """Returns how many of the trained clicks the server lacks, of a sample of them, once it has had time to follow.

    Their rows are in the PSs at the end, and `fit` returns only after it has published them. So a click that the server
    lacks was lost on the way from training to served rows. All are lacking if the server does not answer.
    """
    some = clicks[:: max(1, len(clicks) // sample)][:sample]
    end = time.monotonic() + SERVED_SECONDS
    while True:
        try:
            left = int((~server.client.embeddings("click", some).found).sum())
        except PersiaError:
            left = len(some)
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.5)
