"""Rows next to Lightning's checkpoints: written before the .ckpt file, read and removed with it."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch.plugins.io import CheckpointIO

from persia.checkpoint import CheckpointReader, CheckpointWriter
from persia.checkpoint.row_writing import write_rows, write_states
from persia.config import dump
from persia.errors import CheckpointError
from persia.nn import EmbeddingCollection
from persia.telemetry.logs import get_logger
from persia.trainer.loading import load_partitions, resolved
from persia.trainer.ps_snapshots import begin_snapshots, end_snapshots

__all__ = ["KEY", "RowsCheckpointIO", "load_tables", "rows_directory", "save_tables"]

LOG = get_logger("persia.interop.lightning")
KEY = "persia_rows"
"""Entry of a .ckpt file with the step of its rows."""


def rows_directory(path: str | os.PathLike[str]) -> str:
    """Returns the directory of rows next to a checkpoint file: `last.rows` for `last.ckpt`."""
    return f"{os.fspath(path).removesuffix('.ckpt')}.rows"


def save_tables(embeddings: EmbeddingCollection, directory: str) -> int:
    """Writes all rows with their optimizer state, once all gradients so far are applied. Blocks.

    The directory is a persia checkpoint without a network: `persia checkpoint inspect`, `export` and `reshard` read
    it. The last two steps are retained.

    Returns:
        The global step, which names the checkpoint in the directory.

    Raises:
        CheckpointError: the rows cannot be written, or move between PSs meanwhile.
        DeadlineError: the gradients were not applied in time.
    """
    embeddings.await_pushes()
    servers, step = embeddings.connection.servers, embeddings.global_step
    with CheckpointWriter(directory, step, keep_last=2) as writer:
        write_states(writer, servers)
        name, _, buckets = begin_snapshots(servers, None, directory, live=False)
        try:
            write_rows(writer, servers, name)
        finally:
            end_snapshots(servers, name)
        config = {
            "schema": dump(embeddings.schema),
            "embedding_optimizer": dump(embeddings.optimizer),
        }
        writer.commit(schema=resolved(embeddings.schema, servers), config=config, buckets=buckets)
    return step


def load_tables(embeddings: EmbeddingCollection, directory: str, step: int) -> None:
    """Reads rows that `save_tables` has written, and sets the global step to theirs. Blocks.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or has another schema.
    """
    servers = embeddings.connection.servers
    load_partitions(servers, embeddings.schema, directory, range(len(servers)), step)
    embeddings.global_step = step
    saved = CheckpointReader(directory, step).manifest.tables
    for table, counters in embeddings.statistics().items():
        if counters["rows"] > saved[table].rows:
            LOG.warning(
                "Table %r has %d rows that are not in %s: they were trained later, and remain. Load checkpoints in a "
                "new process to get exactly their rows.",
                table, counters["rows"] - saved[table].rows, directory,
            )  # fmt: skip


class RowsCheckpointIO(CheckpointIO):  # type: ignore[misc]
    """Saves, loads and removes rows along with the files of another `CheckpointIO`.

    Args:
        base: writes the .ckpt files.
        embeddings: collection whose rows are saved.
    """

    def __init__(self, base: CheckpointIO, embeddings: EmbeddingCollection) -> None:
        self.base = base
        self.embeddings = embeddings

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Writes the rows, then the file, which names their step: a file never lacks its rows."""
        step = save_tables(self.embeddings, rows_directory(path))
        self.base.save_checkpoint({**checkpoint, KEY: step}, path, storage_options=storage_options)

    def load_checkpoint(self, path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Reads the file, and the rows into the tables.

        Raises:
            CheckpointError: the file was saved without rows, or they are missing.
        """
        checkpoint: dict[str, Any] = self.base.load_checkpoint(path, *args, **kwargs)
        if KEY not in checkpoint:
            raise CheckpointError(
                f"{path} has no rows: it was saved without PersiaCallback. Add the callback to the Trainer that saves, "
                "or load only the network with `load_from_checkpoint`.",
                path=os.fspath(path),
            )
        load_tables(self.embeddings, rows_directory(path), checkpoint[KEY])
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        """Removes the file, then its rows."""
        import fsspec

        self.base.remove_checkpoint(path)
        system, directory = fsspec.core.url_to_fs(rows_directory(path))
        if system.exists(directory):
            system.rm(directory, recursive=True)

    def teardown(self) -> None:
        """Tears down the other `CheckpointIO`."""
        self.base.teardown()
