"""What a model's input looks like, and how its embedding tables behave: plain, frozen, checked records.

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


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of records that a configuration file tells apart by their `kind`."""

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
        raise ConfigError(
            f"{owner}.{name} = {value!r} is not a whole number from {low} to {high:g}; correct it.",
            field=f"{owner}.{name}",
        )


def _name(owner: str, value: object) -> None:
    if not isinstance(value, str) or not value or len(value.encode()) > MAX_NAME or "/" in value or "\0" in value:
        raise ConfigError(
            f"{owner} name {value!r} is not a text of 1 to {MAX_NAME} bytes without '/'; rename it.", field=owner
        )


# --- how rows are updated ---------------------------------------------------------------------------------------


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Learning-rate factor by global step: linear warm-up, then constant or a decay to `floor`.

    Args:
        warmup_steps: the factor rises linearly from 1/warmup_steps to 1 over so many steps.
        decay: shape after the warm-up.
        total_steps: global step at which the decay has reached `floor`; needed unless `decay` is "constant".
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
            raise ConfigError(f"Schedule.decay = {self.decay!r}; use constant, linear or cosine.", field="decay")
        if self.decay != "constant" and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"Schedule.total_steps = {self.total_steps} must exceed warmup_steps = {self.warmup_steps}.",
                field="Schedule.total_steps",
            )

    def factor(self, step: int) -> float:
        """Factor on the learning rate at global step `step` (0 for the first)."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        remaining = 1.0 - progress if self.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.floor + (1.0 - self.floor) * remaining


class SGD(_Record, frozen=True, tag="sgd"):
    """Stochastic gradient descent with momentum and L2 weight decay, on the rows of a batch only.

    State per row: none, or the momentum vector when `momentum` > 0. Rule as in `torch.optim.SGD`.
    """

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._number("lr", 0, math.inf, open_low=True)
        self._number("momentum", 0, 1, open_high=True)
        self._number("weight_decay", 0, math.inf)


class _AdagradFields(_Record, frozen=True):
    lr: float
    initial_accumulator: float = 0.01
    eps: float = 1e-10
    weight_decay: float = 0.0
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        self._number("lr", 0, math.inf, open_low=True)
        self._number("initial_accumulator", 0, math.inf)
        self._number("eps", 0, math.inf)
        self._number("weight_decay", 0, math.inf)


class Adagrad(_AdagradFields, frozen=True, tag="adagrad"):
    """Adagrad, one accumulator per element (Duchi et al., 2011). Rule as in `torch.optim.Adagrad`."""


class RowwiseAdagrad(_AdagradFields, frozen=True, tag="rowwise_adagrad"):
    """Adagrad with one accumulator per row: the mean of the squared gradient, as in FBGEMM's fused optimizer."""


class Adam(_Record, frozen=True, tag="adam"):
    """Lazy Adam: rows of the batch only, bias-corrected by the number of updates of the row itself."""

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


# --- how rows begin ---------------------------------------------------------------------------------------------


class Uniform(_Record, frozen=True, tag="uniform"):
    """New rows are uniform in [low, high), keyed by (seed, table, id): the same on every machine and order."""

    low: float = -0.01
    high: float = 0.01

    def __post_init__(self) -> None:
        self._number("low", -math.inf, math.inf)
        self._number("high", self.low, math.inf)


class Normal(_Record, frozen=True, tag="normal"):
    """New rows are normal with this mean and standard deviation, keyed by (seed, table, id)."""

    mean: float = 0.0
    std: float = 0.01

    def __post_init__(self) -> None:
        self._number("mean", -math.inf, math.inf)
        self._number("std", 0, math.inf)


class Zeros(_Record, frozen=True, tag="zeros"):
    """New rows are zero."""


class RsqrtDim(_Record, frozen=True, tag="rsqrt_dim"):
    """New rows are uniform in +-1/sqrt(dim), keyed by (seed, table, id)."""


Initializer = Uniform | Normal | Zeros | RsqrtDim


class AdmitAll(_Record, frozen=True, tag="all"):
    """Every id that training looks up gets a row."""


class AdmitProbability(_Record, frozen=True, tag="probability"):
    """Each occurrence of an id without a row admits it with this probability, keyed by (seed, id, occurrence)."""

    probability: float

    def __post_init__(self) -> None:
        self._number("probability", 0, 1, open_low=True)


class AdmitMinFrequency(_Record, frozen=True, tag="min_frequency"):
    """An id gets a row at its `count`-th occurrence, counted in a bounded sketch (it may admit early, never late)."""

    count: int

    def __post_init__(self) -> None:
        _integer("AdmitMinFrequency", "count", self.count, 1, 65535)


Admission = AdmitAll | AdmitProbability | AdmitMinFrequency


# --- tables, features, schema -----------------------------------------------------------------------------------


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One embedding table. Only needed where a table differs from the defaults; features create theirs otherwise.

    Args:
        name: what features refer to.
        dim: length of an embedding, 1 to 4096.
        optimizer: how its rows are updated; None takes the one given to the trainer or collection.
        initializer: first value of a row.
        capacity: most rows held; the least recently used row makes room. Memory grows with rows, not with this.
        admission: which ids get a row in training.
        value_bound: embeddings are clamped to +-this after an update; 0 for no bound.
    """

    name: str
    dim: int
    optimizer: EmbeddingOptimizer | None = None
    initializer: Initializer = Uniform()
    capacity: int = 1 << 30
    admission: Admission = AdmitAll()
    value_bound: float = 0.0

    def __post_init__(self) -> None:
        _name("Table", self.name)
        _integer(f"Table({self.name!r})", "dim", self.dim, 1, MAX_DIM)
        _integer(f"Table({self.name!r})", "capacity", self.capacity, 1, 1 << 38)
        _number(f"Table({self.name!r})", "value_bound", self.value_bound, 0, math.inf)


class IdFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One ID-type feature: for each sample one id, or a list of them.

    Args:
        name: column of the input, key of the model's input.
        dim: length of its embeddings; may be left out where `table` is declared in the schema.
        table: table whose rows it reads; its own name by default. Features of one table share rows.
        pooling: how the embeddings of a sample's ids become one: "sum", "mean", "sqrtn" (sum / sqrt(count)).
            None ("none" in a file) keeps the sequence: the model gets `[batch, max_length, dim]` and a mask.
        max_length: only the first so many ids of a sample count; needed when `pooling` is None.
        cross: names of single-valued features whose combination is the id (the column is then computed, not read).
        kind: how a value becomes an id, by the value alone. "auto": whole numbers from 0 to 2^64 - 1 are ids as they
            are (5, 5.0 and the text "5" alike), everything else is hashed as text. "number": only such numbers;
            anything else is an error. "text": texts are hashed, "5" too. Recorded in checkpoints.
    """

    name: str
    dim: int | None = None
    table: str | None = None
    pooling: Pooling | Literal["none"] | None = "sum"
    max_length: int | None = None
    cross: tuple[str, ...] = ()
    kind: IdKind = "auto"

    def __post_init__(self) -> None:
        owner = f"IdFeature({self.name!r})"
        _name("IdFeature", self.name)
        if self.dim is not None:
            _integer(owner, "dim", self.dim, 1, MAX_DIM)
        if self.pooling == "none":  # TOML has no null.
            msgspec.structs.force_setattr(self, "pooling", None)
        if self.pooling not in ("sum", "mean", "sqrtn", None):
            raise ConfigError(
                f"{owner}.pooling = {self.pooling!r}; use 'sum', 'mean', 'sqrtn', or None for the sequence.",
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
            raise ConfigError(f"{owner}.kind = {self.kind!r}; use 'auto', 'number' or 'text'.", field=f"{owner}.kind")
        if self.cross and self.kind != "auto":
            raise ConfigError(
                f"{owner}.kind = {self.kind!r}, but a cross is computed from the ids of its parts; set their kind.",
                field=f"{owner}.kind",
            )
        if len(self.cross) == 1:
            raise ConfigError(f"{owner}.cross needs two or more features.", field=f"{owner}.cross")

    @property
    def table_name(self) -> str:
        """The table it reads."""
        return self.table or self.name


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input of a model.

    Args:
        id_features: ID-type features; names are unique over all kinds of features.
        dense_features: names of numeric columns, in the order in which the model gets them.
        labels: names of the label columns, each in [0, 1].
        tables: declarations of tables that need more than a dimension.

    Raises:
        ConfigError: names clash, a dimension is missing or contradictory, a cross names an unknown feature.
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
                        f"IdFeature({feature.name!r}).cross names {part!r}, which is no (uncrossed) ID-type feature.",
                        field=f"IdFeature({feature.name!r}).cross",
                    )

    def resolved_tables(self) -> dict[str, Table]:
        """All tables by name, declared or implied by a feature, in the order of first use."""
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
                known = Table(name, dims[0])
            if feature.dim is not None and feature.dim != known.dim:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).dim = {feature.dim}, but its table {name!r} has dim {known.dim}; "
                    "features of one table have one dim.",
                    field=f"IdFeature({feature.name!r}).dim",
                )
            tables[name] = known
        return tables

    def feature(self, name: str) -> IdFeature:
        """The ID-type feature of this name.

        Raises:
            ConfigError: there is none.
        """
        for feature in self.id_features:
            if feature.name == name:
                return feature
        known = ", ".join(f.name for f in self.id_features)
        raise ConfigError(f"The schema has no ID-type feature {name!r}; it has {known}.", field=name)
