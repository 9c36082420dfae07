"""Measures the rates of a configuration: the contents of its batches, and the cost of a batch in each role.

Each role is measured alone, between fakes of its neighbors, in processor time: on one machine the costs of the roles
add up.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import cast

import numpy as np

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import DataError
from persia.modes import Hybrid, Mode
from persia.plan.measure import core_seconds
from persia.plan.rates import BatchShape, StepRate, WorkloadRate
from persia.ps import EmbeddingServer
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection, EmbeddingPS, EmbeddingWorker
from persia.types import (
    BucketMap,
    Contribution,
    FreshRows,
    LookedUp,
    Moment,
    Packed,
    PackedGradients,
    PushHeader,
    UpdateCounts,
)
from persia.types.half_floats import words_of
from persia.worker import Worker

__all__ = ["FakeCluster", "measure_server", "measure_worker", "measure_workload"]

BATCHES = 12
WARM_STEPS = 10
STEPS = 30
ROUNDS = 3

Fit = Callable[["FakeCluster", Sequence[Batch], int], float]
"""Trains a number of steps with an NN worker of a fake cluster; returns the seconds of the training loop."""


class FakeCluster:
    """A cluster whose embedding worker answers immediately with rows of zeros, so that only the NN worker takes time.

    Args:
        answers: answers by `fingerprint` of a batch.
    """

    def __init__(self, answers: Mapping[int, LookedUp]) -> None:
        self._worker = _FakeWorker(answers)

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Returns a connection to the fake, and to a PS that stays empty."""
        server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1)
        return Connection(cast("EmbeddingWorker", self._worker), [server])


class _FakeServer:
    """A PS that answers immediately with rows of zeros."""

    def __init__(self, schema: Schema) -> None:
        self._words = {name: words_of(table.dtype, table.dim) for name, table in schema.resolved_tables().items()}
        self._zeros = np.zeros(0, np.float32)

    def buckets(self) -> BucketMap:
        return BucketMap.even(1)

    def lookup(self, ids: Packed[np.uint64], train: bool, map_version: int = 0) -> Packed[np.float32]:
        widths = [self._words[name] for name in ids.names]
        size = sum(count * width for count, width in zip(ids.counts, widths, strict=True))
        if len(self._zeros) < size:
            self._zeros = np.zeros(size, np.float32)
        return Packed(ids.names, ids.counts, self._zeros[:size], widths)

    def push(self, header: PushHeader, gradients: PackedGradients, map_version: int = 0) -> dict[str, UpdateCounts]:
        return {}


class _FakeWorker:
    """An embedding worker with prepared answers."""

    def __init__(self, answers: Mapping[int, LookedUp]) -> None:
        self._answers = answers
        self._registered: dict[int, LookedUp] = {}
        self._ids = itertools.count(1)

    def register(self, id_features: Mapping[str, IdColumn]) -> int:
        number = next(self._ids)
        self._registered[number] = self._answers[fingerprint(id_features)]
        return number

    def lookup(self, batch_id: int, train: bool = True, pool: bool = False) -> LookedUp:
        return self._registered[batch_id]

    def lookup_ahead(self, batch_id: int, pool: bool = False, recent: int = 0) -> LookedUp:
        return self._registered[batch_id]._replace(seen=[Moment(0, 0)])

    def refresh(self, batch_id: int, seen: list[Moment], left_out: Packed[np.bool_] | None = None) -> FreshRows:
        """Answers that no row has changed."""
        rows = self._registered[batch_id].rows
        none = [0] * len(rows)
        places = Packed(rows.names, none, np.empty(0, np.uint32))
        return FreshRows(places, Packed(rows.names, none, rows.buffer[:0], rows.widths), seen)

    def push(self, header: PushHeader, contributions: Sequence[Contribution]) -> dict[str, UpdateCounts]:
        for contribution in contributions:
            self._registered.pop(contribution.batch_id, None)
        return {}

    def release(self, batch_id: int) -> None:
        self._registered.pop(batch_id, None)

    def statistics(self) -> dict[str, int]:
        return {}


def fingerprint(id_features: Mapping[str, IdColumn]) -> int:
    """Returns a number that distinguishes the batches of a measurement."""
    return hash(tuple(column.values[:64].tobytes() for column in id_features.values()))


def measure_workload(
    name: str,
    schema: Schema,
    optimizer: EmbeddingOptimizer,
    reader: Iterable[Batch],
    fit: Fit,
    device: str,
    parameters: int,
) -> WorkloadRate:
    """Measures the roles of a configuration on its own batches.

    Args:
        name: name of the configuration.
        schema: schema of the data.
        optimizer: optimizer of the rows.
        reader: reader of the data; the first batches are read.
        fit: trains with the configuration's network.
        device: device of the network.
        parameters: number of parameters of the network.

    Raises:
        DataError: the data have too few batches to measure.
    """
    source = iter(reader)
    first = list(itertools.islice(source, 2))  # Reading the first batches opens files.
    began = time.process_time()
    batches = list(itertools.islice(source, BATCHES))
    reading = (time.process_time() - began) / max(1, len(batches))
    if len(batches) < 2:
        raise DataError(f"The data of {name} have {len(first) + len(batches)} batches; measuring needs at least 4.")
    full = [batch for batch in batches if len(batch) == len(batches[0])]
    worker = Worker(schema, [cast("EmbeddingPS", _FakeServer(schema))])
    numbers = [worker.register(batch.id_features) for batch in full]
    distinct = [worker.distinct_ids(number) for number in numbers]
    answers = {
        fingerprint(batch.id_features): worker.lookup(number) for batch, number in zip(full, numbers, strict=True)
    }
    shape = BatchShape(
        len(full[0]),
        _mean([_ids_by_table(schema, batch) for batch in full]),
        _mean([dict(zip(ids.names, map(float, ids.counts), strict=True)) for ids in distinct]),
        _mean([_offsets_by_table(schema, batch) for batch in full]),
        float(full[0].dense.nbytes + full[0].labels.nbytes),
        parameters,
    )
    return WorkloadRate(
        name,
        shape,
        reading,
        measure_worker(schema, full),
        measure_server(schema, optimizer),
        _step(fit, FakeCluster(answers), full, device),
    )


def _ids_by_table(schema: Schema, batch: Batch) -> dict[str, float]:
    ids = dict.fromkeys(schema.resolved_tables(), 0.0)
    for feature in schema.id_features:
        ids[feature.table_name] += len(batch.id_features[feature.name].values)
    return ids


def _offsets_by_table(schema: Schema, batch: Batch) -> dict[str, float]:
    nbytes = dict.fromkeys(schema.resolved_tables(), 0.0)
    for feature in schema.id_features:
        column = batch.id_features[feature.name]
        nbytes[feature.table_name] += sum(a.nbytes for a in (column.offsets, column.weights) if a is not None)
    return nbytes


def _mean(mappings: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: statistics.fmean(each[name] for each in mappings) for name in mappings[0]}


def measure_worker(schema: Schema, batches: Sequence[Batch]) -> float:
    """Returns the core seconds of an embedding worker for a batch: register, lookup and push."""
    worker = Worker(schema, [cast("EmbeddingPS", _FakeServer(schema))])
    tables = schema.resolved_tables()
    following = itertools.cycle(batches)
    sequence = itertools.count(1)

    def one() -> int:
        batch = next(following)
        number = worker.register(batch.id_features)
        rows = worker.lookup(number).rows
        sizes = [count * tables[name].dim for name, count in zip(rows.names, rows.counts, strict=True)]
        gradients = Packed(
            rows.names, rows.counts, np.zeros(sum(sizes), np.float32), [tables[name].dim for name in rows.names]
        )
        step = next(sequence)
        worker.push(PushHeader(1, 0, step, step, len(batch)), [Contribution(number, gradients)])
        return 1

    return core_seconds(one)


def measure_server(schema: Schema, optimizer: EmbeddingOptimizer) -> float:
    """Returns the core seconds of a PS for a lookup and a push with one row of each table."""
    tables = schema.resolved_tables()
    server = EmbeddingServer(tables, optimizer, Hybrid(4), 0, 1)
    names, counts = list(tables), [1] * len(tables)
    ids = Packed(names, counts, np.arange(len(names), dtype=np.uint64))
    widths = [table.dim for table in tables.values()]
    gradients = PackedGradients(ids, Packed(names, counts, np.zeros(sum(widths), np.float32), widths))
    sequence = itertools.count(1)

    def one() -> int:
        server.lookup(ids, True)
        step = next(sequence)
        server.push(PushHeader(1, 0, step, step - 1, 1), gradients)
        return 1

    return core_seconds(one)


def _step(fit: Fit, cluster: FakeCluster, batches: Sequence[Batch], device: str) -> StepRate:
    """Returns the time of an NN worker for a step, in the round that other programs disturbed least.

    On a CPU it is the processor time if that is less: waiting on a busy machine is not part of a step.
    """
    fit(cluster, batches, WARM_STEPS)
    times, cores = [], []
    for _ in range(ROUNDS):
        began = time.process_time()
        times.append(fit(cluster, batches, STEPS) / STEPS)
        cores.append((time.process_time() - began) / STEPS)
    seconds, core = min(times), min(cores)
    return StepRate(device, min(seconds, core) if device == "cpu" else seconds, core)
