"""Reads messages that are Arrow IPC streams, and computes their expanded size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.errors import DataError

__all__ = ["concatenated", "grown_size", "may_grow", "read_stream"]


def read_stream(value: bytes) -> Any:
    """Returns the rows of a stream as a pyarrow table.

    Raises:
        Exception: of pyarrow, if the stream is invalid.
    """
    import pyarrow as pa

    table = pa.ipc.open_stream(value).read_all()
    table.validate(full=True)  # Else lengths and offsets in the message are trusted.
    return table


def concatenated(tables: list[Any]) -> Any:
    """Concatenates tables of the same types; each column becomes one array if its texts have less than 2 GiB."""
    import pyarrow as pa

    return pa.concat_tables(tables).combine_chunks()


def may_grow(kind: Any) -> bool:
    """Whether values of a type may take fewer bytes in a message than once they are expanded to ids."""
    import pyarrow as pa

    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        value = kind.value_type
        wide = pa.types.is_primitive(value) and value.bit_width >= 32
        return not wide and not _is_text(value)
    return pa.types.is_dictionary(kind) or _is_view(kind)


def grown_size(array: Any) -> int:
    """Returns the bytes of an array once no value shares bytes and each has 8 or more, as ids and numbers have.

    Raises:
        DataError: the array is a dictionary of lists or records.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, size = array.type, 8 * len(array)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return size + grown_size(array.flatten())
    if _is_view(kind):
        return size + int(_view_lengths(array).sum())
    if pa.types.is_dictionary(kind):
        entries = array.dictionary
        if pa.types.is_nested(entries.type) or pa.types.is_dictionary(entries.type):
            raise DataError(f"A column holds {kind}; ids and numbers are texts, numbers, or lists of these.")
        if _is_text(entries.type):
            return size + int(pc.sum(pc.binary_length(entries).take(array.indices)).as_py() or 0)
        if _is_view(entries.type):
            return size + int(pc.sum(pa.array(_view_lengths(entries)).take(array.indices)).as_py() or 0)
        return size * max(1, int(entries.type.bit_width) // 64)
    return max(size, int(array.nbytes))


def _view_lengths(array: Any) -> NDArray[np.int64]:
    """Returns the lengths of the texts of a view array: the first 4 of the 16 bytes of each view."""
    views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[array.offset : array.offset + len(array), 0]
    return np.where(array.is_valid().to_numpy(zero_copy_only=False), views, 0).astype(np.int64)


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    return any(test(kind) for test in tests)


def _is_view(kind: Any) -> bool:
    return str(kind) in ("string_view", "binary_view")
