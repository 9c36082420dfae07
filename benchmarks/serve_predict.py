"""The predictor in process: equal to the trainer, the latency compared with the network alone, and ranking.

    python -m benchmarks 'serve.*' [--preset smoke|laptop|full] [--json FILE]

The log of changes goes to PERSIA_BENCH_DIR, or the directory for temporary files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import persia
from benchmarks import runner
from benchmarks.publish import folder
from persia.optim import Adagrad
from persia.publish import PublishOptions
from persia.serve import Predictor, ServeOptions
from persia.serve.ranking import expanded

FEATURES, DIM, BATCH = 26, 16, 256
ROWS = {"smoke": 200, "laptop": 40_000, "full": 400_000}
"""Ids of each feature; rows are random reads from memory that no cache holds, but for smoke."""
REQUESTS = {"smoke": 20, "laptop": 2_000, "full": 10_000}
ROUNDS = {"smoke": 1, "laptop": 7, "full": 11}
LOAD = 0.7
ITEMS = 500

Model = Callable[[persia.Schema], torch.nn.Module]


@contextlib.contextmanager
def served(
    model: Model, schema: persia.Schema, data: Sequence[persia.Batch], *, compiled: bool = False, **options: Any
) -> Iterator[tuple[persia.Trainer, Predictor]]:
    """Trains on the data, publishes, and serves what was published, with further `ServeOptions`."""
    torch.manual_seed(0)
    with folder() as path:
        url = str(Path(path, "log"))
        trainer = persia.Trainer(
            model(schema),
            schema,
            optimizer=lambda params: torch.optim.Adam(params, 1e-3),
            embedding_optimizer=Adagrad(lr=0.05),
            mode=persia.modes.Sync(),
            options=persia.TrainerOptions(device="cpu", progress=False, publish=PublishOptions(url)),
        )
        trainer.fit(data)
        with Predictor(url, model, ServeOptions(poll_seconds=3600.0, compile=compiled, **options)) as predictor:
            yield trainer, predictor


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Runs the block on one core."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def network_of(schema: persia.Schema) -> torch.nn.Module:
    return persia.nn.models.FFNN(schema, hidden=(256, 128))


def click_data(preset: str, batches: int) -> tuple[persia.Schema, list[persia.Batch]]:
    reader = persia.data.synthetic(
        batches * BATCH, id_features=FEATURES, ids_per_feature=ROWS[preset], dim=DIM, batch_size=BATCH
    )
    return reader.schema, list(reader)


@runner.measures("serve.equal", "serve.equal_other_size", "serve.equal_compiled")
def equal(preset: str) -> Iterator[runner.Measure]:
    """Largest difference of a served probability from the trainer's.

    Of the same batch, of one in other parts, and of the same batch from compiled code. A smoke run compiles nothing: a
    compiler of C++ takes half a minute, and `tests/serve/test_compiled_network.py` needs it, too.
    """
    schema, data = click_data(preset, 20)

    def differs(name: str, batches: Sequence[persia.Batch], most: float, *, compiled: bool = False) -> runner.Measure:
        with served(network_of, schema, data, compiled=compiled) as (trainer, predictor):
            if compiled and isinstance(predictor.current().network.compute, torch.nn.Module):
                raise RuntimeError("The network was not compiled; the log says why. A C++ compiler is needed.")
            expected = np.concatenate(list(trainer.predict(data)))
            predicted = np.concatenate([predictor.predict(batch).probabilities for batch in batches])
            details = {"rows": len(expected), "step": trainer.global_step}
        largest = float(np.abs(predicted.astype(np.float64) - expected).max())
        return runner.Measure(name, largest, "fraction", at_most=most, details=details)

    parts = [batch.slice(begin, begin + 100) for batch in data for begin in range(0, len(batch), 100)]
    yield differs("serve.equal", data, 0.0)
    yield differs("serve.equal_other_size", parts, 1e-6)
    if preset != "smoke":
        yield differs("serve.equal_compiled", data, 1e-6, compiled=True)


def highest_rate(call: Callable[[int], object], requests: int) -> float:
    began = time.perf_counter()
    for number in range(requests):
        call(number)
    return requests / (time.perf_counter() - began)


def p99(call: Callable[[int], object], rate: float, requests: int, seed: int) -> float:
    """99th percentile of the time from a request's arrival to its answer; arrivals are random, and wait for none."""
    arrivals = np.random.default_rng(seed).exponential(1 / rate, requests).cumsum()
    latencies = []
    began = time.perf_counter()
    for number, arrival in enumerate(arrivals.tolist()):
        while time.perf_counter() - began < arrival:  # To sleep would be less exact than what is measured.
            pass
        call(number)
        latencies.append(time.perf_counter() - began - arrival)
    return float(np.quantile(latencies, 0.99))


@runner.measures("serve.p99_in_process", "serve.p99_in_process_ratio")
def latency(preset: str) -> Iterator[runner.Measure]:
    """p99 of `predict` on one core at 70 % of its highest rate, and over that of the network alone at 70 % of its own.

    26 features of dim 16, MLP 256-128, batches of 256. The network alone gets embeddings that are ready.
    """
    schema, data = click_data(preset, 100)
    requests, unlabelled = (
        REQUESTS[preset],
        [persia.Batch(batch.id_features, batch.dense, batch.labels[:, :0]) for batch in data],
    )
    with served(network_of, schema, data) as (trainer, predictor), one_core():
        network, embeddings = trainer.model.eval(), trainer.embeddings.eval()
        with torch.no_grad():
            ready = [(torch.from_numpy(batch.dense), embeddings(batch)) for batch in data]
            ready = [(dense, {name: each.clone() for name, each in rows.items()}) for dense, rows in ready]

        def whole(number: int) -> object:
            return predictor.predict(unlabelled[number % len(unlabelled)])

        @torch.no_grad()
        def alone(number: int) -> object:
            return network(*ready[number % len(ready)])

        calls = (whole, alone)
        for call in calls:
            highest_rate(call, requests // 4)
        latencies: list[list[float]] = [[], []]
        rates: list[list[float]] = [[], []]
        for seed in range(ROUNDS[preset]):
            for which in [0, 1] if seed % 2 else [1, 0]:
                rate = highest_rate(calls[which], requests // 4)
                rates[which].append(rate)
                latencies[which].append(p99(calls[which], LOAD * rate, requests, seed))
    medians = {name: statistics.median(values) for name, values in zip(("predict", "network"), rates, strict=True)}
    details = {"requests_per_s": medians, "load": LOAD, "rows": ROWS[preset] * FEATURES}
    yield runner.quantity("serve.p99_in_process", latencies[0], "s", details=details)
    ratios = [own / network_s for own, network_s in zip(*latencies, strict=True)]
    of = {"of": "p99, predict over the network alone", "network_p99_s": statistics.median(latencies[1])}
    yield runner.quantity("serve.p99_in_process_ratio", ratios, "ratio", at_most=1.3, details=of | details)


USER = ("user", "city", "device", "language", "history", "history_category")
RANKING = persia.Schema(
    [
        *(persia.IdFeature(name, 16) for name in ("user", "city", "device", "language")),
        persia.IdFeature("item", 16, table="items"),
        persia.IdFeature("category", 16, table="categories"),
        persia.IdFeature("history", table="items", pooling=None, max_length=50),
        persia.IdFeature("history_category", table="categories", pooling=None, max_length=50, aligned_with="history"),
    ],
    ["age", "hour", "price"],
)
MODELS: dict[str, Model] = {
    "two_tower": lambda schema: persia.nn.models.TwoTower(schema, item=["item", "category", "price"]),
    "din": lambda schema: persia.nn.models.DIN(schema, history=[("history", "item"), ("history_category", "category")]),
}


def ranking_batch(random: np.random.Generator, rows: int, events: int, ids: int) -> persia.Batch:
    columns: dict[str, object] = {name: random.integers(0, ids, rows) for name in ("user", "item", "category")}
    columns |= {name: random.integers(0, 50, rows) for name in ("city", "device", "language")}
    columns |= {name: random.integers(0, ids, (rows, events)) for name in ("history", "history_category")}
    columns |= {name: random.random(rows) for name in ("age", "hour", "price")}
    return persia.Batch.from_columns(RANKING, columns | {"label": random.integers(0, 2, rows)})


@runner.measures("serve.rank.two_tower", "serve.rank.din", "serve.rank")
def ranking(preset: str) -> Iterator[runner.Measure]:
    """Requests/s for one user with 500 items and 50 past events, `rank` over `predict` on 500 whole rows."""
    items, requests = (20, 3) if preset == "smoke" else (ITEMS, 30)
    random = np.random.default_rng(1)
    ids = 1_000 if preset == "smoke" else 50_000
    data = [ranking_batch(random, 64 if preset == "smoke" else 1024, 50, ids) for _ in range(4)]
    measures = []
    for name, model in MODELS.items():
        with served(model, RANKING, data) as (_, predictor), one_core():
            source = ranking_batch(random, items, 50, ids)
            user = persia.Batch(
                {name: source.id_features[name].slice(0, 1) for name in USER}, source.dense[:1], source.labels[:1, :0]
            )
            theirs = {name: column for name, column in source.id_features.items() if name not in USER}
            dense = source.dense.copy()
            dense[:, :2] = np.nan
            many = persia.Batch(theirs, dense, source.labels[:, :0])
            whole = expanded(RANKING, user, many)

            rank, score = functools.partial(predictor.rank, user, many), functools.partial(predictor.predict, whole)
            off = np.abs(rank().scores - score().scores).max()
            measure = runner.ratio(
                f"serve.rank.{name}",
                ours=functools.partial(highest_rate, lambda _, rank=rank: rank(), requests),
                theirs=functools.partial(highest_rate, lambda _, score=score: score(), requests),
                of=f"requests/s of {items} items, rank over predict on whole rows",
                rounds=ROUNDS[preset],
                at_least=2.0,
            )
            measures.append(dataclasses.replace(measure, details={**measure.details, "differs": float(off)}))
            yield measures[-1]
    yield runner.worst("serve.rank", measures)
