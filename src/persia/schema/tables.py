"""Embedding tables: initial values of rows, admission of ids, and a table's size and dtype."""

from __future__ import annotations

import math
from typing import Literal, get_args

import msgspec

from persia.checks import (
    MAX_STEPS,
    check_choice,
    check_flag,
    check_integer,
    check_kind,
    check_number,
    described,
    plain_fields,
    plain_paths,
)
from persia.errors import ConfigError
from persia.schema.checks import TaggedRecord, check_dtype, check_name
from persia.schema.optimizers import EmbeddingOptimizer
from persia.types.half_floats import Dtype, round_down

__all__ = [
    "MAX_DIM",
    "Admission",
    "AdmitAll",
    "AdmitMinFrequency",
    "AdmitProbability",
    "Days",
    "Initializer",
    "Normal",
    "RsqrtDim",
    "Steps",
    "Table",
    "Uniform",
    "Zeros",
]

MAX_DIM = 4096
MAX_CAPACITY = 1 << 48
MAX_DAYS = 36_500

EvictionKind = Literal["lru", "midpoint"]


class Uniform(TaggedRecord, frozen=True, tag="uniform"):
    """Uniform values in [low, high), keyed by (seed, table, id): independent of the machine and the order of ids."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("low", -math.inf, math.inf)
        self._number("high", self.low, math.inf)


class Normal(TaggedRecord, frozen=True, tag="normal"):
    """Normal values with this mean and standard deviation, keyed by (seed, table, id)."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("mean", -math.inf, math.inf)
        self._number("std", 0, math.inf)


class Zeros(TaggedRecord, frozen=True, tag="zeros"):
    """Zero values."""


class RsqrtDim(TaggedRecord, frozen=True, tag="rsqrt_dim"):
    """Uniform values in +-1/sqrt(dim), keyed by (seed, table, id)."""


Initializer = Uniform | Normal | Zeros | RsqrtDim


class AdmitAll(TaggedRecord, frozen=True, tag="all"):
    """Admits every id that training looks up."""


class AdmitProbability(TaggedRecord, frozen=True, tag="probability"):
    """Admits an id with this probability at each occurrence, keyed by (seed, id, occurrence)."""

    probability: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("probability", 0, 1, open_low=True)


class AdmitMinFrequency(TaggedRecord, frozen=True, tag="min_frequency"):
    """Admits an id at its `count`-th occurrence. A bounded sketch counts, so it may admit early but never late."""

    count: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("AdmitMinFrequency.count", self.count, 1, 65535)


class Days(TaggedRecord, frozen=True, tag="days"):
    """Days of training: a pause without gradients counts as at most an hour."""

    days: float

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("days", 0, MAX_DAYS, open_low=True)


class Steps(TaggedRecord, frozen=True, tag="steps"):
    """Global steps of training."""

    steps: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_integer("Steps.steps", self.steps, 1, MAX_STEPS)


Admission = AdmitAll | AdmitProbability | AdmitMinFrequency


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An embedding table. Declare it only if it differs from the defaults; otherwise features create their tables.

    Args:
        name: name that features refer to.
        dim: length of an embedding, 1 to 4096.
        optimizer: optimizer of its rows; None for the optimizer of the trainer or collection.
        initializer: initial values of a row.
        capacity: maximum number of rows in the whole cluster, up to 2^48; beyond it, least recently used rows are
            evicted. It is divided among the embedding PSs, and rejected if it cannot fit into their memory. Each PS may
            hold 1,024 rows (or `capacity`, if less), so a table of fewer than 1,024 rows per PS may exceed it. None:
            limited only by memory, or with `spill` by memory and disk, to at most 2^30 rows in each PS. Memory grows
            with the rows held, not with this number.
        admission: which ids get a row in training.
        ttl: time to live: rows expire that training has not seen for this number of `Days` or `Steps`. None: they do
            not expire.
        value_bound: embeddings are clamped to +-`value_bound` after an update; 0 for no bound.
        cache_rows: number of rows of which each NN worker caches copies on its device, for as many batches as the
            mode's staleness permits; see the guide on GPUs. 0 for none.
        dtype: dtype of its embeddings in the memory of PSs and in messages: "float32", "bfloat16" or "float16". Models
            always get float32 and send gradients of float32. Adam's moments in a bfloat16 table have 16 bits, too; all
            other optimizer state is float32. See the guide on tables for its cost.
        spill: directory on a local SSD of each host with an embedding PS, an absolute path. Least recently used rows
            beyond `memory_rows` move there, and move back when training sees them: no row is evicted below `capacity`.
            See the guide on tables larger than memory. None: all rows are in memory.
        memory_rows: with `spill`, maximum number of rows in memory in the whole cluster; divided among the embedding
            PSs like `capacity`. None: as many as memory holds when the cluster starts.
        eviction: which row a full table evicts. "lru": exactly the least recently used one. "midpoint": the least
            recently used one, but a new row counts as less recent than about five eighths of the rows until training
            sees it again, so that ids that occur once displace few others. Not with `ttl` or `spill`. See the guide on
            tables for hit rates.
        trainable: whether gradients update its rows. If not, rows are looked up, admitted and initialised as in other
            tables, or loaded (`Trainer.load_rows`, `EmbeddingCollection.set_rows`), and then stay as they are: no
            gradient of them is computed or sent, and they have no optimizer state.
        owned_rows: number of rows that the device of the only NN worker may own in training, with their optimizer
            state: it updates them, and writes them back when others need them. Only in `Sync`, on an `Embedded`
            cluster; see the guide on GPUs. 0 for none.
    """

    name: str
    dim: int
    optimizer: EmbeddingOptimizer | None = None
    initializer: Initializer = Uniform()
    capacity: int | None = None
    admission: Admission = AdmitAll()
    value_bound: float = 0.0
    cache_rows: int = 0
    dtype: Dtype = "float32"
    ttl: Days | Steps | None = None
    spill: str | None = None
    memory_rows: int | None = None
    eviction: EvictionKind = "lru"
    trainable: bool = True
    owned_rows: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        plain_paths(self, "spill")
        check_name("Table", self.name)
        owner = f"Table({self.name!r})"
        check_kind(f"{owner}.optimizer", self.optimizer, EmbeddingOptimizer | None, "one of persia.optim, or None")
        check_kind(f"{owner}.initializer", self.initializer, Initializer, "Uniform, Normal, Zeros or RsqrtDim")
        check_kind(f"{owner}.admission", self.admission, Admission, "AdmitAll, AdmitProbability or AdmitMinFrequency")
        check_integer(f"Table({self.name!r}).dim", self.dim, 1, MAX_DIM)
        if self.capacity is not None:
            check_integer(f"Table({self.name!r}).capacity", self.capacity, 1, MAX_CAPACITY)
        check_number(f"Table({self.name!r}).value_bound", self.value_bound, 0, math.inf)
        check_integer(f"Table({self.name!r}).cache_rows", self.cache_rows, 0, (1 << 31) - 2)
        check_integer(f"Table({self.name!r}).owned_rows", self.owned_rows, 0, (1 << 31) - 2)
        check_dtype(f"Table({self.name!r})", self.dtype)
        check_kind(f"{owner}.ttl", self.ttl, Days | Steps | None, "Days(...), Steps(...) or None")
        check_choice(f"{owner}.eviction", self.eviction, get_args(EvictionKind))
        check_flag(f"{owner}.trainable", self.trainable)
        if self.optimizer is not None and not self.trainable:
            raise ConfigError(
                f"{owner}.optimizer = {self.optimizer!r} has no effect with trainable = False, as no gradient updates "
                "its rows. Remove the optimizer, or set trainable to True.",
                field=f"{owner}.optimizer",
            )
        self._check_spill(owner)
        if self.eviction != "lru" and (self.ttl is not None or self.spill is not None):
            raise ConfigError(
                f"{owner}.eviction = {self.eviction!r} cannot be combined with ttl or spill, which need the time of "
                'each row\'s last use. Set eviction to "lru", or remove ttl and spill.',
                field=f"{owner}.eviction",
            )
        if self.value_bound and not round_down(self.value_bound, self.dtype):
            raise ConfigError(
                f"Invalid Table({self.name!r}).value_bound = {self.value_bound!r}; expected 0, or at least the "
                f"smallest number of {self.dtype}.",
                field=f"Table({self.name!r}).value_bound",
            )
        if self.cache_rows and not isinstance(self.admission, AdmitAll):
            raise ConfigError(
                f"Table({self.name!r}).cache_rows = {self.cache_rows} needs admission = AdmitAll(): parameter servers "
                "do not count the ids that copies serve. Set cache_rows to 0, or admit all ids.",
                field=f"Table({self.name!r}).cache_rows",
            )

        if self.owned_rows:
            self.check_ownable()

    def check_ownable(self) -> None:
        """Raises ConfigError unless a device can own rows of this table; see `owned_rows`."""
        if self.capacity is not None and self.owned_rows > self.capacity:
            raise ConfigError(
                f"Table({self.name!r}).owned_rows = {self.owned_rows} is more than its capacity = {self.capacity}: "
                "rows could not be written back. Set owned_rows to at most the capacity, or to 0.",
                field=f"Table({self.name!r}).owned_rows",
            )
        reasons = {
            "dtype": self.dtype != "float32" and "updates of 16-bit rows are rounded by the parameter server",
            "ttl": self.ttl is not None and "the parameter server does not see uses of owned rows",
            "admission": not isinstance(self.admission, AdmitAll) and "it does not count lookups of owned rows",
            "trainable": not self.trainable and "its rows are never updated",
            "cache_rows": self.cache_rows and "copies of rows serve in other modes",
        }
        for field, reason in reasons.items():
            if reason:
                raise ConfigError(
                    f"Table({self.name!r}).{field} = {getattr(self, field)!r}: rows of this table cannot be owned by a "
                    f"device, as {reason}. Leave this table at the parameter servers: set owned_rows to 0.",
                    field=f"Table({self.name!r}).{field}",
                )

    def optimizer_or(self, default: EmbeddingOptimizer | None) -> EmbeddingOptimizer | None:
        """Returns the optimizer of its rows: its own, or the default of a run; None if the table is not trainable."""
        return self.optimizer or default if self.trainable else None

    def _check_spill(self, owner: str) -> None:
        if self.spill is not None and not (isinstance(self.spill, str) and self.spill.startswith("/")):
            raise ConfigError(
                f"Invalid {owner}.spill = {described(self.spill)}; expected an absolute path of a directory on a local "
                "SSD, or None.",
                field=f"{owner}.spill",
            )
        if self.memory_rows is None:
            return
        if self.spill is None:
            raise ConfigError(
                f"{owner}.memory_rows = {described(self.memory_rows)} needs spill = a directory on a local SSD, for "
                "the rows beyond them. Set spill, or limit the rows of a table in memory with `capacity`.",
                field=f"{owner}.memory_rows",
            )
        check_integer(f"{owner}.memory_rows", self.memory_rows, 1, self.capacity or MAX_CAPACITY)
