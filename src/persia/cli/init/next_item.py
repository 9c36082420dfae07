"""Writes the configuration of `persia init --owner`: the next item of each owner in a log of events."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.compute as pc

from persia.cli.init.column_names import quoted_column, words_of
from persia.cli.init.columns import guess_column
from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues
from persia.cli.init.label_guess import described
from persia.cli.init.sample import Sample
from persia.cli.init.toml_text import toml_comment, toml_value
from persia.errors import ConfigError, DataError
from persia.schema.checks import MAX_NAME

__all__ = ["NextItemGuess", "guess_next_item", "next_item_config"]

_ITEMS = {"item", "product", "article", "movie", "song", "track", "video", "book", "sku", "asin", "page", "ad", "hotel"}
_LEAST_EVENTS = 3
"""Events of an owner of which one is the test, one the validation, and one is trained."""
_LONGEST, _SHORTEST = 200, 5
_MAX_BATCH, _STEPS_OF_AN_EPOCH = 128, 50

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
{options}labels = {{ chosen = {rule} }}  # Each event is something that was chosen.
min_history = 1
leave_one_out = "train"  # All events of each {owner} but the newest two.
newest_only = true  # A sample for each {owner}, with all its events as targets.

[eval_data]  # The newest event but one of each {owner}; "test" is the newest one.
kind = "event_log"
path = {path}
options = {{ leave_one_out = "validation" }}

[schema]
labels = ["chosen"]
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
retrieval_leave_out = [{history}]  # Nobody gets what they had; leave this out where items are chosen again.
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
        events: events of each owner, sorted.
        again: share of the events that are of an item that the owner had before.
    """

    sample: Sample
    owner: ColumnGuess
    item: ColumnGuess
    time: ColumnGuess
    unused: list[str]
    events: list[int]
    again: float


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
        ConfigError: a column is missing, is of another kind, or is one of several that it might be.
        DataError: no owner has enough events.
    """
    columns = {name: guess_column(name, of, csv=sample.kind == "csv") for name, of in values.items()}
    for option, column in (("owner", owner), ("item", item), ("time", time)):
        if column is not None and column not in columns:
            raise ConfigError(f"{sample.path} has no column {column!r}; it has {described(sample)}.", field=option)
    times = [name for name, of in columns.items() if of.role == "time"]
    time = time or _only(sample, "time", times, times)
    left = [name for name, of in columns.items() if of.role in ("id", "text", "number") and name not in (owner, time)]
    ids = [name for name in left if columns[name].role == "id"]
    item = item or _only(sample, "item", [name for name in ids if set(words_of(name)) & _ITEMS] or ids, left)
    if len({owner, item, time}) < 3:
        raise ConfigError(f"--owner, --item and --time name one column twice: {owner}, {item}, {time}.", field="item")
    owners, items = (values[name].array for name in (owner, item))
    counts = sorted(pc.value_counts(owners.drop_null()).field("counts").to_pylist())
    if sum(count >= _LEAST_EVENTS for count in counts) < 2:
        raise DataError(
            f"{sample.path}: fewer than two of {owner!r} have {_LEAST_EVENTS} events, of which one is tested, one "
            "validated and one trained; give more rows, or another column with --owner.",
            path=sample.path,
        )
    different = len(set(zip(owners.to_pylist(), items.to_pylist(), strict=True)))
    unused = [name for name in columns if name not in (owner, item, time)]
    again = 1 - different / len(owners)
    return NextItemGuess(sample, columns[owner], columns[item], columns[time], unused, counts, again)


def next_item_config(guess: NextItemGuess, folder: Path) -> str:
    """Returns the text of the configuration.

    Args:
        guess: guesses about the log.
        folder: directory that the file will be in.
    """
    sample, item, time = guess.sample, guess.item, guess.time
    name = re.sub(r"[/\0\n\r\t]", "_", item.column.strip())[: MAX_NAME // 8] or "item"
    options: dict[str, Any] = {}
    if sample.kind == "csv":
        if not sample.header:
            options["column_names"] = list(sample.columns)
        if sample.delimiter != ",":
            options["delimiter"] = sample.delimiter
    if time.unit not in ("", "s"):
        options["time_unit"] = time.unit
    if name != item.column:
        options["rename"] = {name: item.column}
    length = next(size for size in (_SHORTEST, 10, 20, 50, 100, _LONGEST) if size >= _ninety(guess) or size == _LONGEST)
    batch_size = 8
    while batch_size < _MAX_BATCH and 2 * batch_size * _STEPS_OF_AN_EPOCH <= len(guess.events):
        batch_size *= 2
    median = guess.events[len(guess.events) // 2]
    text = _CONFIG.format(
        item=toml_comment(item.column),
        owner=toml_comment(guess.owner.column),
        name=toml_comment(os.path.basename(sample.path.rstrip("/"))),
        config=toml_comment(str(folder / "config.toml")),
        rows=f"its {sample.rows:,} rows" if sample.complete else f"the first {sample.rows:,} rows",
        path=toml_value(sample.path if "://" in sample.path else os.path.abspath(sample.path)),
        batch_size=batch_size,
        owner_value=toml_value(guess.owner.column),
        owner_reason=f"{len(guess.events):,} of them, with {median:,} events at the median",
        time_value=toml_value(time.column),
        time_reason=toml_comment(time.reason),
        options="".join(f"{key} = {toml_value(value)}\n" for key, value in options.items()),
        rule=toml_value(f"{quoted_column(item.column)} is not None"),
        item_value=toml_value(name),
        item_reason=f"{item.distinct:,} different ones" if item.distinct else "what was chosen",
        history=toml_value(f"{name}_before"),
        kind='kind = "text"\n' if item.text else "",
        length=length,
        length_reason=f"nine of ten have up to {_ninety(guess):,} events",
        unused="".join(f"# Left out: {toml_comment(column)}\n" for column in guess.unused),
    )
    if guess.again > 0.1:
        line = next(line for line in text.splitlines() if line.startswith("retrieval_leave_out"))
        said = f"# {guess.again:.0%} of the events repeat an item, so none is left out: retrieval_leave_out"
        text = text.replace(line, f"{said} would.")
    return re.sub(r"\n{3,}", "\n\n", text)


def _ninety(guess: NextItemGuess) -> int:
    """Returns a number of events that nine of ten owners do not exceed."""
    return guess.events[min(len(guess.events) - 1, len(guess.events) * 9 // 10)]


def _only(sample: Sample, option: str, likely: list[str], others: list[str]) -> str:
    """Returns the only likely column.

    Raises:
        ConfigError: there is none, or there are several.
    """
    if len(likely) == 1:
        return likely[0]
    choice = " or ".join(likely) or ", ".join(others) or described(sample)
    raise ConfigError(
        f"{sample.path}: unsure which column has the {option} of an event; name it with --{option}: {choice}.",
        field=option,
    )
