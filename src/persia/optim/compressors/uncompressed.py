"""No compression."""

from __future__ import annotations

import torch

from persia.optim.compressors.base import Compressor

__all__ = ["Uncompressed"]


class Uncompressed(Compressor, frozen=True, tag="uncompressed"):
    """Sends float32 values without loss. APMSqueeze (uncompressed) of the paper, section 5.3."""

    def payload_bytes(self, count: int) -> int:
        """Returns four bytes per value."""
        return 4 * count

    def compress(self, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """Copies the values."""
        payload.view(torch.float32).copy_(values)
        values.zero_()

    def decompress(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the values."""
        out.copy_(payload.view(torch.float32))
