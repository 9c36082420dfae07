"""Top-k compression: the values of largest magnitude."""

from __future__ import annotations

import math

import torch

from persia.checks import check_number, plain_fields
from persia.optim.compressors.base import Compressor

__all__ = ["TopK"]


class TopK(Compressor, frozen=True, tag="top_k"):
    """Sends the largest values of each chunk and their positions (section 5.1 of the paper); the others are zero.

    Payload: `k` positions, int32, then their values, float32.

    Args:
        ratio: fraction of the values to send, 0 to 1; at least one value is sent.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        plain_fields(self)
        check_number("ratio", self.ratio, 0, 1, open_low=True)

    def payload_bytes(self, count: int) -> int:
        """Returns eight bytes per sent value."""
        return 8 * self._sent(count)

    def compress(self, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """See `Compressor.compress`."""
        sent = self._sent(values.numel())
        if not sent:
            return
        positions = torch.topk(values.abs(), sent, sorted=False).indices
        payload[: 4 * sent].view(torch.int32).copy_(positions)
        payload[4 * sent :].view(torch.float32).copy_(values[positions])
        values.index_fill_(0, positions, 0.0)

    def decompress(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """See `Compressor.decompress`."""
        sent = self._sent(out.numel())
        out.zero_()
        out.index_copy_(0, payload[: 4 * sent].view(torch.int32).long(), payload[4 * sent :].view(torch.float32))

    def _sent(self, count: int) -> int:
        """Returns the number of values that are sent."""
        return min(count, math.ceil(self.ratio * count))
