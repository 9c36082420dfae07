"""Writes the rows of tables as a checkpoint of `torch.distributed.checkpoint`."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from persia.checkpoint.row_view import TableRows

__all__ = ["write_dcp"]


def write_dcp(
    tables: Mapping[str, TableRows],
    target: str | os.PathLike[str],
    state: bool,
    progress: Callable[[int], object],
) -> list[str]:
    """Writes a checkpoint, and returns its files; see `persia.checkpoint.export`.

    The rows of a table are read in parts, but torch writes mappable tensors. The rows are therefore collected in
    memory-mapped files.
    """
    import torch
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with tempfile.TemporaryDirectory(prefix=".part-", dir=target) as folder:
        tensors: dict[str, torch.Tensor] = {}
        for number, (name, rows) in enumerate(tables.items()):
            arrays = _collected(rows, Path(folder) / str(number), state, progress)
            tensors |= {f"embedding_bags.{name}.{key}": torch.from_numpy(array) for key, array in arrays.items()}
        written = Path(folder) / "dcp"
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # Due to `no_dist`.
            save(tensors, storage_writer=FileSystemWriter(written), no_dist=True)
        # The metadata names the other files, so it comes last.
        files = sorted(os.listdir(written), key=lambda file: file == ".metadata")
        for file in files:
            os.replace(written / file, Path(target) / file)
    return [str(Path(target) / file) for file in files]


def _collected(
    rows: TableRows, prefix: Path, state: bool, progress: Callable[[int], object]
) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the columns of a table as arrays over files that begin with `prefix`."""
    count = len(rows)
    columns: dict[str, tuple[str, Any, tuple[int, ...]]] = {
        "weight": ("embeddings", np.float32, (count, rows.dim)),
        "ids": ("ids", np.int64, (count,)),
    }
    if state:
        columns["state"] = ("state", np.float32, (count, rows.state_width))
        columns |= {name: (name, np.int64, (count,)) for name in ("update_count", "last_step")}
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    for key, (_, dtype, shape) in columns.items():
        mappable = np.prod(shape) > 0  # An empty file cannot be mapped.
        path = f"{prefix}.{key}"
        arrays[key] = np.memmap(path, dtype, "w+", shape=shape) if mappable else np.empty(shape, dtype)
    at = 0
    for part in rows:
        end = at + len(part["ids"])
        for key, (name, dtype, _) in columns.items():
            arrays[key][at:end] = part[name].view(dtype) if key == "ids" else part[name]
        progress(end - at)
        at = end
    return arrays
