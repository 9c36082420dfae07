"""Weights and optimizer state of `EmbeddingBagCollection`s, in and out, also from sharded checkpoints."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from persia.errors import CheckpointError, ConfigError
from persia.interop.embedding_bag import RowsExported
from persia.interop.row_transfer import PART_VALUES, declared, located, read_parts, set_parts
from persia.nn import EmbeddingCollection
from persia.schema import SGD, Adagrad, RowwiseAdagrad
from persia.types import RowsSet, RowState

__all__ = ["export_weights", "import_dcp", "import_weights"]

MOMENTUM = re.compile(r"momentum_?1")
"""Name of the accumulator of FBGEMM's Adagrad and row-wise Adagrad, at the end of a key."""


def import_weights(
    collection: EmbeddingCollection,
    weights: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    *,
    tables: Iterable[str] | None = None,
) -> dict[str, RowsSet]:
    """Sets rows of tables to the weights of an `EmbeddingBagCollection`. Blocks.

    Row i belongs to the number i, which is its id, except for features of `kind="text"`, which hash it.

    Call it while no NN worker trains; with several NN workers, on the first one.

    Args:
        collection: collection whose tables have the names and dims of the TorchRec tables.
        weights: `ebc.state_dict()`, or the state dict of a model that contains an `ebc`:
            `...embedding_bags.<table>.weight`.
        optimizer: `ebc.fused_optimizer().state_dict()`, the state of fused Adagrad or row-wise Adagrad. None leaves
            the state of existing rows unchanged; new rows get the initial state.
        tables: names of tables; None for all tables of the schema.

    Returns:
        Numbers of rows by table.

    Raises:
        ConfigError: a table is missing, ambiguous, sharded, or has another shape or optimizer. Tables before it, in
            the order of the schema, are set.
        DataError: features of a table map numbers to ids in several ways.
    """
    states = {} if optimizer is None else _flat(optimizer.get("state", optimizer))
    done: dict[str, RowsSet] = {}
    for table in _names(collection, tables):
        weight = _plain(table, weights[_weight_key(table, weights)])
        key = _state_key(table, _shapes(states))
        momentum = None if key is None else _plain(table, states[key])
        if optimizer is not None and momentum is None:
            _check_stateless(collection, table)
        done[table] = _import(collection, table, weight, momentum)
    return done


def export_weights(
    collection: EmbeddingCollection,
    weights: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None = None,
    *,
    tables: Iterable[str] | None = None,
) -> dict[str, RowsExported]:
    """Writes rows of tables into the weights of an `EmbeddingBagCollection`, in place. Blocks.

    Rows of ids beyond `num_embeddings` are left out; weights of ids without a row do not change.

    Args:
        collection: collection whose tables have the names and dims of the TorchRec tables.
        weights: `ebc.state_dict()`, whose tensors share memory with the module.
        optimizer: `ebc.fused_optimizer().state_dict()`; None to leave it unchanged.
        tables: names of tables; None for all tables of the schema.

    Raises:
        ConfigError: as for `import_weights`.
    """
    states = {} if optimizer is None else _flat(optimizer.get("state", optimizer))
    done: dict[str, RowsExported] = {}
    for table in _names(collection, tables):
        weight = _plain(table, weights[_weight_key(table, weights)]).detach()
        key = _state_key(table, _shapes(states))
        momentum = None if key is None else _plain(table, states[key])
        if optimizer is not None and momentum is None:
            _check_stateless(collection, table)
        _check(collection, table, weight, momentum)
        rows = located(collection, table, len(weight), None)
        written = 0
        for places, read in read_parts(collection, table, rows, weight.shape[1], momentum is not None):
            index = places.to(weight.device)
            weight[index] = torch.from_numpy(read.values).to(weight)
            if momentum is not None and read.state is not None:
                values = torch.from_numpy(read.state.values).to(momentum)
                momentum[index] = values.reshape(len(index), *momentum.shape[1:])
            written += len(places)
        done[table] = RowsExported(written, len(rows.ids) - written)
    return done


def import_dcp(
    collection: EmbeddingCollection,
    directory: str | os.PathLike[str],
    *,
    tables: Iterable[str] | None = None,
    state: bool = True,
) -> dict[str, RowsSet]:
    """Sets rows of tables to the weights in a checkpoint of `torch.distributed.checkpoint`. Blocks.

    Row i of a weight belongs to the number i, as for `import_weights`; in a checkpoint of `persia export --format dcp`
    it belongs to the id `ids[i]`.

    The tables may have been sharded in any way over any number of ranks. Shards are assembled table by table, so this
    needs memory for the largest table. It needs neither a process group nor TorchRec. The metadata of such a checkpoint
    is a pickle, which can run code: read only checkpoints that you trust.

    Args:
        collection: collection whose tables have the names and dims of the TorchRec tables.
        directory: directory that `torch.distributed.checkpoint.save` wrote.
        tables: names of tables; None for all tables of the schema.
        state: also read the optimizer state, if the checkpoint has any.

    Returns:
        Numbers of rows by table.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: a table is missing, or has another shape or optimizer. Tables before it, in the order of the
            schema, are set.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    path = os.fspath(directory)
    try:
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # Unpickling may raise anything.
        raise CheckpointError(
            f"{path} is not a checkpoint of torch.distributed.checkpoint ({error!r}); pass the directory that contains "
            "its file .metadata.",
            path=path,
        ) from error
    tensors = {key: entry for key, entry in metadata.items() if isinstance(entry, TensorStorageMetadata)}
    done: dict[str, RowsSet] = {}
    for table in _names(collection, tables):
        keys = [_weight_key(table, tensors)]
        if (prefix := keys[0].removesuffix("weight")) + "ids" in tensors:
            done[table] = _import_own(collection, table, path, tensors, prefix, state)
            continue
        if state and (key := _state_key(table, {key: entry.size for key, entry in tensors.items()})) is not None:
            keys.append(key)
        weight, *momenta = _read(path, tensors, keys)
        done[table] = _import(collection, table, weight, momenta[0] if momenta else None)
    return done


def _import_own(
    collection: EmbeddingCollection, table: str, path: str, metadata: Mapping[str, Any], prefix: str, state: bool
) -> RowsSet:
    """Sets rows of a table from a checkpoint that persia has exported."""
    names = ["weight", "ids"]
    if state and f"{prefix}state" in metadata:
        names += ["state", "update_count", "last_step"]
    weight, ids, *others = _read(path, metadata, [prefix + name for name in names])
    _check(collection, table, weight, None)
    most = max(1, PART_VALUES // max(1, weight.shape[1]))
    done = RowsSet(0, 0, 0)
    for start in range(0, len(ids), most):
        part = slice(start, start + most)
        values = None
        if others:
            counts = [each[part].numpy().astype(np.uint32) for each in others[1:]]
            values = RowState(others[0][part].numpy(), counts[0], counts[1])
        now = collection.set_rows(table, ids[part].numpy().view(np.uint64), weight[part].numpy(), state=values)
        done = RowsSet(*map(sum, zip(done, now, strict=True)))
    return done


def _read(path: str, metadata: Mapping[str, Any], keys: Sequence[str]) -> list[Tensor]:
    """Reads tensors of a checkpoint.

    Args:
        path: path of the checkpoint.
        metadata: metadata of its tensors, by key.
        keys: keys of the tensors to read.
    """
    tensors = {key: torch.empty(metadata[key].size, dtype=metadata[key].properties.dtype) for key in keys}
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # As requested.
            load(tensors, storage_reader=FileSystemReader(path), no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException is not an Exception.
        raise CheckpointError(
            f"{path} cannot be read: {error!r}. Save it again, or import another checkpoint.", path=path
        ) from error
    return list(tensors.values())


def _import(collection: EmbeddingCollection, table: str, weight: Tensor, momentum: Tensor | None) -> RowsSet:
    _check(collection, table, weight, momentum)
    rows = located(collection, table, len(weight), None)
    return set_parts(collection, table, rows, weight, None if momentum is None else [momentum])


def _check(collection: EmbeddingCollection, table: str, weight: Tensor, momentum: Tensor | None) -> None:
    known, rules = declared(collection, table)
    if weight.ndim != 2 or weight.shape[1] != known.dim:
        raise ConfigError(
            f"The weight of table {table!r} has shape {list(weight.shape)}, but the table has dim {known.dim}; declare "
            "the table with the dim of the weight.",
            field=table,
        )
    if momentum is None:
        return
    width = known.dim if isinstance(rules, Adagrad) else int(isinstance(rules, RowwiseAdagrad))
    if momentum.numel() != len(weight) * width or len(momentum) != len(weight):
        raise ConfigError(
            f"The optimizer state of table {table!r} has shape {list(momentum.shape)}, which does not match {rules!r}: "
            f"Adagrad has [{len(weight)}, {known.dim}], RowwiseAdagrad [{len(weight)}]. Declare the table with the "
            "optimizer that trained it, or import only the weights.",
            field=table,
        )
    if momentum.numel() and momentum.min() < 0:
        raise ConfigError(
            f"The optimizer state of table {table!r} has negative values, which no accumulator of Adagrad has: it "
            "belongs to another optimizer. Import only the weights.",
            field=table,
        )


def _check_stateless(collection: EmbeddingCollection, table: str) -> None:
    """Raises ConfigError if the optimizer of a table needs a state, which is missing."""
    rules = declared(collection, table)[1]
    if rules is not None and not (isinstance(rules, SGD) and not rules.momentum):
        raise ConfigError(
            f"The optimizer has no state momentum1 for table {table!r}, which {rules!r} needs; pass the state of fused "
            "Adagrad or row-wise Adagrad, or leave the optimizer out to move only the weights.",
            field="optimizer",
        )


def _names(collection: EmbeddingCollection, tables: Iterable[str] | None) -> Iterator[str]:
    for table in collection.schema.resolved_tables() if tables is None else tables:
        declared(collection, table)
        yield table


def _weight_key(table: str, keys: Iterable[str]) -> str:
    known = list(keys)
    name = f"embedding_bags.{table}.weight"
    matches = [key for key in known if key == name or key.endswith(f".{name}")]
    if len(matches) != 1:
        count = f"{len(matches)} keys" if matches else "no key"
        raise ConfigError(
            f"The state has {count} ending with {name!r}; it has {', '.join(known[:8])}{', ...' if known[8:] else ''}. "
            "Name tables as TorchRec does, and pass the state of one collection.",
            field=table,
        )
    return matches[0]


def _state_key(table: str, shapes: Mapping[str, torch.Size]) -> str | None:
    """Returns `...<table>.weight.<table>.momentum1`, or `...<table>.weight.<table>.weight.momentum_1`.

    TorchRec uses this name for the first state of every optimizer, even Adam's first moment: only a second state
    distinguishes them.
    """
    own = re.compile(rf"(^|\.){re.escape(table)}\.weight\.")
    accumulator: str | None = None
    for key, shape in shapes.items():
        owner, _, name = key.rpartition(".")
        if not own.search(f"{owner}."):
            continue
        if MOMENTUM.fullmatch(name):
            accumulator = accumulator or key
        elif shape.numel() > 1:  # Scalars such as a step, which are not state of rows, may be next to it.
            raise ConfigError(
                f"The optimizer has the state {name!r} for table {table!r}, which Adagrad and row-wise Adagrad do not "
                "have; its momentum1 is no accumulator. Import only the weights.",
                field=table,
            )
    return accumulator


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{owner}.{name}": value for owner, values in state.items() for name, value in values.items()}


def _shapes(states: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {key: value.shape for key, value in states.items() if isinstance(value, Tensor)}


def _plain(table: str, tensor: Any) -> Tensor:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise ConfigError(
            f"The tensor of table {table!r} is a {type(tensor).__name__}, part of a sharded tensor; save a checkpoint "
            "with torch.distributed.checkpoint, and use `import_dcp`.",
            field=table,
        )
    plain: Tensor = tensor
    return plain
