"""Ranking many candidates by one long history: `Predictor.rank`, which computes the history once.

    python -m benchmarks 'seq.rank*' [--preset smoke|laptop|full] [--json FILE]

seq.rank.MODEL     Requests/s for one history of 200 events with 500 candidates, over `predict` on 500 rows that each
                   have the history. One core; `differs` is the largest difference of their scores.
seq.rank           The worst of them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

import persia
from benchmarks import runner
from benchmarks.serve_predict import Model, highest_rate, one_core, served
from persia.serve.ranking import expanded

BATCH, DIM = 64, 32
EVENTS = 200


class Size(NamedTuple):
    """Amount of work.

    Attributes:
        events: length of histories.
        candidates: candidates of a request.
        items: number of items.
        requests: requests of a round; a tenth of them with whole rows, which take longer.
        rounds: rounds of both, in turn.
    """

    events: int
    candidates: int
    items: int
    requests: int
    rounds: int


SIZES = {
    "smoke": Size(10, 20, 200, 2, 1),
    "laptop": Size(EVENTS, 500, 20_000, 20, 7),
    "full": Size(EVENTS, 500, 200_000, 100, 11),
}
MODELS: dict[str, Model] = {
    "hstu": lambda schema: persia.nn.models.HSTU(schema, history=[("history", "item")]),
    "sasrec": lambda schema: persia.nn.models.SASRec(schema, history=[("history", "item")]),
}


def schema_of(events: int) -> persia.Schema:
    """Returns the schema: an item and a history of items."""
    return persia.Schema(
        [persia.IdFeature("item", DIM), persia.IdFeature("history", table="item", pooling=None, max_length=events)]
    )


def batch(schema: persia.Schema, random: np.random.Generator, rows: int, size: Size) -> persia.Batch:
    """Draws samples with whole histories."""
    columns = {
        "item": random.integers(0, size.items, rows),
        "history": random.integers(0, size.items, (rows, size.events)),
        "label": random.integers(0, 2, rows),
    }
    return persia.Batch.from_columns(schema, columns)


def rate(call: Callable[[], object], requests: int) -> float:
    """Returns requests/s."""
    return highest_rate(lambda _: call(), requests)


@runner.measures(*(f"seq.rank.{name}" for name in MODELS), "seq.rank")
def ranking(preset: str) -> Iterator[runner.Measure]:
    """Requests/s of `rank` for one history with many candidates, over `predict` on whole rows."""
    size = SIZES[preset]
    schema = schema_of(size.events)
    random = np.random.default_rng(0)
    data = [batch(schema, random, BATCH, size) for _ in range(2)]
    measures = []
    for name, model in MODELS.items():
        with served(model, schema, data) as (_, predictor), one_core():
            many = batch(schema, random, size.candidates, size)
            user = persia.Batch(
                {"history": many.id_features["history"].slice(0, 1)}, many.dense[:1], many.labels[:1, :0]
            )
            items = persia.Batch({"item": many.id_features["item"]}, many.dense, many.labels[:, :0])
            whole = expanded(schema, user, items)
            rank = functools.partial(predictor.rank, user, items)
            score = functools.partial(predictor.predict, whole)
            off = float(np.abs(rank().scores - score().scores).max())
            measure = runner.ratio(
                f"seq.rank.{name}",
                ours=functools.partial(rate, rank, size.requests),
                theirs=functools.partial(rate, score, max(1, size.requests // 10)),
                of=f"requests/s of {size.candidates} candidates, rank over predict on whole rows",
                rounds=size.rounds,
                at_least=5.0,
            )
            measures.append(dataclasses.replace(measure, details={**measure.details, "differs": off}))
            yield measures[-1]
    yield runner.worst("seq.rank", measures)
