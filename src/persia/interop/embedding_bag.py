"""Converts `nn.EmbeddingBag` and `nn.Embedding` to tables and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from persia.errors import ConfigError
from persia.interop.row_transfer import Vocabulary, declared, located, read_parts, set_parts
from persia.interop.torch_optimizers import read_state, state_to_write
from persia.nn import EmbeddingCollection
from persia.schema import EmbeddingOptimizer
from persia.types import RowsSet

__all__ = ["RowsExported", "export_embedding", "import_embedding"]

Module = torch.nn.EmbeddingBag | torch.nn.Embedding


class RowsExported(NamedTuple):
    """Result of exporting a table to a module.

    Attributes:
        written: number of rows of the module that the table has.
        absent: number of rows of the module that the table does not have; they did not change.
    """

    written: int
    absent: int


def import_embedding(
    collection: EmbeddingCollection,
    table: str,
    module: Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    vocabulary: Vocabulary = None,
) -> RowsSet:
    """Sets rows of a table to rows of an `nn.EmbeddingBag` or `nn.Embedding`, in parts. Blocks.

    Call it while no NN worker trains, like `EmbeddingCollection.set_rows`; with several NN workers, on the first one.
    Training in `persia.modes.Sync` then continues as it would in torch, if the pooling of features is the module's
    `mode`, and the optimizer of the table is `embedding_optimizer(optimizer, module.weight)`. The row of `padding_idx`
    is left out; batches should not contain its id either.

    Args:
        collection: collection with the table; with a `Trainer`, `trainer.embeddings`.
        table: name of the table.
        module: module with the table's dim.
        optimizer: optimizer of the module, whose state of each row is imported. None leaves the state of existing rows
            unchanged; new rows get the initial state.
        vocabulary: the ids of the module's rows: a dict from value to row, which leaves out other rows, or a column
            with the value of each row. Values are mapped to ids as readers do. None: row i belongs to the number i,
            which is its id, except for features of `kind="text"`.

    Returns:
        Numbers of rows. `evicted` is more than 0 if the table's capacity is less than the rows of the module.

    Raises:
        ConfigError: the table does not exist, has another dim or optimizer, or the module has an option that tables
            lack. Nothing has changed.
        DataError: the vocabulary does not match the module; nothing has changed. Or values are not finite, or do not
            fit the dtype of the table; rows before them may be set.
    """
    rules = _checked(collection, table, module)
    rows = located(collection, table, module.num_embeddings, vocabulary, module.padding_idx)
    state = None if optimizer is None else read_state(optimizer, module.weight, rules)
    if state is None:
        return set_parts(collection, table, rows, module.weight, None)
    return set_parts(collection, table, rows, module.weight, state.columns, state.step)


def export_embedding(
    collection: EmbeddingCollection,
    table: str,
    module: Module,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    vocabulary: Vocabulary = None,
) -> RowsExported:
    """Writes rows of a table into an `nn.EmbeddingBag` or `nn.Embedding`, in parts. Blocks; the table does not change.

    A module has a fixed number of rows, unlike a table: ids that are not in the vocabulary are left out. To export all
    rows, use `ids = table_ids(collection, table)`, a module of `len(ids)` rows, and `vocabulary=ids`.

    Args:
        collection: collection with the table.
        table: name of the table.
        module: module with the table's dim, on any device. Rows whose id has no row in the table do not change, nor
            does the row of `padding_idx`.
        optimizer: optimizer of the module, which gets the state of each row. Its step becomes the largest number of
            updates of a row, as torch counts updates of the weight, and persia counts updates of each row.
        vocabulary: as for `import_embedding`.

    Raises:
        ConfigError: the table does not exist, has another dim or optimizer, or the module has an option that tables
            lack.
        DataError: the vocabulary does not match the module.
    """
    rules = _checked(collection, table, module)
    weight = module.weight
    rows = located(collection, table, module.num_embeddings, vocabulary, module.padding_idx)
    state, columns = ({}, []) if optimizer is None else state_to_write(optimizer, weight, rules)
    written = steps = 0
    with torch.no_grad():
        for places, read in read_parts(collection, table, rows, module.embedding_dim, bool(columns)):
            places = places.to(weight.device)
            weight[places] = torch.from_numpy(read.values).to(weight)
            written += len(places)
            if read.state is not None and len(places):
                halves = torch.from_numpy(read.state.values).split(module.embedding_dim, dim=1)
                for column, values in zip(columns, halves, strict=True):
                    column[places.to(column.device)] = values.to(column)
                steps = max(steps, int(read.state.update_count.max()))
    if "step" in state:
        step = state["step"]
        state["step"] = step.fill_(max(steps, step.item())) if isinstance(step, torch.Tensor) else max(steps, step)
    return RowsExported(written, len(rows.ids) - written)


def _checked(collection: EmbeddingCollection, table: str, module: Module) -> EmbeddingOptimizer | None:
    """Returns the optimizer of the table, None if it is not trainable; checks that the table matches the module."""
    known, rules = declared(collection, table)
    if not isinstance(module, Module):
        raise ConfigError(
            f"Invalid module: {type(module).__name__}; expected nn.EmbeddingBag or nn.Embedding.", field="module"
        )
    if module.embedding_dim != known.dim:
        raise ConfigError(
            f"The module has embedding_dim {module.embedding_dim}, but table {table!r} has dim {known.dim}; declare "
            "the table with the dim of the module.",
            field="module",
        )
    if isinstance(module, torch.nn.EmbeddingBag) and module.mode == "max":
        raise ConfigError(
            "The module has mode = 'max', which features do not support as pooling; train it with 'sum' or 'mean'.",
            field="mode",
        )
    for name, value in (("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, name) != value:
            raise ConfigError(
                f"The module has {name} = {getattr(module, name)!r}, which tables do not support; set it to {value!r}.",
                field=name,
            )
    return rules
