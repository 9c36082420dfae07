"""Publishes a checkpoint to a log of changes, so that it can be served."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from persia.checkpoint.format import StepChoice
from persia.checkpoint.reader import CheckpointReader
from persia.checks import check_choice
from persia.errors import CheckpointError, ConfigError
from persia.publish.epochs import begin_epoch, remove_older_epochs
from persia.publish.format import NETWORK, Precision, TableChanges, stream_of
from persia.publish.log_storage import open_storage
from persia.publish.publisher import PART_BYTES
from persia.publish.stream import StreamWriter
from persia.publish.values import encode_values
from persia.schema import InputRules
from persia.types import BucketMap
from persia.types.publishing import ModelDescription, PublishDtype

__all__ = ["publish_checkpoint"]


def publish_checkpoint(
    checkpoint: str | os.PathLike[str],
    url: str | os.PathLike[str],
    *,
    step: StepChoice = None,
    dtype: PublishDtype = "float32",
    model: ModelDescription | None = None,
    progress: Callable[[int], object] = lambda _: None,
) -> int:
    """Writes the rows and the network of a checkpoint as a new epoch of a log of changes, which replaces older ones.

    Reads the checkpoint part by part; the memory does not depend on its size. Blocks.

    Args:
        checkpoint: directory of checkpoints, or of one step.
        url: URL of the log, as in `PublishOptions`. Nothing else may publish there.
        step: step to publish, "best" or "latest"; None for the latest.
        dtype: type of published values; see `PublishOptions`.
        model: how to build the network; None for the description that `persia train` recorded in the checkpoint.
        progress: called with the number of rows after each part.

    Returns:
        The number of the epoch.

    Raises:
        ConfigError: `dtype` is not valid.
        CheckpointError: there is no such checkpoint, a part is damaged, or the log cannot be written.
        PublishError: the log cannot be written to its topic.
        MissingExtraError: a package for a URL is not installed.
    """
    check_choice("dtype", dtype, get_args(PublishDtype))
    reader = CheckpointReader(checkpoint, step)
    storage = open_storage(url)
    network = reader.tensors("model")
    started, at = time.monotonic(), reader.manifest.global_step
    description = _precision(reader), model or _model(reader), _input_rules(reader)
    epoch = begin_epoch(storage, BucketMap.even(1), reader.schema, *description)
    rows = StreamWriter(storage, epoch.epoch, epoch.run, stream_of(0), dtype)
    tables = []
    for place, name in enumerate(sorted(reader.manifest.tables)):
        count = 0
        for ids, values in _parts(reader, name):
            encoded, scales = encode_values(values, dtype)
            part: dict[str, NDArray[Any]] = {f"{place}.ids": ids, f"{place}.values": encoded}
            rows.add_part(part if scales is None else {**part, f"{place}.scales": scales})
            count += len(ids)
            progress(len(ids))
        tables.append(TableChanges(name=name, dim=reader.manifest.tables[name].dim, rows=count, removed=0))
    rows.commit("snapshot", at, started, tables)
    writer = StreamWriter(storage, epoch.epoch, epoch.run, NETWORK)
    writer.add_part({name: value for name, value in network.items() if hasattr(value, "dtype")})
    writer.commit("network", at, started, [])
    remove_older_epochs(storage, epoch.epoch)
    return epoch.epoch


def _parts(reader: CheckpointReader, table: str) -> Iterator[tuple[NDArray[np.uint64], NDArray[np.float32]]]:
    """Yields ids `[n]` and values `[n, dim]` of a table, in parts of bounded size."""
    chunk_rows = max(1, PART_BYTES // (8 + 4 * reader.manifest.tables[table].dim))
    for _, arrays in reader.rows(table):
        for begin in range(0, len(arrays["ids"]), chunk_rows):
            end = begin + chunk_rows
            yield arrays["ids"][begin:end], np.ascontiguousarray(arrays["embeddings"][begin:end], np.float32)


def _precision(reader: CheckpointReader) -> Precision:
    options = reader.config.get("options")
    precision = options.get("precision") if isinstance(options, dict) else None
    return cast("Precision", precision) if precision in get_args(Precision) else "float32"


def _model(reader: CheckpointReader) -> ModelDescription | None:
    model = reader.config.get("model")
    try:
        return None if model is None else msgspec.convert(model, ModelDescription)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{reader.path}: the description of its model is not valid: {error}.") from None


def _input_rules(reader: CheckpointReader) -> InputRules:
    try:
        return msgspec.convert(reader.config.get("input_rules", {}), InputRules)
    except (msgspec.ValidationError, ConfigError) as error:
        raise CheckpointError(f"{reader.path}: the rules of its reader are not valid: {error}.") from None
