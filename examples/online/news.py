"""Clicks on a news portal: what a model reads, the model, and where clicks come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import persia

CONTEXTS = ["environment", "device_group", "os", "country", "region", "referrer"]
COLUMNS = ["label", "user_id", "article_id", "history", *CONTEXTS]
PAIR = 2
"""Rows that belong together: a click, and an article that was not clicked."""


def schema() -> persia.Schema:
    features = [persia.IdFeature(name, dim=16) for name in ("user_id", "article_id", *CONTEXTS)]
    history = persia.IdFeature("history", dim=16, table="article_id", pooling="mean", max_length=10)
    # Users who have not come for a while leave, and so do articles without readers.
    tables = [persia.Table(name, dim=16, capacity=400_000) for name in ("user_id", "article_id")]
    return persia.Schema([*features, history], labels=["label"], tables=tables)


class Model(persia.nn.models.FFNN):
    """The network. `persia serve --model news:Model` makes it, too."""

    def __init__(self, schema: persia.Schema) -> None:
        super().__init__(schema, hidden=(256, 128), products=[("article_id", "history")])


def trainer(**options: Any) -> persia.Trainer:
    torch.manual_seed(0)
    cluster = options.pop("cluster", None)
    return persia.Trainer(
        Model(schema()),
        schema(),
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Hybrid("auto", warmup=0),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, **options),
    )


def clicks(first_day: int) -> Iterator[pa.Table]:
    """Yields clicks in time order, from a day of globo_ctr on, if it is there; made-up ones otherwise."""
    folder = persia.data.find("globo_ctr")
    if folder is None:
        yield from made_up(seed=first_day)
        return
    for day in sorted(folder.glob("*.parquet"))[first_day:]:
        yield pq.read_table(day, columns=COLUMNS)


def made_up(seed: int, rows: int = 50_000) -> Iterator[pa.Table]:
    """Yields clicks on articles that are published all the time, and liked by some users for a while."""
    draw = np.random.default_rng(seed)
    newest, population = 1_000, 5_000
    taste = np.random.default_rng(1).standard_normal((population, 4))
    while True:
        articles = newest - draw.geometric(0.01, rows).clip(max=newest - 1) + np.arange(rows) * 200 // rows
        users = draw.integers(0, population, rows)
        population += 1_000
        topics = np.stack([np.sin(articles * (3 + k)) for k in range(4)], axis=1)
        liked = (2 * taste[users % len(taste)] * topics).sum(1) + draw.standard_normal(rows) > 0
        newest += 200
        yield pa.table(
            {
                "label": liked.astype(np.int8),
                "user_id": users.astype(np.int32),
                "article_id": articles.astype(np.int32),
                "history": pa.array([[]] * rows, pa.list_(pa.int32())),
                **{name: draw.integers(0, 5, rows).astype(np.int16) for name in CONTEXTS},
            }
        )


def parts(tables: Iterator[pa.Table], rows: int) -> Iterator[pa.Table]:
    """Cuts tables into parts of `rows` rows, a multiple of `PAIR`, and leaves out the rest of each table."""
    for table in tables:
        for begin in range(0, table.num_rows - rows + 1, rows):
            yield table.slice(begin, rows)


def message(part: pa.Table) -> bytes:
    """Returns an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, part.schema) as writer:
        writer.write_table(part)
    return sink.getvalue().to_pybytes()


def columns(part: pa.Table) -> dict[str, Any]:
    """Returns the columns of a request for predictions."""
    columns: dict[str, Any] = {name: part[name].to_numpy() for name in COLUMNS if name not in ("label", "history")}
    lists = part["history"].combine_chunks()
    offsets = lists.offsets.to_numpy().astype(np.int64)
    columns["history"] = (lists.values.to_numpy()[offsets[0] : offsets[-1]], offsets - offsets[0])
    return columns
