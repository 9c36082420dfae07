"""The messages of a log of changes: records of files, and chunks of their contents.

Input is untrusted: unknown fields are rejected, and so are records that contradict themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec

from persia.checkpoint.format import checksum_text
from persia.checkpoint.storage import crc32
from persia.publish.format import MAX_PART_BYTES

__all__ = [
    "CHUNK",
    "HEADER",
    "MAX_RECORD_BYTES",
    "RECORD",
    "FileRecord",
    "Record",
    "RemovalRecord",
    "decode_record",
    "encode_record",
    "kind_of",
]

HEADER: Final = "persia-changes"
"""Name of the header of all messages. Its value is the version of the format and the kind of the message."""

RECORD: Final = b"1/record"
CHUNK: Final = b"1/chunk"

MAX_RECORD_BYTES = 1 << 20

Path = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9][A-Za-z0-9._-]*(/[a-z0-9][A-Za-z0-9._-]*){0,2}$", max_length=200)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="file"):
    """A file that was written. A later record of the same path replaces it.

    Args:
        path: path of the file.
        begin: offset from which a new reader must read to get all files that existed.
        size: length of the file in bytes.
        checksum: checksum of its content.
        data: content of a small file; None if it is in chunks.
        partition: partition of the chunks.
        chunks: offsets of the chunks, ascending.
    """

    path: Path
    begin: Offset
    size: Annotated[int, msgspec.Meta(ge=0, le=MAX_PART_BYTES)]
    checksum: Annotated[str, msgspec.Meta(pattern=r"^crc32:[0-9a-f]{8}$")]
    data: bytes | None = None
    partition: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    chunks: list[Offset] = []


class RemovalRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="removal"):
    """A file, or a directory and its contents, that was removed.

    Args:
        path: path of the file or directory.
        begin: as in `FileRecord`.
    """

    path: Path
    begin: Offset


Record = FileRecord | RemovalRecord

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)


def kind_of(headers: Sequence[tuple[str, bytes | str | None]] | None) -> Literal["record", "chunk"]:
    """Returns the kind of a message, by its headers.

    Raises:
        ValueError: it has none, or has another version; the text does not name the message.
    """
    kinds = [value for name, value in headers or () if name == HEADER]
    if kinds == [RECORD]:
        return "record"
    if kinds == [CHUNK]:
        return "chunk"
    if not kinds:
        raise ValueError("does not belong to a log of changes; let nothing else write to the topic")
    raise ValueError("is damaged, or of another version of persia")


def encode_record(record: Record) -> bytes:
    """Returns the value of the message of a record."""
    return _ENCODER.encode(record)


def decode_record(value: bytes | None, offset: int) -> Record:
    """Decodes the value of a message that is a record.

    Args:
        value: value of the message.
        offset: offset of the message.

    Raises:
        ValueError: it is not a record; the text does not name the message.
    """
    if value is None or len(value) > MAX_RECORD_BYTES:
        raise ValueError("has no record, or one that is too long")
    try:
        record = _DECODER.decode(value)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"has a record that is damaged, or of another version of persia: {error}") from None
    if record.begin > offset or (isinstance(record, FileRecord) and not _consistent(record)):
        raise ValueError("has a record that contradicts itself; it is damaged")
    return record


def _consistent(record: FileRecord) -> bool:
    if record.data is None:
        chunks = record.chunks
        return bool(chunks) and all(a < b for a, b in itertools.pairwise(chunks))
    fits = not record.chunks and len(record.data) == record.size
    return fits and checksum_text(crc32(memoryview(record.data))) == record.checksum
