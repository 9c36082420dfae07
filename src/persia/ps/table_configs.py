"""Translates the tables of a schema to the configuration of a store."""

from __future__ import annotations

from persia.errors import StoreError
from persia.ps.ages import ttl_of
from persia.schema import (
    SGD,
    Adagrad,
    Adam,
    AdmitMinFrequency,
    AdmitProbability,
    EmbeddingOptimizer,
    Ftrl,
    Initializer,
    Normal,
    RowwiseAdagrad,
    RsqrtDim,
    Table,
    Uniform,
)
from persia.store import TableConfig
from persia.store.table_config import AdmissionKind, InitializerKind, OptimizerKind

__all__ = ["learning_rate", "table_config"]

OPTIMIZERS: dict[type[EmbeddingOptimizer], OptimizerKind] = {
    SGD: "sgd",
    Adagrad: "adagrad",
    RowwiseAdagrad: "rowwise_adagrad",
    Adam: "adam",
    Ftrl: "ftrl",
}


def table_config(table: Table, seed: int, capacity: int | None, memory_rows: int = 0) -> TableConfig:
    """Returns the store's configuration of a table whose optimizer is filled in.

    Rows that are not trained have the optimizer without state, which is never used.

    Args:
        table: the table.
        seed: seed of row initialisation and admission.
        capacity: maximum rows in this PS; None if the table declares no capacity.
        memory_rows: maximum rows in memory, of a table with `spill`; 0 for other tables.
    """
    optimizer = table.optimizer
    kind, low, high = _initializer(table.initializer)
    admission, value = _admission(table)
    ttl, unit = ttl_of(table.ttl)
    return TableConfig(
        name=table.name,
        dim=table.dim,
        capacity=TableConfig.capacity if capacity is None else capacity,
        seed=seed,
        optimizer="sgd" if optimizer is None else OPTIMIZERS[type(optimizer)],
        optimizer_params={
            name: getattr(optimizer, name)
            for name in (() if optimizer is None else type(optimizer).__struct_fields__)
            if name not in ("lr", "schedule")
        },
        initializer=kind,
        initializer_a=low,
        initializer_b=high,
        admission=admission,
        admission_value=value,
        value_bound=table.value_bound,
        ttl=ttl,
        ttl_unit=unit,
        dtype=table.dtype,
        memory_rows=memory_rows,
        eviction=table.eviction,
    )


def learning_rate(table: Table, step: int) -> float:
    """Returns the learning rate of a table at a global step.

    Raises:
        StoreError: the table is not trainable.
    """
    if (optimizer := table.optimizer) is None:
        raise StoreError(
            f"Table {table.name!r} is not trainable, and a push has gradients for it. Give all processes the schema of "
            "the PSs.",
            table=table.name,
        )
    return optimizer.lr * (optimizer.schedule.factor(step) if optimizer.schedule is not None else 1.0)


def _initializer(initializer: Initializer) -> tuple[InitializerKind, float, float]:
    match initializer:
        case Uniform(low, high):
            return "uniform", low, high
        case Normal(mean, std):
            return "normal", mean, std
        case RsqrtDim():
            return "rsqrt_dim", 0.0, 0.0
        case _:
            return "zeros", 0.0, 0.0


def _admission(table: Table) -> tuple[AdmissionKind, float]:
    match table.admission:
        case AdmitProbability(probability):
            return "probability", probability
        case AdmitMinFrequency(count):
            return "min_frequency", float(count)
        case _:
            return "all", 0.0
