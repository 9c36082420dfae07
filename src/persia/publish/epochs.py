"""Begins epochs of the log of changes, and removes old ones."""

from __future__ import annotations

import secrets

import msgspec

from persia.metrics.drift import DriftReference
from persia.publish.format import (
    DRIFT_FILE,
    EPOCH_FILE,
    FORMAT,
    MODEL_FILE,
    VERSION,
    Description,
    Drift,
    Epoch,
    Precision,
    epoch_name,
    parse_epoch,
)
from persia.publish.log_storage import LogStorage
from persia.schema import NO_RULES, InputRules, Schema
from persia.types import BucketMap
from persia.types.publishing import ModelDescription

__all__ = ["begin_epoch", "remove_older_epochs", "write_drift"]


def begin_epoch(
    storage: LogStorage,
    buckets: BucketMap,
    schema: Schema,
    precision: Precision = "float32",
    model: ModelDescription | None = None,
    input_rules: InputRules = NO_RULES,
) -> Epoch:
    """Writes `model.json` and then `epoch.json` of a new epoch, before any of its entries. Blocks.

    Readers ignore an epoch without `epoch.json`, so a crash between the two leaves nothing for them to read.

    Args:
        storage: storage of the log.
        buckets: the PS of each bucket of ids; each PS has a stream of rows.
        schema: the input of the model.
        precision: precision of its forward pass.
        model: how to build it; None if that is not known.
        input_rules: input rules of the training data's reader.

    Raises:
        CheckpointError: they cannot be written to the file system.
        PublishError: they cannot be written to the topic.
    """
    storage.refresh()
    used = [number for name in storage.names() if (number := parse_epoch(name)) is not None]
    number, run = max(used, default=-1) + 1, secrets.token_hex(16)
    epoch = Epoch(format=FORMAT, version=VERSION, epoch=number, run=run, buckets=buckets)
    description = Description(
        format=FORMAT,
        version=VERSION,
        epoch=number,
        run=run,
        schema=schema,
        precision=precision,
        model=model,
        input_rules=input_rules,
    )
    storage.put(f"{epoch_name(number)}/{MODEL_FILE}", msgspec.json.encode(description))
    storage.put(f"{epoch_name(number)}/{EPOCH_FILE}", msgspec.json.encode(epoch))
    return epoch


def write_drift(storage: LogStorage, epoch: Epoch, reference: DriftReference) -> None:
    """Writes or replaces `drift.json` of an epoch. Blocks.

    Raises:
        CheckpointError: it cannot be written to the file system.
        PublishError: it cannot be written to the topic.
    """
    drift = Drift(format=FORMAT, version=VERSION, epoch=epoch.epoch, run=epoch.run, training=reference)
    storage.put(f"{epoch_name(epoch.epoch)}/{DRIFT_FILE}", msgspec.json.encode(drift))


def remove_older_epochs(storage: LogStorage, epoch: int) -> None:
    """Removes the epochs before `epoch`. Call it once all streams of `epoch` have entries.

    Raises:
        CheckpointError: an epoch cannot be removed from the file system.
        PublishError: an epoch cannot be removed from the topic.
    """
    for name in storage.names():
        if (number := parse_epoch(name)) is not None and number < epoch:
            storage.remove(name)
