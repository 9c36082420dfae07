"""Items that were never trained: what rows shared by similar items are worth.

    python -m benchmarks seq.cold [--preset smoke|laptop|full] [--json FILE]

seq.cold           HR@20 of cold items among all items, with features of code prefixes over without; mean over seeds.
                   Without, they are often below all others, so it is at least over that of a random order.
                   Users like one kind of items; vectors of items say their kind with noise. A fifth of the items is in
                   no sample of training. Two towers, whose user is a history of 10 items.
"""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import runner
from persia import Batch, CodePrefix, IdFeature, Schema, Trainer, TrainerOptions
from persia.data import semantic_ids, write_semantic_ids
from persia.modes import Sync
from persia.nn import models
from persia.optim import Adagrad

HISTORY, TOP, DIM, VECTOR = 10, 20, 16, 16
BATCH = 256
COLD = 0.2
"""Share of the items that training does not see."""


class Size(NamedTuple):
    """Amount of data and training.

    Attributes:
        items: number of items.
        kinds: number of kinds of items.
        steps: batches of training.
        tested: users whose next item is a cold one.
        seeds: seeds of data and training.
    """

    items: int
    kinds: int
    steps: int
    tested: int
    seeds: int


SIZES = {
    "smoke": Size(200, 5, 5, 4, 1),
    "laptop": Size(2_000, 40, 300, 200, 5),
    "full": Size(20_000, 200, 2_000, 500, 10),
}


class Planted(NamedTuple):
    """Items of some kinds.

    Attributes:
        vectors: float32 `[items, VECTOR]`.
        by_kind: items of each kind, first those that training sees.
        warm: how many of these it sees.
    """

    vectors: NDArray[np.float32]
    by_kind: NDArray[np.int64]
    warm: int


def planted(size: Size, seed: int) -> Planted:
    """Draws items: each kind has a centre, which its items' vectors are near."""
    draw = np.random.default_rng(seed)
    each = size.items // size.kinds
    by_kind = draw.permutation(size.items).reshape(size.kinds, each)
    vectors = np.empty((size.items, VECTOR), np.float32)
    vectors[by_kind] = draw.normal(0, 1, (size.kinds, 1, VECTOR)) + draw.normal(0, 0.3, (size.kinds, each, VECTOR))
    return Planted(vectors, by_kind, round(each * (1 - COLD)))


def samples(data: Planted, rows: int, draw: np.random.Generator, cold: bool) -> dict[str, Any]:
    """Draws users of one kind each: a history of warm items, and the next item, which is a cold one if `cold`."""
    kinds = draw.integers(0, len(data.by_kind), rows)
    past = data.by_kind[kinds[:, None], draw.integers(0, data.warm, (rows, HISTORY))]
    low, high = (data.warm, data.by_kind.shape[1]) if cold else (0, data.warm)
    item = data.by_kind[kinds, draw.integers(low, high, rows)]
    return {"past": past, "item": item, "click": np.ones(rows)}


def schema_of(codes: str | None) -> Schema:
    """Returns the schema, with features of one and two codes where there is a file of codes."""
    features = [IdFeature("item", DIM), IdFeature("past", DIM, table="item", pooling="mean")]
    for length in (1, 2) if codes else ():
        for name in ("item", "past"):
            mapping = CodePrefix(str(codes), length)
            features.append(IdFeature(f"{name}_{length}", DIM, table="kinds", pooling="mean", of=name, mapping=mapping))
    return Schema(features, labels=["click"])


def hit_rate(size: Size, seed: int, data: Planted, codes: str | None) -> float:
    """Trains, and returns HR@TOP of cold items; equal scores count as if they were in random order."""
    schema = schema_of(codes)
    torch.manual_seed(seed)
    trainer = Trainer(
        models.TwoTower(schema, item=[feature.name for feature in schema.id_features if "past" not in feature.name]),
        schema,
        optimizer=functools.partial(torch.optim.Adam, lr=0.003),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        options=TrainerOptions(progress=False, seed=seed),
    )
    draw = np.random.default_rng([seed, 1])
    trainer.fit(Batch.from_columns(schema, samples(data, BATCH, draw, False)) for _ in range(size.steps))
    tested = samples(data, size.tested, draw, True)
    hits = []
    for past, target in zip(tested["past"], tested["item"], strict=True):
        columns = {"past": np.tile(past, (size.items, 1)), "item": np.arange(size.items), "click": np.zeros(size.items)}
        (scores,) = trainer.predict([Batch.from_columns(schema, columns)])
        of_all = np.asarray(scores).ravel()
        better, equal = int((of_all > of_all[target]).sum()), int((of_all == of_all[target]).sum())
        hits.append(min(1.0, max(0.0, (TOP - better) / equal)))
    return statistics.fmean(hits)


@runner.measures("seq.cold")
def cold(preset: str) -> Iterator[runner.Measure]:
    """HR@20 of items that were never trained, with prefixes over without."""
    size = SIZES[preset]
    rates: dict[str, list[float]] = {"with": [], "without": []}
    with tempfile.TemporaryDirectory() as directory:
        for seed in range(size.seeds):
            data = planted(size, seed)
            codes = str(Path(directory) / f"{seed}.parquet")
            found = semantic_ids(data.vectors, levels=2, codes=size.kinds, seed=seed)
            write_semantic_ids(codes, found, np.arange(size.items), found.assign(data.vectors))
            for name, file in (("with", codes), ("without", None)):
                rates[name].append(hit_rate(size, seed, data, file))
    means = {name: statistics.fmean(each) for name, each in rates.items()}
    chance = TOP / size.items
    details = {"HR@20": means, "per_seed": rates, "by chance": chance}
    yield runner.Measure(
        "seq.cold", means["with"] / max(means["without"], chance), "ratio",
        at_least=None if preset == "smoke" else 1.0, details=details,
    )  # fmt: skip
