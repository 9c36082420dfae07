"""Training publishes its changes; a predictor follows them, and its predictions get better while it serves.

    python examples/serving.py [DIR]

The predictor runs next to training here. It could be any process that can read DIR, which may be a URL such as
s3://bucket/changes.
"""

import os
import sys
import tempfile
import threading
import time

import torch

import persia
from persia.metrics import Metrics
from persia.publish import PublishOptions
from persia.serve import Predictor, ServeOptions

SMALL = "PERSIA_EXAMPLE_SMALL" in os.environ
BATCHES = 200 if SMALL else 4000

reader = persia.data.synthetic((BATCHES + 20) * 256, id_features=4, ids_per_feature=2_000, batch_size=256)
schema, batches = reader.schema, list(reader)
data, held_out = batches[:BATCHES], batches[BATCHES:]


def serve(url: str, done: threading.Event) -> None:
    """Prints the quality of what is served, every second, and once training is done."""
    options = ServeOptions(poll_seconds=0.1)
    with Predictor(url, persia.nn.models.FFNN, options) as predictor:  # Waits until the first epoch is complete.
        while True:
            last = done.wait(0.2 if SMALL else 1.0)
            predictor.refresh()
            metrics = Metrics(predictor.schema.labels)
            began = time.perf_counter()
            for batch in held_out:
                metrics.update(predictor.predict(batch).scores, batch.labels)
            rate = len(held_out) * 256 / (time.perf_counter() - began)
            state = predictor.state()
            print(f"step {state.network_step}: AUC {metrics.result().auc:.4f}, ", end="")
            print(f"{state.rows:,} rows, {state.rows_age_seconds:.1f} s old; {rate:,.0f} predictions/s")
            if last:
                return


def main(url: str) -> None:
    torch.manual_seed(0)
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        options=persia.TrainerOptions(progress=False, publish=PublishOptions(url, seconds=0.5)),
    )
    done = threading.Event()
    server = threading.Thread(target=serve, args=(url, done))
    server.start()
    try:
        trainer.fit(data)
    finally:
        done.set()
        server.join()
    batch = held_out[0]
    with Predictor(url, persia.nn.models.FFNN) as predictor:
        same = predictor.predict(batch).probabilities == next(trainer.predict([batch]))
        print(f"served and trained predictions are the same bits: {bool(same.all())}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        main(sys.argv[1] if len(sys.argv) > 1 else os.path.join(directory, "changes"))
