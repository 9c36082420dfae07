"""The base class of compressors, which encode float32 values as bytes and return the error."""

from __future__ import annotations

import msgspec
import torch

__all__ = ["Compressor"]


class Compressor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A compression scheme; C_w of Algorithm 1. Stateless: the optimizer stores the errors.

    To add one, write a file next to this one with a subclass (a `tag`, its parameters, the three functions below), and
    list it in `compressors/__init__.py`.
    """

    def payload_bytes(self, count: int) -> int:
        """Returns the bytes of `count` values. Depends only on `count`, and does not decrease with it."""
        raise NotImplementedError

    def compress(self, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """Compresses values into bytes; leaves the error in `values`.

        Args:
            values: float32 `[count]`, contiguous; afterwards values - decompressed.
            payload: uint8 `[payload_bytes(count)]`, contiguous, aligned to 4 bytes, on the same device; overwritten.
            key: random key, different for each worker, step and chunk, but the same if a step is repeated.
        """
        raise NotImplementedError

    def decompress(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Decompresses bytes into `out`, float32 `[count]`."""
        raise NotImplementedError

    def average(self, payloads: torch.Tensor, error: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """Averages the payloads of all workers, adds the error, and compresses the sum (line 9 of Algorithm 1).

        Args:
            payloads: uint8 `[workers, payload_bytes(count)]`, in the order of ranks.
            error: error of the previous step, float32 `[count]`; afterwards the error of this step.
            payload: payload of the result.
            key: as for `compress`.
        """
        total, one = torch.zeros_like(error), torch.empty_like(error)
        for row in payloads.unbind(0):
            self.decompress(row, one)
            total += one
        error.add_(total.mul_(1.0 / len(payloads)))
        self.compress(error, payload, key)
