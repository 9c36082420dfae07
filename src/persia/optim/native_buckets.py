"""Buckets in host memory: each step of the algorithm is one pass over memory (`cpp/include/persia/onebit.hpp`)."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia.batching.native import ThreadPool
from persia.optim.buckets import Bucket, Flat, Rule
from persia.optim.compressors import Compressor, OneBit

__all__ = ["NativeBucket", "OneBitBucket", "bucket_class", "squares", "sum_of_squares"]

_core: Any = importlib.import_module("persia._core").onebit


def bucket_class(flat: Flat, compressor: Compressor) -> type[Bucket]:
    """Returns the fastest Bucket class for a Flat and a compressor."""
    if flat.pool is None:
        return Bucket
    return OneBitBucket if isinstance(compressor, OneBit) else NativeBucket


def squares(tensors: Sequence[torch.Tensor], pool: ThreadPool | None) -> list[float]:
    """Returns the sum of squares of each flat float32 tensor; finite if its values are. Synchronizes without a pool."""
    if pool is not None:
        return [float(_core.sum_of_squares(t.data_ptr(), t.numel(), pool)) for t in tensors]
    if not tensors:
        return []
    norms = torch.stack([torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors])
    return [float(square) for square in norms.square_().tolist()]


def sum_of_squares(tensors: Sequence[torch.Tensor], pool: ThreadPool | None) -> float:
    """Returns the sum of squares of flat float32 tensors; finite if all values are. Synchronizes without a pool."""
    return sum(squares(tensors, pool))


class NativeBucket(Bucket):
    """A Bucket in host memory that runs Adam's step in one pass. The Flat must have a pool."""

    def __init__(self, flat: Flat, begin: int, end: int, compressor: Compressor, workers: tuple[int, int]) -> None:
        super().__init__(flat, begin, end, compressor, workers)
        assert flat.pool is not None
        self._pool = flat.pool

    def adam(self, rules: Sequence[Rule], gradients: torch.Tensor, factor: float) -> None:
        """See Bucket."""
        runs = _Runs(self, rules, lambda rule: (rule.beta1, 1.0 - rule.beta1))
        _core.adam(*runs.tables, gradients.numpy(), factor, self.momentum.numpy(), self.variance.numpy(), self._pool)
        runs.store()


class OneBitBucket(NativeBucket):
    """A NativeBucket for OneBit. It reads the momentum from the gathered bits instead of storing it."""

    def __init__(self, flat: Flat, begin: int, end: int, compressor: Compressor, workers: tuple[int, int]) -> None:
        super().__init__(flat, begin, end, compressor, workers)
        assert isinstance(compressor, OneBit)
        self._format = (compressor.block, compressor.scale == "l2")
        self._implied = False

    def compress(self, rules: Sequence[Rule], momentum: bool, key: int) -> None:
        """See Bucket."""
        runs = _Runs(
            self,
            rules,
            lambda rule: (
                rule.beta1 if rule.active else 1.0,
                (1.0 - rule.beta1 if momentum else 1.0) * rule.scale,
            ),
            move=False,
        )
        _core.compress(
            *runs.tables,
            self.momentum.numpy() if momentum and not self._implied else None,
            self.gathered.numpy() if momentum and self._implied else None,
            self.error.numpy(),
            self.sent.numpy(),
            self.chunk,
            *self._format,
            self._pool,
        )

    def average(self, key: int) -> None:
        """See Bucket."""
        _core.average(
            self.received.numpy(), self.server_error.numpy(), self.averaged.numpy(), *self._format, self._pool
        )

    def apply(self, rules: Sequence[Rule], momentum: bool) -> None:
        """See Bucket."""
        runs = _Runs(self, rules, lambda rule: (rule.beta1 if rule.active else 1.0, 1.0 - rule.beta1))
        written = None if momentum else self.momentum.numpy()
        _core.apply(
            *runs.tables, self.gathered.numpy(), written, self.variance.numpy(), self.chunk, *self._format, self._pool
        )
        runs.store()
        self._implied = momentum

    def settle(self) -> None:
        """See Bucket."""
        if self._implied:
            self.decompress(self.momentum)
            self._implied = False


class _Runs:
    """The pieces of a bucket with their rules, as tables for the core.

    Args:
        bucket: the bucket.
        rules: rules by parameter.
        shares: returns the factors of a rule on the momentum and on the gradient.
        move: whether to update parameters.
    """

    def __init__(self, bucket: Bucket, rules: Sequence[Rule], shares: Any, move: bool = True) -> None:
        self._bucket = bucket
        self._copies: list[tuple[int, torch.Tensor]] = []
        bounds: list[tuple[int, int, int, int]] = []
        numbers: list[tuple[float, ...]] = []
        for number, piece in enumerate(bucket.pieces):
            rule = rules[piece.number]
            gradient = 0 if rule.gradient is None else rule.gradient.data_ptr() + 4 * piece.begin
            target = self._address(number) if move and rule.active else 0
            bounds.append((piece.at.start, piece.at.stop, gradient, target))
            numbers.append((*shares(rule), rule.rate, rule.shrink, rule.eps, rule.beta2, 1.0 - rule.beta2, rule.bias2))
        self.tables: tuple[NDArray[np.uint64], NDArray[np.float32]] = (
            np.array(bounds, np.uint64),
            np.array(numbers, np.float32),
        )

    def _address(self, number: int) -> int:
        piece = self._bucket.pieces[number]
        parameter = self._bucket.flat.parameters[piece.number]
        if parameter.dtype == torch.float32 and parameter.is_contiguous():
            return parameter.data_ptr() + 4 * piece.begin
        copy = parameter.detach().reshape(-1)[piece.begin : piece.end].to(torch.float32, copy=True)
        self._copies.append((number, copy))
        return copy.data_ptr()

    def store(self) -> None:
        """Writes back parameters that were updated as copies, as they are not contiguous float32."""
        for number, copy in self._copies:
            self._bucket.store(self._bucket.pieces[number], copy)
