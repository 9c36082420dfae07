"""The configuration of a table, checked before anything is allocated."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from persia.errors import ConfigError
from persia.types.half_floats import DTYPES, Dtype, round_down, words_of

__all__ = ["COLD_ROW_BYTES", "OPTIMIZER_PARAMS", "TableConfig", "check_spill"]

OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "ftrl"]
InitializerKind = Literal["uniform", "normal", "zeros", "rsqrt_dim"]
AdmissionKind = Literal["all", "probability", "min_frequency"]
TtlUnit = Literal["steps", "seconds"]
EvictionKind = Literal["lru", "midpoint"]

_DECAYS = {"weight_decay": 0.0, "decoupled_weight_decay": 0.0}
_CLIPPING = {"clip_row_norm": 0.0}

OPTIMIZER_PARAMS: dict[str, dict[str, float]] = {
    "sgd": {"momentum": 0.0, **_DECAYS, **_CLIPPING},
    "adagrad": {"initial_accumulator": 0.0, "eps": 1e-10, **_DECAYS, **_CLIPPING},
    "rowwise_adagrad": {"initial_accumulator": 0.0, "eps": 1e-10, **_DECAYS, **_CLIPPING},
    "adam": {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, **_DECAYS, **_CLIPPING},
    "ftrl": {"beta": 1.0, "l1": 0.0, "l2": 0.0, "initial_accumulator": 0.0, **_CLIPPING},
}
"""The parameters of each optimizer, with their defaults."""

TTL_UNITS: dict[TtlUnit, int] = {"steps": 1, "seconds": 2}
"""Numbers of the units in regions and checkpoints."""

_INITIALIZERS = ("uniform", "normal", "zeros", "rsqrt_dim")
_ADMISSIONS = ("all", "probability", "min_frequency")
_EVICTIONS = get_args(EvictionKind)
_ROWS_PER_SHARD = 4096
_DEFAULT_SHARDS = 8
_MAX_SHARDS = 1024
_MAX_ROWS_PER_SHARD: int = importlib.import_module("persia._core").MAX_SHARD_ROWS
"""2^32 - 2, as row numbers within a shard have 32 bits; 2^16 - 2 in a build for tests."""
_CHOSEN_ROWS_PER_SHARD = (_MAX_ROWS_PER_SHARD + 2) // 2
MAX_ROWS = _MAX_SHARDS * _CHOSEN_ROWS_PER_SHARD
"""Maximum rows of a table in one store: 2^41."""
ROW_OVERHEAD = 36
"""Maximum bytes of a row besides embedding and state, including its last step and its share of the index."""
COLD_ROW_BYTES = 12
"""Maximum bytes of memory of a row on disk: its share of the index, and a few bits."""
RECORD_OVERHEAD = 24
"""Bytes of a row on disk besides embedding and state."""


@dataclass(frozen=True)
class TableConfig:
    """Configuration of one table: its rows, their initialisation, admission, training and eviction.

    Attributes:
        name: unique within a store; part of the key of the random start values.
        dim: values per embedding, 1 to 65536.
        capacity: maximum number of rows in this store, in memory and on disk. Existing rows use memory, unused capacity
            does not.
        shards: power of two; 0 chooses by the rows in memory: 8, fewer below 32,768 rows (4,096 a shard), more above
            2^34 rows (2^31 a shard, half of that with rows on disk). Each shard has its lock and its share of the
            capacity, and evicts by itself. Results depend on the number only in the choice of evicted rows, and in
            the counts of admission by frequency.
        seed: seed of start values and random admission.
        optimizer: "sgd", "adagrad", "rowwise_adagrad", "adam" or "ftrl".
        optimizer_params: overrides of `OPTIMIZER_PARAMS[optimizer]`. The learning rate is given with each update.
        initializer: "uniform" on [a, b), "normal" with mean a and deviation b, "zeros", or "rsqrt_dim": uniform on
            [-1/sqrt(dim), 1/sqrt(dim)).
        initializer_a: see `initializer`.
        initializer_b: see `initializer`.
        admission: which ids get a row when looked up in training: "all", each occurrence with "probability", or from
            the n-th occurrence on with "min_frequency".
        admission_value: the probability, or n (up to 65535).
        value_bound: embeddings are clamped to [-value_bound, value_bound] after each update; 0 does not clamp.
        ttl: time after which rows expire that training has not met, in `ttl_unit`; 0: they stay.
        ttl_unit: of `EmbeddingStore.advance_clock`, "steps" or "seconds".
        dtype: dtype of embeddings in memory: "float32", "bfloat16" or "float16". Arithmetic is in float32; updates are
            rounded stochastically to 16 bits, initial and imported values to the nearest, within `value_bound`.
        memory_rows: maximum rows in memory; the least recently used rows beyond them are on disk, see `spill` of
            `EmbeddingStore.create_table`. 0: the table has no rows on disk.
        eviction: which row a full table evicts: exactly the least recently used one ("lru"); or "midpoint", in which a
            new row counts as less recent than about five eighths of the rows until it is used again. Not with `ttl` or
            `memory_rows`.
    """

    name: str
    dim: int
    capacity: int = min(2**30, MAX_ROWS)
    shards: int = 0
    seed: int = 0
    optimizer: OptimizerKind = "adagrad"
    optimizer_params: dict[str, float] = field(default_factory=dict)
    initializer: InitializerKind = "uniform"
    initializer_a: float = -0.01
    initializer_b: float = 0.01
    admission: AdmissionKind = "all"
    admission_value: float = 0.0
    value_bound: float = 0.0
    ttl: int = 0
    ttl_unit: TtlUnit = "steps"
    dtype: Dtype = "float32"
    memory_rows: int = 0
    eviction: EvictionKind = "lru"

    def __post_init__(self) -> None:
        self._check_shape()
        self._check_optimizer()
        self._check_rows()

    def _check_shape(self) -> None:
        self._require("name", bool(self.name), "must not be empty")
        self._require("dim", 1 <= self.dim <= 65536, "must be within 1 ... 65536")
        self._require("dtype", self.dtype in DTYPES, f"must be one of {list(DTYPES)}")
        self._require("capacity", 1 <= self.capacity <= MAX_ROWS, f"must be within 1 ... 2^{MAX_ROWS.bit_length() - 1}")
        shards = self.shards
        power = 0 <= shards <= _MAX_SHARDS and shards & (shards - 1) == 0
        self._require("shards", power, f"must be a power of two <= {_MAX_SHARDS}")
        self._require("capacity", self.capacity >= shards, "must be at least the number of shards")
        most = shards * _MAX_ROWS_PER_SHARD
        self._require("capacity", not shards or self.capacity <= most, f"exceeds {most} rows in {shards} shards")
        if self.memory_rows:
            least = max(1, shards)
            self._require(
                "memory_rows", least <= self.memory_rows <= self.capacity, f"must be 0, or within {least} ... capacity"
            )
            fits = self.resolved_shards <= _MAX_SHARDS and self._numbers_per_shard(self.resolved_shards)
            self._require(
                "capacity",
                fits,
                "and memory_rows exceed the row numbers of the shards: with rows on disk, "
                f"a shard numbers {_MAX_ROWS_PER_SHARD} rows of memory and, twice, of the table",
            )
        self._require("seed", 0 <= self.seed < 2**64, "must be within 0 ... 2^64 - 1")

    def _check_optimizer(self) -> None:
        self._require("optimizer", self.optimizer in OPTIMIZER_PARAMS, f"must be one of {list(OPTIMIZER_PARAMS)}")
        known = OPTIMIZER_PARAMS[self.optimizer]
        for key, value in self.optimizer_params.items():
            place = f"optimizer_params[{key!r}]"
            self._require(place, key in known, f"is not a parameter of {self.optimizer}; it has {list(known)}")
            self._require(place, math.isfinite(value) and value >= 0, "must be finite and not negative")
            self._require(place, not key.startswith("beta") or key == "beta" or value < 1, "must be below 1")

    def _check_rows(self) -> None:
        finite = math.isfinite(self.initializer_a) and math.isfinite(self.initializer_b)
        self._require("initializer", self.initializer in _INITIALIZERS, f"must be one of {list(_INITIALIZERS)}")
        self._require("initializer_a", finite, "and initializer_b must be finite")
        self._require("admission", self.admission in _ADMISSIONS, f"must be one of {list(_ADMISSIONS)}")
        value = self.admission_value
        self._require(
            "admission_value",
            self.admission != "probability" or 0 <= value <= 1,
            "must be within [0, 1] for a probability",
        )
        self._require(
            "admission_value",
            self.admission != "min_frequency" or (1 <= value <= 65535 and value == int(value)),
            "must be a whole number within 1 ... 65535 for a minimum frequency",
        )
        self._require("ttl_unit", self.ttl_unit in TTL_UNITS, f"must be one of {list(TTL_UNITS)}")
        self._require("ttl", 0 <= self.ttl < 2**63, "must be within 0 ... 2^63 - 1")
        self._require("eviction", self.eviction in _EVICTIONS, f"must be one of {list(_EVICTIONS)}")
        exact = not self.ttl and not self.memory_rows  # Both depend on the time of the last use.
        self._require("eviction", self.eviction == "lru" or exact, 'must be "lru" with ttl or memory_rows')
        bound = self.value_bound
        self._require("value_bound", math.isfinite(bound) and bound >= 0, "must be finite and not negative")
        self._require("value_bound", not bound or self.stored_bound > 0, f"is less than any number of {self.dtype}")

    def _require(self, name: str, condition: bool, message: str) -> None:
        if not condition:
            raise ConfigError(
                f"table {self.name!r}: {name} {message}; it is {getattr(self, name.split('[')[0])!r}",
                table=self.name,
                field=name,
            )

    def with_defaults(self) -> dict[str, float]:
        """Returns all parameters of the optimizer, including defaults."""
        return {**OPTIMIZER_PARAMS[self.optimizer], **self.optimizer_params}

    @property
    def resolved_shards(self) -> int:
        """The number of shards, chosen if `shards` is 0."""
        if self.shards:
            return self.shards
        shards = _DEFAULT_SHARDS
        while shards > 1 and (self.memory_rows or self.capacity) // shards < _ROWS_PER_SHARD:
            shards //= 2
        while self.capacity > shards * _CHOSEN_ROWS_PER_SHARD or not self._numbers_per_shard(shards):
            shards *= 2
        return shards

    def _numbers_per_shard(self, shards: int) -> bool:
        """Returns whether a shard has enough row numbers, as half of the records on disk may be dead."""
        rows, total = (-(-count // shards) for count in (self.memory_rows, self.capacity))
        return not self.memory_rows or rows + 2 * total <= _MAX_ROWS_PER_SHARD

    @property
    def row_bytes(self) -> int:
        """Maximum bytes of memory per row: values, state and overhead."""
        return ROW_OVERHEAD + 4 * (self.row_words + words_of(self.state_dtype, self.state_width))

    @property
    def record_bytes(self) -> int:
        """Bytes of a row on disk: checksum, last step, key, counters, values and state."""
        return RECORD_OVERHEAD + 4 * (self.row_words + words_of(self.state_dtype, self.state_width))

    @property
    def row_words(self) -> int:
        """32-bit words of an embedding, as stored and as looked up; see `persia.types.half_floats`."""
        return words_of(self.dtype, self.dim)

    @property
    def state_dtype(self) -> Dtype:
        """Dtype of the optimizer's state in memory: "bfloat16" for Adam's moments in a bfloat16 table, else float32.

        Second moments underflow in float16. Sums of squares, which FTRL and Adagrad keep, need float32.
        """
        return "bfloat16" if (self.optimizer, self.dtype) == ("adam", "bfloat16") else "float32"

    @property
    def stored_bound(self) -> float:
        """The largest number of `dtype` that is not above `value_bound`."""
        return round_down(self.value_bound, self.dtype)

    @property
    def state_width(self) -> int:
        """Values of optimizer state per row."""
        if self.optimizer == "sgd":
            return self.dim if self.with_defaults()["momentum"] else 0
        return {"adagrad": self.dim, "rowwise_adagrad": 1, "adam": 2 * self.dim, "ftrl": 2 * self.dim}[self.optimizer]

    @property
    def initial_state(self) -> NDArray[np.float32]:
        """The initial optimizer state of a row: float32 [state_width]."""
        state = np.zeros(self.state_width, np.float32)
        state[self.dim if self.optimizer == "ftrl" else 0 :] = self.with_defaults().get("initial_accumulator", 0.0)
        return state

    @property
    def initial_range(self) -> tuple[float, float]:
        """(a, b) of the initializer, computed for "rsqrt_dim"."""
        if self.initializer == "rsqrt_dim":
            return -1 / math.sqrt(self.dim), 1 / math.sqrt(self.dim)
        return self.initializer_a, self.initializer_b


def check_spill(config: TableConfig, spill: str | None) -> None:
    """Raises ConfigError unless both or none of `spill` and `TableConfig.memory_rows` are given."""
    if (spill is not None) != (config.memory_rows > 0):
        raise ConfigError(
            f"table {config.name!r}: memory_rows is {config.memory_rows}, and spill is {spill!r}; give both for a "
            "table with rows on disk, or neither",
            table=config.name,
            field="memory_rows",
        )
