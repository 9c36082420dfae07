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
        cross: names of single-valued features whose combination is the id. The column is computed, not read.
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
        mapping: `HashTo`, `Quotient` or `Remainder`; for tables with fewer rows than ids.
        dtype: dtype of its embeddings, see `Table.dtype`; None for the dtype of its table, which is declared, set by
            another feature of the table, or "float32".
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
        check_kind(f"{owner}.mapping", self.mapping, (IdMapping, NoneType), "HashTo, Quotient or Remainder")
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
        dense_features: names of numeric columns, in the order of the model's input.
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
                raise ConfigError(f"Invalid Schema.{field} = {value!r}; expected a list.", field=field)
            if any(isinstance(each, np.generic) for each in value):
                msgspec.structs.force_setattr(self, field, [plain(each) for each in value])
        for feature in self.id_features:
            check_kind("Schema.id_features", feature, IdFeature, "a list of IdFeature")
        for table in self.tables:
            check_kind("Schema.tables", table, Table, "a list of Table")
        names = [f.name for f in self.id_features] + list(self.dense_features) + list(self.labels)
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
        self.resolved_tables()
        for feature in self.id_features:
            if feature.aligned_with is not None:
                self._check_aligned(feature, self.feature(feature.aligned_with))
        single = {f.name for f in self.id_features if not f.computed}
        for feature in self.id_features:
            if feature.of is not None and self.feature(feature.of).of is not None:
                raise ConfigError(
                    f"IdFeature({feature.name!r}).of names {feature.of!r}, which maps ids itself; name the feature "
                    "whose ids it maps.",
                    field=f"IdFeature({feature.name!r}).of",
                )
        for feature in self.id_features:
            for part in feature.cross:
                if part not in single:
                    raise ConfigError(
                        f"IdFeature({feature.name!r}).cross names {part!r}, which is not an uncrossed ID-type feature; "
                        "name features of the schema that are not crosses themselves.",
                        field=f"IdFeature({feature.name!r}).cross",
                    )

    def _check_aligned(self, feature: IdFeature, other: IdFeature) -> None:
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
