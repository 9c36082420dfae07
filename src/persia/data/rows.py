"""Converts rows of a file to batches: selection, label rules, rename, hive keys, day. Errors name file, row, column."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import msgspec

from persia.batching.batch import Batch
from persia.batching.input_rules import apply_rules
from persia.checks import check_flag
from persia.data.column_values import without_views
from persia.data.day_columns import PER_DAY, DayUnit, day_of_column, day_of_text
from persia.data.expressions import Expression, Rule
from persia.data.files import File
from persia.data.selection import Selection
from persia.data.text_format import PYTHONS_TEXTS, TextFormat
from persia.errors import ConfigError, DataError
from persia.schema import NO_RULES, InputRules, Schema, WrittenNumbers
from persia.types import Int64Array

__all__ = ["COUNTED", "Conversion", "Piece", "present_columns", "require_rows"]

COUNTED = " Rows are counted from 0, without header and blank lines."
"""End of errors about a row of a file, as editors count lines from 1."""

_REMEDY = " Correct the schema, or rename."
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"

Prepare: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Function that converts the columns of a file to those that a conversion reads."""


class Piece(NamedTuple):
    """Consecutive rows of a file.

    Attributes:
        file: the file.
        row: number of the first row in the file, from 0; a header line does not count.
        columns: pyarrow array `[rows]` by column of the file; a list if Arrow has no type for all values.
        rows: number of rows.
        counted: whether the rows are not read, but count for the numbers of later rows; `columns` may then be empty.
    """

    file: File
    row: int
    columns: dict[str, Any]
    rows: int
    counted: bool = False


@dataclass(frozen=True)
class Conversion:
    """Conversion of the columns of a file to those of the schema.

    `rename`, `day`, `day_unit`, `labels` and `fill` are `ColumnOptions`; `require_labels` is one of `RowOptions`.

    Attributes:
        schema: schema of the batches.
        selection: rows to read; None for all.
        rules: lists, by feature.
        texts: how the texts of the file are read.
        passthrough: further columns of the file, for `passthrough_columns`.
        only: columns of the schema to read, for `inputs`; None for all.
    """

    schema: Schema
    rename: Mapping[str, str] = field(default_factory=dict)
    day: str | None = None
    day_unit: DayUnit = "day"
    require_labels: bool = True
    labels: Mapping[str, Rule] = field(default_factory=dict)
    fill: Mapping[str, float] = field(default_factory=dict)
    selection: Selection | None = None
    rules: InputRules = NO_RULES
    texts: TextFormat = PYTHONS_TEXTS
    passthrough: tuple[str, ...] = ()
    only: frozenset[str] | None = None

    def __post_init__(self) -> None:
        if self.day_unit not in PER_DAY:
            raise ConfigError(f"day_unit = {self.day_unit!r}; use one of {', '.join(PER_DAY)}.", field="day_unit")
        check_flag("require_labels", self.require_labels)
        known = [*self.schema.feature_columns, *self.schema.label_names, *self._sample_columns]
        for name in self.rename:
            if name not in known:
                raise ConfigError(
                    f"rename has {name!r}, which is not a column of the schema; it maps schema names "
                    f"({', '.join(known)}) to columns of the source.",
                    field="rename",
                )
        for name in self.labels:
            if name not in self.schema.label_names or name in self.rename:
                raise ConfigError(
                    f"labels has a rule for {name!r}; give rules for labels of the schema "
                    f"({', '.join(self.schema.label_names)}) that are not renamed.",
                    field="labels",
                )
        for name in self.fill:
            if name not in (*self.schema.dense_names, *self.schema.label_names):
                raise ConfigError(
                    f"Invalid key {name!r} in fill; expected a dense feature or label of the schema.", field="fill"
                )
        for feature in self.schema.dense:
            if feature.name in self.fill and feature.size != 1:
                raise ConfigError(
                    f"fill has {feature.name!r}, which has {feature.values} values per row; declare it instead: "
                    f"DenseFeature({feature.name!r}, size=..., fill=...).",
                    field="fill",
                )
        self._rules()
        self._applied_rules()
        if self.only is None:
            self.texts.check(self.rename, self.number_columns)

    @property
    def source_columns(self) -> dict[str, str]:
        """Returns the column of the file for each column that the schema reads, except labels by rules."""
        labels = (name for name in self.schema.label_names if name not in {*self._schema_rules, *self.labels})
        names = [*self.schema.feature_columns, *labels, *self._sample_columns]
        return {name: self.rename.get(name, name) for name in names if self.only is None or name in self.only}

    @property
    def number_columns(self) -> list[str]:
        """Returns the columns of the file that may hold numbers other than ids."""
        schema, columns = self.schema, self.source_columns
        names = [each.name for each in schema.dense if each.size == 1]
        names += [each.bucketize.column for each in schema.id_features if each.bucketize is not None]
        names += [each.weights for each in schema.id_features if each.weights is not None]
        names += [*schema.label_names, schema.sample_weight or ""]
        read = [columns[name] for name in dict.fromkeys(names) if name in columns]
        return [*read, *self.rule_columns, *(self.selection.columns if self.selection else ())]

    @property
    def _sample_columns(self) -> tuple[str, ...]:
        """The columns of weights and groups of samples."""
        return tuple(name for name in (self.schema.sample_weight, self.schema.group) if name is not None)

    @property
    def input_rules(self) -> InputRules:
        """Returns the rules for missing values, lists and numbers of features, which a server also applies."""
        fill = {name: float(value) for name, value in self.fill.items() if name in self.schema.dense_names}
        columns, written = self.source_columns, self.written_numbers
        features = {name: columns[name] for name in self.schema.feature_columns if columns[name] in written}
        return msgspec.structs.replace(
            self._applied_rules(),
            fill=fill,
            null_values=self.texts.null_values,
            numbers={name: written[column] for name, column in features.items()},
        )

    @property
    def written_numbers(self) -> dict[str, WrittenNumbers]:
        """Returns how numbers are written, by column of the file, if not as Python writes them."""
        return self.texts.numbers(self.rename, self.number_columns)

    @property
    def rule_columns(self) -> list[str]:
        """Returns the columns of the file that rules of labels read."""
        return [column for rule in self._rules().values() for column in rule.columns]

    def columns_of(self, file: File, present: list[str], hint: str = _REMEDY) -> list[str]:
        """Returns the columns to read from a file.

        Args:
            file: the file.
            present: columns of the file.
            hint: remedy in the error for a missing column.

        Raises:
            DataError: the file lacks a needed column, or has two of the same name.
        """
        needed = [*self.source_columns.items(), *([("day", self.day)] if self.day else [])]
        needed += [(name, column) for name, rule in self._rules().items() for column in rule.columns]
        needed += [("where or split", column) for column in (self.selection.columns if self.selection else ())]
        needed += [(column, column) for column in self.passthrough]
        targets = (*self.schema.label_names, *self._sample_columns)
        return present_columns(file, present, needed, targets, self.require_labels, hint)

    def batches(self, pieces: Iterator[Piece], skip: int, prepare: Prepare | None = None) -> Iterator[Batch]:
        """Converts the selected rows of the pieces to batches, without the first `skip`.

        Args:
            pieces: pieces of the files; with a selection, from the first row of the first file on.
            skip: number of selected rows to skip.
            prepare: converts the columns of a file to those of the schema.

        Raises:
            DataError: a value is invalid; the message names file, row, column and remedy.
        """
        for piece, positions, computed in self._selected(pieces, skip):
            with self.located(piece, positions, self.rename):
                yield self._batch(piece._replace(columns=prepare(piece.columns)) if prepare else piece, computed)

    def inputs(self, pieces: Iterator[Piece], prepare: Prepare | None = None) -> Iterator[dict[str, Any]]:
        """Yields the columns `only` of the selected rows, as `Batch.from_columns` would get them.

        Args:
            pieces: as for `batches`, from the first row of the first file on.
            prepare: as for `batches`.

        Raises:
            DataError: as `batches` does, but for the values of other columns.
        """
        for piece, positions, computed in self._selected(pieces, 0):
            with self.located(piece, positions, self.rename):
                prepared = piece._replace(columns=prepare(piece.columns)) if prepare else piece
                columns = dict(self._inputs(prepared, computed))
            yield columns

    def _selected(
        self, pieces: Iterator[Piece], skip: int
    ) -> Iterator[tuple[Piece, Int64Array | None, dict[str, Any]]]:
        """Yields the selected rows of pieces without the first `skip`, their positions, and the labels by rules."""
        first = 0
        for piece in pieces:
            if piece.counted:
                first += piece.rows
                continue
            piece = self.with_plain_texts(piece)
            positions = None
            if self.selection is not None:
                positions = self.selected(piece, first)
                first += piece.rows
            count = piece.rows if positions is None else len(positions)
            begin, skip = min(skip, count), max(skip - count, 0)
            if begin == count:
                continue
            if positions is None:
                if begin:
                    rest = {name: column[begin:] for name, column in piece.columns.items()}
                    piece = Piece(piece.file, piece.row + begin, rest, count - begin)
            else:
                import pyarrow as pa

                positions = positions[begin:]
                with self.located(piece, None, {}):
                    rest = {name: _taken(name, column, pa.array(positions)) for name, column in piece.columns.items()}
                piece = Piece(piece.file, piece.row, rest, count - begin)
            with self.located(piece, positions, {}):
                computed = self._computed_labels(piece)
            yield piece, positions, computed

    def with_plain_texts(self, piece: Piece) -> Piece:
        """Returns rows without texts for missing values, and with numbers as Python writes them."""
        piece = _without_views(piece)
        if self.texts == PYTHONS_TEXTS:
            return piece
        rules = InputRules(null_values=self.texts.null_values, numbers=self.written_numbers)
        with self.located(piece, None, {}):
            return piece._replace(columns=dict(apply_rules(rules, piece.columns)))

    def passthrough_columns(self, pieces: Iterator[Piece]) -> Iterator[dict[str, Any]]:
        """Yields the columns `passthrough` of the selected rows, unconverted.

        Args:
            pieces: as for `batches`, from the first row of the first file on.
        """
        import pyarrow as pa

        first = 0
        for piece in pieces:
            piece = _without_views(piece)
            columns = {name: self._read(piece, name, as_text=True) for name in self.passthrough}
            if self.selection is not None:
                positions = pa.array(self.selected(self.with_plain_texts(piece), first))
                columns = {name: _taken(name, column, positions) for name, column in columns.items()}
            first += piece.rows
            yield columns

    def selected(self, piece: Piece, first: int) -> Int64Array:
        """Returns the positions of the selected rows in a piece; for a conversion with a selection.

        Args:
            piece: the rows.
            first: number of the first row over all files.

        Raises:
            DataError: a rule does not match the columns.
        """
        assert self.selection is not None
        with self.located(piece, None, {}):
            named = {name: self._read(piece, name) for name in self.selection.columns}
            return self.selection.positions(named, first, piece.rows)

    def _computed_labels(self, piece: Piece) -> dict[str, Any]:
        """Evaluates the rules of labels; None for a rule whose column the file lacks."""
        labels: dict[str, Any] = {}
        for name, rule in self._rules().items():
            columns = {column: self._read(piece, column) for column in rule.columns}
            missing = [column for column, values in columns.items() if values is None]
            labels[name] = None if missing else rule.evaluate(columns, piece.rows)
        return labels

    def _batch(self, piece: Piece, computed: dict[str, Any]) -> Batch:
        columns = self._inputs(piece, computed)
        return Batch.from_columns(self.schema, columns, self._day(piece), require_labels=self.require_labels)

    def _inputs(self, piece: Piece, computed: dict[str, Any]) -> Mapping[str, Any]:
        texts = {feature.column for feature in self.schema.id_features if feature.kind == "text"}
        named = {name: self._read(piece, column, name in texts) for name, column in self.source_columns.items()}
        present = {name: column for name, column in (named | computed).items() if column is not None}
        return apply_rules(self._applied_rules(), present)

    def _applied_rules(self) -> InputRules:
        """Returns the rules of this reader, with `fill` of labels and dense features."""
        return msgspec.structs.replace(self.rules, fill=dict(self.fill))

    def _rules(self) -> dict[str, Expression]:
        """Returns the rules of labels: the schema's, unless the reader gives another one or renames the label."""
        if self.only is not None:
            return {}
        own = {name: Expression(f"labels[{name!r}]", rule) for name, rule in self.labels.items()}
        declared = self._schema_rules
        return {name: Expression(f"Label({name!r}).rule", rule) for name, rule in declared.items()} | own

    @property
    def _schema_rules(self) -> dict[str, str]:
        """The rules of labels in the schema."""
        targets = (each for each in self.schema.labels if not isinstance(each, str))
        return {each.name: each.rule for each in targets if each.rule is not None and each.name not in self.rename}

    def _read(self, piece: Piece, column: str, as_text: bool = False) -> Any:
        """Returns a column of the file, or its hive key as a constant column, or None.

        Args:
            piece: the rows.
            column: name in the file.
            as_text: whether a hive key stays a text; by default a key of digits is a number.
        """
        if column in piece.columns or column not in piece.file.keys:
            return piece.columns.get(column)
        import pyarrow as pa

        value = piece.file.keys[column]
        if value == _HIVE_NULL:
            return pa.nulls(piece.rows)
        if not as_text and value.isdecimal() and int(value) < 2**64:  # 03 is 3, as in Spark and Arrow.
            return pa.repeat(pa.scalar(int(value), pa.uint64()), piece.rows)
        return pa.repeat(value, piece.rows)

    def _day(self, piece: Piece) -> Any:
        if self.day is None:
            return None
        if self.day not in piece.columns:
            return day_of_text(self.day, piece.file.keys[self.day], PER_DAY[self.day_unit])
        return day_of_column(self.day, piece.columns[self.day], self.day_unit)

    @contextmanager
    def located(self, piece: Piece, positions: Int64Array | None, rename: Mapping[str, str]) -> Iterator[None]:
        """Converts errors about rows to a DataError that names the file, the row and the column.

        Args:
            piece: the rows.
            positions: position of each row relative to `piece.row` in the file; None if they are all rows of the piece.
            rename: column of the file by its name in errors; empty for errors of rules, which name columns of the file.
        """
        try:
            yield
        except DataError as error:
            fields = {**error.fields, "path": piece.file.path}
            message = error.message
            if "row" in fields:
                row = piece.row + (fields["row"] if positions is None else int(positions[fields["row"]]))
                message = message.replace(f"at row {fields['row']}", f"at row {row}")
                fields["row"] = row
            name = fields.get("column", fields.get("feature"))
            if name is not None:
                fields["column"] = column = rename.get(name, name)
                message += f" In the source, the column is {column!r}." if column != name else ""
            message += COUNTED if "row" in fields else ""
            raise DataError(f"{piece.file.path}: {message}", **fields) from error
        except Exception as error:
            if not type(error).__module__.startswith("pyarrow"):
                raise
            raise DataError(
                f"{piece.file.path}: the rows from {piece.row} on cannot be converted ({error}); correct "
                "them, or leave them out.",
                path=piece.file.path,
            ) from error


def _without_views(piece: Piece) -> Piece:
    return piece._replace(columns={name: without_views(column) for name, column in piece.columns.items()})


def _taken(name: str, column: Any, indices: Any) -> Any:
    """Returns rows of a column.

    Raises:
        DataError: pyarrow cannot select rows of this type.
    """
    import pyarrow as pa

    try:
        return column.take(indices)
    except pa.ArrowNotImplementedError as error:
        raise DataError(
            f"Column {name!r} holds {column.type}, of which pyarrow {pa.__version__} cannot select rows; cast it to "
            "plain texts, numbers or lists of these, or read all rows.",
            column=name,
        ) from error


def present_columns(
    file: File,
    present: list[str],
    needed: Iterable[tuple[str, str]],
    labels: Collection[str],
    required: bool,
    hint: str,
) -> list[str]:
    """Returns the columns to read from a file, each once.

    Args:
        file: the file.
        present: columns of the file.
        needed: use and name in the file of each needed column.
        labels: uses that are labels.
        required: whether a file without labels is an error.
        hint: remedy in the error for a missing column.

    Raises:
        DataError: the file lacks a needed column, or has two of the same name.
    """
    columns: list[str] = []
    for name, column in needed:
        if present.count(column) > 1:
            raise DataError(
                f"{file.path} has {present.count(column)} columns named {column!r}; rename or remove all but one.",
                path=file.path,
                column=column,
            )
        if column in present:
            columns.append(column)
        elif column not in file.keys and (required or name not in labels):
            similar = next((p for p in present if p.strip().casefold() == column.strip().casefold()), None)
            if similar is not None:
                hint = f" {similar!r} differs in case or spaces, which count." + hint
            elif name in labels:
                hint += " To predict without labels, set require_labels=False."
            raise DataError(
                f"{file.path} has no column {column!r}{f' (for {name!r})' if name != column else ''}; it has "
                f"{_listed([*present, *file.keys])}.{hint}",
                path=file.path,
                column=column,
            )
    return list(dict.fromkeys(columns))


def _listed(names: list[str], most: int = 40) -> str:
    """Formats names for a message. Quotes names with surrounding spaces or unprintable characters."""
    shown = [name if name.isprintable() and name == name.strip() != "" else repr(name) for name in names[:most]]
    listed = ", ".join(name if len(name) <= 80 else name[:80] + "..." for name in shown)
    return listed + (f" and {len(names) - most} more" if len(names) > most else "")


def require_rows(
    batches: Iterator[Batch], files: Sequence[File], skip: int, selection: Selection | None
) -> Iterator[Batch]:
    """Passes batches through; raises DataError if there are none and no rows were skipped."""
    first = next(batches, None)
    if first is not None:
        yield first
        yield from batches
    elif skip == 0:
        names = ", ".join(file.path for file in files[:3]) + (f" and {len(files) - 3} more" if len(files) > 3 else "")
        if selection is None:
            message = f"{names} {'is' if len(files) == 1 else 'are'} empty: there are no rows; give another source."
        else:
            message = f"{names}: `where` and `split` select no rows; correct them, or give another source."
        raise DataError(message, path=files[0].path)
