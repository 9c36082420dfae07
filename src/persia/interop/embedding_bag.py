"""`nn.EmbeddingBag` and `nn.Embedding` as tables, and back."""

from __future__ import annotations

from typing import NamedTuple

import torch

from persia.errors import ConfigError
from persia.interop.rows import Vocabulary, declared, located, read_parts, set_parts
from persia.interop.torch_optimizers import read_state, state_to_write
from persia.nn import EmbeddingCollection
from persia.schema import EmbeddingOptimizer
from persia.types import RowsSet

__all__ = ["RowsExported", "export_embedding", "import_embedding"]

Module = torch.nn.EmbeddingBag | torch.nn.Embedding


class RowsExported(NamedTuple):
    """Result of exporting a table to a module.

    Attributes:
        written: rows of the module that the table has.
        absent: rows of the module that it does not have; they are as they were.
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
    """Sets rows of a table to those of an `nn.EmbeddingBag` or `nn.Embedding`, in parts. Blocks.

    Call it while no NN worker trains, as `EmbeddingCollection.set_rows`; with several NN workers, on the first one.
    Training in `persia.modes.Sync` then continues as it would in torch: the pooling of features is to be the module's
    `mode`, and the optimizer of the table `embedding_optimizer(optimizer, module.weight)`. The row of `padding_idx` is
    left out; so should its id be in batches.

    Args:
        collection: with the table; of a `Trainer`, `trainer.embeddings`.
        table: its name.
        module: of the table's dim.
        optimizer: of the module; its state of each row comes along. None leaves state as it is: that of new rows is the
            initial one.
        vocabulary: the ids of the module's rows. A dict from value to row, as models have that map texts to rows: rows
            that it does not name are left out. Or a column with the value of each row. Values are mapped to ids as
            readers do. None: row i is that of the number i, which is its id, except for features of `kind="text"`.

    Returns:
        Numbers of rows. `evicted` is more than 0 if the table's capacity is less than the rows of the module.

    Raises:
        ConfigError: there is no such table, its dim or optimizer is another one, or the module has an option that
            tables lack. Nothing has changed.
        DataError: the vocabulary does not fit; nothing has changed. Or values are not finite, or do not fit the dtype
            of the table; rows before them may be set.
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

    A module has a fixed number of rows, a table has not: ids that the vocabulary does not have are left out.
    For a module of all rows, give those that there are: `ids = table_ids(collection, table)`, a module of `len(ids)`
    rows, and `vocabulary=ids`.

    Args:
        collection: with the table.
        table: its name.
        module: of the table's dim, on any device. Rows whose id has no row in the table stay as they are, and so does
            that of `padding_idx`.
        optimizer: of the module; it gets the state of each row. Its step becomes the largest number of updates of a
            row, as torch counts the updates of a weight, and persia those of a row.
        vocabulary: as for `import_embedding`.

    Raises:
        ConfigError: there is no such table, its dim or optimizer is another one, or the module has an option that
            tables lack.
        DataError: the vocabulary does not fit.
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


def _checked(collection: EmbeddingCollection, table: str, module: Module) -> EmbeddingOptimizer:
    """Returns the optimizer of the table's rows; the table has to fit the module."""
    known, rules = declared(collection, table)
    if not isinstance(module, Module):
        raise ConfigError(
            f"Invalid module: {type(module).__name__}; expected nn.EmbeddingBag or nn.Embedding.", field="module"
        )
    if module.embedding_dim != known.dim:
        raise ConfigError(
            f"The module has embedding_dim {module.embedding_dim}, but table {table!r} has dim {known.dim}; declare "
            "the table with that of the module.",
            field="module",
        )
    if isinstance(module, torch.nn.EmbeddingBag) and module.mode == "max":
        raise ConfigError(
            "The module has mode = 'max', which no pooling of features does; train it with 'sum' or 'mean'.",
            field="mode",
        )
    for name, value in (("max_norm", None), ("scale_grad_by_freq", False)):
        if getattr(module, name) != value:
            raise ConfigError(
                f"The module has {name} = {getattr(module, name)!r}, which tables do not have; set it to {value!r}.",
                field=name,
            )
    return rules
