"""Rules of features: the same bits on each way, their cost in reading, fitting and serving, and what they gain.

    python -m benchmarks 'features.*' [--preset smoke|laptop|full] [--json FILE]

features.equal       rows that differ between the ways of `feature_cases.WAYS`, for random schemas.
features.rate.*      rows/s with 13 log-scaled numbers, 4 bucketised, 2 parts of times and 1 split, over reading the
                     same columns without rules; and of a pass of fitting over reading without rules.
features.serve_p99   99th percentile of converting and predicting 256 rows from raw columns, over prepared ones.
features.adult       test AUC of adult from its CSV by declaration alone; needs the data.
features.vector      AUC that a pretrained vector gains on cold items of generated data.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as pc
import pyarrow.parquet as pq
import torch

import persia
from benchmarks import runner
from benchmarks.feature_cases import WAYS, different_rows, from_lists, random_case
from benchmarks.reading import rate
from persia.data import find
from persia.optim import Adagrad
from persia.serve.http.bodies import Bodies
from persia.serve.http.codecs.json_codec import JsonCodec
from persia.serve.http.limits import ServeLimits

CASES = {"smoke": (3, 20), "laptop": (200, 1000), "full": (1000, 1000)}
"""Random schemas, and rows of each."""
ROWS = {"smoke": 5_000, "laptop": 300_000, "full": 2_000_000}
ROUNDS = {"smoke": 1, "laptop": 7, "full": 9}
BLOCKS = {"smoke": 2, "laptop": 30, "full": 150}
REQUESTS = 10
"""Requests of a block; blocks of the two sides alternate, so that a busy moment slows both."""
BATCH = 4096


@runner.measures("features.equal")
def equal(preset: str) -> runner.Measure:
    cases, rows = CASES[preset]
    different: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(cases):
            case = random_case(Random(number), rows)
            expected = from_lists(case, Path(folder))
            for way in WAYS[1:]:
                batch = way(case, Path(folder))
                found = different_rows(expected, batch, labels=bool(batch.labels.shape[1]))
                different[way.__name__] = different.get(way.__name__, 0) + found
    details = {"schemas": cases, "rows": rows, **different}
    return runner.Measure("features.equal", sum(different.values()), "rows", at_most=0.0, details=details)


def _schemas() -> tuple[persia.Schema, persia.Schema]:
    """Returns the schema with rules, and one that reads the same columns without them."""
    numbers = [f"n{i}" for i in range(13)]
    shared = [persia.IdFeature(f"id{i}", dim=8) for i in range(4)]
    ruled = [
        *(persia.IdFeature(f"b{i}", dim=8, bucketize=persia.Buckets(f"n{i}", quantiles=64)) for i in range(4)),
        persia.IdFeature("hour", dim=8, time=persia.TimePart("time", "hour")),
        persia.IdFeature("weekday", dim=8, time=persia.TimePart("time", "weekday")),
        persia.IdFeature("tags", dim=8, split="|"),
    ]
    rules = [persia.DenseFeature(name, fill=0, log=True, scale="standard") for name in numbers]
    unruled = [persia.IdFeature("time", dim=8), persia.IdFeature("tags", dim=8)]
    return (
        persia.Schema([*shared, *ruled], dense_features=rules, labels=["click"]),
        persia.Schema([*shared, *unruled], dense_features=numbers, labels=["click"]),
    )


def _write(folder: str, rows: int) -> tuple[Path, Path]:
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {f"id{i}": rng.integers(0, 10 ** (3 + i), rows) for i in range(4)}
    columns |= {f"n{i}": np.round(rng.lognormal(i / 4, 2, rows), 3) for i in range(13)}
    columns["time"] = rng.integers(1_600_000_000, 1_700_000_000, rows)
    columns["tags"] = ["|".join(map(str, row[: 1 + row[0] % 3])) for row in rng.integers(0, 100, (rows, 3))]
    table = pa.table(columns | {"click": rng.integers(0, 2, rows)})
    pq.write_table(table, Path(folder) / "rows.parquet")
    pc.write_csv(table, Path(folder) / "rows.csv")
    return Path(folder) / "rows.csv", Path(folder) / "rows.parquet"


@runner.measures("features.rate.csv", "features.rate.parquet", "features.rate.fit_csv", "features.rate.fit_parquet")
def rates(preset: str) -> Iterator[runner.Measure]:
    with tempfile.TemporaryDirectory() as folder:
        ruled, unruled = _schemas()
        for kind, path in zip(("csv", "parquet"), _write(folder, ROWS[preset]), strict=True):
            read = getattr(persia.data, kind)
            plain, raw = read(path, unruled, BATCH), read(path, ruled, BATCH)
            fitted = raw.with_schema(persia.fit_features(ruled, raw))
            theirs = rate(lambda plain=plain: sum(map(len, plain)))
            yield runner.ratio(
                f"features.rate.{kind}",
                ours=rate(lambda fitted=fitted: sum(map(len, fitted))),
                theirs=theirs,
                of="rows/s with rules over without",
                rounds=ROUNDS[preset],
                at_least=0.8,
            )

            def fit(raw: Any = raw) -> int:
                persia.fit_features(ruled, raw)
                return ROWS[preset]

            yield runner.ratio(
                f"features.rate.fit_{kind}",
                ours=rate(fit),
                theirs=theirs,
                of="rows/s of fitting over reading without rules",
                rounds=ROUNDS[preset],
                at_least=0.7,
            )


@runner.measures("features.serve_p99")
def serve_p99(preset: str) -> runner.Measure:
    """In process: the body of a `/predict` request is decoded, converted and predicted by the network alone.

    Each round is a ratio of two percentiles, each of all requests of one side in all blocks of the round.
    """
    rows = 256
    rng = np.random.default_rng(0)
    names = [f"n{i}" for i in range(13)]
    slots = [persia.IdFeature(f"id{i}", dim=16) for i in range(26)]
    rules = [persia.DenseFeature(name, fill=0, log=True, scale=(1.0, 2.0)) for name in names]
    raw = persia.Schema(slots, dense_features=rules)
    prepared = persia.Schema(slots, dense_features=names)
    numbers = {name: np.round(rng.lognormal(0, 2, rows), 3) for name in names}
    ids = {f"id{i}": rng.integers(0, 10_000, rows).tolist() for i in range(26)}
    network = torch.nn.Sequential(torch.nn.Linear(26 * 16 + 13, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
    embedding = torch.nn.Embedding(10_000, 16)

    def server(schema: persia.Schema, dense: dict[str, list[float]]) -> Callable[[], float]:
        body = msgspec.json.encode({"features": ids, "dense": dense})
        bodies, codec = Bodies(schema, ServeLimits()), JsonCodec()

        @torch.inference_mode()
        def seconds() -> float:
            start = time.perf_counter()
            batch = bodies.samples(codec, body)
            found = [embedding(torch.from_numpy(c.values.astype(np.int64))) for c in batch.id_features.values()]
            network(torch.cat([*found, torch.from_numpy(batch.dense)], 1))
            return time.perf_counter() - start

        return seconds

    sides = (
        server(raw, {name: values.tolist() for name, values in numbers.items()}),
        server(prepared, {name: np.round((np.log1p(x) - 1) / 2, 6).tolist() for name, x in numbers.items()}),
    )
    rounds = [_alternating_p99(sides, BLOCKS[preset]) for _ in range(ROUNDS[preset] + 1)][1:]  # The first warms up.
    details = {
        "of": "p99 of raw over prepared columns",
        "ours": statistics.median(ours for ours, _ in rounds),
        "theirs": statistics.median(theirs for _, theirs in rounds),
        "requests_per_round": BLOCKS[preset] * REQUESTS,
    }
    ratios = [ours / theirs for ours, theirs in rounds]
    return runner.quantity("features.serve_p99", ratios, "ratio", at_most=1.1, details=details)


def _alternating_p99(sides: tuple[Callable[[], float], Callable[[], float]], blocks: int) -> tuple[float, float]:
    """Returns the 99th percentile of the seconds of each side's requests."""
    times: tuple[list[float], list[float]] = ([], [])
    for block in range(blocks):
        for side in (0, 1) if block % 2 else (1, 0):
            times[side].extend(sides[side]() for _ in range(REQUESTS))
    ours, theirs = (float(np.quantile(each, 0.99)) for each in times)
    return ours, theirs


ADULT_SLOTS = (
    "workclass", "education", "marital_status", "occupation", "relationship", "race", "sex", "native_country",
)  # fmt: skip
ADULT = [
    "age", "workclass", "fnlwgt", "education", "education_num", "marital_status", "occupation", "relationship", "race",
    "sex", "capital_gain", "capital_loss", "hours_per_week", "native_country", "income",
]  # fmt: skip


def adult_schema() -> persia.Schema:
    """Adult by declaration: standardised numbers, of which two are logged, buckets of age, and texts."""
    numbers = [persia.DenseFeature(name, scale="standard") for name in ("age", "education_num", "hours_per_week")]
    numbers += [persia.DenseFeature(name, log=True, scale="standard") for name in ("capital_gain", "capital_loss")]
    return persia.Schema(
        [persia.IdFeature(name, dim=8, kind="text") for name in ADULT_SLOTS],
        dense_features=numbers,
        labels=[persia.Label("income", rule='income in (" >50K", " >50K.")')],
    )


@runner.measures("features.adult")
def adult(preset: str) -> runner.Measure | None:
    folder = find("adult")
    if folder is None:
        return None
    with tempfile.TemporaryDirectory() as copies:
        for name in ("data", "test"):  # The test file begins with a line that is a comment.
            lines = Path(folder, f"adult.{name}").read_text().splitlines()
            Path(copies, f"{name}.csv").write_text("\n".join(line for line in lines if line.count(",") == 14) + "\n")
        aucs = [
            _adult_auc(copies, seed, 1 if preset == "smoke" else 3) for seed in range(1 if preset == "smoke" else 3)
        ]
    target = None if preset == "smoke" else 0.899
    return runner.Measure(
        "features.adult", statistics.mean(aucs), "AUC", at_least=target, details={"aucs": [round(a, 5) for a in aucs]}
    )


def _adult_auc(folder: str, seed: int, epochs: int) -> float:
    train = persia.data.csv(
        f"{folder}/data.csv", adult_schema(), 128, column_names=ADULT, shuffle_rows=50_000, seed=seed
    )
    schema = persia.fit_features(train.schema, train)
    test = persia.data.csv(f"{folder}/test.csv", schema, 1024, column_names=ADULT)
    return _trained_auc(schema, train.with_schema(schema), test, seed, epochs, lr=1e-3, rows_lr=0.02)


def _trained_auc(
    schema: persia.Schema, train: Any, test: Any, seed: int, epochs: int, *, lr: float, rows_lr: float
) -> float:
    torch.manual_seed(seed)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(64, 32)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr),
        embedding_optimizer=Adagrad(lr=rows_lr),
        mode=persia.modes.Sync(),
        options=persia.TrainerOptions(device="cpu", progress=False, seed=seed),
    )
    trainer.fit(train, epochs=epochs)
    return float(next(iter(trainer.evaluate(test).labels.values())).auc)


@runner.measures("features.vector")
def vector(preset: str) -> runner.Measure:
    """Users and items have hidden vectors; a third of the items is only in the test. Item vectors are pretrained."""
    rows = 20_000 if preset == "smoke" else 200_000
    rng = np.random.default_rng(0)
    users, items, size = 300, 600, 8
    taste, style = rng.normal(size=(users, size)), rng.normal(size=(items, size))
    user, item = rng.integers(0, users, rows), rng.integers(0, items, rows)
    score = (taste[user] * style[item]).sum(1) + style[item, 0]
    columns = {"user": user, "item": item, "vector": style[item].astype(np.float32)}
    columns["label"] = (rng.random(rows) < 1 / (1 + np.exp(-score))).astype(np.float32)
    cold = item >= items * 2 // 3
    features = [persia.IdFeature("user", dim=size), persia.IdFeature("item", dim=size)]

    def auc(dense: list[persia.DenseFeature]) -> float:
        schema = persia.Schema(features, dense_features=dense)
        parts = [
            persia.Batch.from_columns(schema, {n: c[chosen] for n, c in columns.items()}) for chosen in (~cold, cold)
        ]
        train, test = ([part.slice(at, at + 512) for at in range(0, len(part), 512)] for part in parts)
        return _trained_auc(schema, train, test, 0, 1 if preset == "smoke" else 5, lr=3e-3, rows_lr=0.1)

    without, given = auc([]), auc([persia.DenseFeature("vector", size=size)])
    details = {"without": round(without, 4), "with": round(given, 4), "rows": rows}
    return runner.Measure("features.vector", given - without, "AUC", at_least=0.0, details=details)
