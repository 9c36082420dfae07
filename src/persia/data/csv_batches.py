"""Reads delimited text with Arrow, and waits for its reading threads at the end."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

__all__ = ["csv_batches"]

LET_GO_SECONDS = 10.0
"""Maximum wait for a read of Arrow in progress, which may use a network, and for Arrow to free its memory."""


class _Stream:
    """A file that only Arrow's reader owns: the reader has ended once this object and all blocks are deleted.

    Args:
        stream: the file.
        held: receives weak references to this object and to each block that Arrow has read and may still hold.
    """

    def __init__(self, stream: IO[bytes], held: list[weakref.ref[Any]]) -> None:
        self._stream = stream
        self._held = held
        held.append(weakref.ref(self))

    def read(self, size: int = -1) -> memoryview:
        stream, held = self._stream, self._held
        del self  # The traceback of an error lives until the caller gets it, and must not keep this object alive.
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
    """Yields the record batches of a file, and ends only when Arrow has released the file.

    Arrow reads some blocks ahead in its own thread. After an error, or when the caller stops early, this thread may
    still be reading, or freeing what it has read. If it does so when the interpreter exits, the process aborts.

    Args:
        stream: the file.
        compression: name of the compression in Arrow; None for plain text.
        refuse: called for a line with a wrong number of fields; returns "error" or "skip".
        delimiter: delimiter between fields.
        names: names of the columns; None reads them from the first line.
        skip_rows: number of lines to skip at the beginning.
        block_bytes: size of a block.
        convert: arguments of `pyarrow.csv.ConvertOptions`.

    Raises:
        pyarrow.ArrowInvalid: a line does not match the options.
    """
    import pyarrow as pa
    import pyarrow.csv as pc

    def handler(line: Any) -> str:
        return refuse(line)

    held: list[weakref.ref[Any]] = []  # Arrow's reader becomes the only owner of these objects.
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
