"""Signs, eight to a byte, and a scale per block, on any device; `optim/native_buckets.py` is the fast path for CPUs."""

from __future__ import annotations

from typing import Literal

import torch

from persia.checks import MAX_COUNT, check_choice, plain_fields
from persia.errors import ConfigError
from persia.optim.compressors.base import Compressor

__all__ = ["OneBit"]


class OneBit(Compressor, frozen=True, tag="one_bit"):
    """Sends the sign of each value and a scale per block: 1/32 of float32, plus the scales.

    `compress` leaves the residual, values minus what is sent, in place of the values, for error feedback.

    A value >= 0 (also -0) has the sign +. Payload: the blocks' scales, float32, then the signs, value i in bit i % 8 of
    byte i // 8, 1 for +.

    Args:
        scale: "mean": the block's mean magnitude, which minimizes the error, so errors shrink for any values. "l2":
            the paper's scale (section 5.1), ||values|| / sqrt(count), which preserves the norm of the block; errors
            may grow if few values are large.
        block: number of values that share a scale, a multiple of 64.
    """

    scale: Literal["mean", "l2"] = "mean"
    block: int = 2048

    def __post_init__(self) -> None:
        plain_fields(self)
        check_choice("scale", self.scale, ("mean", "l2"))
        if not isinstance(self.block, int) or not 64 <= self.block <= MAX_COUNT or self.block % 64:
            raise ConfigError(f"Invalid block = {self.block!r}; expected a multiple of 64.", field="block")

    def payload_bytes(self, count: int) -> int:
        """Returns one bit per value plus four bytes per block."""
        return 4 * self._blocks(count) + -(-count // 8)

    def compress(self, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """See `Compressor.compress`."""
        count, blocks = values.numel(), self._blocks(values.numel())
        if not count:
            return
        padded = torch.nn.functional.pad(values, (0, blocks * self.block - count)).view(blocks, self.block)
        lengths = torch.full((blocks,), float(self.block), device=values.device)
        lengths[-1:].fill_(count - (blocks - 1) * self.block)  # Assigning a number would wait for the GPU.
        if self.scale == "mean":
            scales = padded.abs().sum(1) / lengths
        else:
            scales = (padded.square().sum(1) / lengths).sqrt()
        payload[: 4 * blocks].view(torch.float32).copy_(scales)
        positive = padded >= 0
        bits = (positive.view(-1, 8) * self._weights(values.device)).sum(1, dtype=torch.uint8)
        payload[4 * blocks :].copy_(bits[: -(-count // 8)])
        if count % 8:
            payload[-1] &= (1 << count % 8) - 1
        # Error feedback: the residual stays, and is added to the next values.
        values.sub_(torch.where(positive, scales[:, None], -scales[:, None]).view(-1)[:count])

    def decompress(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """See `Compressor.decompress`."""
        count, blocks = out.numel(), self._blocks(out.numel())
        if not count:
            return
        scales = payload[: 4 * blocks].view(torch.float32)[:, None].expand(-1, self.block).reshape(-1)[:count]
        positive = (payload[4 * blocks :, None] & self._weights(out.device)).view(-1)[:count] != 0
        out.copy_(torch.where(positive, scales, -scales))

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    @staticmethod
    def _weights(device: torch.device) -> torch.Tensor:
        return 1 << torch.arange(
            8, dtype=torch.uint8, device=device
        )  # Created on the device: a copy would wait for it.
