"""Decodes JSON lines to Arrow columns whose values equal the values in the file."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from persia.batching.ids import text_of_id
from persia.data.files import File
from persia.data.json_lines import refused
from persia.errors import DataError
from persia.schema import IdKind

__all__ = ["JsonDecoder"]

_EXACT = 2.0**53
"""From here on float64 does not represent every whole number."""
_ROUNDS = 3
"""Two are needed: null lists first, then large numbers. If Arrow still ignores a type, Python decodes the column."""


class JsonDecoder:
    """Decodes the blocks of a file.

    Arrow infers the types of a block: times from texts such as "2024-05-01 10:00:00", and floats from whole numbers of
    2^63 and more. Such columns are read again, as texts and as uint64. A column with values of several kinds, which
    Arrow refuses, is decoded in Python: its numbers become texts, which have the same ids.

    Args:
        file: the file, for messages.
        ids: kind of the ids, by column with ids.
        written: columns whose texts have numbers that are not written as in Python, such as 1.234,50.
    """

    def __init__(self, file: File, ids: Mapping[str, IdKind], written: Collection[str] = ()) -> None:
        self._file = file
        self._ids = ids
        self._written = written
        self._types: dict[str, Any] = {}
        """Types of an earlier block, by column, which represent a value exactly or refuse it."""
        self._decoder = msgspec.json.Decoder(dict[str, Any])
        self.row = 0
        """Row at which the next block begins."""

    def table(self, block: bytes, columns: Sequence[str] | None) -> Any:
        """Returns the rows of a block as a pyarrow table.

        Args:
            block: whole lines.
            columns: needed keys; a key that no object has gives no column. None for all.

        Raises:
            DataError: a line is not a JSON object, or a value is not an id; the message names the row.
        """
        import pyarrow as pa

        try:
            table = self._read(block, columns)
        except (pa.ArrowInvalid, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise refused(self._file, error, self.row) from error
        except DataError as error:
            raise DataError(f"{self._file.path}: {error.message}", path=self._file.path, **error.fields) from error
        table = table.combine_chunks()
        known = zip(table.column_names, table.schema.types, strict=True)
        self._types = {name: kind for name, kind in known if (columns is None or name in columns) and _is_exact(kind)}
        self.row += table.num_rows
        return table

    def _read(self, block: bytes, columns: Sequence[str] | None) -> Any:
        import pyarrow as pa

        types = dict(self._types)
        try:
            table = _parsed(block, types, columns)
        except pa.ArrowInvalid:  # The types of a column have changed, or a line is not an object.
            types = {}
            try:
                table = _parsed(block, types, None)
            except pa.ArrowInvalid as error:
                if "changed from" not in str(error):
                    raise
                return self._by_value(block, columns)
        better = self._better_types(table)
        for _ in range(_ROUNDS):
            if not better:
                return table
            types |= better
            try:
                table = _parsed(block, types, None)
            except pa.ArrowInvalid:
                break
            better = self._better_types(table)
        texts = self._by_value(block, list(better))
        for name in better:
            table = table.set_column(table.column_names.index(name), name, texts.column(name))
        return table

    def _better_types(self, table: Any) -> dict[str, Any]:
        """Returns the types to read columns again in, by name."""
        better = {name: self._better(name, table.column(name)) for name in table.column_names}
        return {name: kind for name, kind in better.items() if kind is not None}

    def _better(self, name: str, column: Any) -> Any:
        """Returns the type to read a column again in, or None."""
        import pyarrow as pa
        import pyarrow.compute as pc

        nested = pa.types.is_list(column.type)
        kind = column.type.value_type if nested else column.type
        if pa.types.is_timestamp(kind) or (nested and pa.types.is_null(kind)):
            return pa.list_(pa.string()) if nested else pa.string()
        try:
            column.validate()
        except pa.ArrowInvalid:  # Arrow loses nulls at the beginning of lists unless the type is given.
            return column.type
        if name in self._ids and pa.types.is_floating(kind):
            largest = pc.max(pc.abs(pc.list_flatten(column) if nested else column)).as_py()
            if largest is not None and largest >= _EXACT:
                return pa.list_(pa.uint64()) if nested else pa.uint64()
        return None

    def _by_value(self, block: bytes, columns: Collection[str] | None) -> Any:
        import pyarrow as pa

        rows = self._decoder.decode_lines(block)
        names = dict.fromkeys(key for row in rows for key in row) if columns is None else columns
        return pa.table({name: self._array(name, [row.get(name) for row in rows]) for name in names})

    def _array(self, name: str, values: list[Any]) -> Any:
        import pyarrow as pa

        try:
            return pa.array(values)
        except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
            pass
        nested = any(isinstance(value, list) for value in values)
        texts = [
            [self._text(name, each, row) for each in (value if isinstance(value, list) else [value])]
            if nested and value is not None
            else self._text(name, value, row)
            for row, value in enumerate(values, self.row)
        ]
        return pa.array(texts, pa.list_(pa.string()) if nested else pa.string())

    def _text(self, name: str, value: Any, row: int) -> str | None:
        if value is None or isinstance(value, str):
            return value
        if name in self._ids:
            return text_of_id(name, value, row, self._ids[name]).decode()
        text = str(value)
        # The number 1.234 must not be read as the text "1.234", which may be 1234: no such text has an exponent.
        number = name in self._written and type(value) in (int, float)
        return f"{text}e0" if number and "e" not in text else text


def _is_exact(kind: Any) -> bool:
    """Whether a later block may be read with a type, which then represents its values exactly or refuses them."""
    import pyarrow as pa

    kind = kind.value_type if pa.types.is_list(kind) else kind
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_string, pa.types.is_boolean)
    return any(test(kind) for test in tests)


def _parsed(block: bytes, types: Mapping[str, Any], columns: Sequence[str] | None) -> Any:
    """Parses a block with the types of some columns. The others are inferred, unless none of them is needed."""
    import pyarrow as pa
    import pyarrow.json as pj

    enough = columns is not None and types.keys() >= set(columns)
    schema = pa.schema(list(types.items())) if types else None
    parse = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore" if enough else "infer")
    read = pj.ReadOptions(use_threads=False, block_size=len(block) + 1)
    return pj.read_json(pa.BufferReader(block), read, parse)
