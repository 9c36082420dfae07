"""Exports the rows of a checkpoint to Parquet, .npy or safetensors files, or for `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from persia.checkpoint.exporting_dcp import write_dcp
from persia.checkpoint.format import StepChoice, file_name
from persia.checkpoint.row_view import TableRows, open
from persia.checkpoint.tensors import encode_header
from persia.checks import check_choice
from persia.errors import CheckpointError

__all__ = ["EXPORT_FORMATS", "ExportFormat", "export", "replaced"]

Progress = Callable[[int], object]

ExportFormat: TypeAlias = Literal["parquet", "npy", "safetensors", "dcp"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)


def export(
    url: str | os.PathLike[str],
    target: str | os.PathLike[str],
    kind: ExportFormat = "parquet",
    *,
    tables: Sequence[str] | None = None,
    step: StepChoice = None,
    state: bool = False,
    progress: Progress = lambda _: None,
) -> list[str]:
    """Writes the rows of each table to local files, part by part.

    A checkpoint of `torch.distributed.checkpoint` has `embedding_bags.<table>.weight`, float32 `[rows, dim]`, and
    `embedding_bags.<table>.ids`, int64 `[rows]`, the bits of the ids; with `state` also `.state`, float32
    `[rows, width]`, `.update_count` and `.last_step`, int64 `[rows]`. `persia.interop.torchrec.import_dcp` reads it
    back. Writing it needs memory for the largest table, and temporarily disk space for all tables.

    Args:
        url: directory of checkpoints, or of one step.
        target: local directory. Files of the same names are replaced once the new ones are complete.
        kind: "parquet": `<table>.parquet` with `id`, `embedding`, `update_count`, `last_step`; "npy":
            `<table>.ids.npy` and `<table>.embeddings.npy`, in the same order; "safetensors": `<table>.safetensors`
            with `ids` and `embeddings`, and with `state` also `state`, `update_count` and `last_step`; or "dcp": one
            checkpoint of `torch.distributed.checkpoint`, as described above.
        tables: tables to export; None for all.
        step: step to read, "best" or "latest"; None for the latest.
        state: also write the optimizer state.
        progress: called with the number of rows after each part.

    Returns:
        Paths of the files.

    Raises:
        ConfigError: there is no such kind.
        CheckpointError: a table does not exist, a part is damaged, or a file cannot be written.
    """
    check_choice("kind", kind, EXPORT_FORMATS)
    checkpoint = open(url, step)
    for name in tables or ():
        if name not in checkpoint.tables:
            known = ", ".join(checkpoint.tables)
            raise CheckpointError(f"{url} has no table {name!r}; it has {known}.", path=os.fspath(url), table=name)
    files: list[str] = []
    try:
        Path(target).mkdir(parents=True, exist_ok=True)
        chosen = {name: rows for name, rows in checkpoint.tables.items() if tables is None or name in tables}
        if kind == "dcp":
            return write_dcp(chosen, target, state, progress)
        for name, rows in chosen.items():
            files += _WRITERS[kind](rows, str(Path(target) / file_name(name)), state, progress)
    except OSError as error:
        raise CheckpointError(f"Cannot write to {target}: {error}.", path=os.fspath(target)) from error
    return files


def _parquet(rows: TableRows, path: str, state: bool, progress: Progress) -> list[str]:
    import pyarrow.parquet as pq

    path += ".parquet"
    batches = rows.arrow(state)
    # Ids and trained floats repeat too rarely for dictionaries or compression to pay off.
    with (
        replaced([path]) as [draft],
        pq.ParquetWriter(draft, batches.schema, compression="none", use_dictionary=False) as writer,
    ):
        for batch in batches:
            writer.write_batch(batch)
            progress(batch.num_rows)
    return [path]


def _npy(rows: TableRows, path: str, state: bool, progress: Progress) -> list[str]:
    count = len(rows)
    columns: dict[str, tuple[Any, tuple[int, ...]]] = {
        "ids": (np.uint64, (count,)),
        "embeddings": (np.float32, (count, rows.dim)),
    }
    if state:
        columns["state"] = (np.float32, (count, rows.state_width))
    paths = [f"{path}.{name}.npy" for name in columns]
    with replaced(paths) as drafts, contextlib.ExitStack() as stack:
        handles = {
            name: stack.enter_context(Path(draft).open("wb")) for name, draft in zip(columns, drafts, strict=True)
        }
        for name, (dtype, shape) in columns.items():
            header = {"descr": np.lib.format.dtype_to_descr(np.dtype(dtype)), "fortran_order": False, "shape": shape}
            np.lib.format.write_array_header_2_0(handles[name], header)
        for arrays in rows:
            for name in columns:
                handles[name].write(np.ascontiguousarray(arrays[name]).data)
            progress(len(arrays["ids"]))
    return paths


def _safetensors(rows: TableRows, path: str, state: bool, progress: Progress) -> list[str]:
    path += ".safetensors"
    count = len(rows)
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {
        "ids": ("U64", (count,)),
        "embeddings": ("F32", (count, rows.dim)),
    }
    if state:
        counts = dict.fromkeys(("update_count", "last_step"), ("U32", (count,)))
        tensors |= {"state": ("F32", (count, rows.state_width)), **counts}
    header, positions = encode_header(tensors)
    with replaced([path]) as [draft], Path(draft).open("wb") as file:
        file.write(header)
        for arrays in rows:
            for name, position in positions.items():
                file.seek(position)
                positions[name] += file.write(np.ascontiguousarray(arrays[name]).data)
            progress(len(arrays["ids"]))
    return [path]


_WRITERS: dict[str, Callable[[TableRows, str, bool, Progress], list[str]]] = {
    "parquet": _parquet,
    "npy": _npy,
    "safetensors": _safetensors,
}


@contextlib.contextmanager
def replaced(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yields temporary names to write to. Renames them at the end; removes them after an error."""
    drafts = [f"{path}.part" for path in paths]
    try:
        yield drafts
        for draft, path in zip(drafts, paths, strict=True):
            os.replace(draft, path)
    finally:
        for draft in drafts:
            Path(draft).unlink(missing_ok=True)
