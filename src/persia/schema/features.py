"""The input of a model: ID-type features, non-ID-type features and labels, and the tables that features read."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Literal

import msgspec
import numpy as np

from persia.checks import check_choice, check_integer, check_kind, plain, plain_fields
from persia.errors import ConfigError
from persia.schema.checks import check_dtype, check_name
from persia.schema.dense import DenseFeature, dense_feature
from persia.schema.derivations import Buckets, TimePart, Tokens
from persia.schema.labels import Label, label
from persia.schema.losses import BPR, EntireSpace, Hinge, ListwiseSoftmax
from persia.schema.mappings import IdMapping
from persia.schema.tables import MAX_DIM, Table
from persia.types.half_floats import Dtype

__all__ = ["IdFeature", "IdKind", "Pooling", "Schema"]

Pooling = Literal["sum", "mean", "sqrtn"]
IdKind = Literal["auto", "number", "text"]


class IdFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An ID-type feature: one id, or a list of ids, per sample.

    Args:
        name: column of the data, and key of the model's input.
        dim: length of its embeddings; optional if `table` is declared in the schema.
        table: table whose rows it reads; defaults to its own name. Features of one table share rows.
        pooling: reduction of a sample's embeddings to one: "sum", "mean", "sqrtn" (sum / sqrt(count)).
            None ("none" in a file) keeps the sequence: the model gets `[batch, max_length, dim]` and a mask.
        max_length: maximum number of ids per sample; further ids are ignored. Required if `pooling` is None.
        keep: which ids of a longer list are used: the "first", or the "last", the newest ids of a history in time
            order.
        cross: names of features whose combination is the id; at most one of them may have lists, each of whose ids is
            combined. The column is computed, not read.
        kind: conversion of values to ids. "auto": integers from 0 to 2^64 - 1 are used as ids (5, 5.0 and the text "5"
            are the same id); all other values are hashed as text. "number": accepts only such integers. "text":
            hashes every value as text, including "5". Recorded in checkpoints.
        aligned_with: another feature with the same `max_length` and `keep`, whose list has one entry for each entry of
            this feature: the parts of one event. Data are rejected if the lists of a sample differ in length or lack a
            value.
        age_since: column with the time of the sample. The feature's own column then has times of events, and its ids
            are the magnitudes of their ages, floor(log2(1 + age)), so that a model can learn how much an old event
            counts. Both columns have timestamps or dates, with ages in whole seconds (UTC without a time zone), or
            integers from 0 on in one unit. An event after the sample has age 0.
        of: another feature, whose ids are mapped by `mapping`. The column is computed, not read.
        mapping: `HashTo`, `Quotient`, `Remainder` or `CodePrefix`; for tables with fewer rows than ids.
        dtype: dtype of its embeddings, see `Table.dtype`; None for the dtype of its table, which is declared, set by
            another feature of the table, or "float32".
        bucketize: the ids are numbers of buckets of another column. Of `bucketize`, `time`, `tokens`, `age_since`,
            `cross` and `of`, one at most is given.
        time: the ids are parts of the times in a column.
        tokens: the ids are the words of the texts in a column.
        split: separator of the ids within a text: "|" reads "a|b" as two ids. Lists stay as they are.
        fill: value whose id a sample gets that has none: its value is missing, or its list is empty. It is converted
            to an id as `kind` says; with `bucketize` and `time` it is the id. None gives a sample without ids.
        weights: column with a weight for each id (one number per id of a list), by which embeddings are multiplied
            before pooling: "sum" is the weighted sum, "mean" divides it by the sum of the weights, "sqrtn" by the root
            of the sum of their squares, as in TensorFlow and, for "sum", `per_sample_weights` of PyTorch. Weights are
            finite, and 0 or more where they are divided by; a sample whose weights are all 0 then has zeros. The
            weight of a missing id is left out; that of an id in whose place `fill` is may be missing, and is then 1.
    """

    name: str
    dim: int | None = None
    table: str | None = None
    pooling: Pooling | Literal["none"] | None = "sum"
    max_length: int | None = None
    cross: tuple[str, ...] = ()
    kind: IdKind = "auto"
    dtype: Dtype | None = None
    keep: Literal["first", "last"] = "first"
    aligned_with: str | None = None
    age_since: str | None = None
    of: str | None = None
    mapping: IdMapping | None = None
    bucketize: Buckets | None = None
    time: TimePart | None = None
    tokens: Tokens | None = None
    split: str | None = None
    fill: str | int | None = None
    weights: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        owner = f"IdFeature({self.name!r})"
        check_name("IdFeature", self.name)
        check_kind(f"{owner}.table", self.table, (str, NoneType), "the name of a table, or None")
        check_kind(f"{owner}.cross", self.cross, (tuple, list), "a tuple of names of features")
        if self.dim is not None:
            check_integer(f"{owner}.dim", self.dim, 1, MAX_DIM)
        if self.dtype is not None:
            check_dtype(owner, self.dtype)
        if self.pooling == "none":  # TOML has no null.
            msgspec.structs.force_setattr(self, "pooling", None)
        if self.pooling not in ("sum", "mean", "sqrtn", None):
            raise ConfigError(
                f"Invalid {owner}.pooling = {self.pooling!r}; expected 'sum', 'mean', 'sqrtn', or None to keep the "
                "sequence.",
                field=f"{owner}.pooling",
            )
        if self.max_length is not None:
            check_integer(f"{owner}.max_length", self.max_length, 1, 1 << 20)
        if self.pooling is None and self.max_length is None:
            raise ConfigError(
                f"{owner} has pooling=None; set max_length, the length of the sequence the model gets.",
                field=f"{owner}.max_length",
            )
        check_choice(f"{owner}.kind", self.kind, ("auto", "number", "text"))
        if self.cross and self.kind != "auto":
            raise ConfigError(
                f"{owner}.kind = {self.kind!r}, but a cross is computed from the ids of its parts; set their kind.",
                field=f"{owner}.kind",
            )
        check_choice(f"{owner}.keep", self.keep, ("first", "last"))
        for field in ("aligned_with", "age_since", "of"):
            check_kind(f"{owner}.{field}", getattr(self, field), (str, NoneType), "a name, or None")
        if self.age_since is not None and (self.cross or self.kind != "auto"):
            raise ConfigError(
                f"{owner}.age_since computes ids from times; leave cross and kind out.", field=f"{owner}.age_since"
            )
        check_kind(f"{owner}.mapping", self.mapping, (IdMapping, NoneType), "HashTo, Quotient, Remainder or CodePrefix")
        if (self.of is None) != (self.mapping is None):
            raise ConfigError(
                f"{owner} has {'no of' if self.of is None else 'no mapping'}; set both: the other feature, and the "
                "mapping of its ids.",
                field=f"{owner}.of",
            )
        if self.of is not None and (self.cross or self.kind != "auto" or self.age_since is not None):
            raise ConfigError(
                f"{owner} maps the ids of {self.of!r}; leave cross, kind and age_since out.", field=f"{owner}.of"
            )
        if len(self.cross) == 1:
            raise ConfigError(f"{owner}.cross needs two or more features.", field=f"{owner}.cross")
        self._check_derivation(owner)

    def _check_derivation(self, owner: str) -> None:
        kinds = {"bucketize": Buckets, "time": TimePart, "tokens": Tokens}
        for field, kind in kinds.items():
            check_kind(f"{owner}.{field}", getattr(self, field), (kind, NoneType), f"{kind.__name__}, or None")
        sources = [field for field in (*kinds, "age_since", "cross", "of") if getattr(self, field)]
        if len(sources) > 1:
            raise ConfigError(
                f"{owner} has {' and '.join(sources)}; give one source of its ids.", field=f"{owner}.{sources[0]}"
            )
        for field in ("split", "weights"):
            check_kind(f"{owner}.{field}", getattr(self, field), (str, NoneType), "a string, or None")
        check_kind(f"{owner}.fill", self.fill, (str, int, NoneType), "a string or a whole number, or None")
        if self.split is not None and (not self.split or sources):
            raise ConfigError(
                f"{owner}.split = {self.split!r}; give a separator, for a feature that reads its own column.",
                field=f"{owner}.split",
            )
        if self.fill is not None and set(sources) - {"bucketize", "time"}:
            raise ConfigError(f"{owner}.fill does not go with {sources[0]}; leave it out.", field=f"{owner}.fill")
        self._check_fill(owner)
        if self.weights is not None and (sources or self.pooling is None):
            raise ConfigError(
                f"{owner}.weights weighs ids that are read and pooled; set pooling, or leave weights out.",
                field=f"{owner}.weights",
            )
        if sources and sources[0] in kinds and self.kind != "auto":
            raise ConfigError(f"{owner}.{sources[0]} computes ids; leave kind out.", field=f"{owner}.kind")

    def _check_fill(self, owner: str) -> None:
        if self.fill is None:
            return
        text = str(self.fill)
        number = text.isascii() and text.isdecimal() and str(int(text)) == text and int(text) < 1 << 64
        if isinstance(self.fill, bool) or not text or not (number or (self.reads_ids and self.kind != "number")):
            expected = "a text or a whole number" if self.reads_ids else "the number of an id"
            if self.kind == "number" or not self.reads_ids:
                expected += ", from 0 to 2**64 - 1"
            raise ConfigError(f"Invalid {owner}.fill = {self.fill!r}; expected {expected}.", field=f"{owner}.fill")

    @property
    def column(self) -> str:
        """The column that is read for it; its own name, unless the ids are derived from another column."""
        derivation = self.bucketize or self.time or self.tokens
        return self.name if derivation is None else derivation.column

    @property
    def derived(self) -> bool:
        """Whether the ids are derived from raw values: buckets, parts of times, words, or parts of texts."""
        return not (self.bucketize is None and self.time is None and self.tokens is None and self.split is None)

    @property
    def reads_ids(self) -> bool:
        """Whether the values of its column, or their parts, are the ids, converted as `kind` says."""
        derivation = self.bucketize or self.time or self.tokens or self.age_since
        return derivation is None and not self.computed

    @property
    def needs_fit(self) -> bool:
        """Whether a rule still needs `persia.fit_features`."""
        return self.bucketize is not None and self.bucketize.needs_fit

    @property
    def computed(self) -> bool:
        """Whether the ids are computed from ids of other features, and not read."""
        return bool(self.cross) or self.of is not None

    @property
    def table_name(self) -> str:
        """The name of the table that the feature reads."""
        return self.table or self.name


class Schema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The input of a model.

    Args:
        id_features: ID-type features; names are unique over all kinds of features.
        dense_features: non-ID-type features, in the order of the model's input; a string is a numeric column.
        labels: targets, in the order of the model's output; a string is a column of numbers in [0, 1].
        tables: declarations of tables that differ from the defaults.
        sample_weight: column with a weight of each sample, from 0 on, in loss and metrics. None weighs all 1.
        group: column with the group of each sample, such as a session or a query: losses and metrics that rank compare
            samples within a group. Values are converted as ids are.

    Raises:
        ConfigError: names clash, a dimension is missing or contradictory, or a cross names an unknown feature.
    """

    id_features: Sequence[IdFeature]
    dense_features: Sequence[str | DenseFeature] = ()
    labels: Sequence[str | Label] = ("label",)
    tables: Sequence[Table] = ()
    sample_weight: str | None = None
    group: str | None = None

    def __post_init__(self) -> None:
        for field in ("id_features", "dense_features", "labels", "tables"):
            value = getattr(self, field)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ConfigError(f"Invalid Schema.{field} = {value!r}; expected a list.", field=field)
            if any(isinstance(each, np.generic) for each in value):
                msgspec.structs.force_setattr(self, field, [plain(each) for each in value])
        for feature in self.id_features:
            check_kind("Schema.id_features", feature, IdFeature, "a list of IdFeature")
        for table in self.tables:
            check_kind("Schema.tables", table, Table, "a list of Table")
        for dense in self.dense_features:
            check_kind("Schema.dense_features", dense, (str, DenseFeature), "a list of names and DenseFeature")
        for target in self.labels:
            check_kind("Schema.labels", target, (str, Label), "a list of names and Label")
        names = [f.name for f in self.id_features]
        names += [*self.dense_names, *self.label_names]
        for name in names:
            check_name("feature or label", name)
            if names.count(name) > 1:
                raise ConfigError(f"The name {name!r} occurs twice in the schema; rename one.", field=name)
        declared = [t.name for t in self.tables]
        for name in declared:
            if declared.count(name) > 1:
                raise ConfigError(f"Table {name!r} is declared twice in the schema.", field=name)
            if name not in {f.table_name for f in self.id_features}:
                raise ConfigError(
                    f"Table {name!r} is read by no feature; remove it, or name it in a feature.", field=name
                )
        for field in ("sample_weight", "group"):
            if getattr(self, field) is not None:
                check_name(f"Schema.{field}", getattr(self, field))
        self._check_losses()
        self.resolved_tables()
        for feature in self.id_features:
            if feature.aligned_with is not None:
                self._check_aligned(feature, self.feature(feature.aligned_with))
        single = {f.name for f in self.id_features if not f.computed}
        lists = {f.name for f in self.id_features if f.tokens is not None or f.split is not None}
        for feature in self.id_features:
            if feature.of is not None and self.feature(feature.of).of is not None:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).of names {feature.of!r}, which maps ids itself; name the feature "
                    "whose ids it maps.",
                    field=f"IdFeature({feature.name!r}).of",
                )
        for feature in self.id_features:
            if len(both := [part for part in feature.cross if part in lists]) > 1:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).cross names {' and '.join(map(repr, both))}, which have lists; at "
                    "most one feature of a cross may have several ids in a sample.",
                    field=f"IdFeature({feature.name!r}).cross",
                )
            for part in feature.cross:
                if part not in single:
                    raise ConfigError(
                        f"IdFeature({feature.name!r}).cross names {part!r}, which is not an ID-type feature that is "
                        "read; name features of the schema that are neither crosses nor maps (`of`) themselves.",
                        field=f"IdFeature({feature.name!r}).cross",
                    )

    def _check_losses(self) -> None:
        kinds = {each.name: each.kind for each in self.targets}
        for each in self.targets:
            if each.needs_groups and self.group is None:
                raise ConfigError(
                    f"Label({each.name!r}).loss compares samples of a group; set Schema.group, its column.",
                    field="Schema.group",
                )
            loss = each.loss
            if isinstance(loss, EntireSpace) and (kinds.get(loss.through) != "binary" or loss.through == each.name):
                raise ConfigError(
                    f"Label({each.name!r}).loss goes through {loss.through!r}, which is not another binary label; "
                    f"the labels are {', '.join(kinds)}.",
                    field=f"Label({each.name!r}).loss",
                )
            if isinstance(loss, EntireSpace):
                self._check_through(each.name, loss.through)

    def _check_through(self, name: str, through: str) -> None:
        """Raises ConfigError unless labels that conversions go through end at one with its own probability."""
        losses = {each.name: each.effective_loss for each in self.targets}
        seen = [name]
        while isinstance(loss := losses.get(through), EntireSpace) and through not in seen:
            seen.append(through)
            through = loss.through
        if through in seen:
            raise ConfigError(
                f"Label({name!r}).loss goes through {', '.join(map(repr, seen[1:]))} back to {through!r}; let one of "
                "them have another loss.",
                field=f"Label({name!r}).loss",
            )
        if isinstance(loss, (BPR, Hinge, ListwiseSoftmax)):
            raise ConfigError(
                f"Label({name!r}).loss goes through {through!r}, whose loss only ranks and gives no probability; give "
                "it another loss, such as BinaryCrossEntropy or JRC.",
                field=f"Label({name!r}).loss",
            )

    @property
    def dense(self) -> tuple[DenseFeature, ...]:
        """The non-ID-type features, in the order of the model's input."""
        return tuple(dense_feature(each) if isinstance(each, str) else each for each in self.dense_features)

    @property
    def dense_names(self) -> tuple[str, ...]:
        """The names of the non-ID-type features, which are columns of the data."""
        return tuple(each if isinstance(each, str) else each.name for each in self.dense_features)

    @property
    def dense_width(self) -> int:
        """The number of non-ID-type values per sample: the columns of `Batch.dense`."""
        return sum(1 if isinstance(each, str) else each.width for each in self.dense_features)

    @property
    def dense_slices(self) -> dict[str, slice]:
        """The columns of `Batch.dense` of each non-ID-type feature; the last one is its indicator, if it has one."""
        slices: dict[str, slice] = {}
        start = 0
        for each in self.dense:
            slices[each.name] = slice(start, start + each.width)
            start += each.width
        return slices

    @property
    def dense_values(self) -> tuple[str, ...]:
        """A name for each column of `Batch.dense`: "price", "price (missing)", "vector[3]"."""
        names: list[str] = []
        for each in self.dense:
            names += [each.name] if each.values == 1 else [f"{each.name}[{i}]" for i in range(each.values)]
            names += [f"{each.name} (missing)"] if each.missing_indicator else []
        return tuple(names)

    @property
    def targets(self) -> tuple[Label, ...]:
        """The labels, in the order of the columns of `Batch.labels`."""
        return tuple(label(each) if isinstance(each, str) else each for each in self.labels)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of the labels."""
        return tuple(each if isinstance(each, str) else each.name for each in self.labels)

    @property
    def outputs(self) -> int:
        """The number of logits per sample: one for each label, more for labels with classes."""
        return sum(each.outputs for each in self.targets)

    @property
    def output_slices(self) -> dict[str, slice]:
        """The columns of the logits of each label."""
        slices: dict[str, slice] = {}
        start = 0
        for each in self.targets:
            slices[each.name] = slice(start, start + each.outputs)
            start += each.outputs
        return slices

    @property
    def binary(self) -> bool:
        """Whether all labels are binary with one logit, so that logits have the shape of labels."""
        return all(isinstance(each, str) or (each.kind == "binary" and each.outputs == 1) for each in self.labels)

    @property
    def feature_columns(self) -> tuple[str, ...]:
        """The columns of the data that the features read, each once."""
        names: list[str] = []
        for feature in self.id_features:
            if not feature.computed:
                names += [feature.column, feature.age_since or "", feature.weights or ""]
        names += self.dense_names
        return tuple(name for name in dict.fromkeys(names) if name)

    @property
    def needs_fit(self) -> tuple[str, ...]:
        """The names of features with a rule that still needs `persia.fit_features`."""
        names = [each.name for each in self.id_features if each.bucketize is not None and each.needs_fit]
        names += [each.name for each in self.dense_features if not isinstance(each, str) and each.needs_fit]
        return tuple(names)

    def check_fitted(self) -> None:
        """Raises ConfigError if a rule still needs `persia.fit_features`."""
        if names := self.needs_fit:
            raise ConfigError(
                f"The rules of {', '.join(map(repr, names))} need statistics of the data; call persia.fit_features, "
                "and use the schema that it returns, also for readers: reader.with_schema(schema).",
                field="schema",
            )

    def _check_aligned(self, feature: IdFeature, other: IdFeature) -> None:
        for each in (feature, other):
            if rule := "tokens" if each.tokens is not None else "fill" if each.fill is not None else "":
                raise ConfigError(
                    f"IdFeature({feature.name!r}).aligned_with = {other.name!r}, but {each.name!r} has {rule}, which "
                    "changes the number of its ids; leave one of them out.",
                    field=f"IdFeature({feature.name!r}).aligned_with",
                )
        for field in ("max_length", "keep"):
            own_value, other_value = getattr(feature, field), getattr(other, field)
            if own_value != other_value or feature.name == other.name:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).aligned_with = {other.name!r}, whose {field} is {other_value!r}, not "
                    f"{own_value!r}; aligned features are two features with the same max_length and keep.",
                    field=f"IdFeature({feature.name!r}).aligned_with",
                )

    def aligned(self) -> set[str]:
        """Returns the columns that are read for features whose lists are aligned with the lists of another feature."""
        pairs = [(f.name, f.aligned_with) for f in self.id_features if f.aligned_with is not None]
        features = [self.feature(name) for pair in pairs for name in pair]
        return {f.of or f.name for f in features}

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
                        f"IdFeature({feature.name!r}) has no dim and its table {name!r} is not declared; set dim.",
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
