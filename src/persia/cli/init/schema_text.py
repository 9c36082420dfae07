"""Writes the schema and the options of the reader of a configuration, each with the reason of its guess."""

from __future__ import annotations

import re
from typing import Any

from persia.cli.init.column_names import quoted_column
from persia.cli.init.guess import Guess
from persia.cli.init.guessed_columns import ColumnGuess
from persia.cli.init.sample import Sample
from persia.cli.init.toml_text import toml_comment, toml_value
from persia.schema.checks import MAX_NAME

__all__ = ["feature_name", "file_options", "reader_options", "schema_names", "schema_text"]

_SMALL_DIM, _DIM = 8, 16
_FEW_IDS = 1_000
_DERIVED = "_buckets", "_hour", "_weekday", "_month"
_RARE = 0.01
"""Share of missing ids from which on they get an embedding."""


def schema_names(guess: Guess) -> dict[str, str]:
    """Returns a valid and unique name for each column that the schema reads; unchanged where possible."""
    read = [c.column for c in guess.columns if c.role != "unused" and (c.role != "time" or c.parts)]
    names: dict[str, str] = {}
    longest = MAX_NAME - 4 - max(map(len, _DERIVED))
    for number, column in enumerate([guess.label.column, *read], 1):
        name = feature_name(column, longest)
        names[column] = name if name not in names.values() else f"{name[: MAX_NAME // 8]}_{number}"
    return names


def feature_name(column: str, longest: int) -> str:
    """Returns a valid name for a column, of at most `longest` bytes; unchanged where possible."""
    name = re.sub(r"[/\0\n\r\t]", "_", column.strip())
    return name.encode()[:longest].decode(errors="ignore").strip() or "unnamed"


def file_options(sample: Sample) -> dict[str, Any]:
    """Returns the arguments of a reader that say how files are delimited."""
    options: dict[str, Any] = {}
    if sample.kind == "csv":
        if not sample.header:
            options["column_names"] = list(sample.columns)
        if sample.delimiter != ",":
            options["delimiter"] = sample.delimiter
    return options


def reader_options(guess: Guess, names: dict[str, str]) -> dict[str, Any]:
    """Returns the arguments of the reader, except arguments that select rows.

    Args:
        guess: guesses about the data set.
        names: name in the schema by column.
    """
    sample, label = guess.sample, guess.label
    used = [column for column in guess.columns if column.column in names]
    options = file_options(sample)
    if sample.numerals.decimal != ".":
        options["decimal"] = sample.numerals.decimal
    if sample.numerals.thousands:
        options["thousands"] = sample.numerals.thousands
    numbers = [c for c in used if c.role in ("number", "sample_weight") and c.column in sample.units]
    units = {names[c.column]: sample.units[c.column] for c in numbers}
    if label.column in sample.units:
        units[label.column if label.rule else names[label.column]] = sample.units[label.column]
    if units:
        options["units"] = units
    nulls = sorted({text for texts in (label.nulls, *(column.nulls for column in used)) for text in texts})
    if nulls:
        options["null_values"] = nulls
    if label.rule is not None:
        options["labels"] = {names[label.column]: label.rule}
    rename = {
        name: column for column, name in names.items() if name != column and (column != label.column or not label.rule)
    }
    if rename:
        options["rename"] = rename
    if label.gaps:
        options["where"] = f"{quoted_column(label.column)} is not None"
    return options


def schema_text(guess: Guess, names: dict[str, str]) -> str:
    """Returns the fields of the section `schema`, with comments.

    Args:
        guess: guesses about the data set.
        names: name in the schema by column.
    """
    lines = [f"labels = [{toml_value(_label(guess, names))}]  # {toml_comment(guess.label.reason)}"]
    for field in ("sample_weight", "group"):
        lines += [
            f"{field} = {toml_value(names[each.column])}  # {toml_comment(each.reason)}"
            for each in guess.of_role(field)
        ]
    dense = [_dense(column, names, guess.sample.complete) for column in guess.of_role("number")]
    lines += _listed("dense_features", dense)
    lines += _listed("id_features", [line for column in guess.columns for line in _ids(guess, column, names)])
    return "\n".join(lines)


def _label(guess: Guess, names: dict[str, str]) -> str | dict[str, Any]:
    label = guess.label
    name = names[label.column]
    if label.kind == "binary":
        return name
    fields: dict[str, Any] = {"name": name, "kind": label.kind}
    if label.classes is not None:
        fields["classes"] = list(label.classes) if isinstance(label.classes, tuple) else label.classes
    if label.unit:
        fields["unit"] = label.unit
    return fields


def _listed(field: str, entries: list[tuple[dict[str, Any], str]]) -> list[str]:
    if not entries:
        return [f"{field} = []"]
    lines = [f"  {toml_value(fields)},  # {toml_comment(reason)}" for fields, reason in entries]
    return [f"{field} = [", *lines, "]"]


def _dense(column: ColumnGuess, names: dict[str, str], complete: bool) -> tuple[dict[str, Any], str]:
    """Returns the fields of a non-ID-type feature, and the reasons."""
    fields: dict[str, Any] = {"name": names[column.column]}
    reasons = [column.reason]
    if column.missing:
        fields |= {"fill": "mean", "missing_indicator": True}
        reasons.append(f"{_share(column.missing)} missing")
    elif not complete:
        fields["fill"] = "mean"
        reasons.append("later rows may lack it")
    if column.log:
        fields["log"] = True
        reasons.append("skewed, so by its logarithm")
    return {**fields, "scale": "standard"}, "; ".join(reasons)


def _ids(guess: Guess, column: ColumnGuess, names: dict[str, str]) -> list[tuple[dict[str, Any], str]]:
    """Returns the fields of the ID-type features of a column, and their reasons."""
    if column.role == "number" and column.buckets:
        name = names[column.column]
        rule = {"column": name, "quantiles": column.buckets}
        fields = {"name": _derived(f"{name}_buckets", names), "dim": _SMALL_DIM, "bucketize": rule}
        return [(fields | ({"fill": column.buckets} if column.missing else {}), column.bucket_reason)]
    if column.role == "time":
        return [_part(column, part, names) for part in column.parts]
    if column.role not in ("id", "list", "text"):
        return []
    tables = {each.column: each for each in guess.columns}
    owner = tables[column.table] if column.table else column
    shared = {other.table for other in guess.columns}
    small = owner.role == "id" and owner.distinct <= _FEW_IDS and owner.column not in shared
    fields = {"name": names[column.column], "dim": _SMALL_DIM if small else _DIM}
    reason = column.reason
    if column.table:
        fields["table"] = names[column.table]
    if column.role != "id":
        fields["pooling"] = "mean"
    if column.separator:
        fields["split"] = column.separator
    if column.role == "text":
        fields["tokens"] = {"column": names[column.column], "ngrams": list(column.ngrams)}
    if column.weights:
        fields["weights"] = names[column.weights]
    if column.max_length is not None:
        fields["max_length"] = column.max_length
    if column.text and column.role != "text":
        fields["kind"] = "text"
    if column.role == "id" and column.missing >= _RARE:
        fields["fill"] = "missing"
        reason += f"; {_share(column.missing)} missing, with an embedding of their own"
    return [(fields, reason)]


def _part(column: ColumnGuess, part: str, names: dict[str, str]) -> tuple[dict[str, Any], str]:
    name = names[column.column]
    time = {"column": name, "part": part} | ({"unit": column.unit} if column.unit not in ("", "s") else {})
    reason = f"{column.reason}: {column.parts[part]}; in UTC"
    return {"name": _derived(f"{name}_{part}", names), "dim": _SMALL_DIM, "time": time}, reason


def _derived(name: str, names: dict[str, str]) -> str:
    """Returns a name that no column has."""
    while name in names.values():
        name += "_"
    return name


def _share(missing: float) -> str:
    return f"{missing:.0%}" if missing >= 0.01 else f"{missing:.2g} of the rows"
