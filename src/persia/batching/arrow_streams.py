"""Sizes that Arrow IPC streams declare, read from their metadata: nothing is decompressed or allocated."""

from __future__ import annotations

from struct import unpack_from
from typing import Any

import numpy as np

from persia.errors import DataError

__all__ = ["declared_size", "is_compressed"]

_OLD_COMPRESSION = b"ARROW:experimental_compression"
"""Metadata that announced compression before Arrow 1.0. Readers of Arrow still obey it."""

_HEADER, _DATA = 2, 1
"""Numbers of fields: the header of a `Message`, the record batch of a `DictionaryBatch` (Arrow's Message.fbs)."""

_LENGTH, _BUFFERS, _COMPRESSION = 0, 2, 3
"""Numbers of the fields of a `RecordBatch`."""


def declared_size(value: bytes) -> tuple[int, int]:
    """Returns the rows of a stream, and the bytes of its buffers once they are decompressed.

    Arrow allocates the declared size of a compressed buffer before it decompresses the buffer, and a few kilobytes can
    declare gigabytes. Nothing is decompressed here.

    Raises:
        DataError: the stream is invalid.
        Exception: of pyarrow, if the stream is invalid.
    """
    import pyarrow as pa

    rows = size = 0
    for message in pa.ipc.MessageReader.open_stream(value):
        kind = message.type
        if kind not in ("record batch", "dictionary"):
            continue
        metadata, body = memoryview(message.metadata), message.body
        batch = _record_batch(metadata, kind)
        if kind == "record batch" and (at := _field(metadata, batch, _LENGTH)):
            length = unpack_from("<q", metadata, at)[0]
            if length < 0:
                raise DataError(f"A record batch declares {length} rows.")
            rows += length
        if _OLD_COMPRESSION in bytes(metadata):
            raise DataError("The stream uses the compression format of Arrow before 1.0.")
        if not _field(metadata, batch, _COMPRESSION):
            size += 0 if body is None else body.size
        elif at := _field(metadata, batch, _BUFFERS):
            size += _decompressed(metadata, _followed(metadata, at), body)
    return rows, size


def is_compressed(message: Any) -> bool:
    """Whether the buffers of a message of a stream are compressed.

    Args:
        message: a `pyarrow.ipc.Message`.

    Raises:
        DataError: the message is invalid.
    """
    kind = message.type
    if kind not in ("record batch", "dictionary"):
        return False
    metadata = memoryview(message.metadata)
    compressed = _field(metadata, _record_batch(metadata, kind), _COMPRESSION) != 0
    return compressed or _OLD_COMPRESSION in bytes(metadata)


def _decompressed(metadata: memoryview, buffers: int, body: Any) -> int:
    """Returns the bytes that buffers declare, each in the 8 bytes before its content; -1 means that it is plain."""
    count = unpack_from("<I", metadata, buffers)[0]
    offsets, lengths = np.frombuffer(metadata, "<i8", 2 * count, buffers + 4).reshape(count, 2).T
    offsets, lengths = offsets[lengths > 0], lengths[lengths > 0]
    if not len(offsets):
        return 0
    if body is None or offsets.min() < 0 or offsets.max() > body.size - 8:
        raise DataError("A compressed buffer lies outside of its message.")
    sizes = np.frombuffer(body, np.uint8)[offsets[:, None] + np.arange(8)].view("<i8")[:, 0]
    if sizes.min() < -1:
        raise DataError(f"A compressed buffer declares {sizes.min()} bytes.")
    return sum(np.where(sizes < 0, lengths, sizes).tolist())


# pyarrow returns a message only after Arrow has verified its metadata, so all positions below lie within the metadata.


def _field(metadata: memoryview, table: int, number: int) -> int:
    """Returns the position of a field in a flatbuffers table; 0 if the table lacks the field."""
    layout = table - unpack_from("<i", metadata, table)[0]
    place = 4 + 2 * number
    if place >= unpack_from("<H", metadata, layout)[0]:
        return 0
    offset = unpack_from("<H", metadata, layout + place)[0]
    return table + offset if offset else 0


def _record_batch(metadata: memoryview, kind: str) -> int:
    """Returns the position of the `RecordBatch` of a message."""
    header = _followed(metadata, _field(metadata, unpack_from("<I", metadata)[0], _HEADER))
    return header if kind == "record batch" else _followed(metadata, _field(metadata, header, _DATA))


def _followed(metadata: memoryview, at: int) -> int:
    """Returns the position that a field refers to.

    Raises:
        DataError: the field is missing.
    """
    if not at:
        raise DataError("A record batch is missing.")
    return at + int(unpack_from("<I", metadata, at)[0])
