"""Writes the configuration of `persia init --owner`: the next item of each owner in a log of events."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc

from persia.cli.init.column_names import quoted_column, words_of
from persia.cli.init.columns import guess_column
from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues, is_list
from persia.cli.init.label_guess import described
from persia.cli.init.number_guess import unit_of_times
from persia.cli.init.sample import Sample, read_column
from persia.cli.init.schema_text import feature_name, file_options
from persia.cli.init.toml_text import toml_comment, toml_value
from persia.data.from_csv import CSV_SUFFIXES
from persia.errors import ConfigError, DataError
from persia.schema.checks import MAX_NAME

__all__ = ["NextItemGuess", "guess_next_item", "next_item_config"]

_ITEMS = {"item", "product", "article", "movie", "song", "track", "video", "book", "sku", "asin", "page", "ad", "hotel"}
_LEAST_EVENTS = 4
"""Events of an owner of which one is the test, one the validation, one is trained, and one is before it."""
_LENGTHS = (5, 10, 20, 50, 100, 200)
_MAX_BATCH, _STEPS_OF_AN_EPOCH = 128, 50
_REPEATS = 0.1
"""Share of events of an item that the owner had, from which on such items stay in the ranking."""

_CONFIG = """\
# Predicts the next `{item}` of each `{owner}` of {name}: `persia train {config}`.
# Written by `persia init` from {rows}; change what it guessed wrong.

[data]
kind = "event_log"
path = {path}
batch_size = {batch_size}

[data.options]
owner = {owner_value}  # {owner_reason}
time = {time_value}  # {time_reason}
{options}labels = {{ {label} = {rule} }}  # Every event has the label 1.
min_history = 1
leave_one_out = "train"  # All events of each owner but the newest two.
newest_only = true  # One sample for each owner, with all its events as targets.

[eval_data]  # The newest event but one of each owner; "test" is the newest one.
kind = "event_log"
path = {path}
options = {{ leave_one_out = "validation" }}

[schema]
labels = ["{label}"]
{unused}
[[schema.id_features]]
name = {item_value}  # {item_reason}
dim = 32
{kind}
[[schema.id_features]]
name = {history}
table = {item_value}
pooling = "none"
max_length = {length}  # {length_reason}
keep = "last"
{kind}
[model]
kind = "next_item"

[optimizer]
lr = 0.003

[embedding_optimizer]
kind = "adagrad"
lr = 0.1

[train]
epochs = 50  # At most: [trainer] ends training earlier.

[trainer]  # Ranks all items after each pass, and keeps the best checkpoint next to the last.
keep_best = "retrieval_hr@10"
{repeats}retrieval_leave_out = [{history}]  # Items of the history are not ranked{repeats_reason}.
eval_every_epochs = 1
patience = 5  # Passes in a row without an improvement after which training ends.
"""


class NextItemGuess(NamedTuple):
    """Guesses about a log of events.

    Attributes:
        sample: its first rows.
        owner: column that says whose an event is.
        item: column with what was chosen.
        time: column with the time.
        unused: names of the other columns.
        items: number of different items.
        events: number of events of each owner, in ascending order.
        repeats: share of the events that are of an item that the owner had before.
    """

    sample: Sample
    owner: ColumnGuess
    item: ColumnGuess
    time: ColumnGuess
    unused: list[str]
    items: int
    events: list[int]
    repeats: float


def guess_next_item(
    sample: Sample, values: dict[str, ColumnValues], owner: str, item: str | None, time: str | None
) -> NextItemGuess:
    """Guesses which columns are the item and the time of events.

    Args:
        sample: first rows of the log.
        values: of its columns.
        owner: column that says whose an event is.
        item: column of the items; None to guess.
        time: column of the times; None to guess.

    Raises:
        ConfigError: a column is missing, has values of another kind, or is one of several that it might be.
        DataError: the files are no log that `persia.data.event_log` reads, or owners have too few events.
    """
    columns = {name: guess_column(name, of, csv=sample.kind == "csv") for name, of in values.items()}
    for option, column in (("owner", owner), ("item", item), ("time", time)):
        if column is not None and column not in columns:
            raise ConfigError(f"{sample.path} has no column {column!r}; it has {described(sample)}.", field=option)
    others = [name for name in columns if name not in (owner, item, time)]
    time = time or _only(sample, "time", [name for name in others if columns[name].role == "time"], others)
    others = [name for name in others if name != time and columns[name].role in ("id", "text", "number", "unused")]
    ids = [name for name in others if columns[name].role == "id"]
    likely = [name for name in ids if set(words_of(name)) & _ITEMS] or (ids if ids == others else [])
    item = item or _only(sample, "item", likely, others)
    if len({owner, item, time}) < 3:
        raise ConfigError(
            f"The owner {owner!r}, the item {item!r} and the time {time!r} of an event are three columns; name each "
            "with --owner, --item and --time.",
            field="item",
        )
    _check(sample, values, owner, item, time)
    of_time = columns[time]
    if of_time.role != "time":
        numbers = values[time].numbers
        assert numbers is not None
        of_time = of_time._replace(unit=unit_of_times(numbers), reason="numbers")
    counts = _counts(sample, values, owner)
    if sum(count >= _LEAST_EVENTS for count in counts) < 2:
        raise DataError(
            f"{sample.path}: fewer than two of {owner!r} have {_LEAST_EVENTS} events: one to test, one to validate, "
            "one to train, and one before it. Give more rows, or another column with --owner.",
            path=sample.path,
        )
    pairs = zip(values[owner].array.to_pylist(), values[item].array.to_pylist(), strict=True)
    repeats = 1 - len(set(pairs)) / sample.rows
    unused = [name for name in columns if name not in (owner, item, time)]
    return NextItemGuess(sample, columns[owner], columns[item], of_time, unused, values[item].distinct, counts, repeats)


def next_item_config(guess: NextItemGuess, folder: Path) -> str:
    """Returns the text of the configuration.

    Args:
        guess: guesses about the log.
        folder: directory that the file will be in.
    """
    sample, item, time = guess.sample, guess.item, guess.time
    name = feature_name(item.column, MAX_NAME - len("_before"))
    options = file_options(sample)
    if time.unit not in ("", "s"):
        options["time_unit"] = time.unit
    if name != item.column:
        options["rename"] = {name: item.column}
    most = guess.events[min(len(guess.events) - 1, len(guess.events) * 9 // 10)]
    median = guess.events[len(guess.events) // 2]
    length = next((size for size in _LENGTHS if size >= most), _LENGTHS[-1])
    batch_size = 8
    while batch_size < _MAX_BATCH and 2 * batch_size * _STEPS_OF_AN_EPOCH <= len(guess.events):
        batch_size *= 2
    part = "" if sample.complete else f" in the first {sample.rows:,} rows"
    repeated = guess.repeats > _REPEATS
    text = _CONFIG.format(
        item=toml_comment(item.column),
        owner=toml_comment(guess.owner.column),
        name=toml_comment(os.path.basename(sample.path.rstrip("/"))),
        config=toml_comment(str(folder / "config.toml")),
        rows=f"its {sample.rows:,} rows" if sample.complete else f"the first {sample.rows:,} rows",
        path=toml_value(sample.path if "://" in sample.path else os.path.abspath(sample.path)),
        batch_size=batch_size,
        owner_value=toml_value(guess.owner.column),
        owner_reason=f"{len(guess.events):,} different ones, with {median:,} events at the median",
        time_value=toml_value(time.column),
        time_reason=toml_comment(time.reason),
        options="".join(f"{key} = {toml_value(value)}\n" for key, value in options.items()),
        label="chosen" if name != "chosen" else "is_chosen",
        rule=toml_value(f"{quoted_column(item.column)} is not None"),
        item_value=toml_value(name),
        item_reason=f"{guess.items:,} different ones{part}",
        history=toml_value(f"{name}_before"),
        kind='kind = "text"\n' if item.text else "",
        length=length,
        length_reason=f"nine of ten owners have up to {most:,} events",
        unused="".join(f"# Left out: {toml_comment(column)}\n" for column in guess.unused),
        repeats="# " if repeated else "",
        repeats_reason=f"; {guess.repeats:.0%} of the events{part} repeat one, so they are" if repeated else "",
    )
    return re.sub(r"\n{3,}", "\n\n", text)


def _check(sample: Sample, values: dict[str, ColumnValues], owner: str, item: str, time: str) -> None:
    """Raises an error unless `persia.data.event_log` reads these columns of the files."""
    for option, column in (("owner", owner), ("item", item), ("time", time)):
        of = values[column]
        if is_list(of.array.type):
            raise ConfigError(
                f"Column {column!r} has lists, but an event has one {option}; name another column with --{option}.",
                field=option,
            )
        if of.missing:
            raise DataError(
                f"{sample.path}: {of.missing:,} of {of.rows:,} rows have no {column!r}; leave them out of the file, as "
                "an event has an owner, an item and a time.",
                path=sample.path,
                column=column,
            )
    if values[time].numbers is None and guess_column(time, values[time], csv=sample.kind == "csv").role != "time":
        raise ConfigError(f"Column {time!r} has no times; name another column with --time.", field="time")
    for file in sample.files:
        if sample.kind == "csv" and not file.path.endswith(CSV_SUFFIXES):
            raise DataError(
                f"{file.path}: a log of events is told by its suffix; rename it to end in .csv, .tsv or .txt.",
                path=sample.path,
            )


def _counts(sample: Sample, values: dict[str, ColumnValues], owner: str) -> list[int]:
    """Returns the number of events of each owner, in ascending order: in all rows, as files are sorted in any way."""
    owners = values[owner].array if sample.complete else read_column(sample, owner)
    return sorted(pc.value_counts(owners.drop_null()).field("counts").to_pylist())


def _only(sample: Sample, option: str, likely: list[str], others: list[str]) -> str:
    """Returns the only likely column.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if len(likely) == 1:
        return likely[0]
    choice = " or ".join(likely or others) or described(sample)
    raise ConfigError(
        f"{sample.path}: cannot guess which column has the {option} of an event. Name it with --{option}: {choice}.",
        field=option,
    )
