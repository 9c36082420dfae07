"""The manifest of a checkpoint as typed records, and the names of its files.

`docs/reference/checkpoint.md` is the specification. Input is untrusted: sizes are limited before anything is decoded,
unknown fields are rejected, and so are numbers that contradict each other.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from datetime import datetime
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar
from urllib.parse import quote

import msgspec

from persia.errors import CheckpointError, PersiaError
from persia.schema import EmbeddingOptimizer
from persia.types import BucketMap
from persia.types.half_floats import Dtype

__all__ = [
    "FORMAT",
    "LATEST",
    "MANIFEST",
    "MAX_MANIFEST_BYTES",
    "MAX_PART_BYTES",
    "MOST_SHARDS",
    "VERSION",
    "Base",
    "Manifest",
    "Part",
    "RemovedPart",
    "RowsPart",
    "StatePart",
    "StepChoice",
    "TableRecord",
    "TensorsPart",
    "checksum_text",
    "decode_manifest",
    "encode_manifest",
    "file_name",
    "parse_step",
    "step_name",
]

FORMAT = "persia-checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
LATEST = "LATEST"

MAX_MANIFEST_BYTES = 64 << 20
MAX_DOCUMENT_BYTES = 4 << 20  # schema, config, extra: decoded JSON takes up to 20 times its length in memory
MAX_PART_BYTES = 64 << 30
MAX_STEP = 10**12
MOST_SHARDS = 1024
"""Maximum number of shards of a table in one PS: shard s of PS p is number p * MOST_SHARDS + s in a checkpoint."""

_STEP = re.compile(r"step-([0-9]{12})")

StepChoice: TypeAlias = int | Literal["best", "latest"] | None
"""Which checkpoint of a directory: its step, the best one, which `BEST` names, or the latest one. None: the latest."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Dim = Annotated[int, msgspec.Meta(ge=1, le=4096)]
Width = Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
PartBytes = Annotated[int, msgspec.Meta(ge=0, le=MAX_PART_BYTES)]
# Relative, with forward slashes, and no path component starts with a dot: a path cannot leave the step directory.
PartPath = Annotated[
    str, msgspec.Meta(max_length=512, pattern=r"^[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*(/[A-Za-z0-9_~%-][A-Za-z0-9_.~%-]*)*$")
]
Checksum = Annotated[str, msgspec.Meta(pattern=r"^crc32:[0-9a-f]{8}$")]
Content = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """Base of the records below."""


class _Part(_Record, frozen=True):
    """One file: path relative to the step directory, length and checksum."""

    path: PartPath
    bytes: PartBytes
    checksum: Checksum


class RowsPart(_Part, frozen=True, tag="rows"):
    """Rows of one shard of a table. `steps` are their lowest and highest `last_step`; None without rows."""

    table: Name
    shard: Count
    rows: Count
    steps: tuple[Count, Count] | None = None


class RemovedPart(_Part, frozen=True, tag="removed"):
    """Ids whose rows an incremental checkpoint removes from its base."""

    table: Name
    shard: Count
    ids: Count


class TensorsPart(_Part, frozen=True, tag="tensors"):
    """Named tensors, for example the dense model."""

    name: Name


class StatePart(_Part, frozen=True, tag="state"):
    """A nested Python value; see `packing`."""

    name: Name


Part = RowsPart | RemovedPart | TensorsPart | StatePart


class TableRecord(_Record, frozen=True):
    """One embedding table: layout of its rows, number of rows and of shards."""

    dim: Dim
    optimizer: EmbeddingOptimizer | None
    state_width: Width
    rows: Count
    shards: Count
    dtype: Dtype


class Base(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reference to the checkpoint that an incremental one builds on: the step of its directory, and its `content`."""

    step: Count
    content: Content


Document = TypeVar("Document")


class Manifest(_Record, Generic[Document], frozen=True):
    """All of a checkpoint except the tensors.

    Args:
        span: first and last global step at which rows were captured; equal if all belong to one step boundary.
        base: checkpoint that this one builds on; None for a full checkpoint.
        buckets: the PS of each bucket of ids when it was written, in the numbers of shards; None if that is not known.
        content: random identifier of the contents. It is kept when a chain is compacted into one full checkpoint.
        checksum: checksum of the file's bytes before the last `"checksum"` in it.
    """

    format: str
    version: int
    persia: str
    created: Annotated[datetime, msgspec.Meta(tz=True)]
    global_step: Count
    span: tuple[Count, Count]
    base: Base | None
    tables: dict[Name, TableRecord]
    buckets: BucketMap | None
    parts: list[Part]
    schema: Document
    config: Document
    extra: Document
    content: Content
    checksum: Checksum = "crc32:00000000"


class _Head(msgspec.Struct, frozen=True):
    """The two fields that exist in all versions of the format."""

    format: str
    version: int


_UNDECODABLE = (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError, PersiaError)
_head_decoder = msgspec.json.Decoder(_Head)
_decoder = msgspec.json.Decoder(Manifest[msgspec.Raw])


def checksum_text(crc: int) -> str:
    """Formats a CRC-32 as it appears in a manifest."""
    return f"crc32:{crc:08x}"


def step_name(step: int) -> str:
    """Returns the directory name of a step."""
    return f"step-{step:012d}"


def parse_step(name: str) -> int | None:
    """Parses the directory name of a step; None if it is not one."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def file_name(name: str) -> str:
    """Percent-encodes a name, including a leading dot, so that any table name is one safe path component."""
    encoded = quote(name, safe="")
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


def _signed(data: bytes) -> bytes:
    """Replaces the checksum at the end of `data` by the checksum of the bytes before it; no change if it is intact."""
    body = data.rpartition(b'"checksum"')[0]
    return body + f'"checksum": "{checksum_text(zlib.crc32(body))}"\n}}\n'.encode()


def encode_manifest(manifest: Manifest[dict[str, Any]]) -> bytes:
    """Encodes `manifest.json`, including its checksum.

    Raises:
        CheckpointError: the reader would reject it, for example because of a NaN or an oversized `config`.
    """
    for name in ("schema", "config", "extra"):
        _check_json(getattr(manifest, name), name)
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"
    data = _signed(data)
    decode_manifest(data, MANIFEST)
    return data


def _check_json(value: Any, where: str) -> None:
    """Rejects values that JSON would change silently."""
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise CheckpointError(f"{where} has the key {key!r}; keys must be text. Use add_state.", field=where)
            _check_json(item, f"{where}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_json(item, f"{where}[{i}]")
    elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        raise CheckpointError(f"{where} = {value} cannot be written as JSON; use add_state for it.", field=where)
    elif isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise CheckpointError(f"{where} = {value} does not fit 64 bits; use add_state for it.", field=where)
    elif value is not None and not isinstance(value, (str, int, float)):
        raise CheckpointError(
            f"{where} is a {type(value).__name__}, which is not JSON; use add_state for it.", field=where
        )


def decode_manifest(data: bytes, path: str) -> Manifest[dict[str, Any]]:
    """Decodes and validates a manifest; `path` is for error messages.

    Raises:
        CheckpointError: the data are not a manifest, have another version, are damaged, or contradict themselves.
    """
    remedy = "Use another checkpoint (list_checkpoints lists them)."
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}. {remedy}", path=path)
    try:
        head = _head_decoder.decode(data)
    except _UNDECODABLE as error:
        raise CheckpointError(f"{path} is truncated or not a manifest: {error}. {remedy}", path=path) from None
    if head.format != FORMAT:
        raise CheckpointError(f"{path} has format {head.format[:64]!r}, not {FORMAT!r}. {remedy}", path=path)
    if head.version != VERSION:
        raise CheckpointError(
            f"{path} has format version {head.version}; this version of persia reads version {VERSION}. "
            "Install the version of persia that wrote it, or a newer one.",
            path=path,
            version=head.version,
        )
    try:
        raw = _decoder.decode(data)
        documents: dict[str, Any] = {}
        for name in ("schema", "config", "extra"):
            document = getattr(raw, name)
            if len(bytes(document)) > MAX_DOCUMENT_BYTES:
                raise ValueError(f"{name} exceeds {MAX_DOCUMENT_BYTES} bytes")
            documents[name] = msgspec.json.decode(document, type=dict[str, Any])
    except _UNDECODABLE as error:
        reason = str(error).rstrip(".")
        raise CheckpointError(f"{path} is not a valid manifest: {reason}. {remedy}", path=path) from None
    if _signed(data) != data:
        raise CheckpointError(f"{path} is damaged: its checksum does not match. {remedy}", path=path)
    problem = _contradiction(raw)
    if problem:
        raise CheckpointError(f"{path} is contradictory: {problem}. {remedy}", path=path)
    fields = {name: getattr(raw, name) for name in raw.__struct_fields__}
    return Manifest[dict[str, Any]](**(fields | documents))


def _contradiction(manifest: Manifest[Any]) -> str | None:
    """Returns the first contradiction in a manifest; None if there is none."""
    if manifest.span[0] > manifest.span[1]:
        return f"its span of steps {manifest.span} runs backwards"
    seen: set[tuple[str, str]] = set()
    paths: set[str] = set()
    rows: Counter[str] = Counter()
    shards: dict[str, set[int]] = {}
    for part in manifest.parts:
        if part.path in paths:
            return f"the part {part.path} occurs twice"
        paths.add(part.path)
        if isinstance(part, RowsPart):
            if part.table not in manifest.tables:
                return f"the part {part.path} belongs to an unknown table {part.table!r}"
            if part.steps is not None and part.steps[0] > part.steps[1]:
                return f"the part {part.path} has steps that run backwards"
            rows[part.table] += part.rows
            shards.setdefault(part.table, set()).add(part.shard)
            continue
        if isinstance(part, RemovedPart):
            if part.table not in manifest.tables or manifest.base is None:
                return f"the part {part.path} removes rows from nothing"
            continue
        key = (type(part).__name__, part.name)
        if key in seen:
            return f"the name {part.name!r} occurs twice"
        seen.add(key)
    for name, table in manifest.tables.items():
        if rows[name] != table.rows or len(shards.get(name, ())) != table.shards:
            return f"table {name!r} has {table.rows} rows in {table.shards} shards, its parts hold {rows[name]} rows"
    return None
