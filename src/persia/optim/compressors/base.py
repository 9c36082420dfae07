"""What a compressor is: a way to write a run of float32 values into bytes, and to say what was lost."""

from __future__ import annotations

import msgspec
import torch

__all__ = ["Compressor"]


class Compressor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """A way to compress; C_w of Algorithm 1. Stateless: the errors are the optimizer's.

    To add one, write a file beside this one with a subclass (a `tag`, its parameters, the three functions below), and
    name it in `compressors/__init__.py`.
    """

    def payload_bytes(self, count: int) -> int:
        """Bytes of `count` values. Depends on nothing else, and never falls when `count` rises."""
        raise NotImplementedError

    def compress(self, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """Writes values into bytes; what is lost stays in `values`.

        Args:
            values: float32 `[count]`, contiguous; afterwards values - decompressed.
            payload: uint8 `[payload_bytes(count)]`, contiguous, aligned to 4 bytes, on the same device; all is written.
            key: of random choices: different for each worker, step and chunk; the same when a step is repeated.
        """
        raise NotImplementedError

    def decompress(self, payload: torch.Tensor, out: torch.Tensor) -> None:
        """Writes what the bytes stand for to `out`, float32 `[count]`."""
        raise NotImplementedError

    def average(self, payloads: torch.Tensor, error: torch.Tensor, payload: torch.Tensor, key: int) -> None:
        """Averages what came from all workers, adds the error, and compresses the sum again (line 9 of Algorithm 1).

        Args:
            payloads: uint8 `[workers, payload_bytes(count)]`, in the order of ranks.
            error: float32 `[count]`: of this step before; afterwards that of this step.
            payload: the result.
            key: as for `compress`.
        """
        total, one = torch.zeros_like(error), torch.empty_like(error)
        for row in payloads.unbind(0):
            self.decompress(row, one)
            total += one
        error.add_(total.mul_(1.0 / len(payloads)))
        self.compress(error, payload, key)
