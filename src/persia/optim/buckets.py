"""Buckets: ranges of a flat array of parameters, and the parts of a step on them; in torch, on any device.

:mod:`persia.optim.native_buckets` does the same on CPUs with fewer passes over memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from persia.batching.native import ThreadPool
from persia.optim.compressors import Compressor, Uncompressed

__all__ = ["SMALL", "Bucket", "BucketPiece", "Flat", "Rule", "bucket_count", "ranges"]

SMALL = 1024
"""Number of elements below which a tensor is sent uncompressed (4 KiB), as compression would save little."""

ALIGNMENT = 64
"""Alignment of chunks (in elements) and payloads (in bytes)."""


LEAST_BUCKETS = 6
"""Minimum number of buckets of a network with enough parameters, so that one is packed while another one is sent."""

LEAST_BYTES = 1 << 20
"""Minimum size of such a bucket in bytes of float32, as each message has a fixed cost."""


class Rule(NamedTuple):
    """Update of one parameter in one step.

    Attributes:
        gradient: gradient, float32, flat, contiguous; None if this worker has none.
        active: whether any worker has a gradient for it; otherwise the parameter does not change.
        scale: factor on the gradient: undoes loss scaling and clips.
        beta1: decay of the momentum.
        beta2: decay of v.
        rate: learning rate, including the bias correction of m.
        shrink: factor of decoupled weight decay on the parameter.
        eps: added to sqrt(v).
        bias2: divisor for the bias correction of v.
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
    """Flat arrays of momentum, v and worker error of parameters: larger tensors first, then small ones.

    The worker error is the residual of error feedback: what compression has dropped of this worker's values so far.
    `Bucket.server_error` is that of the averages.

    Args:
        parameters: parameters on one device.
        pool: threads of the core, if the device is the host.
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
        """Yields views of an array, each of the shape of its parameter."""
        for parameter, begin in zip(self.parameters, self.offsets, strict=False):
            yield array[begin : begin + parameter.numel()].view(parameter.shape)


def bucket_count(large: int, bucket_bytes: int) -> int:
    """Returns the number of buckets for a number of elements of larger tensors."""
    return max(-(-4 * large // bucket_bytes), min(LEAST_BUCKETS, 4 * large // LEAST_BYTES))


def ranges(flat: Flat, bucket_bytes: int, compressor: Compressor) -> list[tuple[int, int, Compressor]]:
    """Returns begin, end and compressor of buckets: of similar size for larger tensors, and one for all small ones."""
    count = bucket_count(flat.large, bucket_bytes)
    edges = [flat.large * i // count // ALIGNMENT * ALIGNMENT for i in range(count)] + [flat.large]
    large = [(begin, end, compressor) for begin, end in itertools.pairwise(edges) if end > begin]
    small: list[tuple[int, int, Compressor]] = (
        [(flat.large, flat.size, Uncompressed())] if flat.size > flat.large else []
    )
    return large + small


class BucketPiece(NamedTuple):
    """The part of a parameter that is in a bucket.

    Attributes:
        number: number of the parameter in the Flat.
        begin: first element within the parameter.
        end: end within the parameter.
        at: position within the bucket.
    """

    number: int
    begin: int
    end: int
    at: slice


class Bucket:
    """A range of a Flat that is sent together, in one chunk per worker, of equal length except the last ones.

    Args:
        flat: the flat arrays.
        begin: start of the range.
        end: end of the range.
        compressor: compressor of its chunks.
        workers: number of workers, and rank of this one.
    """

    def __init__(self, flat: Flat, begin: int, end: int, compressor: Compressor, workers: tuple[int, int]) -> None:
        self.flat, self.begin, self.end, self.compressor = flat, begin, end, compressor
        self.workers, self.rank = workers
        size = end - begin
        self.chunk = -(-size // (self.workers * ALIGNMENT)) * ALIGNMENT
        bounds = [min(size, i * self.chunk) for i in range(self.workers + 1)]
        self.chunks = [slice(a, b) for a, b in itertools.pairwise(bounds)]
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

    # --- full precision ---------------------------------------------------------------------------------------

    def collect(self, rules: Sequence[Rule], out: torch.Tensor) -> torch.Tensor:
        """Writes this worker's unscaled gradients, float32, in the order of the bucket. Returns `out`."""
        for piece in self.pieces:
            gradient, part = rules[piece.number].gradient, out[piece.at]
            if gradient is None:
                part.zero_()
            else:
                torch.mul(gradient[piece.begin : piece.end], rules[piece.number].scale, out=part)
        return out

    def adam(self, rules: Sequence[Rule], gradients: torch.Tensor, factor: float) -> None:
        """Runs an Adam step with gradients times a factor, in the order of the bucket. May change the gradients."""
        for piece in self.pieces:
            rule = rules[piece.number]
            if not rule.active:
                continue
            g, m, v = gradients[piece.at].mul_(factor), self.momentum[piece.at], self.variance[piece.at]
            m.mul_(rule.beta1).add_(g, alpha=1.0 - rule.beta1)
            v.mul_(rule.beta2).addcmul_(g, g, value=1.0 - rule.beta2)
            self._move(piece, rule, m, (v / rule.bias2).sqrt_())

    # --- compressed (lines 6 to 11 of Algorithm 1) ------------------------------------------------------------

    def compress(self, rules: Sequence[Rule], momentum: bool, key: int) -> None:
        """Runs lines 6 and 7 (error feedback): adds momentum (or gradient) to the error, and compresses the sum.

        The payloads of the chunks are written to `sent`; the part that compression drops stays in the error.
        """
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
        """Runs line 9: averages this worker's chunk, adds the server error, and compresses the sum into `averaged`.

        The part that compression drops becomes the new server error (error feedback).
        """
        size = self.compressor.payload_bytes(len(self.server_error))
        self.compressor.average(self.received[:, :size], self.server_error, self.averaged[:size], key)

    def apply(self, rules: Sequence[Rule], momentum: bool) -> None:
        """Runs lines 10 and 11: uses the averages as the new momentum, and updates the parameters."""
        target = self.momentum if momentum else torch.empty_like(self.momentum)
        self.decompress(target)
        for piece in self.pieces:
            rule, m = rules[piece.number], self.momentum[piece.at]
            if not momentum:
                m.mul_(rule.beta1 if rule.active else 1.0).add_(target[piece.at], alpha=1.0 - rule.beta1)
            if rule.active:
                self._move(piece, rule, m, self.variance[piece.at].sqrt())

    def decompress(self, out: torch.Tensor) -> None:
        """Decompresses the gathered averages in the order of the bucket."""
        for k, chunk in enumerate(self.chunks):
            self.compressor.decompress(self._payload(self.gathered[k], chunk), out[chunk])

    def settle(self) -> None:
        """Updates `momentum` so that it can be read."""

    def _payload(self, row: torch.Tensor, chunk: slice) -> torch.Tensor:
        return row[: self.compressor.payload_bytes(chunk.stop - chunk.start)]

    def _move(self, piece: BucketPiece, rule: Rule, momentum: torch.Tensor, deviation: torch.Tensor) -> None:
        """Computes x = x * shrink - rate * m / (deviation + eps). Overwrites the deviation."""
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
