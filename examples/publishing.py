"""Training publishes its changes; a reader next to it has them a moment later, without the evicted rows.

    python examples/publishing.py [DIR]

The reader is a thread here. It could be any process that can read DIR, which may be a URL such as s3://bucket/changes.
"""

import os
import sys
import tempfile
import threading

import torch

import persia
from persia.publish import PublishOptions, Replica, follow

SMALL = "PERSIA_EXAMPLE_SMALL" in os.environ
BATCHES = 200 if SMALL else 4000

data = persia.data.synthetic(BATCHES * 256, id_features=2, ids_per_feature=20_000, batch_size=256)
tables = [persia.Table(feature.name, dim=16, capacity=5_000) for feature in data.schema.id_features]
schema = persia.Schema(data.schema.id_features, data.schema.dense_features, data.schema.labels, tables)


def read(url: str, done: threading.Event) -> None:
    """Prints what a reader has, every second, and once training is done."""
    replica = Replica(follow(url))
    while True:
        last = done.wait(0.2 if SMALL else 1.0)
        replica.refresh()
        if replica.network is not None:
            rows = sum(len(replica.rows(table.name)) for table in tables)
            print(f"epoch {replica.epoch}: {rows:,} rows of step {min(replica.steps.values())}, ", end="")
            print(f"network of step {replica.network.step}")
        if last:
            return


def main(url: str) -> None:
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.1, dtype="float16")),
    )
    done = threading.Event()
    reader = threading.Thread(target=read, args=(url, done))
    reader.start()
    try:
        result = trainer.fit(data)
    finally:
        done.set()
        reader.join()
    print(f"trained {result.global_step} steps; {result.stored_rows:,} rows in the store")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(directory, "changes"))
