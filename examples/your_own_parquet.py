"""Your own Parquet files: name the columns, pick the tables, train, predict."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

import persia

ROWS = 20_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 500_000


def write_files(directory: Path) -> None:
    """Stands in for your data: texts, lists and numbers, in two files."""
    rng = np.random.default_rng(0)
    for part in range(2):
        shop = rng.integers(0, 300, ROWS)
        taste = rng.integers(0, 10, ROWS)
        table = {
            "shop": [f"shop-{s}" for s in shop],
            "viewed": [[int(taste[i]) * 100 + j for j in range(i % 4)] for i in range(ROWS)],
            "price": rng.lognormal(size=ROWS),
            "clicked": rng.random(ROWS) < np.where(shop % 3 == 0, 0.6, 0.2) + 0.03 * taste,
        }
        pq.write_table(pa.table(table), directory / f"part-{part}.parquet")


def main() -> None:
    schema = persia.Schema(
        id_features=[
            persia.IdFeature("shop", dim=16),
            persia.IdFeature("viewed", dim=16, pooling="mean", max_length=50),
        ],
        dense_features=["price"],
        labels=["click"],
    )
    with tempfile.TemporaryDirectory() as directory:
        write_files(Path(directory))
        # Any fsspec URL works as well: "s3://bucket/clicks/*.parquet" (pip install "persia-recsys[s3]").
        reader = persia.data.parquet(
            f"{directory}/*.parquet", schema, batch_size=512, rename={"click": "clicked"}, shuffle_rows=10_000
        )
        torch.manual_seed(0)
        trainer = persia.Trainer(
            persia.nn.models.FFNN(schema, hidden=(64, 32), products=[("shop", "viewed")]),
            schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        )
        result = trainer.fit(reader, epochs=2)
        print(f"progressive AUC {result.progressive.auc:.4f} at {result.rows_per_second:,.0f} rows/s")
        first = next(trainer.predict(reader))
        print(f"first probabilities: {first[:3, 0]}")


if __name__ == "__main__":
    main()
