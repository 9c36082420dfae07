"""Stochastic ternary compression: minus, zero or plus at random."""

from __future__ import annotations

import torch

from persia.checks import MAX_COUNT, MAX_STEPS, check_integer, plain_fields
from persia.errors import ConfigError
from persia.optim.compressors.base import Compressor

__all__ = ["StochasticTernary"]


class StochasticTernary(Compressor, frozen=True, tag="stochastic_ternary"):
    """A value v of a block becomes a * sign(v) with probability |v| / max|v|, else 0; a = sum v^2 / sum |v|.

    A randomized compressor, covered by the paper's theory (C_w with its w, section 1), after TernGrad (arXiv
    1705.07878). TernGrad's a is max|v|, which is unbiased, but its error may exceed the values, so errors grow without
    bound. This a minimizes the expected error, which is always less than the values; error feedback corrects the bias.
    Payload: the blocks' a, float32, then two bits per value, four values to a byte: 0 zero, 1 plus, 2 minus.

    Args:
        block: number of values that share a scale, a multiple of 4.
        seed: seed of the random choices.
    """

    block: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        plain_fields(self)
        check_integer("seed", self.seed, 0, MAX_STEPS)
        if not isinstance(self.block, int) or not 4 <= self.block <= MAX_COUNT or self.block % 4:
            raise ConfigError(f"Invalid block = {self.block!r}; expected a multiple of 4.", field="block")

    def payload_bytes(self, count: int) -> int:
        """Returns two bits per value plus four bytes per block."""
        return 4 * self._blocks(count) + -(-count // 4)

    def compress(self, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """See `Compressor.compress`."""
        count, blocks = values.numel(), self._blocks(values.numel())
        if not count:
            return
        padded = torch.nn.functional.pad(values, (0, blocks * self.block - count)).view(blocks, self.block)
        magnitudes = padded.abs()
        totals = magnitudes.sum(1)
        scales = torch.where(totals > 0, padded.square().sum(1) / totals, 0.0)
        payload[: 4 * blocks].view(torch.float32).copy_(scales)
        # Drawn on the host, so that the choices do not depend on the device.
        generator = torch.Generator().manual_seed(self.stream(key))
        chance = torch.rand(count, generator=generator).to(values.device)
        largest = magnitudes.amax(1, keepdim=True).expand(-1, self.block).reshape(-1)[:count]
        chosen = chance * largest < values.abs()
        digits = torch.nn.functional.pad(torch.where(values > 0, 1, 2).to(torch.uint8) * chosen, (0, -count % 4))
        payload[4 * blocks :].copy_((digits.view(-1, 4) << self._shifts(values.device)).sum(1, dtype=torch.uint8))
        sent = torch.empty_like(values)
        self.decompress(payload, sent)
        values.sub_(sent)

    def decompress(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """See `Compressor.decompress`."""
        count, blocks = out.numel(), self._blocks(out.numel())
        if not count:
            return
        digits = (payload[4 * blocks :, None] >> self._shifts(out.device) & 3).view(-1)[:count]
        scales = payload[: 4 * blocks].view(torch.float32)[:, None].expand(-1, self.block).reshape(-1)[:count]
        out.copy_((digits == 1).float() - (digits == 2).float()).mul_(scales)

    def stream(self, key: int) -> int:
        """Returns the seed of the random choices for a key of `compress`."""
        return (self.seed * 0x9E3779B97F4A7C15 + key) & 0x7FFFFFFFFFFFFFFF

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    @staticmethod
    def _shifts(device: torch.device) -> torch.Tensor:
        return torch.arange(
            0, 8, 2, dtype=torch.uint8, device=device
        )  # Created on the device: a copy would wait for it.
