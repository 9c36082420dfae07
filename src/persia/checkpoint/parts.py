"""Reads the parts of one checkpoint. Length and checksum of a part are verified before its data are used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Manifest,
    Part,
    RemovedPart,
    RowsPart,
    checksum_text,
    decode_manifest,
)
from persia.checkpoint.row_files import ROW_ARRAYS
from persia.checkpoint.storage import Storage
from persia.checkpoint.tensors import TensorView, decode, header_length, parse_header
from persia.errors import CheckpointError

__all__ = ["PartReader"]


class PartReader:
    """Reads the manifest and the parts of one checkpoint. Thread-safe; methods block while they read.

    Args:
        storage: directory of checkpoints, or of one step.
        prefix: prefix of the step's paths, relative to `storage`; empty if `storage` is the directory of the step.

    Attributes:
        manifest: the manifest.

    Raises:
        CheckpointError: the manifest is missing or invalid.
    """

    def __init__(self, storage: Storage, prefix: str) -> None:
        self._storage = storage
        self._prefix = prefix
        path = prefix + MANIFEST
        size, full = storage.size(path), storage.full(path)
        if size is None or size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{full} is missing or larger than {MAX_MANIFEST_BYTES} bytes.", path=full)
        self.manifest: Manifest[dict[str, Any]] = decode_manifest(storage.head(path, 0, size), full)

    def full(self, part: Part) -> str:
        """Returns the whole path of a part."""
        return self._storage.full(self._prefix + part.path)

    def describe(self, part: Part) -> list[tuple[str, str, tuple[int, ...], int]]:
        """Returns name, dtype, shape and bytes of each tensor of a part. Reads its header only.

        Raises:
            CheckpointError: the part is missing, or its header is invalid.
        """
        path, full = self._prefix + part.path, self.full(part)
        if self._storage.size(path) != part.bytes:
            raise CheckpointError(f"{full} is missing or truncated.", path=full)
        start = 8 + header_length(self._storage.head(path, 0, 8), full)
        header = self._storage.head(path, 8, start)
        entries = parse_header(header, part.bytes - start, full)
        return [(k, e.dtype, e.shape, e.data_offsets[1] - e.data_offsets[0]) for k, e in entries.items()]

    def tensors(self, part: Part) -> dict[str, TensorView]:
        """Reads the tensors of a part as bytes.

        Raises:
            CheckpointError: the part is missing or damaged.
        """
        path, full = self._prefix + part.path, self.full(part)
        size = self._storage.size(path)
        remedy = "Use another checkpoint, or copy this one again."
        if size is None:
            raise CheckpointError(f"{full} is missing. {remedy}", path=full)
        if size != part.bytes:
            fault = "truncated" if size < part.bytes else "too long"
            raise CheckpointError(f"{full} is {fault}: {size} of {part.bytes} bytes. {remedy}", path=full)
        data, crc = self._storage.load(path, size)
        if checksum_text(crc) != part.checksum:
            raise CheckpointError(f"{full} is damaged: its checksum does not match. {remedy}", path=full)
        return decode(data, full)

    def rows(self, part: RowsPart) -> dict[str, NDArray[Any]]:
        """Reads the arrays of rows by name, embeddings in the dtype of the table; bfloat16 as bits.

        Raises:
            CheckpointError: the part is missing or damaged, or contradicts the manifest.
        """
        table = self.manifest.tables[part.table]
        views = self.tensors(part)
        shapes = {"embeddings": (part.rows, table.dim), "state": (part.rows, table.state_width)}
        if set(views) != set(ROW_ARRAYS):
            raise CheckpointError(
                f"{self.full(part)} lacks the arrays of rows, {', '.join(ROW_ARRAYS)}. Use another checkpoint.",
                path=self.full(part),
            )
        arrays: dict[str, NDArray[Any]] = {}
        for name, (dtype, _) in ROW_ARRAYS.items():
            bits = views[name].dtype == "BF16"  # numpy has no such dtype
            array = (views[name]._replace(dtype="U16") if bits else views[name]).numpy()
            actual = "bfloat16" if bits else array.dtype.name
            expected = table.dtype if name == "embeddings" else dtype
            if actual != expected or array.shape != shapes.get(name, (part.rows,)):
                raise CheckpointError(
                    f"{self.full(part)}: {name} is {actual} {list(array.shape)}, which contradicts the manifest. "
                    "Use another checkpoint.",
                    path=self.full(part),
                )
            arrays[name] = array
        return arrays

    def removed(self, part: RemovedPart) -> NDArray[np.uint64]:
        """Reads the ids of rows that were removed.

        Raises:
            CheckpointError: the part is missing or damaged, or contradicts the manifest.
        """
        views = self.tensors(part)
        ids: NDArray[Any] = views["ids"].numpy() if set(views) == {"ids"} else np.empty(0)
        if ids.dtype != np.uint64 or ids.shape != (part.ids,):
            raise CheckpointError(f"{self.full(part)} does not hold {part.ids} ids.", path=self.full(part))
        return ids

    def problem(self, part: Part) -> str | None:
        """Reads a part. Returns the error text, or None if the part is intact."""
        try:
            match part:
                case RowsPart():
                    self.rows(part)
                case RemovedPart():
                    self.removed(part)
                case _:
                    self.tensors(part)
        except CheckpointError as error:
            return error.message
        return None
