"""Rows of a batch to the device and gradients back, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from persia.batching.batch import Batch
from persia.nn.codec import decode, decode_tensors, encode, encode_tensors
from persia.nn.prepared import PreparedBatch, PreparedRows
from persia.nn.staging import Ready, Staging
from persia.types import FedBatch, Floats, LookedUp, WireRows

__all__ = ["Encoded", "Transfer"]

Encoded = tuple[dict[str, WireRows], dict[str, Floats] | None]
"""Gradients by table as they travel, and their scales if they are compressed."""


class Transfer:
    """What an NN worker does between the wire and its network.

    Compressed rows are decoded where the network runs, so that half the bytes go to a GPU and back; on the host the
    native core does it, with the same bits.

    Args:
        staging: of the device.
        on_host: whether the native core works on the rows.
    """

    def __init__(self, staging: Staging, on_host: bool) -> None:
        self._staging = staging
        self._on_host = on_host

    def rows(self, batch: Batch | FedBatch, found: LookedUp, batch_id: int | None) -> tuple[PreparedBatch, Ready]:
        """The batch on the device; call the second result in the using thread first."""
        arrays: dict[str, NDArray[Any]] = {"dense": batch.dense, "labels": batch.labels}
        if self._on_host:
            arrays.update(_named("rows", decode(found.rows, found.scales)))
            tensors, ready = self._staging.to_device(arrays)
        else:
            arrays.update(_named("rows", found.rows))
            arrays.update(_named("scales", found.scales or {}))
            arrays.update(_named("inverse", found.inverse))
            arrays.update(_named("offsets", {n: o for n, o in found.offsets.items() if o is not None}))
            tensors, ready = self._staging.to_device(arrays, _decoded)
        prepared = PreparedBatch(
            tensors["dense"],
            tensors["labels"],
            batch.day,
            PreparedRows(
                {name: tensors[f"rows/{name}"] for name in found.rows},
                found.inverse if self._on_host else {name: tensors[f"inverse/{name}"] for name in found.inverse},
                found.offsets if self._on_host else {name: tensors.get(f"offsets/{name}") for name in found.offsets},
            ),
            batch_id,
        )
        return prepared, ready

    def gradients(self, gradients: Mapping[str, torch.Tensor], compressed: bool) -> Callable[[], Encoded]:
        """Starts copying gradients to the host; the result blocks until they are there. For the training thread."""
        if not compressed or self._on_host:
            plain = self._staging.to_host(gradients)
            return lambda: encode(plain()) if compressed else (dict(plain()), None)
        halves, scales = encode_tensors(gradients)
        arrived = self._staging.to_host({**_named("rows", halves), **_named("scales", scales)})

        def wait() -> Encoded:
            arrays = arrived()
            return {n: arrays[f"rows/{n}"] for n in halves}, {n: arrays[f"scales/{n}"] for n in scales}

        return wait


def _named(kind: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{kind}/{name}": value for name, value in values.items()}


def _decoded(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rows in place of halves and scales, on the device and in the stream that has copied them."""
    scales = {name.removeprefix("scales/"): t for name, t in tensors.items() if name.startswith("scales/")}
    rows = {name.removeprefix("rows/"): t for name, t in tensors.items() if name.startswith("rows/")}
    rest = {name: t for name, t in tensors.items() if not name.startswith(("rows/", "scales/"))}
    return {**rest, **_named("rows", decode_tensors(rows, scales))}
