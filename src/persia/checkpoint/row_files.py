"""Writes the files of rows of one checkpoint: by the writer of the checkpoint, or by each PS for itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import MAX_PART_BYTES, checksum_text, file_name
from persia.checkpoint.storage import Storage
from persia.checkpoint.tensors import TensorView, encode, view
from persia.errors import CheckpointError
from persia.types import WrittenPart

__all__ = ["ROW_ARRAYS", "RowFiles", "WrittenFile", "base_of", "check_layout", "segment", "write_file"]

ROW_ARRAYS: dict[str, tuple[str, int]] = {
    "ids": ("uint64", 1),
    "embeddings": ("float32", 2),
    "state": ("float32", 2),
    "update_count": ("uint32", 1),
    "last_step": ("uint32", 1),
    "stamp": ("uint32", 1),
}
"""Arrays of a part of rows: dtype and number of axes; the first axis is the row."""


class WrittenFile(NamedTuple):
    """A written file, as in a manifest: path relative to the directory of the step, size in bytes, and checksum."""

    path: str
    bytes: int
    checksum: str


Write: TypeAlias = Callable[[str, Mapping[str, TensorView]], WrittenFile]
"""Writes tensors to a file, given its path relative to the base of the writer."""


class RowFiles:
    """Writes files of rows of one checkpoint. Not thread-safe.

    Args:
        write: writes a file.
        claim: in the names of all files; see `persia.types.RowsToWrite`. Empty for none.
    """

    def __init__(self, write: Write, claim: str = "") -> None:
        self._write = write
        self._end = f".{claim}.safetensors" if claim else ".safetensors"
        self._numbers: Counter[tuple[str, int]] = Counter()  # Number of parts by table and shard.
        self._layouts: dict[str, tuple[int, int, str]] = {}

    def rows(self, table: str, shard: int, arrays: Mapping[str, NDArray[Any]]) -> WrittenPart:
        """Writes rows of a shard as one part; see `CheckpointWriter.add_rows`."""
        count, layout = _check_rows(table, arrays)
        check_layout(table, layout, self._layouts.get(table, layout))
        shard = _check_shard(table, shard)
        path = f"rows/{segment(table)}/{shard}-{self._numbers[table, shard]}{self._end}"
        views = {name: view(arrays[name], f"{table}.{name}") for name in ROW_ARRAYS}
        if arrays["embeddings"].dtype == np.uint16:
            views["embeddings"] = views["embeddings"]._replace(dtype="BF16")
        file = self._write(path, views)
        self._numbers[table, shard] += 1
        self._layouts[table] = layout
        steps = arrays["last_step"]
        span = (int(steps.min()), int(steps.max())) if count else None
        return WrittenPart(table, shard, *file, count, span, layout)

    def removed(self, table: str, shard: int, ids: NDArray[np.uint64]) -> WrittenPart:
        """Writes the ids of removed rows; see `CheckpointWriter.add_removed`."""
        if ids.dtype != np.uint64 or ids.ndim != 1:
            raise CheckpointError(f"ids of table {table!r} must be uint64 [n].", table=table)
        shard = _check_shard(table, shard)
        path = f"removed/{segment(table)}/{shard}{self._end}"
        file = self._write(path, {"ids": view(ids, f"{table}.ids")})
        return WrittenPart(table, shard, *file, len(ids), None, None)


def base_of(rewrite: int) -> str:
    """Returns the prefix of paths in the directory of a step that is written for the n-th time again; 0: the first."""
    return f"rewrite-{rewrite}/" if rewrite else ""


def write_file(storage: Storage, directory: str, path: str, views: Mapping[str, TensorView]) -> WrittenFile:
    """Writes tensors to a file.

    Args:
        storage: directory of checkpoints.
        directory: name of the directory of the step.
        path: path of the file in it.
        views: the tensors.

    Raises:
        CheckpointError: there are too many bytes for one file, or the file cannot be written.
    """
    buffers = encode(views)
    size = sum(map(len, buffers))
    if size > MAX_PART_BYTES:
        raise CheckpointError(f"{path} would have {size} bytes, more than {MAX_PART_BYTES}; split it.", path=path)
    size, crc = storage.write(f"{directory}/{path}", buffers)
    return WrittenFile(path, size, checksum_text(crc))


def check_layout(table: str, layout: tuple[int, int, str], known: tuple[int, int, str]) -> None:
    """Checks that rows have the same dim, state width and dtype as earlier ones of their table."""
    if known != layout:
        raise CheckpointError(
            f"Rows of table {table!r} have dim, state width and dtype {layout}, earlier parts had {known}.",
            table=table,
        )


def _check_rows(table: str, arrays: Mapping[str, NDArray[Any]]) -> tuple[int, tuple[int, int, str]]:
    """Returns the number of rows of a part, and its dim, state width and dtype."""
    if set(arrays) != set(ROW_ARRAYS):
        raise CheckpointError(f"Rows of table {table!r} need exactly the arrays {', '.join(ROW_ARRAYS)}.", table=table)
    count = len(arrays["ids"])
    for name, (dtype, axes) in ROW_ARRAYS.items():
        array = arrays[name]
        half = name == "embeddings" and array.dtype in (np.float16, np.uint16)
        if (array.dtype != np.dtype(dtype) and not half) or array.ndim != axes or len(array) != count:
            raise CheckpointError(
                f"{name} of table {table!r} is {array.dtype} {list(array.shape)}; "
                f"{dtype} with {axes} axes and {count} rows is expected.",
                table=table,
                field=name,
            )
    embeddings = arrays["embeddings"]
    dtype = "bfloat16" if embeddings.dtype == np.uint16 else embeddings.dtype.name
    return count, (embeddings.shape[1], arrays["state"].shape[1], dtype)


def segment(name: str) -> str:
    """Returns a name as one component of a path."""
    try:
        valid = 0 < len(name.encode()) <= 64
    except (AttributeError, UnicodeEncodeError):
        valid = False
    if not valid:
        raise CheckpointError(f"The name {name!r} is not a text of 1 to 64 bytes.", name=name)
    return file_name(name)


def _check_shard(table: str, shard: int) -> int:
    if int(shard) < 0:
        raise CheckpointError(f"shard = {shard} of table {table!r} is negative.", table=table, shard=shard)
    return int(shard)
