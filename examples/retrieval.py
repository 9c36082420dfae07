"""Trains two towers on generated clicks, and finds the items for a user: python examples/retrieval.py."""

import os
import tempfile

import numpy as np
import torch

import persia
from persia.publish import PublishOptions
from persia.serve import IndexOptions, Predictor, Retriever

SMALL = bool(os.environ.get("PERSIA_EXAMPLE_SMALL"))
USERS, ITEMS, GROUPS = 500, 2_000, 10

schema = persia.Schema(
    [persia.IdFeature("user", dim=16), persia.IdFeature("item", dim=16), persia.IdFeature("group", dim=8)],
    labels=["click"],
)


def batch(seed: int, rows: int = 1_000) -> persia.Batch:
    """Users click the items of their group."""
    rng = np.random.default_rng(seed)
    users = rng.integers(0, USERS, rows)
    items = rng.integers(0, ITEMS // GROUPS, rows) * GROUPS + users % GROUPS
    columns = {"user": users, "item": items, "group": items % GROUPS, "click": np.ones(rows)}
    return persia.Batch.from_columns(schema, columns)


def main() -> None:
    torch.manual_seed(0)

    def network() -> torch.nn.Module:
        return persia.nn.models.TwoTower(schema, item=["item", "group"], hidden=(32,), dim=16)

    with tempfile.TemporaryDirectory() as url:
        trainer = persia.Trainer(
            network(),
            schema,
            optimizer=lambda params: torch.optim.Adam(params, 3e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            options=persia.TrainerOptions(progress=False, publish=PublishOptions(url)),
        )
        trainer.fit([batch(seed) for seed in range(40 if SMALL else 400)])

        items = np.arange(ITEMS)
        catalogue = persia.Batch(
            {
                "item": persia.IdColumn(items.astype(np.uint64)),
                "group": persia.IdColumn((items % GROUPS).astype(np.uint64)),
            },
            dense=np.empty((ITEMS, 0), np.float32),
            labels=np.empty((ITEMS, 0), np.float32),
        )
        users = persia.Batch(
            {"user": persia.IdColumn(np.array([3, 14], np.uint64))},
            dense=np.empty((2, 0), np.float32),
            labels=np.empty((2, 0), np.float32),
        )
        options = IndexOptions(expansion_search=256)
        with (
            Predictor(url, network()) as predictor,
            Retriever(predictor, catalogue, key="item", options=options) as retriever,
        ):
            neighbours = retriever.search(users, 5)
            for user, ids, scores in zip((3, 14), neighbours.ids, neighbours.scores, strict=True):
                print(f"user {user}, group {user % GROUPS}:", *map("{} ({:.2f})".format, ids, scores))


if __name__ == "__main__":
    main()
