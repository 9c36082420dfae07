"""Rows of a batch to the device and gradients back, in the form in which they travel."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from persia import batching
from persia.batching.batch import Batch
from persia.nn.codec import decode, decode_tensors, encode, encode_tensors
from persia.nn.prepared import PreparedBatch, PreparedRows
from persia.nn.staging import Ready, Staging
from persia.types import FedBatch, Int64Array, LookedUp, Packed

__all__ = ["Encoded", "Transfer"]

Encoded = tuple[Packed[np.float32 | np.float16], Packed[np.float32] | None]
"""Gradients by table as they travel, and their scales if they are compressed."""


class Transfer:
    """What an NN worker does between the wire and its network.

    Compressed rows are decoded where the network runs, so that half the bytes go to a GPU and back; on the host the
    native core does it, with the same bits. Each kind of array crosses as one.

    Args:
        staging: of the device.
        on_host: whether the native core works on the rows.
    """

    def __init__(self, staging: Staging, on_host: bool) -> None:
        self._staging = staging
        self._on_host = on_host
        self._scratch = batching.Scratch()

    def rows(self, batch: Batch | FedBatch, found: LookedUp, batch_id: int | None) -> tuple[PreparedBatch, Ready]:
        """The batch on the device; call the second result in the using thread first."""
        arrays: dict[str, NDArray[Any]] = {"dense": batch.dense, "labels": batch.labels}
        if self._on_host:
            plain = decode(found.rows, found.scales, self._scratch)
            tensors, ready = self._staging.to_device({**arrays, "rows": plain.buffer})
            offsets = cast("Mapping[str, Int64Array]", found.offsets)
            inverse = found.inverse
            prepared = PreparedRows(
                unpacked(tensors["rows"], plain), inverse, {name: offsets.get(name) for name in inverse}
            )
        else:
            packs = {"rows": found.rows, "narrow": found.narrow, "wide": found.wide, "offsets": found.offsets}
            scales = {} if found.scales is None else {"scales": found.scales}
            packed: dict[str, Packed[Any]] = {**packs, **scales}
            arrays.update({kind: pack.buffer for kind, pack in packed.items()})
            # Made on the device, in the stream that has copied the rest.
            made: dict[str, dict[str, torch.Tensor]] = {}

            def unpack(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
                made.update({kind: unpacked(tensors[kind], pack) for kind, pack in packed.items()})
                made["rows"] = decode_tensors(made["rows"], made.get("scales"))
                return {**tensors, **{f"rows/{name}": rows for name, rows in made["rows"].items()}}

            tensors, ready = self._staging.to_device(arrays, unpack)
            indices = {**made["narrow"], **made["wide"]}
            prepared = PreparedRows(made["rows"], indices, {name: made["offsets"].get(name) for name in indices})
        return PreparedBatch(tensors["dense"], tensors["labels"], batch.day, prepared, batch_id), ready

    def gradients(self, gradients: Mapping[str, torch.Tensor], compressed: bool) -> Callable[[], Encoded]:
        """Starts copying gradients to the host; the result blocks until they are there. For the training thread."""
        names, counts = list(gradients), [len(rows) for rows in gradients.values()]
        widths = [rows.shape[1] for rows in gradients.values()]

        if not compressed or self._on_host:
            plain = self._staging.to_host({"rows": joined(list(gradients.values()))})

            def arrived() -> Encoded:
                rows = Packed(names, counts, cast("NDArray[np.float32]", plain()["rows"]), widths)
                return cast("Encoded", encode(rows) if compressed else (rows, None))

            return arrived
        halves, scales = encode_tensors(gradients)
        encoded = self._staging.to_host(
            {"rows": joined(list(halves.values())), "scales": joined(list(scales.values()))}
        )

        def wait() -> Encoded:
            arrays = encoded()
            return Packed(names, counts, arrays["rows"], widths), Packed(names, counts, arrays["scales"])

        return wait


def unpacked(buffer: torch.Tensor, packed: Packed[Any]) -> dict[str, torch.Tensor]:
    """The tensors that lie in a buffer as the arrays of `packed` do; views."""
    if packed.widths is None:
        return dict(zip(packed.names, buffer.split(list(packed.counts)), strict=True))
    sizes = [count * width for count, width in zip(packed.counts, packed.widths, strict=True)]
    parts = zip(packed.names, buffer.split(sizes), packed.counts, packed.widths, strict=True)
    return {name: part.view(count, width) for name, part, count, width in parts}


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All values in one dimension: a view where the tensors lie one after another in one storage, else a copy."""
    if not tensors:
        return torch.empty(0)
    first = tensors[0]
    base, end = first.untyped_storage().data_ptr(), first.storage_offset()
    start = end
    for tensor in tensors:
        if tensor.untyped_storage().data_ptr() != base or tensor.storage_offset() != end or not tensor.is_contiguous():
            return torch.cat([tensor.reshape(-1) for tensor in tensors])
        end += tensor.numel()
    return first.as_strided((end - start,), (1,), start)
