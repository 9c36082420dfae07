"""Guesses features, weights, groups and held-out rows of a sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from persia.cli.init.column_names import words_of
from persia.cli.init.columns import guess_column
from persia.cli.init.guessed_columns import ColumnGuess, ColumnValues
from persia.cli.init.label_guess import LABEL_NAMES, LabelGuess, label_targets
from persia.cli.init.number_guess import with_buckets
from persia.cli.init.sample import Sample, read_column
from persia.data.column_values import times_of_text
from persia.errors import DataError

__all__ = ["Guess", "guess"]

_TEST = 0.1
_SAMPLE_WEIGHTS = {"sample_weight", "sample_weights", "instance_weight", "example_weight", "row_weight", "case_weight"}
_GROUPS = {
    "session", "session_id", "query_id", "qid", "search_id", "srch_id", "request_id", "impression_id", "slate_id",
}  # fmt: skip
_OF_LISTS = {"weight", "weights", "scores", "confidences", "tfidf"}


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

    def of_role(self, *roles: str) -> list[ColumnGuess]:
        """Returns the columns of some roles."""
        return [column for column in self.columns if column.role in roles]


def guess(sample: Sample, label: LabelGuess, values: dict[str, ColumnValues]) -> Guess:
    """Guesses the use of all columns but the label, and which rows to hold out.

    Raises:
        DataError: no column can be an ID-type feature.
    """
    columns: list[ColumnGuess] = []
    targets = label_targets(label, values[label.column])
    for name, column_values in values.items():
        if name == label.column:
            continue
        column = guess_column(name, column_values, csv=sample.kind == "csv")
        if column.role in ("number", "id") and "_".join(words_of(name)) in LABEL_NAMES and column_values.distinct == 2:
            column = ColumnGuess(name, "unused", "has the name of a label, which is known too late to predict with")
        if column.role == "number" and targets is not None:
            column = with_buckets(column, column_values, targets)
        columns.append(column)
    columns = _with_weights_of_lists(columns, values)
    columns = _with_sample_columns(sample, columns, values)
    columns = _with_an_id(sample, columns)
    columns = [_sharing(column, columns, values) if column.role == "list" else column for column in columns]
    split, in_order = _split(sample, columns)
    return Guess(sample, label, columns, split, in_order)


def _with_sample_columns(
    sample: Sample, columns: list[ColumnGuess], values: dict[str, ColumnValues]
) -> list[ColumnGuess]:
    """Takes one column each as the weight and the group of samples, if its name and values leave no doubt.

    A column that is just named "weight" is taken if its values lie around 1, as weights of samples do, and products of
    one kilogram; the user is asked.
    """
    taken: set[str] = set()
    result = []
    for column in columns:
        name, of = "_".join(words_of(column.column)), values[column.column]
        if of.numbers is not None and not of.missing and column.role in ("number", "id") and of.numbers.min() >= 0:
            around = bool(0.2 <= of.numbers.mean() <= 5 and of.numbers.max() <= 100)
            sure = name in _SAMPLE_WEIGHTS
            if (sure or (name in ("weight", "weights") and around)) and "sample_weight" not in taken:
                taken.add("sample_weight")
                reason = f"numbers from {of.numbers.min():g} to {of.numbers.max():g} with the name of a weight"
                column = column._replace(role="sample_weight", reason=reason, sure=sure)
        grouped = name in _GROUPS and column.role in ("number", "id", "unused") and 0 < 2 * of.distinct <= sample.rows
        if grouped and not of.missing and "group" not in taken:
            taken.add("group")
            size = sample.rows / of.distinct
            reason = f"about {size:.1f} rows of each, ranked against each other in metrics and losses that rank"
            column = column._replace(role="group", reason=reason)
        result.append(column)
    return result


def _with_weights_of_lists(columns: list[ColumnGuess], values: dict[str, ColumnValues]) -> list[ColumnGuess]:
    """Pairs each column of lists of numbers that is named like weights with a list of the same lengths in each row."""
    result = list(columns)
    for place, column in enumerate(columns):
        words = words_of(column.column)
        if not words or words[-1] not in _OF_LISTS or column.role not in ("list", "unused", "number"):
            continue
        for at, other in enumerate(columns):
            if other.role != "list" or other is column or not _shares_a_word(words, words_of(other.column)):
                continue
            if not _paired(values[other.column].array, values[column.column].array, other.separator):
                continue
            result[place] = column._replace(role="weights", reason=f"one number for each id of {other.column}")
            reason = f"{other.reason}; weighted by {column.column}"
            result[at] = other._replace(weights=column.column, reason=reason)
            break
    return result


def _shares_a_word(words: list[str], others: list[str]) -> bool:
    def stem(word: str) -> str:
        return word.removesuffix("s")

    return bool({stem(word) for word in words[:-1]} & {stem(word) for word in others})


def _paired(ids: Any, weights: Any, separator: str) -> bool:
    """Whether two columns have lists of the same lengths, the second one of numbers from 0 on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        lists = [pc.split_pattern(each, separator) if separator else each for each in (ids, weights)]
        lengths = [pc.fill_null(pc.list_value_length(each), 0) for each in lists]
        numbers = pc.list_flatten(lists[1]).cast(pa.float64())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    if not len(numbers) or numbers.null_count or pc.min(numbers).as_py() < 0:
        return False
    return bool(pc.all(pc.equal(*lengths)).as_py())


def _with_an_id(sample: Sample, columns: list[ColumnGuess]) -> list[ColumnGuess]:
    """Takes the numbers with the fewest different values as ids if there are no others.

    Raises:
        DataError: there are no whole numbers either.
    """
    if any(column.role in ("id", "list", "text") for column in columns):
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
    for column in columns:
        if column.role == "group":  # Rows of a group are ranked together, and share what is known of it.
            return {"by": "hash", "column": column.column, "test": _TEST}, False
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
