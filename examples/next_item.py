"""Predicts the next item of a history, and finds it among all items: python examples/next_item.py.

Trains on clicks on a news portal in the order of time (globo_ctr, where PERSIA_DATA has it), else on generated
sessions. Each click is predicted once, from the user's clicks before it, and competes with articles that were clicked
shortly before: the reader of the data draws them, so that their rows are looked up ahead.
"""

import os
import tempfile
from collections import Counter
from itertools import islice

import numpy as np
import pyarrow as pa
import torch

import persia
from persia.publish import PublishOptions
from persia.serve import Predictor, Retriever

SMALL = bool(os.environ.get("PERSIA_EXAMPLE_SMALL"))
BATCH, STEPS, TESTED = (128, 40, 2) if SMALL else (256, 3_000, 20)
LENGTH, K = 10, 20

schema = persia.Schema(
    [
        persia.IdFeature("article_id", dim=32),
        persia.IdFeature("history", table="article_id", pooling=None, max_length=LENGTH),
    ]
)


def sessions(rows: int, articles: int = 1_000) -> pa.Table:
    """Generates sessions in which each article has three that often follow, histories newest first."""
    rng = np.random.default_rng(0)
    follows = rng.integers(0, articles, (articles, 3))
    seen = [rng.integers(0, articles, rows)]
    for _ in range(LENGTH):
        linked = follows[seen[-1], rng.integers(0, 3, rows)]
        seen.append(np.where(rng.random(rows) < 0.8, linked, rng.integers(0, articles, rows)))
    history = [list(each[: 1 + i % LENGTH]) for i, each in enumerate(np.stack(seen[-2::-1], 1))]
    return pa.table({"article_id": seen[-1], "history": history, "label": np.ones(rows)})


def clicks() -> persia.data.Reader:
    """Returns a reader with a sample for each click, in the order of time."""
    files = persia.data.find("globo_ctr")
    if files is None:
        return persia.data.arrow(sessions(BATCH * (STEPS + TESTED)), schema, BATCH)
    return persia.data.parquet(files, schema, BATCH, where="label == 1")


def only(schema: persia.Schema, name: str, column: persia.IdColumn) -> persia.Batch:
    """Returns a batch with one feature, for the index, which reads no dense features."""
    rows = len(column)
    dense = np.zeros((rows, schema.dense_width), np.float32)
    return persia.Batch({name: column}, dense=dense, labels=np.empty((rows, 0), np.float32))


def main() -> None:
    torch.manual_seed(0)
    reader = persia.data.shared_negatives(clicks(), ["article_id"], BATCH, by="popularity", window=10)

    def network() -> torch.nn.Module:
        return persia.nn.models.NextItem(
            reader.schema,
            backbone="hstu",
            history=[("history", "article_id")],
            newest_first=True,
            targets="newest",  # A sample for each click: each is a target once.
            negatives=["negative_article_id"],
            log_q="log_q",
            negatives_log_q="negative_log_q",
            temperature=0.1,
        )

    train, test = islice(reader.batches(), STEPS), persia.Batch.concat([*islice(clicks().batches(0, STEPS), TESTED)])
    with tempfile.TemporaryDirectory() as url:
        trainer = persia.Trainer(
            network(),
            reader.schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            mode=persia.modes.Sync(),
            options=persia.TrainerOptions(progress=False, publish=PublishOptions(url)),
        )
        result = trainer.fit(train)

        # The articles of the newest clicks, most frequent first.
        newest = islice(clicks().batches(0, STEPS * 3 // 4), STEPS // 4)
        counts = Counter(np.concatenate([batch.id_features["article_id"].values for batch in newest]).tolist())
        articles = np.array([article for article, _ in counts.most_common()], np.uint64)
        catalogue = only(reader.schema, "article_id", persia.IdColumn(articles))
        users = only(reader.schema, "history", test.id_features["history"])
        with Predictor(url, network()) as predictor, Retriever(predictor, catalogue, key="article_id") as retriever:
            found = retriever.search(users, K).ids
    clicked = test.id_features["article_id"].values
    hits = np.mean([article in ids for article, ids in zip(clicked, found, strict=True)])
    popular = np.isin(clicked, articles[:K]).mean()
    print(f"{result.rows_per_second:,.0f} clicks/s")
    print(f"{len(clicked):,} clicks that followed, {len(articles):,} articles:")
    print(f"{hits:.1%} are among the {K} articles that the model finds, {popular:.1%} among the {K} most popular")


if __name__ == "__main__":
    main()
