"""What `online.exactly_once` trains: clicks with one id each, whose row counts how often the click was trained.

The processes of training and serving import this module.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from confluent_kafka import Producer

import persia
from benchmarks.exactly_once_broker import PARTITIONS, Broker
from benchmarks.exactly_once_count import Repeat
from persia.cluster import Ray, RayOptions
from persia.modes import Async, Auto, Bsp, Gba, HopBs, HopBw, Hybrid, Mode, Sync
from persia.publish import PublishOptions
from persia.services import Attempt
from persia.types import StreamStart

BATCH = 64
"""Clicks of a message. Each message is one batch, so a batch is the same whenever it is read."""

MODES: dict[str, Mode | Auto] = {
    "hybrid": Hybrid(2, warmup=0), "sync": Sync(), "gba": Gba(2 * BATCH), "async": Async(), "bsp": Bsp(2),
    "hop_bs": HopBs(4), "hop_bw": HopBw(1), "auto": Auto(Gba(2 * BATCH)),
}  # fmt: skip
RECOVERY_SECONDS = 2.0
"""Between two recovery points."""

SCHEMA = persia.Schema([persia.IdFeature(name, dim=4) for name in ("click", "user", "item")], labels=["label"])


class Net(persia.nn.models.FFNN):
    """The network."""

    def __init__(self, schema: persia.Schema) -> None:
        super().__init__(schema, hidden=(8,))


def columns(batch: int) -> dict[str, Any]:
    """Returns the features of the clicks of a batch."""
    click = np.arange(batch * BATCH, (batch + 1) * BATCH, dtype=np.int64)
    return {"click": click, "user": click * 7919 % 5000, "item": click * 104729 % 800}


def message(batch: int) -> bytes:
    """Returns a batch as an Arrow IPC stream."""
    arrays = columns(batch)
    table = pa.table({**arrays, "label": ((arrays["user"] + arrays["item"]) % 3 == 0).astype(np.int8)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def reader(broker: Broker, topic: str, **options: Any) -> Any:
    # A pause of the broker is shorter than `timeout`.
    return persia.data.kafka(
        topic, SCHEMA, BATCH, bootstrap=broker.bootstrap, values="arrow", linger=0.2, timeout=120.0,
        config={"fetch.wait.max.ms": 50}, **options,
    )  # fmt: skip


def make_trainer(cluster: Any, mode: Mode | Auto, log: str) -> persia.Trainer:
    torch.manual_seed(0)
    options = persia.TrainerOptions(
        progress=False,
        timeout=120.0,
        recovery_point_every_seconds=RECOVERY_SECONDS,
        max_failures=1_000,
        publish=PublishOptions(log, seconds=1.0),
    )
    return persia.Trainer(
        Net(SCHEMA),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.01),
        embedding_optimizer=persia.optim.SGD(lr=0.01),
        mode=mode,
        cluster=cluster,
        options=options,
    )


def times_trained(trainer: persia.Trainer, batches: int, at_once: int = 1_000) -> Any:
    """Returns how often each click was trained, by the number of updates of its row: `[batches, BATCH]`."""
    counts = [np.zeros((0, BATCH), np.int64)]
    for begin in range(0, batches, at_once):
        numbers = np.arange(begin * BATCH, min(begin + at_once, batches) * BATCH)
        rows = trainer.embeddings.rows("click", trainer.embeddings.row_ids("click", numbers), state=True)
        assert rows.state is not None
        counts.append(rows.state.update_count.reshape(-1, BATCH).astype(np.int64))
    return np.concatenate(counts)


class Clicks(threading.Thread):
    """Sends batches of clicks to all partitions in turn, at a constant rate and in bursts, until `end`.

    The producer is idempotent: a broker that goes away gets each message once.

    Args:
        broker: gets them.
        topic: of that broker.
        per_second: batches a second.
    """

    def __init__(self, broker: Broker, topic: str, per_second: float) -> None:
        super().__init__(name="clicks")
        self._topic, self._per_second = topic, per_second
        self._producer = Producer(
            {"bootstrap.servers": broker.bootstrap, "enable.idempotence": True, "linger.ms": 5, "log_level": 2}
        )
        self._over = threading.Event()
        self._extra = 0
        """Batches of bursts."""
        self._failure: BaseException | None = None
        self.offsets: dict[int, int] = {}
        """Offset of each batch, by number."""

    @property
    def sent(self) -> int:
        """Batches that the broker has."""
        return len(self.offsets)

    def run(self) -> None:
        """Sends."""
        try:
            began, number = time.monotonic(), 0
            while not self._over.wait(0.02):
                while number < self._extra + (time.monotonic() - began) * self._per_second:
                    self._send(number)
                    number += 1
            if self._producer.flush(120.0):
                raise RuntimeError("The broker has not taken all clicks within two minutes.")
        except BaseException as error:
            self._failure = error

    def burst(self, batches: int) -> None:
        """Sends `batches` batches without a pause."""
        self._extra += batches

    def _send(self, number: int) -> None:
        def delivered(error: Any, sent: Any) -> None:
            if error is not None:
                self._failure = RuntimeError(f"Batch {number} was not delivered: {error}")
            else:
                self.offsets[number] = sent.offset()

        self._producer.produce(self._topic, message(number), partition=number % PARTITIONS, on_delivery=delivered)
        self._producer.poll(0)

    def end(self) -> None:
        """Waits until the broker has all clicks.

        Raises:
            RuntimeError: it has not, or has one twice.
        """
        self._over.set()
        self.join()
        if self._failure is not None:
            raise self._failure
        for number, offset in self.offsets.items():
            if offset != number // PARTITIONS:
                raise RuntimeError(
                    f"Batch {number} is at offset {offset} of its partition, not {number // PARTITIONS}."
                )


class WatchedRay(Ray):
    """A cluster that notes which part of the stream each restart of the NN workers trains again.

    Args:
        topic: the stream.
        counts: arguments of `Ray`.
    """

    def __init__(self, topic: str, **counts: Any) -> None:
        super().__init__(**counts, options=RayOptions(threads=1, timeout=120.0, restarts=1_000))
        self._topic = topic
        self._repeats = False
        self.repeats: list[Repeat] = []

    def read(self) -> dict[int, int]:
        """Returns how far the stream is recorded, by partition; empty before training has begun."""
        log = self._roles.stream_log
        return dict(log.stream_offsets(None).get(self._topic, {})) if log is not None else {}

    def attempt(self, *arguments: Any) -> Attempt:
        """Trains, and notes whether all restart from a recovery point: without results of NN workers that survived."""
        done = super().attempt(*arguments)
        self._repeats = bool(done.deaths) and not any(done.results.values())
        return done

    def feed(
        self,
        source: Any,
        epoch: int = 0,
        start: int = 0,
        accumulation_steps: int = 1,
        record: StreamStart | None = None,
    ) -> None:
        """Notes where a restart begins, and how far the stream was read before it."""
        if self._repeats and record is not None:
            self.repeats.append(Repeat(dict(record.offsets.get(self._topic, {})), self.read()))
        self._repeats = False
        super().feed(source, epoch, start, accumulation_steps, record)


def say(text: str) -> None:
    """Shows progress."""
    print(text, file=sys.stderr, flush=True)


def configured() -> str | None:
    """Returns the brokers of KAFKA_BOOTSTRAP, if it is set."""
    return os.environ.get("KAFKA_BOOTSTRAP")
