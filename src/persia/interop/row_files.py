"""Reads rows of tables from Parquet and safetensors files, part by part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from persia.checkpoint.format import file_name
from persia.errors import CheckpointError, DataError
from persia.interop.row_transfer import PART_VALUES, declared
from persia.nn import EmbeddingCollection
from persia.types import Floats, Ids, RowsSet, RowState

__all__ = ["import_rows"]

_TENSORS = {"ids", "state", "update_count", "last_step"}
"""Optional tensors of a safetensors file, with one entry per row."""


class _Part(NamedTuple):
    """Part of the rows of a file: ids, embeddings `[n, dim]`, and the optimizer state if the file has any."""

    ids: Any
    embeddings: Floats
    state: RowState | None


def import_rows(
    collection: EmbeddingCollection, directory: str | os.PathLike[str], *, tables: Iterable[str] | None = None
) -> dict[str, RowsSet]:
    """Sets rows of tables from files as `persia export` writes them. Blocks.

    Each table has a file `<table>.parquet` with the columns `id` and `embedding`, or `<table>.safetensors` with the
    tensors `ids` and `embeddings`. Optional are `state`, the state of the table's optimizer, with `update_count` and
    `last_step`. Ids are integers from 0 on; in Parquet they may be strings, which are mapped as readers do. In a
    safetensors file with a single tensor `[rows, dim]`, row i is the embedding of the id i.

    Args:
        collection: collection whose tables have the same names and dims; with a `Trainer`, `trainer.embeddings`.
        directory: directory of the files.
        tables: names of tables; None for all tables of the schema that have a file.

    Returns:
        Numbers of rows by table.

    Raises:
        ConfigError: a table does not exist.
        CheckpointError: a table has no file or two, or a file cannot be read.
        DataError: ids or embeddings do not match the table. Rows of earlier parts and tables are set.
        StoreError: the state belongs to another optimizer.
    """
    files = {name: _file(Path(directory), name) for name in tables or collection.schema.resolved_tables()}
    if tables is None:
        files = {name: path for name, path in files.items() if path is not None}
    missing = next((name for name, path in files.items() if path is None), None)
    if missing is not None or not files:
        name = missing or next(iter(collection.schema.resolved_tables()))
        raise CheckpointError(
            f"{directory} has no file of rows; name the file of table {name!r} {file_name(name)}.parquet or "
            f"{file_name(name)}.safetensors.",
            path=os.fspath(directory),
        )
    done: dict[str, RowsSet] = {}
    for name, path in files.items():
        assert path is not None
        table, _ = declared(collection, name)
        dim = table.dim
        assert dim is not None
        read = _parquet if path.suffix == ".parquet" else _safetensors
        done[name] = RowsSet(0, 0, 0)
        for part in _checked(path, read(path, max(1, PART_VALUES // dim))):
            if part.embeddings.ndim != 2 or part.embeddings.shape[1] != dim:
                raise DataError(
                    f"{path}: embeddings of shape {list(part.embeddings.shape)} for table {name!r} of dim {dim}; set "
                    "the dim of the table.",
                    path=str(path),
                    table=name,
                )
            set_now = collection.set_rows(name, part.ids, part.embeddings, state=part.state)
            done[name] = RowsSet(*map(sum, zip(done[name], set_now, strict=True)))
    return done


def _file(directory: Path, table: str) -> Path | None:
    paths = [path for end in (".parquet", ".safetensors") if (path := directory / f"{file_name(table)}{end}").exists()]
    if len(paths) > 1:
        raise CheckpointError(
            f"{paths[0]} and {paths[1].name} belong to the same table; remove one.", path=str(paths[0])
        )
    return paths[0] if paths else None


def _checked(path: Path, parts: Iterator[_Part]) -> Iterator[_Part]:
    """Turns errors of the libraries that read a file into CheckpointError."""
    while True:
        try:
            part = next(parts, None)
        except Exception as error:  # pyarrow and safetensors raise their own errors.
            raise CheckpointError(f"{path} cannot be read: {error}. Write it again.", path=str(path)) from error
        if part is None:
            return
        yield part


def _parquet(path: Path, rows: int) -> Iterator[_Part]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        _require(file.schema_arrow.names, "id", "embedding")
        for batch in file.iter_batches(rows):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            keys = columns["id"]  # The table maps strings of any type, such as large_string.
            if pa.types.is_dictionary(keys.type):
                keys = keys.dictionary_decode()
            if pa.types.is_integer(keys.type) or pa.types.is_floating(keys.type):
                keys = _numbers(keys.to_numpy(zero_copy_only=False))
            others = {name: columns[name].to_numpy() for name in ("update_count", "last_step") if name in columns}
            if "state" in columns:
                others["state"] = _matrix("state", columns["state"])
            yield _Part(keys, _matrix("embedding", columns["embedding"]), _state(others))


def _require(present: Sequence[str], *needed: str) -> None:
    """Raises ValueError unless a file has all these columns or tensors."""
    if missing := [name for name in needed if name not in present]:
        raise ValueError(f"it has {', '.join(present)}, but no {missing[0]!r}")


def _numbers(ids: NDArray[Any]) -> Ids:
    """Returns numbers as ids.

    Raises:
        ValueError: a number is negative, missing or not an integer, or a float too large to be exact.
    """
    if ids.dtype.kind not in "iuf":
        raise ValueError(f"its ids are {ids.dtype}; they must be whole numbers, or in Parquet strings")
    bad = ids < 0
    if ids.dtype.kind == "f":
        bad = ~((ids >= 0) & (ids < 2.0 ** (np.finfo(ids.dtype).nmant + 1)) & (ids % 1 == 0))
    if bad.any():
        raise ValueError(f"it has the id {ids[bad][0]}; ids must be whole numbers from 0 on, or in Parquet strings")
    return ids.astype(np.uint64)


def _matrix(name: str, column: Any) -> Floats:
    """Returns a column of lists of equal length as an array."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if not any(test(column.type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)):
        raise ValueError(f"column {name!r} holds {column.type}, not a list in each row")
    if column.null_count or pc.count_distinct(pc.list_value_length(column)).as_py() > 1:
        raise ValueError("its lists differ in length, or are missing")
    values: Floats = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return values.reshape(len(column), -1)


def _safetensors(path: Path, rows: int) -> Iterator[_Part]:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:  # numpy has no bfloat16.
        names = list(file.keys())
        if len(names) > 1:
            _require(names, "ids", "embeddings")
        weight = names[0] if len(names) == 1 else "embeddings"
        tensors = {name: file.get_slice(name) for name in {weight, *_TENSORS} & set(names)}
        counts = {name: tensor.get_shape()[:1] for name, tensor in tensors.items()}
        if len({*map(tuple, counts.values())}) > 1:
            raise ValueError(f"its tensors differ in the number of rows: {counts}")
        (count,) = counts[weight]
        for start in range(0, count, rows):
            end = min(start + rows, count)
            part = {name: _array(tensor[start:end]) for name, tensor in tensors.items()}
            ids = _numbers(part["ids"]) if "ids" in part else np.arange(start, end, dtype=np.uint64)
            yield _Part(ids, np.asarray(part[weight], np.float32), _state(part))


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    array: NDArray[Any] = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return array


def _state(columns: dict[str, Any]) -> RowState | None:
    if "state" not in columns:
        return None
    _require(list(columns), "update_count", "last_step")
    counts = [columns[name].astype(np.uint32) for name in ("update_count", "last_step")]
    return RowState(columns["state"], counts[0], counts[1])
