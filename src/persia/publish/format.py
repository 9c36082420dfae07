"""The log of changes as typed records, and the names of its files.

`docs/reference/changes.md` is the specification. Input is untrusted: sizes are limited before anything is decoded,
unknown fields are rejected, and so are records that contradict their path or each other.
"""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from persia.errors import PersiaError, PublishError
from persia.metrics.drift import DriftReference
from persia.schema import InputRules, Schema
from persia.types import BucketMap
from persia.types.publishing import ModelDescription, PublishDtype

__all__ = [
    "DRIFT_FILE",
    "EPOCH_FILE",
    "FORMAT",
    "MAX_DRIFT_BYTES",
    "MAX_EPOCH_BYTES",
    "MAX_MANIFEST_BYTES",
    "MAX_MODEL_BYTES",
    "MODEL_FILE",
    "NETWORK",
    "VERSION",
    "Description",
    "Drift",
    "Epoch",
    "Kind",
    "LogEntry",
    "Part",
    "Precision",
    "TableChanges",
    "decode",
    "entry_name",
    "epoch_name",
    "parse_entry",
    "parse_epoch",
    "part_name",
    "stream_of",
]

FORMAT: Final = "persia-changes"
VERSION: Final = 1
EPOCH_FILE = "epoch.json"
MODEL_FILE = "model.json"
DRIFT_FILE = "drift.json"
NETWORK = "network"
"""Name of the stream of the network."""

MAX_EPOCH_BYTES = 1 << 20
MAX_MODEL_BYTES = 4 << 20
MAX_DRIFT_BYTES = 16 << 20
MAX_MANIFEST_BYTES = 16 << 20
MAX_PART_BYTES = 8 << 30
MAX_TABLES = 4096
MAX_PARTS = 1 << 16

Kind = Literal["snapshot", "increment", "network"]
Precision = Literal["float32", "bf16", "fp16"]

_EPOCH = re.compile(r"epoch-([0-9]{10})")
_ENTRY = re.compile(r"([0-9]{10})-(snapshot|increment|network)\.json")

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Number = Annotated[int, msgspec.Meta(ge=0, lt=10**10)]
Dim = Annotated[int, msgspec.Meta(ge=1, le=4096)]
TableName = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
Run = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
PartBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_PART_BYTES)]
Checksum = Annotated[str, msgspec.Meta(pattern=r"^crc32:[0-9a-f]{8}$")]
Format = Literal["persia-changes"]
Version = Literal[1]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of the records below."""


class Epoch(_Record, frozen=True):
    """`epoch.json`: an epoch, whose streams are `rows-0` to `rows-(n - 1)` of n PSs, and `network`.

    Args:
        run: random identifier, which all entries of the epoch repeat.
        buckets: the PS of each bucket of ids; another map needs another epoch.
    """

    format: Format
    version: Version
    epoch: Number
    run: Run
    buckets: BucketMap


class Description(_Record, frozen=True):
    """`model.json`: the data besides rows and network that a reader needs to compute predictions.

    Args:
        run: identifies the epoch.
        schema: the input of the model, with its labels.
        precision: precision of the forward pass: "bf16" and "fp16" run it under autocast.
        model: how to build the network; None if that is not known.
        input_rules: rules of the reader of the training data.
    """

    format: Format
    version: Version
    epoch: Number
    run: Run
    schema: Schema
    precision: Precision
    model: ModelDescription | None
    input_rules: InputRules


class Drift(_Record, frozen=True):
    """`drift.json`: the distributions of inputs and predictions in training.

    Args:
        run: identifies the epoch.
        training: the distributions.
    """

    format: Format
    version: Version
    epoch: Number
    run: Run
    training: DriftReference


class TableChanges(_Record, frozen=True):
    """A table: its columns, and how many rows and removed ids there are in the parts of an entry."""

    name: TableName
    dim: Dim
    rows: Count
    removed: Count


class Part(_Record, frozen=True):
    """A file of an entry, number i of which is `part_name(sequence, i)`: its length and checksum."""

    bytes: PartBytes
    checksum: Checksum


class LogEntry(_Record, frozen=True):
    """The manifest of an entry of a stream, written after its parts.

    Args:
        run: identifies the epoch.
        stream: name of the stream.
        sequence: its number in the stream, from 0 on without gaps.
        kind: "snapshot": all rows of the PS; "increment": changes since entry `sequence - 1`; "network".
        step: global steps that it contains.
        time: time of the rows or the network, in seconds since 1970.
        dtype: type of rows.
        tables: tables, sorted by name; tensors of rows are named by the index of their table.
        parts: parts to apply in order.
    """

    format: Format
    version: Version
    run: Run
    epoch: Number
    stream: Annotated[str, msgspec.Meta(pattern=r"^(network|rows-[0-9]{1,5})$")]
    sequence: Number
    kind: Kind
    step: Count
    time: float
    dtype: PublishDtype
    tables: Annotated[list[TableChanges], msgspec.Meta(max_length=MAX_TABLES)]
    parts: Annotated[list[Part], msgspec.Meta(max_length=MAX_PARTS)]


def epoch_name(epoch: int) -> str:
    """Returns the name of the directory of an epoch."""
    return f"epoch-{epoch:010d}"


def parse_epoch(name: str) -> int | None:
    """Returns the number of the epoch in a directory of this name; None if it has another purpose."""
    match = _EPOCH.fullmatch(name)
    return int(match[1]) if match else None


def stream_of(server: int) -> str:
    """Returns the name of the stream of a PS."""
    return f"rows-{server}"


def entry_name(sequence: int, kind: Kind) -> str:
    """Returns the name of the manifest of an entry."""
    return f"{sequence:010d}-{kind}.json"


def parse_entry(name: str) -> tuple[int, str] | None:
    """Returns sequence and kind of the entry with a manifest of this name; None for other files."""
    match = _ENTRY.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def part_name(sequence: int, part: int) -> str:
    """Returns the name of a part of an entry."""
    return f"{sequence:010d}.{part:05d}.safetensors"


Record = TypeVar("Record", Description, Drift, Epoch, LogEntry)


def decode(data: bytes, kind: type[Record], path: str) -> Record:
    """Decodes a manifest, `epoch.json`, `model.json` or `drift.json`, whose length has been checked.

    Raises:
        PublishError: it is not one, or of another version.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, PersiaError) as error:
        raise PublishError(
            f"{path} is not a {FORMAT} file of version {VERSION}: {error}. It is damaged, or of another version of "
            "persia.",
            path=path,
        ) from None
