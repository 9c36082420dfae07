"""The rows of a checkpoint as numpy or Arrow, read as they are asked for; no cluster, no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.reader import CheckpointReader

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Checkpoint", "TableRows", "open"]


class TableRows:
    """The rows of one table.

    Args:
        reader: of the checkpoint.
        name: of the table.

    Attributes:
        dim: numbers of an embedding.
        state_width: numbers of optimizer state.
    """

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        self._reader = reader
        self.name = name
        record = reader.manifest.tables[name]
        self.dim = record.dim
        self.state_width = max(
            (link.manifest.tables[name].state_width for link in reader.links if link.manifest.tables[name].rows),
            default=record.state_width,
        )

    def __len__(self) -> int:
        """Rows; those of an incremental checkpoint are counted by reading them."""
        if len(self._reader.links) == 1:
            return self._reader.manifest.tables[self.name].rows
        return sum(len(arrays["ids"]) for arrays in self)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Part after part, by column.

        `ids` uint64 `[n]`, `embeddings` float32 `[n, dim]`, `state` float32 `[n, state_width]`, `update_count`,
        `last_step` and `stamp` uint32 `[n]`.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        return (arrays for _, arrays in self._reader.rows(self.name))

    def find(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Reads all parts for some rows: found `[n]`, and embeddings float32 `[n, dim]`, zeros where not found."""
        ids = np.asarray(ids, np.uint64)
        found = np.zeros(len(ids), np.bool_)
        embeddings = np.zeros((len(ids), self.dim), np.float32)
        for arrays in self:
            order = np.argsort(arrays["ids"])
            at = np.searchsorted(arrays["ids"], ids, sorter=order)
            rows = order[np.minimum(at, len(order) - 1)]
            here = arrays["ids"][rows] == ids
            found |= here
            embeddings[here] = arrays["embeddings"][rows[here]]
        return found, embeddings

    def arrow(self, state: bool = False) -> pa.RecordBatchReader:
        """The rows as Arrow: `id` uint64, `embedding` fixed-size list of float32, `update_count`, `last_step`.

        Args:
            state: whether to add `state`, the optimizer's, as such a list too.
        """
        import pyarrow as pa

        lists = {"embedding": ("embeddings", self.dim)} | ({"state": ("state", self.state_width)} if state else {})
        fields = [
            pa.field("id", pa.uint64()),
            *(pa.field(name, pa.list_(pa.float32(), width)) for name, (_, width) in lists.items()),
            pa.field("update_count", pa.uint32()),
            pa.field("last_step", pa.uint32()),
        ]
        schema = pa.schema(fields)

        def batches() -> Iterator[pa.RecordBatch]:
            for arrays in self:
                columns = [
                    pa.array(arrays["ids"]),
                    *(
                        pa.FixedSizeListArray.from_arrays(pa.array(arrays[column].reshape(-1)), width)
                        for column, width in lists.values()
                    ),
                    pa.array(arrays["update_count"]),
                    pa.array(arrays["last_step"]),
                ]
                yield pa.record_batch(columns, schema=schema)

        return pa.RecordBatchReader.from_batches(schema, batches())


class Checkpoint:
    """A checkpoint to read; see `open`.

    Attributes:
        reader: for all else that it holds.
        global_step: of the dense model.
        tables: rows by table.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.global_step = reader.manifest.global_step
        self.tables: Mapping[str, TableRows] = {name: TableRows(reader, name) for name in reader.manifest.tables}

    def __getitem__(self, table: str) -> TableRows:
        return self.tables[table]


def open(url: str | os.PathLike[str], step: int | None = None) -> Checkpoint:
    """Opens a checkpoint to read its rows. Nothing but its manifest is read yet.

    Args:
        url: directory of checkpoints, of which LATEST names one, or a step's own directory.
        step: the step to read instead of the latest.

    Raises:
        CheckpointError: there is no such checkpoint, or its manifest is not valid.
    """
    return Checkpoint(CheckpointReader(url, step))
