"""Guesses which column is the label, and of which kind."""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from persia.cli.init.column_names import label_words, names_an_id, quoted_column
from persia.cli.init.columns import guess_column
from persia.cli.init.guessed_columns import ColumnValues
from persia.cli.init.sample import Sample
from persia.errors import DataError
from persia.schema.labels import LabelKind

__all__ = ["LABEL_NAMES", "LabelGuess", "described", "guess_label", "label_from", "label_targets"]

LABEL_NAMES = {
    "label", "labels", "target", "y", "click", "clicked", "is_click", "clk", "converted", "conversion", "purchase",
    "purchased", "bought", "churn", "churned", "exited", "default", "survived", "outcome", "response", "like", "liked",
    "install", "installed", "fraud", "is_fraud", "subscribed", "approved", "event", "positive",
}  # fmt: skip
_SCORES = {"rating", "ratings", "stars", "score", "grade"}
_WATCHED = {
    "watch_time", "watchtime", "watch_seconds", "dwell_time", "play_time", "playtime", "listen_time", "time_spent",
}  # fmt: skip
_CLASSES = {"class", "classes", "category", "species", "kind", "type", "label", "target", "outcome", "response", "y"}
"""Last words in the names of labels with classes."""
_COUNTS = {
    "count", "counts", "num", "number", "views", "visits", "clicks", "orders", "purchases", "quantity", "qty", "plays",
    "downloads", "sold",
}  # fmt: skip
_OWNERS = {"user", "uid", "customer", "client", "member", "visitor", "session", "account", "reviewer", "player"}
"""Words in the names of columns that say whose an event is."""
_MOST_CLASSES = 100
_POSITIVE = {"yes", "y", "true", "t", "1", "click", "clicked", "positive", "pos", "good", "success", "churned"}
_NEGATIVE = {"no", "n", "false", "f", "0", "negative", "neg", "bad", "failure"}


class LabelGuess(NamedTuple):
    """The guessed label.

    Attributes:
        column: column of the file.
        rule: expression that converts the column to 0 or 1; None if it has values of its kind already.
        reason: the reason of the guess.
        sure: whether the user need not be asked which column it is.
        gaps: whether some rows lack the label; they are left out.
        kind: kind of the label.
        classes: number or names of its classes; None without classes.
        unit: unit of its values.
        nulls: texts that stand for a missing number.
        binary: rule of a binary label, which the values of another kind allow as well; empty for none.
    """

    column: str
    rule: str | None
    reason: str
    sure: bool
    gaps: bool
    kind: LabelKind = "binary"
    classes: int | tuple[str, ...] | None = None
    unit: str = ""
    nulls: tuple[str, ...] = ()
    binary: str = ""


def described(sample: Sample) -> str:
    """Formats the columns for a message; with the values of the first row where the file has no names for them."""
    if sample.header:
        return _listed(list(sample.columns))
    return _listed([f"{name} ({column[0].as_py() or 'empty'})" for name, column in sample.columns.items()])


def guess_label(sample: Sample, values: dict[str, ColumnValues]) -> list[LabelGuess]:
    """Returns the columns that may be the label, the likeliest first.

    Raises:
        DataError: there is none; the message says why.
    """
    candidates: list[tuple[int, LabelGuess]] = []
    names = list(values)
    refused: DataError | None = None
    for number, column in enumerate(names):
        words = label_words(column)
        named = "_".join(words) in LABEL_NAMES
        scored = bool(words) and words[-1] in _SCORES
        watched = "_".join(words[:2]) in _WATCHED
        if not (named or scored or watched or values[column].distinct == 2):
            continue
        try:
            label = label_from(sample, column, values[column])
        except DataError as error:
            refused = refused or (error if named else None)
            continue
        if not (named or scored or watched) and (label.gaps or "id" in words):
            continue
        score = 100 * named + 90 * scored + 85 * watched + 30 * (set(words) & LABEL_NAMES != set())
        score += 20 * (number == len(names) - 1) + 15 * (number == 0) + 10 * (label.rule is None)
        candidates.append((score, label._replace(sure=named)))
    if refused is not None and max((score for score, _ in candidates), default=0) < 90:
        raise refused  # A column with two values is not the label if another one has its name.
    if not candidates:
        raise DataError(
            f"{sample.files[0].path}: cannot guess which column to predict, as none has the name of a label or just "
            f"two values. Name one with --label COLUMN: {described(sample)}.{_of_events(sample, values)}",
            path=sample.path,
        )
    candidates.sort(key=lambda item: -item[0])
    labels = [label for _, label in candidates]
    if len(labels) == 1 or (labels[0].sure and candidates[1][0] < 100):
        labels[0] = labels[0]._replace(sure=True)
    else:
        labels[0] = labels[0]._replace(sure=False)
    return labels


def _of_events(sample: Sample, values: dict[str, ColumnValues]) -> str:
    """Returns advice for a log of events, which has no label; empty if the columns do not look like such a log."""
    roles = {name: guess_column(name, of, csv=sample.kind == "csv").role for name, of in values.items()}
    ids = [name for name, role in roles.items() if role == "id"]
    time = next((name for name, role in roles.items() if role == "time"), None)
    if time is None or len(ids) < 2:
        return ""
    owner = next((name for name in ids if set(label_words(name)) & _OWNERS), ids[0])
    return (
        " If each row is an event, such as an item that a user chose, predict the next item of each user, which needs "
        f"no label. Run it with --owner {shlex.quote(owner)} --time {shlex.quote(time)} instead."
    )


def label_from(sample: Sample, column: str, values: ColumnValues, kind: LabelKind | None = None) -> LabelGuess:
    """Returns a column as the label: two values are binary, with a rule if they are not 0 and 1.

    Args:
        sample: the sample.
        column: name of the column.
        values: its values.
        kind: kind to take, one of those that the values allow; None for the likeliest.

    Raises:
        DataError: it has one value only, or too many different texts, or is mostly missing.
    """
    path = sample.files[0].path
    where = "" if sample.complete else f" in the first {sample.rows:,} rows; shuffle the file if it has others later"
    if values.distinct < 2:
        raise DataError(
            f"{path}: column {column!r} has one value only{where}; a label has two. Give another column with --label.",
            column=column,
        )
    if values.missing > values.rows / 2:
        raise DataError(f"{path}: column {column!r} is mostly empty; a label is known in most rows.", column=column)
    gaps = values.missing > 0
    numbers = values.numbers
    if numbers is not None:
        known = numbers[~np.isnan(numbers)]
        if not np.all(np.isfinite(known)):
            raise DataError(f"{path}: column {column!r} has infinite values; leave these rows out.", column=column)
        guess = _of_numbers(column, known, kind)
        return guess._replace(gaps=gaps, nulls=values.nulls, unit=_unit(guess, column, sample))
    return _of_texts(path, column, values)._replace(gaps=gaps)


def label_targets(label: LabelGuess, values: ColumnValues) -> NDArray[np.float64] | None:
    """Returns the label as numbers, NaN where unknown; None for classes."""
    import pyarrow.compute as pc

    if label.kind == "multiclass":
        return None
    if values.numbers is not None:
        if label.rule is None:
            return values.numbers
        least = float(label.rule.rpartition(">=")[2])
        return np.where(np.isnan(values.numbers), np.nan, values.numbers >= least)
    counts = pc.value_counts(values.array.drop_null()).to_pylist()
    positive = next(each["values"] for each in _by_meaning(counts))
    positives = pc.equal(values.array, positive).cast("float64").to_numpy(zero_copy_only=False)
    return np.asarray(positives, np.float64)


def _of_numbers(column: str, known: NDArray[np.float64], kind: LabelKind | None) -> LabelGuess:
    choices = np.unique(known)
    if len(choices) == 2 and set(choices) == {0.0, 1.0}:
        return LabelGuess(column, None, "0 and 1", True, False)
    shares = [float((known >= choice).mean()) for choice in choices[1:]]
    at = next((i for i, share in enumerate(shares) if share <= 0.5), len(shares) - 1)
    rule = f"{quoted_column(column)} >= {choices[1:][at]:.15g}"
    positive = f"{rule} in {shares[at]:.0%} of the rows"
    if len(choices) == 2 or kind == "binary":
        return LabelGuess(column, rule, positive, True, False)
    whole = bool(np.all(known == np.floor(known)))
    words = label_words(column)
    span = f"from {choices[0]:g} to {choices[-1]:g}"
    few = whole and len(choices) <= _MOST_CLASSES
    likeliest: LabelKind = "regression"
    if few and words and words[-1] in _CLASSES and (choices[0] == 0 or words[-1] == "class"):
        likeliest = "multiclass"
    elif whole and choices[0] >= 0 and set(words) & _COUNTS:
        likeliest = "count"
    chosen = kind or likeliest
    if chosen == "multiclass" and few:
        consecutive = choices[0] == 0 and choices[-1] == len(choices) - 1
        classes = len(choices) if consecutive else tuple(f"{choice:.0f}" for choice in choices)
        reason = f"{len(choices)} different whole numbers, as classes"
        return LabelGuess(column, None, reason, True, False, "multiclass", classes)
    if chosen == "count" and whole and choices[0] >= 0:
        return LabelGuess(column, None, f"counts {span}", True, False, "count", binary=rule)
    reason = f"numbers {span}, predicted as values; with the rule {rule!r} it is binary"
    return LabelGuess(column, None, reason, True, False, "regression", binary=rule)


def _of_texts(path: str, column: str, values: ColumnValues) -> LabelGuess:
    import pyarrow.compute as pc

    known = values.array.drop_null()
    words = label_words(column)
    if values.distinct > 2:
        rare = values.distinct > min(_MOST_CLASSES, len(known) / 5)
        if rare or (names_an_id(words) and words[-1] not in _CLASSES):
            raise DataError(
                f"{path}: column {column!r} has {values.distinct:,} different texts; a label has two, or at most "
                f"{_MOST_CLASSES} classes. Choose another column, or write a rule as in persia.data.csv(..., "
                "labels={'click': \"action == 'buy'\"}).",
                column=column,
            )
        classes = tuple(sorted(pc.unique(known).to_pylist()))
        reason = f"{len(classes)} different texts, as classes"
        return LabelGuess(column, None, reason, True, False, "multiclass", classes)
    counts = _by_meaning(pc.value_counts(known).to_pylist())
    positive = counts[0]["values"]
    rule = f"{quoted_column(column)} == {positive!r}"
    share = counts[0]["counts"] / len(known)
    return LabelGuess(column, rule, f"{positive.strip()!r} in {share:.0%} of the rows", True, False)


def _by_meaning(counts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts two texts and their counts: the positive one first, by its meaning, else the rare one."""
    return sorted(
        counts,
        key=lambda c: (
            c["values"].strip().lower() not in _POSITIVE,
            c["values"].strip().lower() in _NEGATIVE,
            c["counts"],
        ),
    )


def _unit(label: LabelGuess, column: str, sample: Sample) -> str:
    return sample.units.get(column, "") if label.kind in ("regression", "count") else ""


def _listed(names: list[str], most: int = 20) -> str:
    """Formats the names of columns for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
