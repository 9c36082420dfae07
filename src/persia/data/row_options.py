"""The options that readers share: declared, documented and checked here, once."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypedDict, TypeVar, Unpack, get_type_hints

from persia.checks import unknown_option
from persia.data.day_columns import DayUnit
from persia.data.expressions import Rule
from persia.data.reader import Order
from persia.data.rows import Conversion
from persia.data.selection import Selection, Split
from persia.data.text_format import TextFormat
from persia.errors import ConfigError
from persia.schema import NO_RULES, InputRules, Schema

__all__ = [
    "ColumnOptions",
    "ReaderOptions",
    "RowOptions",
    "UnsplitRowOptions",
    "conversion_of",
    "order_of",
    "with_options",
]

P = ParamSpec("P")
R = TypeVar("R")


class UnsplitRowOptions(TypedDict, total=False):
    """`RowOptions` without `split`, for a data set whose files are a split already."""

    where: Rule | None
    shuffle_rows: int
    seed: int
    drop_last: bool
    shard: tuple[int, int]
    group_rows: int
    tokens_per_batch: int
    similar_lengths: bool
    require_labels: bool


class RowOptions(UnsplitRowOptions, total=False):
    """Options that select rows, and assign them to batches.

    Attributes:
        where: only rows for which this rule over the columns of the source is true: `"country != 'XX' and price > 0"`,
            or a function of pyarrow arrays whose parameters are named like columns.
        split: only one part of the rows: `Split("train")`, `Split("test", by="hash", column="user")`, ..., or a mapping
            of its arguments.
        shuffle_rows: size of the consecutive blocks within which rows are permuted, differently in each epoch; 0, the
            default, keeps the order. Blocks bound the memory, and resuming reads one block only.
        seed: seed of the permutations; 0 by default.
        drop_last: whether to drop a last batch that is not full; False by default.
        shard: (index, count): only batches i with i % count == index; (0, 1) by default.
        group_rows: maximum rows of a group, to keep groups whole: consecutive rows with the same value of
            `Schema.group` are in one batch, and shuffling moves them together. Batches then vary in size: they have
            about `batch_size - group_rows + 1` rows, and at most `batch_size`. A longer group is an error. 0, the
            default, cuts groups where a batch is full.
        tokens_per_batch: maximum number of events of a batch: the ids of the longest un-pooled feature of each sample,
            at most its `max_length`, summed over its samples. A batch ends where the next row would exceed it, or
            after `batch_size` rows. A budget below a `max_length` is an error, so no sample exceeds it. Resuming reads
            all rows from the beginning, as the lengths of all rows decide where a batch begins. 0, the default, cuts
            by `batch_size` only.
        similar_lengths: whether the batches of `tokens_per_batch` have samples with about equally many events: the rows
            of each block of `shuffle_rows` are sorted, cut, and the block's batches permuted; False by default.
        require_labels: True by default. If False, a source without the label columns gives `labels` of shape
            `[batch, 0]`.
    """

    split: Split | Mapping[str, Any] | None


class ColumnOptions(TypedDict, total=False):
    """Options that map the columns of a source to the columns of the schema.

    Attributes:
        rename: column of the source by name in the schema, if they differ.
        labels: rule by label, for labels that are not a column: `{"click": "rating >= 4"}`, or a function of pyarrow
            arrays whose parameters are named like columns. It returns booleans or numbers from 0 to 1.
        fill: replacement of missing values, by dense feature or label; without it, a missing value is an error.
        day: column or hive key that gives `Batch.day`: whole numbers, dates, timestamps, or texts of these such as
            2024-05-01.
        day_unit: unit of whole numbers in `day`: "day", the default, "s", "ms", "us" or "ns". "ms" divides by
            86,400,000.
        null_values: further texts that mean a missing value, in all columns.
        decimal: `","` if texts have numbers such as 0,5: in dense features, labels, and columns that rules read. `"."`
            by default. Columns of numbers are not concerned.
        thousands: separator of thousands in these numbers, such as `"."` in 1.234,50; one of `.`, `,`, `'`, `_` and
            space, which is also a no-break space; none by default.
        units: text to remove before or after the numbers of a column, by name of a column of numbers or of a rule:
            {"price": "$", "discount": "%"} reads $12.30 as 12.3 and 17 % as 17. With the unit "%", a text without the
            sign is an error, as it may be a fraction.
    """

    rename: Mapping[str, str] | None
    labels: Mapping[str, Rule] | None
    fill: Mapping[str, float] | None
    day: str | None
    day_unit: DayUnit
    null_values: Collection[str]
    decimal: str
    thousands: str
    units: Mapping[str, str] | None


class ReaderOptions(ColumnOptions, RowOptions, total=False):
    """Options of readers that take a schema: `ColumnOptions` and `RowOptions`."""


_DEFAULTS = {
    each.name: each.default
    for kind in (Order, Conversion, TextFormat)
    for each in dataclasses.fields(kind)
    if each.default is not dataclasses.MISSING
}
"""Defaults by option; None for the others."""


def with_options(kind: type[Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorates a reader with `**options: Unpack[kind]`, where `kind` is a record of this module.

    The signature of the reader, as shown by `help` and read by the configuration, names all options. An unknown option
    is a ConfigError that suggests the nearest name.
    """
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=_DEFAULTS.get(name), annotation=annotation)
        for name, annotation in get_type_hints(kind).items()
    ]

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        known = [each.name for each in (*own, *shared)]

        @functools.wraps(function)
        def make(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name not in known:
                    raise unknown_option(f"{name!r} of {function.__name__}", name, known, field=name)
            return function(*args, **kwargs)

        make.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
        return make

    return decorate


def order_of(batch_size: int, **options: Unpack[ReaderOptions]) -> Order:
    """Returns the assignment of rows to batches.

    Raises:
        ConfigError: an option is invalid.
    """
    names = [each.name for each in dataclasses.fields(Order) if each.name != "batch_size"]
    return Order(batch_size, **_selected(options, *names))


def conversion_of(schema: Schema, rules: InputRules = NO_RULES, **options: Unpack[ReaderOptions]) -> Conversion:
    """Returns the conversion of the selected rows of a source to batches.

    Args:
        schema: schema of the batches.
        rules: lists, by feature.
        **options: options of the reader.

    Raises:
        ConfigError: an option is invalid.
    """
    nulls = options.get("null_values") or ()
    if isinstance(nulls, str):
        raise ConfigError(f"null_values = {nulls!r} is one text; give a list of texts.", field="null_values")
    units = dict(options.get("units") or {})
    texts = TextFormat(tuple(nulls), units=units, **_selected(options, "decimal", "thousands"))
    return Conversion(
        schema,
        rename=dict(options.get("rename") or {}),
        labels=dict(options.get("labels") or {}),
        fill=dict(options.get("fill") or {}),
        selection=Selection.of(options.get("where"), options.get("split")),
        rules=rules,
        texts=texts,
        **_selected(options, "day", "day_unit", "require_labels"),
    )


def _selected(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Returns the options among `names` that are set."""
    return {name: options[name] for name in names if name in options}
