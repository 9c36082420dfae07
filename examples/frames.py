"""Trains on a polars frame with texts, lists, missing values and a computed label, and holds out a fifth of it."""

import os

import numpy as np
import polars as pl
import torch

import persia

ROWS = 20_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 500_000


def ratings(rows: int) -> pl.DataFrame:
    """Stands in for your frame: users rate films, and what they have seen matters."""
    draw = np.random.default_rng(0)
    user, film, seen = (draw.integers(0, most, rows) for most in (2_000, 500, 500))
    taste = draw.standard_normal((3, 2_000))
    score = taste[0, user] + taste[1, film] + taste[2, seen]
    return pl.DataFrame(
        {
            "user": [f"user-{number}" for number in user],
            "film": film,
            "seen": [[one, two] if one % 3 else None for one, two in zip(seen, film[::-1], strict=True)],
            "year": 1960.0 + film % 60,
            "stars": np.clip(np.round(3 + score), 1, 5),
        }
    )


def main() -> None:
    torch.manual_seed(0)
    schema = persia.Schema(
        [
            persia.IdFeature("user", dim=16),
            persia.IdFeature("film", dim=16),
            persia.IdFeature("seen", dim=16, table="film", pooling="mean"),
        ],
        dense_features=["year"],
        labels=["liked"],
    )
    frame = ratings(ROWS)
    train, test = (
        persia.data.arrow(frame, schema, 512, labels={"liked": "stars >= 4"}, split={"part": part})
        for part in ("train", "test")
    )
    trainer = persia.Trainer(
        persia.nn.models.DeepFM(schema, hidden=(64, 32)),
        schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
    )
    result = trainer.fit(train, eval_data=test)
    assert result.evaluation is not None
    print(f"{result.rows_per_second:,.0f} rows/s, test AUC {result.evaluation.auc:.4f}")


if __name__ == "__main__":
    main()
