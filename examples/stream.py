"""Trains on a Kafka topic while clicks arrive, is stopped, and continues at the offsets of its checkpoint.

Set KAFKA_BOOTSTRAP to use brokers of your own; without it, librdkafka's mock cluster runs in this process.
"""

import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterable

import numpy as np
import torch
from confluent_kafka import Producer

import persia

CLICKS = 5_000 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 40_000
TOPIC = f"clicks-{uuid.uuid4().hex[:8]}"
SCHEMA = persia.Schema(
    [persia.IdFeature("user", dim=8), persia.IdFeature("item", dim=8)], dense_features=["price"], labels=["click"]
)


def connect() -> tuple[Producer, str]:
    """A producer, and the address of its brokers."""
    configured = os.environ.get("KAFKA_BOOTSTRAP")
    mock = {} if configured else {"test.mock.num.brokers": 1}
    producer = Producer({"bootstrap.servers": configured or "mock", "log_level": 2, **mock})
    brokers = producer.list_topics(timeout=10).brokers.values()
    return producer, configured or ",".join(f"{broker.host}:{broker.port}" for broker in brokers)


def produce(producer: Producer, seed: int) -> None:
    """Stands in for the site: users click on items that they like."""
    draw = np.random.default_rng(seed)
    taste = np.random.default_rng(7).standard_normal((2, 500))
    for number in range(CLICKS):
        user, item = (int(one) for one in draw.integers(0, 500, 2))
        liked = taste[0, user] + taste[1, item] + draw.standard_normal() > 0
        row = {"user": user, "item": item, "price": draw.random(), "click": int(liked)}
        producer.produce(TOPIC, json.dumps(row), partition=number % 3)
        producer.poll(0)
    producer.flush()


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return persia.nn.models.DeepFM(SCHEMA, hidden=(32,))


def adam(parameters: Iterable[torch.nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, 1e-3)


def main() -> None:
    producer, bootstrap = connect()
    with tempfile.TemporaryDirectory() as directory:
        trainer = persia.Trainer(
            model(),
            SCHEMA,
            optimizer=adam,
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            options=persia.TrainerOptions(checkpoint_dir=directory, progress=False),
        )

        def site() -> None:
            produce(producer, seed=0)
            time.sleep(3)  # Idle: training waits, until it is stopped.
            trainer.stop()

        threading.Thread(target=site).start()
        first = trainer.fit(persia.data.kafka(TOPIC, SCHEMA, 256, bootstrap=bootstrap))
        print(f"{first.rows} clicks while they came, progressive AUC {first.progressive.auc:.4f}")

        produce(producer, seed=1)
        resumed = persia.Trainer.resume(directory, model(), optimizer=adam)
        rest = resumed.fit(persia.data.kafka(TOPIC, SCHEMA, 256, bootstrap=bootstrap, until="now"))
        print(f"{rest.rows} clicks after a resume, progressive AUC {rest.progressive.auc:.4f}")
        print(f"{2 * CLICKS - first.rows - rest.rows} clicks are missing")


if __name__ == "__main__":
    main()
