"""Reads delimited text with Arrow, and leaves no thread that still reads."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

__all__ = ["csv_batches"]

LET_GO_SECONDS = 10.0
"""Maximum wait for the read that Arrow has begun, which may go over a network, and for what it deletes then."""


class _Stream:
    """A file with one owner, Arrow's reader: when this object and all that was read are deleted, the reader has ended.

    Args:
        stream: the file.
        held: gets references to this object and to each block that Arrow has read and may still hold.
    """

    def __init__(self, stream: IO[bytes], held: list[weakref.ref[Any]]) -> None:
        self._stream = stream
        self._held = held
        held.append(weakref.ref(self))

    def read(self, size: int = -1) -> memoryview:
        stream, held = self._stream, self._held
        del self  # The traceback of an error is kept until the caller gets it, and must not keep this object.
        block = memoryview(stream.read(size))
        held[:] = [each for each in held if each() is not None] + [weakref.ref(block)]
        return block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def csv_batches(
    stream: IO[bytes],
    compression: str | None,
    refuse: Callable[[Any], str],
    *,
    delimiter: str,
    names: Sequence[str] | None,
    skip_rows: int = 0,
    block_bytes: int,
    convert: Mapping[str, Any],
) -> Iterator[Any]:
    """Yields the record batches of a file, and ends only when Arrow has let go of it.

    Arrow reads some blocks ahead in a thread of its own. After an error, or when the caller stops early, this thread
    may still be reading, or deleting what it has read. If it does so when the interpreter exits, the process aborts.

    Args:
        stream: the file.
        compression: by its name in Arrow; None for plain text.
        refuse: called for a line with another number of fields; returns "error" or "skip".
        delimiter: between fields.
        names: of the columns; None to take them from the first line.
        skip_rows: lines to leave out at the beginning.
        block_bytes: size of a block.
        convert: arguments of `pyarrow.csv.ConvertOptions`.

    Raises:
        pyarrow.ArrowInvalid: a line is not as the options say.
    """
    import pyarrow as pa
    import pyarrow.csv as pc

    def handler(line: Any) -> str:
        return refuse(line)

    held: list[weakref.ref[Any]] = []  # Arrow's reader will be their only owner.
    source: Any = _Stream(stream, held)
    parse: Any = pc.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=handler)
    held.append(weakref.ref(handler))
    if compression is not None:
        source = pa.CompressedInputStream(source, compression)
    del handler
    read = pc.ReadOptions(use_threads=False, block_size=block_bytes, column_names=names, skip_rows=skip_rows)
    reader: Any = None
    try:
        reader = pc.open_csv(source, read, parse, pc.ConvertOptions(**convert))
        source = parse = None
        yield from reader
    finally:
        source = parse = reader = None
        deadline = time.monotonic() + LET_GO_SECONDS
        while any(each() is not None for each in held) and time.monotonic() < deadline:
            time.sleep(0.0002)
