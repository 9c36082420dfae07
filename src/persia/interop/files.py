"""Rows of tables from Parquet and safetensors files, part by part."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from persia.checkpoint.format import file_name
from persia.errors import CheckpointError, DataError
from persia.interop.rows import PART_VALUES, declared
from persia.nn import EmbeddingCollection
from persia.types import Floats, RowsSet, RowState

__all__ = ["import_rows"]


class _Part(NamedTuple):
    """Some rows of a file: ids, embeddings `[n, dim]`, and the state of the optimizer if the file has any."""

    ids: Any
    embeddings: Floats
    state: RowState | None


def import_rows(
    collection: EmbeddingCollection, directory: str | os.PathLike[str], *, tables: Iterable[str] | None = None
) -> dict[str, RowsSet]:
    """Sets rows of tables to those of files, as `persia export` writes them. Blocks.

    Each table has a file `<table>.parquet` with the columns `id` and `embedding`, or `<table>.safetensors` with the
    tensors `ids` and `embeddings`. If there also is `state`, with `update_count` and `last_step`, it is that of the
    table's optimizer. Ids are whole numbers, or in Parquet texts, which are mapped as readers do. A safetensors file
    with one tensor `[rows, dim]` alone has in row i the embedding of the id i.

    Args:
        collection: with tables of the same names and dims; of a `Trainer`, `trainer.embeddings`.
        directory: of the files.
        tables: names of tables; None for all of the schema that have a file.

    Returns:
        By table, the numbers of rows.

    Raises:
        ConfigError: there is no such table.
        CheckpointError: a table has no file or two, or a file cannot be read.
        DataError: ids or embeddings do not fit the table. Rows of earlier parts and tables are set.
        StoreError: the state is of another optimizer.
    """
    found = {name: _file(Path(directory), name) for name in tables or collection.schema.resolved_tables()}
    if tables is None:
        found = {name: path for name, path in found.items() if path is not None}
    missing = next((name for name, path in found.items() if path is None), None)
    if missing is not None or not found:
        name = missing or next(iter(collection.schema.resolved_tables()))
        raise CheckpointError(
            f"{directory} has no file of rows; name the one of table {name!r} {file_name(name)}.parquet or "
            f"{file_name(name)}.safetensors.",
            path=os.fspath(directory),
        )
    done: dict[str, RowsSet] = {}
    for name, path in found.items():
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
    found = [path for end in (".parquet", ".safetensors") if (path := directory / f"{file_name(table)}{end}").exists()]
    if len(found) > 1:
        raise CheckpointError(f"{found[0]} and {found[1].name} are of one table; remove one.", path=str(found[0]))
    return found[0] if found else None


def _checked(path: Path, parts: Iterator[_Part]) -> Iterator[_Part]:
    """Turns errors of the libraries that read a file into CheckpointError."""
    while True:
        try:
            part = next(parts, None)
        except Exception as error:  # pyarrow and safetensors have errors of their own.
            raise CheckpointError(f"{path} cannot be read: {error}. Write it again.", path=str(path)) from error
        if part is None:
            return
        yield part


def _parquet(path: Path, rows: int) -> Iterator[_Part]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(rows):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            ids = columns["id"]
            keys = ids if pa.types.is_string(ids.type) else ids.cast(pa.uint64()).to_numpy(zero_copy_only=False)
            others = {name: columns[name].to_numpy() for name in ("update_count", "last_step") if name in columns}
            if "state" in columns:
                others["state"] = _matrix(columns["state"])
            yield _Part(keys, _matrix(columns["embedding"]), _state(others))


def _matrix(column: Any) -> Floats:
    """Returns a column of lists of one length as an array."""
    import pyarrow.compute as pc

    if column.null_count or pc.count_distinct(pc.list_value_length(column)).as_py() > 1:
        raise ValueError("its lists differ in length, or are missing")
    values: Floats = pc.list_flatten(column).to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return values.reshape(len(column), -1)


def _safetensors(path: Path, rows: int) -> Iterator[_Part]:
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        names = list(file.keys())
        tensors = {name: file.get_slice(name) for name in names}
        weight = "embeddings" if "embeddings" in tensors else names[0]
        if "ids" not in tensors and len(names) > 1:
            raise ValueError(f"it has the tensors {', '.join(names)}, but no ids")
        count = tensors[weight].get_shape()[0]
        for start in range(0, count, rows):
            end = min(start + rows, count)
            part = {name: tensor[start:end] for name, tensor in tensors.items()}
            ids = part.get("ids", np.arange(start, end)).astype(np.uint64)
            yield _Part(ids, np.asarray(part[weight], np.float32), _state(part))


def _state(columns: dict[str, Any]) -> RowState | None:
    if "state" not in columns:
        return None
    counts = [columns[name].astype(np.uint32) for name in ("update_count", "last_step")]
    return RowState(columns["state"], counts[0], counts[1])
