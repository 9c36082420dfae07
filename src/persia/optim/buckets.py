"""Parameters as runs of one flat array, and what is done to a run in a step; with torch, on any device.

:mod:`persia.optim.native` does the same in fewer passes over memory, on CPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from persia.batching.native import ThreadPool
from persia.optim.compressors import Compressor, Uncompressed

__all__ = ["SMALL", "Bucket", "BucketPiece", "Flat", "Rule", "ranges"]

SMALL = 1024
"""Elements: smaller tensors (4 KiB) are sent as they are; compressing them would save next to nothing."""

ALIGNMENT = 64
"""Chunks and payloads begin at multiples of it: elements, bytes."""


class Rule(NamedTuple):
    """What happens to one parameter in one step.

    Attributes:
        gradient: float32, flat, contiguous; None where there is none on this worker.
        active: whether any worker has a gradient for it; else it stays as it is.
        scale: of the gradient: undoes loss scaling, and clips.
        beta1: of the momentum.
        beta2: of v.
        rate: learning rate, with the correction of m's bias.
        shrink: what decoupled weight decay leaves of the parameter.
        eps: beside sqrt(v).
        bias2: correction of v's bias: what v is divided by.
    """

    gradient: torch.Tensor | None
    active: bool
    scale: float
    beta1: float
    beta2: float
    rate: float
    shrink: float
    eps: float
    bias2: float


class Flat:
    """Momentum, v and worker error of some parameters, one array each: larger tensors first, then the small ones.

    Args:
        parameters: all on one device.
        pool: threads of the core, if that device is the host.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], pool: ThreadPool | None = None) -> None:
        self.pool = pool
        self.parameters = sorted(parameters, key=lambda p: p.numel() < SMALL)  # Stable.
        self.large = sum(p.numel() for p in self.parameters if p.numel() >= SMALL)
        """Elements of the larger tensors."""
        self.offsets = [0]
        for parameter in self.parameters:
            self.offsets.append(self.offsets[-1] + parameter.numel())
        device = self.parameters[0].device
        self.size = self.offsets[-1]
        self.momentum, self.variance, self.error = (torch.zeros(self.size, device=device) for _ in range(3))

    def views(self, array: torch.Tensor) -> Iterator[torch.Tensor]:
        """An array in pieces, each of the shape of its parameter."""
        for parameter, begin in zip(self.parameters, self.offsets, strict=False):
            yield array[begin : begin + parameter.numel()].view(parameter.shape)


def ranges(flat: Flat, bucket_bytes: int, compressor: Compressor) -> list[tuple[int, int, Compressor]]:
    """Begin, end and compressor of buckets: about equal ones of the larger tensors, and one of all small ones."""
    count = -(-4 * flat.large // bucket_bytes)
    edges = [flat.large * i // count // ALIGNMENT * ALIGNMENT for i in range(count)] + [flat.large]
    large = [(begin, end, compressor) for begin, end in itertools.pairwise(edges) if end > begin]
    small: list[tuple[int, int, Compressor]] = (
        [(flat.large, flat.size, Uncompressed())] if flat.size > flat.large else []
    )
    return large + small


class BucketPiece(NamedTuple):
    """A run of a parameter that lies in a bucket.

    Attributes:
        number: of the parameter in the Flat.
        begin: within the parameter.
        end: within the parameter.
        at: within the bucket.
    """

    number: int
    begin: int
    end: int
    at: slice


class Bucket:
    """A run of a Flat that travels at once: cut into one chunk per worker, of equal length but for the last ones.

    Args:
        flat: whose run it is.
        begin: of the run.
        end: of the run.
        compressor: what its chunks are sent with.
        workers: how many there are, and which of them this one is.
    """

    def __init__(self, flat: Flat, begin: int, end: int, compressor: Compressor, workers: tuple[int, int]) -> None:
        self.flat, self.begin, self.end, self.compressor = flat, begin, end, compressor
        self.workers, self.rank = workers
        size = end - begin
        self.chunk = -(-size // (self.workers * ALIGNMENT)) * ALIGNMENT
        cuts = [min(size, i * self.chunk) for i in range(self.workers + 1)]
        self.chunks = [slice(a, b) for a, b in itertools.pairwise(cuts)]
        self.own = self.chunks[self.rank]
        self.momentum, self.variance, self.error = (
            array[begin:end] for array in (flat.momentum, flat.variance, flat.error)
        )
        device = flat.momentum.device
        self.server_error = torch.zeros(self.own.stop - self.own.start, device=device)
        stride = -(-compressor.payload_bytes(self.chunk) // ALIGNMENT) * ALIGNMENT
        self.sent, self.received, self.gathered = (
            torch.zeros((self.workers, stride), dtype=torch.uint8, device=device) for _ in range(3)
        )
        self.averaged = torch.zeros(stride, dtype=torch.uint8, device=device)
        self.pieces = [
            BucketPiece(i, max(a, begin) - a, min(b, end) - a, slice(max(a, begin) - begin, min(b, end) - begin))
            for i, (a, b) in enumerate(itertools.pairwise(flat.offsets))
            if max(a, begin) < min(b, end)
        ]

    # --- warm-up ----------------------------------------------------------------------------------------------

    def collect(self, rules: Sequence[Rule]) -> torch.Tensor:
        """The gradients of this worker, float32, flat, unscaled: in place of the error, which there is none of yet."""
        for piece in self.pieces:
            rule, out = rules[piece.number], self.error[piece.at]
            if rule.gradient is None:
                out.zero_()
            else:
                torch.mul(rule.gradient[piece.begin : piece.end], rule.scale, out=out)
        return self.error

    def adam(self, rules: Sequence[Rule], factor: float) -> None:
        """A step of Adam with the collected gradients, times a factor."""
        for piece in self.pieces:
            rule = rules[piece.number]
            if not rule.active:
                continue
            g, m, v = self.error[piece.at].mul_(factor), self.momentum[piece.at], self.variance[piece.at]
            m.mul_(rule.beta1).add_(g, alpha=1.0 - rule.beta1)
            v.mul_(rule.beta2).addcmul_(g, g, value=1.0 - rule.beta2)
            self._move(piece, rule, m, (v / rule.bias2).sqrt_())

    # --- compressed (lines 6 to 11 of Algorithm 1) ------------------------------------------------------------

    def compress(self, rules: Sequence[Rule], momentum: bool, key: int) -> None:
        """Lines 6 and 7: adds momentum (or gradient) to the error and compresses it, chunk by chunk, into `sent`."""
        for piece in self.pieces:
            rule, error = rules[piece.number], self.error[piece.at]
            if momentum:
                error.add_(self.momentum[piece.at], alpha=rule.beta1 if rule.active else 1.0)
            if rule.gradient is not None:
                share = (1.0 - rule.beta1 if momentum else 1.0) * rule.scale
                error.add_(rule.gradient[piece.begin : piece.end], alpha=share)
        for k, chunk in enumerate(self.chunks):
            self.compressor.compress(self.error[chunk], self._payload(self.sent[k], chunk), key + k)

    def average(self, key: int) -> None:
        """Line 9: averages what came for this worker's chunk, adds the server error, compresses into `averaged`."""
        bytes_ = self.compressor.payload_bytes(len(self.server_error))
        self.compressor.average(self.received[:, :bytes_], self.server_error, self.averaged[:bytes_], key)

    def apply(self, rules: Sequence[Rule], momentum: bool) -> None:
        """Lines 10 and 11: takes what all have averaged as the new momentum, and moves the parameters."""
        target = self.momentum if momentum else torch.empty_like(self.momentum)
        self.decompress(target)
        for piece in self.pieces:
            rule, m = rules[piece.number], self.momentum[piece.at]
            if not momentum:
                m.mul_(rule.beta1 if rule.active else 1.0).add_(target[piece.at], alpha=1.0 - rule.beta1)
            if rule.active:
                self._move(piece, rule, m, self.variance[piece.at].sqrt())

    def decompress(self, out: torch.Tensor) -> None:
        """What all have gathered, in the order of the bucket."""
        for k, chunk in enumerate(self.chunks):
            self.compressor.decompress(self._payload(self.gathered[k], chunk), out[chunk])

    def settle(self) -> None:
        """Afterwards `momentum` is what it should be: somebody wants to read it."""

    def _payload(self, row: torch.Tensor, chunk: slice) -> torch.Tensor:
        return row[: self.compressor.payload_bytes(chunk.stop - chunk.start)]

    def _move(self, piece: BucketPiece, rule: Rule, momentum: torch.Tensor, deviation: torch.Tensor) -> None:
        """X = x * shrink - rate * m / (deviation + eps); the deviation is overwritten."""
        parameter = self.flat.parameters[piece.number].detach()
        change = torch.div(momentum, deviation.add_(rule.eps)).mul_(rule.rate)
        self.store(piece, parameter.reshape(-1)[piece.begin : piece.end] * rule.shrink - change)

    def store(self, piece: BucketPiece, values: torch.Tensor) -> None:
        """Writes a piece of a parameter."""
        parameter = self.flat.parameters[piece.number].detach()
        if parameter.is_contiguous():
            parameter.view(-1)[piece.begin : piece.end] = values
        else:
            whole = parameter.reshape(-1)
            whole[piece.begin : piece.end] = values
            parameter.copy_(whole.view(parameter.shape))
