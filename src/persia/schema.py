"""Declarations of a model's input and of its embedding tables, as frozen, validated records.

A :class:`Schema` names ID-type features, non-ID-type ("dense") features and labels. Features read embedding
tables; features that name the same table share its rows. Everything here can be written in TOML under the same
names, and is stored in every checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from persia.errors import ConfigError
from persia.types.values import DTYPES, Dtype, round_down

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "Admission",
    "AdmitAll",
    "AdmitMinFrequency",
    "AdmitProbability",
    "EmbeddingOptimizer",
    "Ftrl",
    "IdFeature",
    "IdKind",
    "Initializer",
    "Normal",
    "Pooling",
    "RowwiseAdagrad",
    "RsqrtDim",
    "Schedule",
    "Schema",
    "Table",
    "Uniform",
    "Zeros",
]

Pooling = Literal["sum", "mean", "sqrtn"]
IdKind = Literal["auto", "number", "text"]

MAX_DIM = 4096
MAX_NAME = 64
MAX_CAPACITY = 1 << 48


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of records that a configuration file distinguishes by their `kind`."""

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
        _number(type(self).__name__, name, getattr(self, name), low, high, open_low=open_low, open_high=open_high)


def _number(
    owner: str, name: str, value: object, low: float, high: float, *, open_low: bool = False, open_high: bool = False
) -> None:
    """Raises ConfigError unless `value` is a finite number between `low` and `high`."""
    inside = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if inside:
        assert isinstance(value, (int, float))
        inside = (low < value if open_low else low <= value) and (value < high if open_high else value <= high)
    if not inside:
        interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high or math.isinf(high) else ']'}"
        raise ConfigError(
            f"{owner}.{name} = {value!r} is not a number in {interval}; correct it.", field=f"{owner}.{name}"
        )


def _integer(owner: str, name: str, value: object, low: int, high: float) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        interval = f"from {low}" if math.isinf(high) else f"from {low} to {high}"
        raise ConfigError(
            f"{owner}.{name} = {value!r} is not a whole number {interval}; correct it.",
            field=f"{owner}.{name}",
        )


def _dtype(owner: str, value: object) -> None:
    if value not in DTYPES:
        raise ConfigError(
            f"Invalid {owner}.dtype = {value!r}; expected one of: {', '.join(DTYPES)}.", field=f"{owner}.dtype"
        )


def _name(owner: str, value: object) -> None:
    if not isinstance(value, str) or not value or len(value.encode()) > MAX_NAME or "/" in value or "\0" in value:
        raise ConfigError(
            f"{owner} name {value!r} is not a text of 1 to {MAX_NAME} bytes without '/'; rename it.", field=owner
        )


# --- row optimizers ----------------------------------------------------------------------------------------------


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Learning-rate factor by global step: linear warm-up, then constant or a decay to `floor`.

    Args:
        warmup_steps: number of steps over which the factor rises linearly from 1/warmup_steps to 1.
        decay: shape after the warm-up.
        total_steps: global step at which the decay reaches `floor`; required unless `decay` is "constant".
        floor: final factor, in [0, 1].
    """

    warmup_steps: int = 0
    decay: Literal["constant", "linear", "cosine"] = "constant"
    total_steps: int = 0
    floor: float = 0.0

    def __post_init__(self) -> None:
        _integer("Schedule", "warmup_steps", self.warmup_steps, 0, math.inf)
        _integer("Schedule", "total_steps", self.total_steps, 0, math.inf)
        _number("Schedule", "floor", self.floor, 0, 1)
        if self.decay not in ("constant", "linear", "cosine"):
            raise ConfigError(
                f"Invalid Schedule.decay = {self.decay!r}; expected one of: constant, linear, cosine.", field="decay"
            )
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"Schedule.total_steps = {self.total_steps} must exceed warmup_steps = {self.warmup_steps}.",
                field="Schedule.total_steps",
            )

    def factor(self, step: int) -> float:
        """Returns the factor on the learning rate at a global step, counted from 0."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        remaining = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * remaining


class SGD(_Record, frozen=True, tag="sgd"):
    """Stochastic gradient descent with momentum and L2 weight decay, applied to the rows of a batch only.

    The update rule is that of `torch.optim.SGD`. State per row: the momentum vector if `momentum` > 0, else none.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._number("lr", 0, math.inf, open_low=True)
        self._number("momentum", 0, 1, open_high=True)
        self._number("weight_decay", 0, math.inf)


INITIAL_ACCUMULATOR = 1e-6
"""Default first accumulator of Adagrad. Versions up to 0.1 had 0.01, which checkpoints of theirs have recorded."""


class _AdagradFields(_Record, frozen=True):
    lr: float
    initial_accumulator: float = INITIAL_ACCUMULATOR
    eps: float = 1e-10
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._number("lr", 0, math.inf, open_low=True)
        self._number("initial_accumulator", 0, math.inf)
        self._number("eps", 0, math.inf)
        self._number("weight_decay", 0, math.inf)


class Adagrad(_AdagradFields, frozen=True, tag="adagrad"):
    """Adagrad with one accumulator per element (Duchi et al., 2011), updating as `torch.optim.Adagrad` does.

    Args:
        lr: learning rate; 0.05 to 0.1 suits the default `initial_accumulator`. The first update of a number is at most
            this long.
        initial_accumulator: first value of each accumulator, to which squared gradients are added. Gradients of rows
            are small, as the loss is a mean over the batch: 0.01 exceeds their squares by orders of magnitude, so rows,
            rare ones above all, hardly learn. 1e-6 is near those squares, so steps are soon almost `lr` long. With far
            less every first step is, however small the gradient; `lr` has to be smaller then.
            `python -m benchmarks 'quality.adagrad.*'` compares values.
        eps: added to the root of the accumulator.
        weight_decay: L2: adds `weight_decay * row` to the gradient of the rows of a batch.
        schedule: factor on `lr` by global step.
    """


class RowwiseAdagrad(_AdagradFields, frozen=True, tag="rowwise_adagrad"):
    """Adagrad with one accumulator per row: the mean of the squared gradient, as in FBGEMM's fused optimizer.

    Args:
        lr: learning rate; 0.05 to 0.1 suits the default `initial_accumulator`.
        initial_accumulator: first value of the accumulator. It has the scale of the accumulators of `Adagrad`, as it
            sums means over a row, so the default is the same for the same reason.
        eps: added to the root of the accumulator.
        weight_decay: L2: adds `weight_decay * row` to the gradient of the rows of a batch.
        schedule: factor on `lr` by global step.
    """


class Adam(_Record, frozen=True, tag="adam"):
    """Lazy Adam: updates the rows of the batch only; bias correction uses the number of updates of each row."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._number("lr", 0, math.inf, open_low=True)
        self._number("beta1", 0, 1, open_high=True)
        self._number("beta2", 0, 1, open_high=True)
        self._number("eps", 0, math.inf, open_low=True)
        self._number("weight_decay", 0, math.inf)


class Ftrl(_Record, frozen=True, tag="ftrl"):
    """FTRL-proximal (McMahan et al., 2013), per coordinate; `lr` is the paper's alpha."""

    lr: float
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._number("lr", 0, math.inf, open_low=True)
        self._number("beta", 0, math.inf)
        self._number("l1", 0, math.inf)
        self._number("l2", 0, math.inf)


EmbeddingOptimizer = SGD | Adagrad | RowwiseAdagrad | Adam | Ftrl


# --- initialisation ----------------------------------------------------------------------------------------------


class Uniform(_Record, frozen=True, tag="uniform"):
    """Uniform values in [low, high), keyed by (seed, table, id): independent of the machine and of the order."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        self._number("low", -math.inf, math.inf)
        self._number("high", self.low, math.inf)


class Normal(_Record, frozen=True, tag="normal"):
    """Normal values with this mean and standard deviation, keyed by (seed, table, id)."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        self._number("mean", -math.inf, math.inf)
        self._number("std", 0, math.inf)


class Zeros(_Record, frozen=True, tag="zeros"):
    """Zero values."""


class RsqrtDim(_Record, frozen=True, tag="rsqrt_dim"):
    """Uniform values in +-1/sqrt(dim), keyed by (seed, table, id)."""


Initializer = Uniform | Normal | Zeros | RsqrtDim


class AdmitAll(_Record, frozen=True, tag="all"):
    """Admits every id that training looks up."""


class AdmitProbability(_Record, frozen=True, tag="probability"):
    """Admits an id with this probability at each occurrence, keyed by (seed, id, occurrence)."""

    probability: float

    def __post_init__(self) -> None:
        self._number("probability", 0, 1, open_low=True)


class AdmitMinFrequency(_Record, frozen=True, tag="min_frequency"):
    """Admits an id at its `count`-th occurrence. The bounded sketch that counts may admit early, never late."""

    count: int

    def __post_init__(self) -> None:
        _integer("AdmitMinFrequency", "count", self.count, 1, 65535)


Admission = AdmitAll | AdmitProbability | AdmitMinFrequency


# --- tables, features, schema -----------------------------------------------------------------------------------


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One embedding table. Declare it only if it differs from the defaults; features create their tables otherwise.

    Args:
        name: name that features refer to.
        dim: length of an embedding, 1 to 4096.
        optimizer: optimizer of its rows; None for that of the trainer or collection.
        initializer: initial values of a row.
        capacity: maximum number of rows in the whole cluster, up to 2^48; beyond it, least recently used rows are
            evicted. It is divided among the embedding PSs, and refused if it cannot fit into their memory. Each PS may
            keep 1,024 rows (or `capacity`, if less), so a table of fewer than 1,024 rows for each PS may exceed it.
            None: as many as memory holds, at most 2^30 in each PS. Memory grows with the rows held, not with this
            number.
        admission: which ids get a row in training.
        value_bound: embeddings are clamped to +-this after an update; 0 for no bound.
        cache_rows: number of rows that each NN worker keeps copies of on its device, for the batches that the mode's
            staleness lets them serve; see the guide on GPUs. 0 for none.
        dtype: of its embeddings in the memory of PSs and in messages: "float32", "bfloat16" or "float16". Models get
            float32 and send gradients of float32, whatever it is. Adam's moments in a bfloat16 table have 16 bits, too;
            all other state of optimizers is float32. See the guide on tables for what it costs.
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

    def __post_init__(self) -> None:
        _name("Table", self.name)
        _integer(f"Table({self.name!r})", "dim", self.dim, 1, MAX_DIM)
        if self.capacity is not None:
            _integer(f"Table({self.name!r})", "capacity", self.capacity, 1, MAX_CAPACITY)
        _number(f"Table({self.name!r})", "value_bound", self.value_bound, 0, math.inf)
        _integer(f"Table({self.name!r})", "cache_rows", self.cache_rows, 0, (1 << 31) - 2)
        _dtype(f"Table({self.name!r})", self.dtype)
        if self.value_bound and not round_down(self.value_bound, self.dtype):
            raise ConfigError(
                f"Table({self.name!r}).value_bound = {self.value_bound!r} is less than any number of {self.dtype}; "
                "raise it.",
                field=f"Table({self.name!r}).value_bound",
            )
        if self.cache_rows and not isinstance(self.admission, AdmitAll):
            raise ConfigError(
                f"Table({self.name!r}).cache_rows = {self.cache_rows} needs admission = AdmitAll(): parameter servers "
                "do not count the ids that copies serve. Set cache_rows to 0, or admit all ids.",
                field=f"Table({self.name!r}).cache_rows",
            )


class IdFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ID-type feature: for each sample one id, or a list of them.

    Args:
        name: column of the data, and key of the model's input.
        dim: length of its embeddings; optional if `table` is declared in the schema.
        table: table whose rows it reads; defaults to its own name. Features of one table share rows.
        pooling: reduction of a sample's embeddings to one: "sum", "mean", "sqrtn" (sum / sqrt(count)).
            None ("none" in a file) keeps the sequence: the model gets `[batch, max_length, dim]` and a mask.
        max_length: maximum number of ids per sample; further ids are ignored. Required if `pooling` is None.
        cross: names of single-valued features whose combination is the id. The column is computed, not read.
        kind: conversion of values to ids. "auto": whole numbers from 0 to 2^64 - 1 are used as ids (5, 5.0 and the
            text "5" alike); all other values are hashed as text. "number": accepts such numbers only. "text": hashes
            every value as text, "5" included. Recorded in checkpoints.
        dtype: of its embeddings, see `Table.dtype`; None for that of its table: as declared, or as another feature of
            the table says, else "float32".
    """

    name: str
    dim: int | None = None
    table: str | None = None
    pooling: Pooling | Literal["none"] | None = "sum"
    max_length: int | None = None
    cross: tuple[str, ...] = ()
    kind: IdKind = "auto"
    dtype: Dtype | None = None

    def __post_init__(self) -> None:
        owner = f"IdFeature({self.name!r})"
        _name("IdFeature", self.name)
        if self.dim is not None:
            _integer(owner, "dim", self.dim, 1, MAX_DIM)
        if self.dtype is not None:
            _dtype(owner, self.dtype)
        if self.pooling == "none":  # TOML has no null.
            msgspec.structs.force_setattr(self, "pooling", None)
        if self.pooling not in ("sum", "mean", "sqrtn", None):
            raise ConfigError(
                f"Invalid {owner}.pooling = {self.pooling!r}; expected 'sum', 'mean', 'sqrtn', or None to keep the "
                "sequence.",
                field=f"{owner}.pooling",
            )
        if self.max_length is not None:
            _integer(owner, "max_length", self.max_length, 1, 1 << 20)
        if self.pooling is None and self.max_length is None:
            raise ConfigError(
                f"{owner} has pooling=None; give max_length, the length of the sequence the model gets.",
                field=f"{owner}.max_length",
            )
        if self.kind not in ("auto", "number", "text"):
            raise ConfigError(
                f"Invalid {owner}.kind = {self.kind!r}; expected 'auto', 'number' or 'text'.", field=f"{owner}.kind"
            )
        if self.cross and self.kind != "auto":
            raise ConfigError(
                f"{owner}.kind = {self.kind!r}, but a cross is computed from the ids of its parts; set their kind.",
                field=f"{owner}.kind",
            )
        if len(self.cross) == 1:
            raise ConfigError(f"{owner}.cross needs two or more features.", field=f"{owner}.cross")

    @property
    def table_name(self) -> str:
        """The name of the table that the feature reads."""
        return self.table or self.name


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input of a model.

    Args:
        id_features: ID-type features; names are unique over all kinds of features.
        dense_features: names of numeric columns, in the order in which the model gets them.
        labels: names of the label columns, each in [0, 1].
        tables: declarations of tables that differ from the defaults.

    Raises:
        ConfigError: names clash, a dimension is missing or contradictory, or a cross names an unknown feature.
    """

    id_features: Sequence[IdFeature]
    dense_features: Sequence[str] = ()
    labels: Sequence[str] = ("label",)
    tables: Sequence[Table] = ()

    def __post_init__(self) -> None:
        for field in ("id_features", "dense_features", "labels", "tables"):
            value = getattr(self, field)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigError(f"Schema.{field} = {value!r} is not a list; give a list.", field=field)
        names = [f.name for f in self.id_features] + list(self.dense_features) + list(self.labels)
        for name in names:
            _name("feature or label", name)
            if names.count(name) > 1:
                raise ConfigError(f"The name {name!r} occurs twice in the schema; rename one.", field=name)
        declared = [t.name for t in self.tables]
        for name in declared:
            if declared.count(name) > 1:
                raise ConfigError(f"Table {name!r} is declared twice in the schema.", field=name)
            if name not in {f.table_name for f in self.id_features}:
                raise ConfigError(f"Table {name!r} is read by no feature; remove it or name it in one.", field=name)
        self.resolved_tables()
        single = {f.name for f in self.id_features if not f.cross}
        for feature in self.id_features:
            for part in feature.cross:
                if part not in single:
                    raise ConfigError(
                        f"IdFeature({feature.name!r}).cross names {part!r}, which is not an uncrossed ID-type feature; "
                        "name features of the schema that are not crosses themselves.",
                        field=f"IdFeature({feature.name!r}).cross",
                    )

    def resolved_tables(self) -> dict[str, Table]:
        """Returns all tables by name, declared or implied by a feature, in order of first use."""
        declared = {t.name: t for t in self.tables}
        tables: dict[str, Table] = {}
        for feature in self.id_features:
            name = feature.table_name
            known = tables.get(name) or declared.get(name)
            if known is None:
                dims = [f.dim for f in self.id_features if f.table_name == name and f.dim is not None]
                if not dims:
                    raise ConfigError(
                        f"IdFeature({feature.name!r}) has no dim and its table {name!r} is not declared; give dim.",
                        field=f"IdFeature({feature.name!r}).dim",
                    )
                dtypes = [f.dtype for f in self.id_features if f.table_name == name and f.dtype is not None]
                known = Table(name, dims[0], dtype=(dtypes or ["float32"])[0])
            if feature.dim is not None and feature.dim != known.dim:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).dim = {feature.dim}, but its table {name!r} has dim {known.dim}; "
                    "features of one table have one dim.",
                    field=f"IdFeature({feature.name!r}).dim",
                )
            if feature.dtype is not None and feature.dtype != known.dtype:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).dtype = {feature.dtype!r}, but its table {name!r} has dtype "
                    f"{known.dtype!r}; features of one table have one dtype.",
                    field=f"IdFeature({feature.name!r}).dtype",
                )
            tables[name] = known
        return tables

    def feature(self, name: str) -> IdFeature:
        """Returns an ID-type feature by name.

        Raises:
            ConfigError: the schema has no such feature.
        """
        for feature in self.id_features:
            if feature.name == name:
                return feature
        known = ", ".join(f.name for f in self.id_features)
        raise ConfigError(f"The schema has no ID-type feature {name!r}; it has {known}.", field=name)
