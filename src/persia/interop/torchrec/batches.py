"""Converts batches and table declarations from TorchRec to persia and back; shares arrays where possible."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from persia.batching.batch import Batch
from persia.batching.computed_ids import add_computed
from persia.batching.id_column import IdColumn
from persia.batching.validation import check_id_weights
from persia.errors import ConfigError, DataError, MissingExtraError
from persia.nn import Embeddings
from persia.schema import IdFeature, Schema, Table, Uniform
from persia.types import Floats, Ids, Int64Array

if TYPE_CHECKING:
    from torchrec import EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor

__all__ = ["TorchRecBatch", "from_batch", "keyed_jagged_tensor", "keyed_tensor", "schema_of", "to_batch"]

POOLING = {"SUM": "sum", "MEAN": "mean"}
DTYPES = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}


class TorchRecBatch(NamedTuple):
    """A batch in TorchRec's types.

    Attributes:
        ids: the ID-type features; values int64, with the bits of the ids.
        dense: the dense features, each of length `DenseFeature.width`.
        labels: labels, float32 `[batch, labels]`.
    """

    ids: KeyedJaggedTensor
    dense: KeyedTensor
    labels: Tensor


def schema_of(
    configs: Sequence[EmbeddingBagConfig],
    dense_features: Sequence[str] = (),
    labels: Sequence[str] = ("label",),
    *,
    is_weighted: bool = False,
) -> Schema:
    """Returns the schema of an `EmbeddingBagCollection`: `schema_of(ebc.embedding_bag_configs())`.

    New ids get values in the range of the configuration, +-1/sqrt(num_embeddings) by default. Tables have no capacity:
    declare one to bound memory.

    Args:
        configs: configurations of the tables.
        dense_features: names of the dense features.
        labels: names of the labels.
        is_weighted: whether ids have weights, as `ebc.is_weighted()` says. Those of feature `f` are then the column
            `f_weights` where batches are read from columns; `to_batch` takes them from the KeyedJaggedTensor.

    Raises:
        ConfigError: two tables have a feature of the same name, or a table has position weights, or a pooling or
            dtype that persia lacks, or weights with another pooling than SUM.
    """
    features: list[IdFeature] = []
    tables: list[Table] = []
    for config in configs:
        pooling, dtype = POOLING.get(config.pooling.name), DTYPES.get(config.data_type.name)
        if pooling is None or dtype is None:
            raise ConfigError(
                f"Table {config.name!r} has pooling {config.pooling.name} and data type {config.data_type.name}; "
                f"tables of persia support {', '.join(POOLING)} and {', '.join(DTYPES)}.",
                field=config.name,
            )
        if config.need_pos:
            raise ConfigError(
                f"Table {config.name!r} has need_pos, weights by position, which tables of persia do not "
                "support; train it without need_pos.",
                field=config.name,
            )
        if is_weighted and pooling != "sum":
            raise ConfigError(
                f"Table {config.name!r} has pooling {config.pooling.name}, but weights of ids need SUM in TorchRec; "
                "pass is_weighted=False, or declare the features yourself: persia divides by the sum of the weights.",
                field=config.name,
            )
        initializer = Uniform(config.get_weight_init_min(), config.get_weight_init_max())
        tables.append(Table(config.name, config.embedding_dim, initializer=initializer, dtype=dtype))  # type: ignore[arg-type]
        for name in config.feature_names:
            weights = f"{name}_weights" if is_weighted else None
            features.append(IdFeature(name, table=config.name, pooling=pooling, weights=weights))  # type: ignore[arg-type]
    return Schema(features, dense_features, labels, tables)


def to_batch(
    schema: Schema,
    ids: KeyedJaggedTensor,
    dense: Tensor | KeyedTensor | None = None,
    labels: Tensor | None = None,
    day: NDArray[np.int32] | None = None,
    *,
    weights: Tensor | None = None,
    groups: Tensor | None = None,
) -> Batch:
    """Returns a batch that shares the memory of TorchRec's tensors, if they are on the CPU, int64 and float32.

    Offsets are computed, 8 bytes for each sample and feature; not for features with one id per sample.

    Args:
        schema: schema of the model. Crosses and mapped features are computed as readers do, unless `ids` has them.
        ids: the ID-type features and possibly others, int64 or int32. Ids are their bits: -1 is 2^64 - 1. Its weights
            are those of features that declare `IdFeature.weights`; those of other features must be 1.
        dense: dense features, float `[batch, Schema.dense_width]` in the order of the schema, or a KeyedTensor; None if
            the schema has none. They are the input of the model: rules of `DenseFeature` are not applied.
        labels: labels, float `[batch]` or `[batch, labels]`; None for prediction.
        day: day of each sample, int32 `[batch]`, see `Batch`.
        weights: weight of each sample, float `[batch]`; required with labels if the schema has
            `sample_weight`.
        groups: group of each sample, int64 or int32 `[batch]`, whose bits are used as those of ids; required with
            labels if the schema has `group`.

    Raises:
        ConfigError: a feature of the schema is derived, or has `age_since`, `fill` or `kind="text"`: readers do not
            use its numbers as ids.
        DataError: `weights` or `groups` are missing, a feature of the schema is missing, `ids` lack declared weights,
            have others than 1 where none are declared, or have a stride for each key; or shapes differ.
    """
    if ids.variable_stride_per_key():
        raise DataError(
            "The KeyedJaggedTensor has a stride for each key, which batches do not support; convert one without."
        )
    for feature in schema.id_features:
        options = ("age_since", "bucketize", "time", "tokens", "split", "fill")
        option = next((each for each in options if getattr(feature, each) is not None), None)
        if option is not None or feature.kind == "text":
            option = option or 'kind="text"'
            raise ConfigError(
                f"IdFeature({feature.name!r}) has {option}, but the values of a KeyedJaggedTensor are ids already; "
                "declare the feature without it, or make batches with Batch.from_columns.",
                field=f"IdFeature({feature.name!r})",
            )
    for argument, given, column in (("weights", weights, schema.sample_weight), ("groups", groups, schema.group)):
        if given is None and column is not None and labels is not None:
            raise DataError(
                f"The schema has the column {column!r} for {argument} of samples; pass to_batch(..., {argument}=...).",
                column=column,
            )
    keys = list(ids.keys())
    if len(set(keys)) < len(keys):
        raise DataError(f"The KeyedJaggedTensor has a key twice: {', '.join(keys)}; pass each feature once.")
    columns = dict(zip(keys, _id_columns(ids), strict=True))
    if missing := [each.name for each in schema.id_features if not each.computed and each.name not in columns]:
        raise DataError(
            f"The KeyedJaggedTensor has no key {missing[0]!r}; it has {', '.join(columns)}. Name ID-type features as "
            "its keys.",
            feature=missing[0],
        )
    for feature in schema.id_features:
        if not feature.computed:
            columns[feature.name] = _with_declared_weights(feature, columns[feature.name])
    add_computed(schema, columns)
    rows = ids.stride()
    return Batch(
        {feature.name: columns[feature.name] for feature in schema.id_features},
        _dense(schema, dense, rows),
        _matrix("labels", labels, rows, len(schema.label_names) if labels is not None else 0),
        day,
        None if weights is None else _vector("weights", weights.detach().cpu().float().numpy(), rows),
        None if groups is None else _vector("groups", _ids(groups, "groups"), rows),
    )


def from_batch(schema: Schema, batch: Batch) -> TorchRecBatch:
    """Returns a batch as TorchRec's tensors, which share its memory, except for what `keyed_jagged_tensor` copies.

    Raises:
        MissingExtraError: TorchRec is not installed.
    """
    dense = torch.from_numpy(_writable(batch.dense))
    lengths = [each.width for each in schema.dense]
    keyed = _torchrec().KeyedTensor(list(schema.dense_names), lengths, dense)
    return TorchRecBatch(keyed_jagged_tensor(schema, batch), keyed, torch.from_numpy(_writable(batch.labels)))


def keyed_jagged_tensor(schema: Schema, batch: Batch) -> KeyedJaggedTensor:
    """Returns the ID-type features of a batch, in the order of the schema.

    A KeyedJaggedTensor has the values of all features in one array. They are shared if they are adjacent in memory,
    as in a batch from `to_batch` with this order of features, and copied otherwise. Lists are not truncated:
    `max_length` limits lookups. It has weights if a feature has; those of others are 1.

    Raises:
        DataError: the batch lacks a feature of the schema.
        MissingExtraError: TorchRec is not installed.
    """
    if missing := [feature.name for feature in schema.id_features if feature.name not in batch.id_features]:
        raise DataError(
            f"The batch lacks feature {missing[0]!r} of the schema; pass the schema that it was made with.",
            feature=missing[0],
        )
    columns = [batch.id_features[feature.name] for feature in schema.id_features]
    rows = len(batch)
    lengths = np.ones((len(columns), rows), np.int64)
    for at, column in enumerate(columns):
        if column.offsets is not None:
            np.subtract(column.offsets[1:], column.offsets[:-1], out=lengths[at])
    values = torch.from_numpy(_joined([column.values for column in columns]).view(np.int64))
    names = [feature.name for feature in schema.id_features]
    tensor: KeyedJaggedTensor = _torchrec().KeyedJaggedTensor(
        names, values, _joined_weights(columns), lengths=torch.from_numpy(lengths.reshape(-1)), stride=rows
    )
    return tensor


def keyed_tensor(embeddings: Embeddings) -> KeyedTensor:
    """Returns pooled embeddings as an `EmbeddingBagCollection` returns them; gradients flow through it.

    Args:
        embeddings: embeddings of an `EmbeddingCollection`; all features pooled.

    Raises:
        ConfigError: a feature is not pooled, or there are no features.
        MissingExtraError: TorchRec is not installed.
    """
    pooled = {name: each for name, each in embeddings.items() if isinstance(each, Tensor)}
    if rest := embeddings.keys() - pooled.keys():
        raise ConfigError(
            f"Feature {min(rest)!r} is a sequence, which a KeyedTensor cannot hold; leave it out, or pool it.",
            field=min(rest),
        )
    if not pooled:
        raise ConfigError("There are no embeddings; pass the embeddings of at least one feature.", field="embeddings")
    lengths = [each.shape[1] for each in pooled.values()]
    tensor: KeyedTensor = _torchrec().KeyedTensor(list(pooled), lengths, torch.cat(list(pooled.values()), dim=1))
    return tensor


def _with_declared_weights(feature: IdFeature, column: IdColumn) -> IdColumn:
    """Returns a column with weights if the feature declares them.

    Raises:
        DataError: declared weights are missing, or others than 1 are not declared.
    """
    if feature.weights is not None:
        if column.weights is None:
            raise DataError(
                f"IdFeature({feature.name!r}) has weights, but the KeyedJaggedTensor has none; pass one with weights.",
                feature=feature.name,
            )
        check_id_weights(feature, column)
        return column
    if column.weights is not None and (column.weights != 1).any():
        raise DataError(
            f"The KeyedJaggedTensor has weights for {feature.name!r}, which the schema does not declare; declare "
            f"IdFeature({feature.name!r}, weights=...), or pass weights of 1.",
            feature=feature.name,
        )
    return IdColumn(column.values, column.offsets)


def _joined_weights(columns: Sequence[IdColumn]) -> Tensor | None:
    """Returns the weights of all ids, 1 for those without; None if no column has weights."""
    if all(column.weights is None for column in columns):
        return None
    parts = [np.ones(len(c.values), np.float32) if c.weights is None else c.weights for c in columns]
    return torch.from_numpy(np.concatenate(parts))


def _id_columns(ids: KeyedJaggedTensor) -> list[IdColumn]:
    values = _ids(ids.values())
    given = ids.weights_or_none()
    weights: Floats | None = None if given is None else given.detach().cpu().float().contiguous().numpy()
    lengths: NDArray[Any] = ids.lengths().cpu().numpy().reshape(len(ids.keys()), ids.stride())
    columns: list[IdColumn] = []
    start = 0
    for counts, single in zip(lengths, (lengths == 1).all(axis=1).tolist(), strict=True):
        offsets = None
        end = start + len(counts)
        if not single:
            offsets = np.zeros(len(counts) + 1, np.int64)
            np.cumsum(counts, out=offsets[1:])
            end = start + int(offsets[-1])
        columns.append(IdColumn(values[start:end], offsets, None if weights is None else weights[start:end]))
        start = end
    if start != len(values):
        raise DataError(
            f"The KeyedJaggedTensor has {len(values)} values, but its lengths add up to {start}; build it with the "
            "lengths of its values."
        )
    return columns


def _ids(values: Tensor, name: str = "values of the KeyedJaggedTensor") -> Ids:
    if values.dtype not in (torch.int64, torch.int32):
        raise DataError(f"The {name} are {values.dtype}; pass torch.int64 or torch.int32.")
    array: Int64Array = values.detach().cpu().to(torch.int64).contiguous().numpy()
    return array.view(np.uint64)


def _dense(schema: Schema, dense: Tensor | KeyedTensor | None, rows: int) -> Floats:
    if dense is not None and not isinstance(dense, Tensor):
        names = list(schema.dense_names)
        if missing := [name for name in names if name not in dense.keys()]:  # noqa: SIM118
            raise DataError(
                f"The KeyedTensor has no key {missing[0]!r}; it has {', '.join(dense.keys())}.", feature=missing[0]
            )
        none = dense.values()[:, :0]  # For a schema without dense features.
        dense = dense.values() if dense.keys() == names else torch.cat([none, *(dense[n] for n in names)], dim=1)
    return _matrix("dense", dense, rows, schema.dense_width)


def _matrix(name: str, tensor: Tensor | None, rows: int, width: int) -> Floats:
    if tensor is None:
        array: Floats = np.zeros((rows, 0), np.float32)
    else:
        array = tensor.detach().cpu().float().numpy()
    if array.ndim == 1:
        array = array[:, None]
    if array.shape != (rows, width):
        raise DataError(
            f"{name} has shape {list(array.shape)}; the schema and the KeyedJaggedTensor need [{rows}, {width}].",
            column=name,
        )
    return array


def _vector(name: str, array: NDArray[Any], rows: int) -> NDArray[Any]:
    """Returns an array `[rows]`, also of one `[rows, 1]`."""
    if array.shape not in ((rows,), (rows, 1)):
        raise DataError(f"{name} has shape {list(array.shape)}; the KeyedJaggedTensor needs [{rows}].", column=name)
    return array.reshape(rows)


def _joined(arrays: Sequence[Ids]) -> Ids:
    """Returns the concatenated arrays, as a view if they are adjacent in shared memory."""
    first = arrays[0]
    base = first.base
    if base is not None and all(each.base is base and each.flags.c_contiguous for each in arrays):
        begins = [each.__array_interface__["data"][0] for each in arrays]
        ends = itertools.accumulate((each.nbytes for each in arrays), initial=begins[0])
        if all(begin == end for begin, end in zip(begins, ends, strict=False)):
            count = sum(map(len, arrays))
            return _writable(np.lib.stride_tricks.as_strided(first, (count,), writeable=first.flags.writeable))
    return np.concatenate(arrays)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    """Returns a writable array for torch, which warns of arrays that are not writable."""
    return array if array.flags.writeable else array.copy()


def _torchrec() -> ModuleType:
    try:
        import torchrec
    except ImportError as error:
        raise MissingExtraError(
            f"TorchRec cannot be imported ({error}): pip install torchrec, or on a machine without a GPU "
            "pip install --no-deps torchrec and pip install fbgemm-gpu-cpu, in versions that fit your torch.",
            extra="torchrec",
        ) from error
    module: ModuleType = torchrec
    return module
