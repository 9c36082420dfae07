"""Guesses label, features and held-out rows of a sample."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from persia.cli.init.columns import ColumnGuess, ColumnValues, guess_column, words_of
from persia.cli.init.sample import Sample, read_column
from persia.data.column_values import times_of_text
from persia.errors import DataError

__all__ = ["Guess", "LabelGuess", "described", "guess", "guess_label", "label_from", "quoted_column"]

_LABELS = {
    "label", "labels", "target", "y", "click", "clicked", "is_click", "clk", "converted", "conversion", "purchase",
    "purchased", "bought", "churn", "churned", "exited", "default", "survived", "outcome", "response", "like", "liked",
    "install", "installed", "fraud", "is_fraud", "subscribed", "approved", "event", "positive",
}  # fmt: skip
_SCORES = {"rating", "ratings", "stars", "score", "grade"}
_POSITIVE = {"yes", "y", "true", "t", "1", "click", "clicked", "positive", "pos", "good", "success", "churned"}
_NEGATIVE = {"no", "n", "false", "f", "0", "negative", "neg", "bad", "failure"}
_TEST = 0.1


class LabelGuess(NamedTuple):
    """The guessed label.

    Attributes:
        column: column of the file.
        rule: expression that converts the column to 0 or 1; None if it has these values already.
        reason: the reason of the guess.
        sure: whether the user need not be asked.
        gaps: whether some rows lack the label; they are left out.
        positive: fraction of positive rows.
    """

    column: str
    rule: str | None
    reason: str
    sure: bool
    gaps: bool
    positive: float


class Guess(NamedTuple):
    """All guesses about a data set.

    Attributes:
        sample: its first rows.
        label: the label.
        columns: the other columns, in the order of the file.
        split: arguments of `persia.data.Split` that hold out rows, without `part`.
        in_order: whether rows are trained in the order of the file, which is sorted by time.
    """

    sample: Sample
    label: LabelGuess
    columns: list[ColumnGuess]
    split: dict[str, Any]
    in_order: bool


def _listed(names: list[str], most: int = 20) -> str:
    """Formats the names of columns for a message."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def described(sample: Sample) -> str:
    """Formats the columns for a message; with the values of the first row where the file has no names for them."""
    if sample.header:
        return _listed(list(sample.columns))
    return _listed([f"{name} ({column[0].as_py() or 'empty'})" for name, column in sample.columns.items()])


def quoted_column(name: str) -> str:
    """Formats a column for an expression of `persia.data`."""
    return name if re.fullmatch(r"[A-Za-z_]\w*", name) and name != "column" else f"column({name!r})"


def _name_words(column: str) -> list[str]:
    """Returns the words of a name without the range of values: `Stars (1-5)`, `score/10` and `rating out of 5`."""
    name = re.sub(r"[(\[].*?[)\]]|\bout of\b", " ", column)
    return [word for word in words_of(name) if not word.isdecimal()]


def guess_label(sample: Sample, values: dict[str, ColumnValues]) -> list[LabelGuess]:
    """Returns the columns that may be the label, the likeliest first.

    Raises:
        DataError: there is none; the message says why.
    """
    candidates: list[tuple[int, LabelGuess]] = []
    names = list(values)
    refused: DataError | None = None
    for number, column in enumerate(names):
        words = _name_words(column)
        named = "_".join(words) in _LABELS
        scored = bool(words) and words[-1] in _SCORES
        if not (named or scored or values[column].distinct == 2):
            continue
        try:
            label = label_from(sample, column, values[column])
        except DataError as error:
            refused = refused or (error if named else None)
            continue
        if not (named or scored) and (label.gaps or "id" in words):
            continue
        score = 100 * named + 90 * scored + 30 * (set(words) & _LABELS != set())
        score += 20 * (number == len(names) - 1) + 15 * (number == 0) + 10 * (label.rule is None)
        candidates.append((score, label._replace(sure=named)))
    if refused is not None and max((score for score, _ in candidates), default=0) < 90:
        raise refused  # A column with two values is not the label if another one has its name.
    if not candidates:
        raise DataError(
            f"{sample.files[0].path}: cannot guess which column to predict, as none has the name of a label or just "
            f"two values. Name one with --label COLUMN: {described(sample)}.",
            path=sample.path,
        )
    candidates.sort(key=lambda item: -item[0])
    labels = [label for _, label in candidates]
    if len(labels) == 1 or (labels[0].sure and candidates[1][0] < 100):
        labels[0] = labels[0]._replace(sure=True)
    else:
        labels[0] = labels[0]._replace(sure=False)
    return labels


def label_from(sample: Sample, column: str, values: ColumnValues) -> LabelGuess:
    """Returns a column as the label, with a rule if its values are not 0 and 1.

    Raises:
        DataError: it has one value only, or texts of more than two kinds, or is mostly missing.
    """
    import pyarrow.compute as pc

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
    name = quoted_column(column)
    numbers = values.numbers
    if numbers is not None:
        known = numbers[~np.isnan(numbers)]
        if set(np.unique(known)) == {0.0, 1.0}:
            return LabelGuess(column, None, "0 and 1", True, gaps, float(known.mean()))
        choices = np.unique(known)[1:]
        shares = [float((known >= choice).mean()) for choice in choices]
        at = next((i for i, share in enumerate(shares) if share <= 0.5), len(shares) - 1)
        rule = f"{name} >= {choices[at]:g}"
        return LabelGuess(column, rule, f"{rule} in {shares[at]:.0%} of the rows", True, gaps, shares[at])
    if values.distinct > 2:
        raise DataError(
            f"{path}: column {column!r} has {values.distinct:,} different texts; a label has two. Choose another "
            "column, or write a rule as in persia.data.csv(..., labels={'click': \"action == 'buy'\"}).",
            column=column,
        )
    counts = pc.value_counts(values.array.drop_null()).to_pylist()
    texts = sorted(
        counts,
        key=lambda c: (
            c["values"].strip().lower() not in _POSITIVE,
            c["values"].strip().lower() in _NEGATIVE,
            c["counts"],
        ),
    )
    positive = texts[0]["values"]
    rule = f"{name} == {positive!r}"
    share = texts[0]["counts"] / (values.rows - values.missing)
    return LabelGuess(column, rule, f"{positive.strip()!r} in {share:.0%} of the rows", True, gaps, share)


def guess(sample: Sample, label: LabelGuess, values: dict[str, ColumnValues]) -> Guess:
    """Guesses the use of all columns but the label, and which rows to hold out.

    Raises:
        DataError: no column can be an ID-type feature.
    """
    columns: list[ColumnGuess] = []
    for name, column_values in values.items():
        if name == label.column:
            continue
        column = guess_column(name, column_values, csv=sample.kind == "csv")
        if column.role in ("number", "id") and "_".join(words_of(name)) in _LABELS and column_values.distinct == 2:
            column = ColumnGuess(name, "unused", "has the name of a label, which is known too late to predict with")
        columns.append(column)
    columns = _with_an_id(sample, columns)
    columns = [_sharing(column, columns, values) if column.role == "list" else column for column in columns]
    split, in_order = _split(sample, columns)
    return Guess(sample, label, columns, split, in_order)


def _with_an_id(sample: Sample, columns: list[ColumnGuess]) -> list[ColumnGuess]:
    """Takes the numbers with the fewest different values as ids if there are no others.

    Raises:
        DataError: there are no whole numbers either.
    """
    if any(column.role in ("id", "list") for column in columns):
        return columns
    whole = [c for c in columns if c.role == "number" and c.reason.startswith("whole numbers")]
    if not whole:
        raise DataError(
            f"{sample.files[0].path} has no column of ids, categories or lists, only "
            + ("numbers" if any(c.role == "number" for c in columns) else "a label")
            + ". Persia trains embeddings of ids: add such a column, or use plain PyTorch.",
            path=sample.path,
        )
    chosen = min(whole, key=lambda c: c.distinct)
    as_id = chosen._replace(role="id", reason=f"{chosen.distinct:,} different whole numbers, as there are no other ids")
    return [as_id if column is chosen else column for column in columns]


def _sharing(column: ColumnGuess, columns: list[ColumnGuess], values: dict[str, ColumnValues]) -> ColumnGuess:
    """Lets a list share the embeddings of the column of single ids that has most of its values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    array = values[column.column].array
    lists = pc.split_pattern(array, column.separator) if column.separator else array
    members = pc.unique(pc.list_flatten(lists)).cast(pa.string())
    best, share = "", 0.5
    for other in columns:
        if other.role != "id" or len(members) < 10:
            continue
        single = pc.unique(values[other.column].array).cast(pa.string())
        common = pc.mean(pc.is_in(members, value_set=single)).as_py()
        if common >= share:
            best, share = other.column, common
    if not best:
        return column
    text = next(other.text for other in columns if other.column == best)
    return column._replace(table=best, text=text, reason=f"{column.reason}; shares the embeddings of {best}")


def _split(sample: Sample, columns: list[ColumnGuess]) -> tuple[dict[str, Any], bool]:
    """Returns the arguments of a split, and whether the sample is in order of time."""
    for column in sorted(columns, key=lambda c: "timestamp" not in words_of(c.column)):
        if column.role == "time":
            at, in_order = _latest(sample, column.column)
            if at is not None:
                return {"by": "time", "column": column.column, "at": at}, in_order
    return {"test": _TEST}, False


def _latest(sample: Sample, column: str) -> tuple[int | str | None, bool]:
    """Returns the start time of the last tenth of the rows, or None if unknown; and whether rows are in order."""
    import pyarrow as pa

    times = read_column(sample, column)
    if times.null_count:
        return None, False
    if pa.types.is_string(times.type):
        times = times_of_text(column, times.combine_chunks())
    if pa.types.is_date(times.type):
        times = times.cast(pa.timestamp("ms"))
    stamps = times.cast(pa.int64()).to_numpy()
    at = int(np.quantile(stamps, 1 - _TEST, method="higher"))
    if at == stamps.min():
        return None, False
    in_order = bool(np.all(np.diff(stamps) >= 0))
    if pa.types.is_timestamp(times.type):
        text = str(pa.scalar(at, pa.timestamp(times.type.unit)).as_py())
        return text, in_order
    return at, in_order
