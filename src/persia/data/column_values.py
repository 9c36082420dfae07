"""Converts columns of a file to texts, numbers, booleans or times, so that CSV and Parquet compare alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persia.batching.numbers import number_column
from persia.errors import DataError

__all__ = ["Values", "times_of_text", "without_views"]

_EXACT = 1 << 53
"""Bound below which float64 represents every whole number exactly."""


class Values:
    """The columns of some rows, for one evaluation.

    Args:
        columns: pyarrow array `[rows]` by name.
    """

    def __init__(self, columns: Mapping[str, Any]) -> None:
        self._columns = {name: _plain(name, array) for name, array in columns.items()}

    def column(self, name: str) -> Any:
        """Returns a column as texts, numbers, booleans or UTC timestamps. NaN and empty texts become null."""
        return self._columns[name]

    def compare(self, function: str, one: Any, other: Any) -> Any:
        """Converts arrays, or an array and a constant, to one type and compares them as `pyarrow.compute` does.

        Raises:
            DataError: the values cannot be compared; the message names column, row and value.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        kinds = {_kind(one), _kind(other)}
        if "time" in kinds:
            if not kinds <= {"time", "text", "null"}:
                raise DataError("a time is compared with a number; write the time as an ISO text.")
            one, other = self.times(one), self.times(other)
        elif kinds & {"number", "bool"}:
            for value, partner in ((one, other), (other, one)):
                if isinstance(value, str) and _kind(partner) != "text":
                    raise DataError(f"numbers are compared with the text {value!r}; write a number.")
            one, other = self._comparable(one, other)
        elif "text" in kinds:
            if function not in ("equal", "not_equal"):
                return self._ordered(function, one, other)
            one, other = (pa.scalar(x) if isinstance(x, str) else x.cast(pa.string()) for x in (one, other))
        return pc.call_function(function, [one, other])

    def _ordered(self, function: str, one: Any, other: Any) -> Any:
        """Compares texts by order: as times if the constant is one, else letter by letter.

        Raises:
            DataError: both are columns, or the constant is a number. A CSV file holds numbers as texts, and their
                order by letters differs from the order of the numbers.
        """
        import pyarrow as pa
        import pyarrow.compute as pc

        constant = next((value for value in (one, other) if isinstance(value, str)), None)
        if constant is None:
            if "null" in {_kind(one), _kind(other)}:
                return pc.call_function(function, [one.cast(pa.string()), other.cast(pa.string())])
            raise DataError("two columns of texts are compared by order; to compare numbers, write `a + 0 < b + 0`.")
        constant_kind = _text_kind(constant)
        if constant_kind == "number":
            raise DataError(f"texts are compared by order with {constant!r}; write the number without quotes.")
        if constant_kind == "time":
            return pc.call_function(function, [self.times(one), self.times(other)])
        texts = [pa.scalar(x) if isinstance(x, str) else x.cast(pa.string()) for x in (one, other)]
        return pc.call_function(function, texts)

    def truth(self, value: Any) -> Any:
        """Converts to booleans; numbers, and texts of numbers or booleans, are true unless 0."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(value, (pa.Array, pa.Scalar)) and pa.types.is_boolean(value.type):
            return value
        return pc.not_equal(self.floats(value), 0.0)

    def floats(self, value: Any) -> Any:
        """Converts numbers, booleans, or texts of these to float64."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(value, pa.Array) and pa.types.is_boolean(value.type):
            value = value.cast(pa.uint8())
        return pc.cast(self.numbers(value), pa.float64(), safe=False)

    def numbers(self, value: Any) -> Any:
        """Converts texts to float64; returns numbers and booleans unchanged.

        Raises:
            DataError: a text is not a number, or the value is a time; the message names column, row and value.
        """
        import pyarrow as pa

        if isinstance(value, (bool, int, float)):
            return pa.scalar(value, pa.uint64() if value >= 2**63 and type(value) is int else None)
        if isinstance(value, str) or _kind(value) == "time":
            raise DataError(f"{value!r} is not a number." if isinstance(value, str) else "a time is not a number.")
        if _kind(value) != "text":
            return value
        return pa.array(number_column(self._name(value), value, fill=float("nan")), from_pandas=True)

    def times(self, value: Any) -> Any:
        """Converts ISO texts of dates and times to timestamps; returns timestamps unchanged.

        Raises:
            DataError: a text is not a date or time; the message names column, row and value.
        """
        import pyarrow as pa

        if _kind(value) == "time" or _kind(value) == "null":
            return value
        if isinstance(value, str):
            times = times_of_text("", pa.array([value]))
            if not pa.types.is_timestamp(times.type):
                raise DataError(f"a time is compared with {value!r}; write it as 2024-05-01 or 2024-05-01 12:30:00.")
            return times[0]
        times = times_of_text(self._name(value), value)
        if not pa.types.is_timestamp(times.type):
            raise DataError(f"column {self._name(value)!r} holds numbers, which are compared with a time.")
        return times

    def _comparable(self, one: Any, other: Any) -> tuple[Any, Any]:
        """Converts two numbers to a type that represents both."""
        import pyarrow as pa
        import pyarrow.compute as pc

        for value, partner in ((one, other), (other, one)):
            if type(value) is int and abs(value) > _EXACT and _kind(partner) == "text":
                raise DataError(f"texts are compared with {value} as float64, which does not hold it; write a text.")
        numbers = [self.numbers(one), self.numbers(other)]
        if any(pa.types.is_floating(x.type) or pa.types.is_boolean(x.type) for x in numbers):
            return self.floats(numbers[0]), self.floats(numbers[1])
        if pa.uint64() in (numbers[0].type, numbers[1].type) and numbers[0].type != numbers[1].type:
            signed = next(x for x in numbers if x.type != pa.uint64())
            lowest = signed if isinstance(signed, pa.Scalar) else pc.min(signed)
            common = pa.uint64() if (lowest.as_py() or 0) >= 0 else pa.decimal128(20)
            return pc.cast(numbers[0], common), pc.cast(numbers[1], common)
        return numbers[0], numbers[1]

    def _name(self, array: Any) -> str:
        return next((name for name, column in self._columns.items() if column is array), "")


def _kind(value: Any) -> str:
    import pyarrow as pa

    if isinstance(value, str):
        return "text"
    if isinstance(value, (bool, int, float)):
        return "bool" if isinstance(value, bool) else "number"
    if pa.types.is_null(value.type):
        return "null"
    if pa.types.is_timestamp(value.type):
        return "time"
    if pa.types.is_boolean(value.type):
        return "bool"
    return "text" if pa.types.is_string(value.type) else "number"


def _text_kind(constant: str) -> str:
    """Returns "number", "time" or "text", whichever a constant parses as."""
    import pyarrow as pa

    try:
        float(constant)
        return "number"
    except ValueError:
        pass
    try:
        times_of_text("", pa.array([constant]))
    except DataError:
        return "text"
    return "time"


def _plain(name: str, array: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(array, list):
        raise DataError(f"column {name!r} holds values of several types, which cannot be compared.", column=name)
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    type_ = array.type
    if pa.types.is_floating(type_):
        array = array.cast(pa.float64())
        return pc.if_else(pc.is_nan(array), None, array)
    if pa.types.is_decimal(type_):
        return array.cast(pa.float64())
    if pa.types.is_date(type_) or pa.types.is_timestamp(type_):
        return array.cast(pa.timestamp("us"), safe=False)  # With a time zone: in UTC.
    if pa.types.is_integer(type_) or pa.types.is_boolean(type_) or pa.types.is_null(type_):
        return array
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if any(test(type_) for test in texts) or str(type_) in ("string_view", "binary_view"):
        array = array.cast(pa.string())
        return pc.if_else(pc.equal(pc.binary_length(array), 0), None, array)
    raise DataError(f"column {name!r} holds {type_}, which cannot be compared; use a function.", column=name)


def without_views(column: Any) -> Any:
    """Converts text views, as polars writes them, to plain texts: pyarrow cannot select rows of views.

    A list is returned unchanged.
    """
    if isinstance(column, list):
        return column
    kind = _kind_without_views(column.type)
    return column if kind == column.type else column.cast(kind)


def _kind_without_views(kind: Any) -> Any:
    import pyarrow as pa

    if str(kind) in ("string_view", "binary_view"):
        return pa.large_string() if str(kind) == "string_view" else pa.large_binary()
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _kind_without_views(kind.value_type), kind.ordered)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        value = _kind_without_views(kind.value_type)
        if value == kind.value_type:
            return kind
        return pa.list_(value, kind.list_size) if pa.types.is_fixed_size_list(kind) else pa.large_list(value)
    return kind


_DAY_FIRST = r"^[0-9]{1,2}\.[0-9]{1,2}\.[0-9]{4}(?:,? +[0-9]{1,2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?)?$"


def _iso(texts: Any) -> Any:
    """Converts dates with points to ISO texts."""
    import pyarrow.compute as pc

    for pattern, by in (
        (r"^([0-9])\.", r"0\1."),
        (r"^([0-9]{2})\.([0-9])\.", r"\1.0\2."),
        (r",? +([0-9]):", r" 0\1:"),
        (r",? +", " "),
        (r"^([0-9]{2})\.([0-9]{2})\.([0-9]{4})", r"\3-\2-\1"),
    ):
        texts = pc.replace_substring_regex(texts, pattern, by)
    return texts


def times_of_text(name: str, column: Any) -> Any:
    """Converts texts of whole numbers to int64, or texts of dates and times to timestamps; empty texts to null.

    Dates are ISO texts, such as 2024-05-01, or have the day first and points, such as 1.5.2024. Dates with slashes are
    refused, as their order differs from country to country.

    Raises:
        DataError: a text is none of these, or of another kind than the first text; the message names row and value.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    texts = pc.utf8_trim_whitespace(column.cast(pa.string()))
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    original = texts
    day_first = pc.match_substring_regex(texts, _DAY_FIRST)
    if pc.any(day_first).as_py():
        texts = pc.if_else(day_first, _iso(texts), texts)
    kinds = (pa.int64(), pa.timestamp("us"), pa.timestamp("us", "UTC"))
    for kind in kinds:
        try:
            times = texts.cast(kind)
        except pa.ArrowInvalid:
            continue
        return times.cast(pa.timestamp("us")) if kind == kinds[-1] else times
    first = texts[pc.index(pc.is_valid(texts), True).as_py()]
    expected = next((kind for kind in kinds if _casts(first, kind)), None)
    row = next(i for i, text in enumerate(texts) if text.is_valid and (expected is None or not _casts(text, expected)))
    value = original[row].as_py()
    raise DataError(
        f"Column {name!r} has {value!r} at row {row}; it takes whole numbers, or dates and times such as 2024-05-01, "
        "2024-05-01 12:30:00 and 01.05.2024 12:30, of one kind in all rows.",
        column=name,
        row=row,
        value=value,
    )


def _casts(text: Any, kind: Any) -> bool:
    import pyarrow as pa

    try:
        text.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True
