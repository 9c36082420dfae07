"""float16 rows with a scale per row, as they travel between embedding worker and NN worker (Persia, section 4.2.3).

The NN worker decodes where its network runs: on the host by the native core, elsewhere by torch operations, so that
half the bytes go to the device, too. Both give the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np
import torch

from persia import batching
from persia.types import Floats, Halves, Packed, WireRows

__all__ = ["decode", "decode_tensors", "encode", "encode_tensors"]

LARGEST = 2.0**15
SMALLEST_SCALE = 2.0**-126


def decode(
    rows: Mapping[str, WireRows], scales: Mapping[str, Floats] | None, scratch: batching.Scratch | None = None
) -> Packed[np.float32]:
    """float32 rows `[n, dim]` by table; without scales they come as they are."""
    if scales is None:
        return Packed.of(cast("Mapping[str, Floats]", rows), np.float32)
    halves = Packed.of(cast("Mapping[str, Halves]", rows), np.float16)
    return batching.decode_packed(halves, Packed.of(scales, np.float32), scratch or batching.Scratch())


def encode(rows: Mapping[str, Floats]) -> tuple[Packed[np.float16], Packed[np.float32]]:
    """float16 rows and their scales by table. A row that is not finite stays so; see `batching.encode_rows`."""
    return batching.encode_packed(Packed.of(rows, np.float32))


def decode_tensors(
    rows: Mapping[str, torch.Tensor], scales: Mapping[str, torch.Tensor] | None
) -> dict[str, torch.Tensor]:
    """`decode` on the tensors' own device."""
    scales = scales or {}
    return {
        name: values.to(torch.float32) * scales[name].unsqueeze(1) if name in scales else values
        for name, values in rows.items()
    }


def encode_tensors(rows: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """`encode` on the tensors' own device."""
    halves: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    for name, values in rows.items():
        magnitudes = torch.where(values.isnan(), 0.0, values.abs())
        largest = magnitudes.amax(dim=1)
        scale = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp(min=SMALLEST_SCALE))
        halves[name], scales[name] = (values / scale.unsqueeze(1)).to(torch.float16), scale
    return halves, scales
