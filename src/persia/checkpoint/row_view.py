"""Lazy access to the rows of a checkpoint as numpy or Arrow data, without a cluster and without torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import StepChoice
from persia.checkpoint.reader import CheckpointReader

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["Checkpoint", "TableRows", "open"]


class TableRows:
    """The rows of one table.

    Args:
        reader: reader of the checkpoint.
        name: name of the table.

    Attributes:
        dim: length of an embedding.
        state_width: number of optimizer-state values per row.
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
        """Returns the number of rows. Reads all rows of an incremental checkpoint to count them."""
        if len(self._reader.links) == 1:
            return self._reader.manifest.tables[self.name].rows
        return sum(len(arrays["ids"]) for arrays in self)

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        """Iterates over the parts, each as a dict of columns.

        `ids` uint64 `[n]`, `embeddings` float32 `[n, dim]`, `state` float32 `[n, state_width]`, `update_count`,
        `last_step` and `stamp` uint32 `[n]`.

        Raises:
            CheckpointError: a part is missing or damaged.
        """
        return (arrays for _, arrays in self._reader.rows(self.name))

    def find(self, ids: NDArray[np.uint64]) -> tuple[NDArray[np.bool_], NDArray[np.float32]]:
        """Looks up rows by reading all parts.

        Returns:
            Whether each id has a row, bool `[n]`; and embeddings, float32 `[n, dim]`, zero without a row.
        """
        ids = np.asarray(ids, np.uint64)
        found = np.zeros(len(ids), np.bool_)
        embeddings = np.zeros((len(ids), self.dim), np.float32)
        for arrays in self:
            order = np.argsort(arrays["ids"])
            at = np.searchsorted(arrays["ids"], ids, sorter=order)
            rows = order[np.minimum(at, len(order) - 1)]
            hits = arrays["ids"][rows] == ids
            found |= hits
            embeddings[hits] = arrays["embeddings"][rows[hits]]
        return found, embeddings

    def arrow(self, state: bool = False) -> pa.RecordBatchReader:
        """Returns the rows as Arrow: `id` uint64, `embedding` fixed-size list of float32, `update_count`, `last_step`.

        Args:
            state: whether to add the optimizer state as the column `state`, a fixed-size list of float32.
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
    """An open checkpoint; see `open`.

    Attributes:
        reader: reader for the other contents.
        global_step: global step of the dense model.
        tables: rows by table.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.global_step = reader.manifest.global_step
        self.tables: Mapping[str, TableRows] = {name: TableRows(reader, name) for name in reader.manifest.tables}

    def __getitem__(self, table: str) -> TableRows:
        return self.tables[table]


def open(url: str | os.PathLike[str], step: StepChoice = None) -> Checkpoint:
    """Opens a checkpoint to read its rows. Reads only the manifest.

    Args:
        url: directory of checkpoints with a LATEST file, or directory of one step.
        step: step to read, "best" or "latest"; None for the latest.

    Raises:
        CheckpointError: there is no such checkpoint, or its manifest is invalid.
    """
    return Checkpoint(CheckpointReader(url, step))
