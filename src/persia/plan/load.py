"""Work and traffic of each role for a batch: core seconds, bytes in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from persia.plan.host_kinds import ROLES
from persia.plan.rates import BatchShape, Rates, WorkloadRate
from persia.plan.table_bytes import PlannedTable
from persia.worker.feature_pooler import PoolAt

__all__ = ["BatchTraffic", "RoleLoad", "Topology", "batch_traffic", "role_loads"]

ID_BYTES = 8
SCALE_BYTES = 4
NARROW_ROWS = 1 << 16
"""Distinct rows of a table up to which indices have 16 bits."""


class Topology(NamedTuple):
    """How a configuration's roles run.

    Attributes:
        counts: processes by role.
        apart: whether they are processes that call one another; otherwise all are in one process.
        compressed: whether rows and gradients are sent to NN workers and back as fp16.
        pool_at: where features are pooled, as in `persia.worker.WorkerOptions`.
    """

    counts: Mapping[str, int]
    apart: bool = True
    compressed: bool = False
    pool_at: PoolAt = "nn_worker"


class BatchTraffic(NamedTuple):
    """Bytes of the messages of a batch.

    Attributes:
        ids: ids of ID-type features, from a data loader to an embedding worker.
        dense: other features and labels, from a data loader to an NN worker.
        keys: distinct ids, from an embedding worker to the PSs; a push sends them again.
        rows: rows, from the PSs to an embedding worker.
        answers: rows and indices, or values of pooled features, from an embedding worker to an NN worker.
        pushed: gradients of these rows or values, from an NN worker to an embedding worker.
        gradients: gradients, from an embedding worker to the PSs.
        reduced: parts of the all-reduce, in and out of an NN worker.
    """

    ids: float
    dense: float
    keys: float
    rows: float
    answers: float
    pushed: float
    gradients: float
    reduced: float


class RoleLoad(NamedTuple):
    """Load of a batch on all processes of a role together.

    Attributes:
        core_seconds: processor time.
        received: bytes in.
        sent: bytes out.
        calls: number of calls made or answered.
    """

    core_seconds: float = 0.0
    received: float = 0.0
    sent: float = 0.0
    calls: float = 0.0


def role_loads(
    tables: Sequence[PlannedTable], rates: Rates, workload: WorkloadRate, topology: Topology
) -> dict[str, RoleLoad]:
    """Returns the load of each role for a batch.

    Args:
        tables: tables of the plan.
        rates: measured rates.
        workload: rates of the configuration.
        topology: numbers of processes.

    Raises:
        ConfigError: a rate is missing.
    """
    batch, counts = workload.batch, topology.counts
    servers = counts["embedding_ps"]
    rows = {table.config.name: batch.unique[table.config.name] for table in tables}
    cores = dict.fromkeys(ROLES, 0.0)
    cores["data_loader"] = workload.reader
    cores["embedding_worker"] = workload.worker
    cores["nn_worker"] = workload.step.core_seconds
    cores["embedding_ps"] = servers * workload.server
    for table in tables:
        rate = rates.row(table.config)
        cores["embedding_ps"] += rows[table.config.name] * (rate.lookup + rate.update)
    if not topology.apart:
        return {role: RoleLoad(cores[role]) for role in ROLES}
    if rates.wire is None:
        raise rates.missing("the cost of calls between processes")
    traffic = batch_traffic(tables, batch, topology)
    loads = {}
    for role, (received, sent, calls) in _by_role(traffic, servers).items():
        wire = (calls * rates.wire.call + (received + sent) * rates.wire.byte) / 2  # The peer pays the other half.
        loads[role] = RoleLoad((cores[role] + wire) * rates.shared, received, sent, calls)
    return loads


def batch_traffic(tables: Sequence[PlannedTable], batch: BatchShape, topology: Topology) -> BatchTraffic:
    """Returns the bytes of the messages of a batch, without their headers.

    Args:
        tables: tables of the plan.
        batch: shape of a batch.
        topology: numbers of processes, and the form of messages to and from NN workers.
    """
    rows, workers = batch.unique, topology.counts["nn_worker"]
    row_bytes = answers = gradients = pushed = 0.0
    for table in tables:
        config, count = table.config, rows[table.config.name]
        row_bytes += 4 * config.row_words * count
        gradients += 4 * config.dim * count
        answer, push = _with_nn_worker(table, batch, topology)
        answers += answer
        pushed += push
    return BatchTraffic(
        ids=sum(batch.ids.values()) * ID_BYTES + sum(batch.offsets.values()),
        dense=batch.dense_bytes,
        keys=sum(rows[table.config.name] for table in tables) * ID_BYTES,
        rows=row_bytes,
        answers=answers,
        pushed=pushed,
        gradients=gradients,
        reduced=2 * (workers - 1) / workers * 4 * batch.parameters,
    )


def _with_nn_worker(table: PlannedTable, batch: BatchShape, topology: Topology) -> tuple[float, float]:
    """Returns the bytes of the answer to a lookup and of the push, for a table: of its rows, or of values.

    `persia.worker.feature_pooler` makes the same choice for each batch.
    """
    config, count = table.config, batch.unique[table.config.name]
    value = 2 * config.dim + SCALE_BYTES if topology.compressed else 4 * config.dim
    row = value if config.dtype == "float32" else 4 * config.row_words
    index = batch.ids[config.name] * (2 if count <= NARROW_ROWS else 4) + batch.offsets.get(config.name, 0.0)
    push, values = value if table.table.trainable else 0, table.poolable * batch.samples
    of_rows, of_values = (count * row + index, count * push), (values * value, values * push)
    pools = topology.pool_at == "embedding_worker" or (topology.pool_at == "auto" and sum(of_values) < sum(of_rows))
    return of_values if table.poolable and pools else of_rows


def _by_role(traffic: BatchTraffic, servers: int) -> dict[str, tuple[float, float, float]]:
    """Returns bytes in, bytes out and calls of each role for a batch."""
    ids, dense, keys, rows, answers, pushed, gradients, reduced = traffic
    return {
        "data_loader": (0.0, ids + dense, 2),
        "embedding_worker": (ids + rows + pushed, keys + answers + keys + gradients, 3 + 2 * servers),
        "embedding_ps": (keys + keys + gradients, rows, 2 * servers),
        "nn_worker": (dense + answers + reduced, pushed + reduced, 3),
    }
