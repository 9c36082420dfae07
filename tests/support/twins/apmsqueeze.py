"""Slow, readable reference of APMSqueeze for tests: one process, n simulated workers, float64, chunk by chunk.

Implements Algorithm 1 of arXiv 2008.11343. Where the paper leaves details open, it follows
:class:`persia.optim.APMSqueeze`: the bias of m and v is corrected (that of v once, when it is frozen); tiny elements of
the frozen v are raised; small tensors are sent uncompressed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from persia.optim.buckets import ALIGNMENT, SMALL, bucket_count
from persia.optim.compressors import Compressor, OneBit, StochasticTernary, TopK, Uncompressed
from persia.optim.options import APMSqueezeOptions

__all__ = ["ReferenceAPMSqueeze", "reference_compress"]

Vector = NDArray[np.float64]


def reference_compress(compressor: Compressor, values: Vector, key: int = 0) -> Vector:
    """Returns the values of one chunk after compression and decompression: C_w[values]."""
    sent = np.zeros_like(values)
    if isinstance(compressor, Uncompressed):
        return values.copy()
    if isinstance(compressor, TopK):
        if len(values):
            kept = max(1, int(np.ceil(compressor.ratio * len(values))))
            largest = np.argsort(-np.abs(values), kind="stable")[:kept]
            sent[largest] = values[largest]
        return sent
    begins = np.arange(0, len(values), getattr(compressor, "block", 1))
    lengths = np.diff(begins, append=len(values))

    def by_block(of: np.ufunc, numbers: Vector) -> Vector:
        """Returns for each element what a ufunc makes of the numbers of its block."""
        return np.repeat(of.reduceat(numbers, begins), lengths) if len(numbers) else numbers

    size, count = np.abs(values), np.repeat(lengths, lengths)
    if isinstance(compressor, OneBit):
        if compressor.scale == "mean":
            scale = by_block(np.add, size) / count
        else:
            scale = np.sqrt(by_block(np.add, values * values) / count)
        return np.where(values >= 0, scale, -scale)
    if isinstance(compressor, StochasticTernary):
        generator = torch.Generator().manual_seed(compressor.stream(key))
        chance = torch.rand(len(values), generator=generator).double().numpy()
        total, squares = by_block(np.add, size), by_block(np.add, values * values)
        amplitude = np.divide(squares, total, out=np.zeros_like(total), where=total > 0)
        drawn = chance * by_block(np.maximum, size) < size
        return np.where(drawn, np.where(values > 0, amplitude, -amplitude), 0.0)
    raise TypeError(f"no reference for {type(compressor).__name__}")


class ReferenceAPMSqueeze:
    """All workers at once.

    Args:
        parameters: initial values of the tensors, equal on all workers; any shape.
        workers: number of workers.
        options: the options of APMSqueeze.
        lr: learning rate; may be changed between steps.
        betas: as in APMSqueeze.
        eps: as in APMSqueeze.
        weight_decay: decoupled.

    Attributes:
        x: parameters, flat, in the order in which they were given.
        momentum: the agreed one, like `x`.
        variance: v, like `x`; corrected once it is frozen.
        worker_errors: by worker, like `x`.
        server_error: like `x`: each element is on the worker whose chunk it is in.
        sent: by worker, what it sent in the last step, decompressed, like `x`.
    """

    def __init__(
        self,
        parameters: Sequence[NDArray[Any]],
        workers: int,
        options: APMSqueezeOptions,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.workers, self.options, self.lr, self.eps, self.weight_decay = workers, options, lr, eps, weight_decay
        self.beta1, self.beta2 = betas
        self.x: list[Vector] = [np.array(p, np.float64).ravel() for p in parameters]
        self.momentum = [np.zeros_like(x) for x in self.x]
        self.variance = [np.zeros_like(x) for x in self.x]
        self.worker_errors = [[np.zeros_like(x) for x in self.x] for _ in range(workers)]
        self.server_error = [np.zeros_like(x) for x in self.x]
        self.sent = [[np.zeros_like(x) for x in self.x] for _ in range(workers)]
        self.steps = 0
        self.frozen = False
        self.frozen_weight = 1.0
        self.until = 0
        self.corrected = False
        self.squares = [0.0] * len(self.x)
        self.frozen_squares = [0.0] * len(self.x)
        self.refreshes = self.refreshed = 0
        self.norms: list[float] = []
        self.rates: list[float] = []

    def step(self, gradients: Sequence[Sequence[NDArray[Any]]]) -> None:
        """Runs one step of all workers.

        Args:
            gradients: by worker and tensor.
        """
        mine = [[np.array(g, np.float64).ravel() for g in worker] for worker in gradients]
        if not all(np.isfinite(g).all() for worker in mine for g in worker):
            return
        if not self.frozen and self._ready():
            self._freeze()
        refresh = self.frozen and self._refresh_is_due()
        if refresh:
            self._fold()
        self.steps += 1
        if not self.frozen:
            self._adam(mine)
            return
        self._clip_frozen(mine)
        self._track(mine)
        if refresh:
            self._refresh(mine)
        else:
            self._squeeze(mine)

    def _adam(self, gradients: list[list[Vector]]) -> None:
        """Runs line 2."""
        average = [np.sum([worker[t] for worker in gradients], axis=0) / self.workers for t in range(len(self.x))]
        norm = sum(float(g @ g) for g in average) ** 0.5
        clip = 1.0 if self.options.clip_norm is None else min(1.0, self.options.clip_norm / (norm + 1e-6))
        self._track([[clip * g for g in worker] for worker in gradients])
        for t, g in enumerate(average):
            self.momentum[t] = self.beta1 * self.momentum[t] + (1 - self.beta1) * clip * g
            self.variance[t] = self.beta2 * self.variance[t] + (1 - self.beta2) * (clip * g) ** 2
            self._move(t, self.variance[t] / self._bias2())
        self.norms.append(sum(float(v.sum()) for v in self.variance) / self._bias2())
        self.rates.append(self.lr)

    def _ready(self) -> bool:
        """Returns whether the warm-up is over: by number, or v has stabilised and the rate has not risen."""
        if self.corrected or self.steps < self.until:
            return self.steps >= self.until
        if self.options.warmup != "auto":
            return self.steps >= self.options.warmup
        window = int(np.ceil(1 / (1 - self.beta2)))
        if self.steps < 2 * window:
            return False
        early, late = self.norms[-1 - window], self.norms[-1]
        return abs(late - early) <= 0.04 * early and self.rates[-1] <= self.rates[-1 - window]

    def _bias2(self) -> float:
        return 1.0 if self.corrected else 1 - self.beta2**self.steps

    def _freeze(self) -> None:
        self.variance = [v / self._bias2() for v in self.variance]
        self._raise_to_floor()
        self.frozen = self.corrected = True
        self.frozen_squares = list(self.squares)
        self.frozen_weight = 1 - self.beta2**self.steps
        self.refreshes, self.refreshed = 0, self.steps

    def _raise_to_floor(self) -> None:
        overall = np.concatenate(self.variance).mean() or 1.0
        for t, v in enumerate(self.variance):
            mean = (v.mean() if len(v) else 0.0) or overall
            self.variance[t] = np.maximum(v, self.options.variance_floor * mean)

    def _refresh_is_due(self) -> bool:
        """Returns whether the next step updates the frozen v."""
        kappa = self.options.refresh_variance
        return kappa is not None and self.steps + 1 - self.refreshed >= 2 ** (self.refreshes // kappa)

    def _refresh(self, gradients: list[list[Vector]]) -> None:
        """Runs a step with the average of the gradients, which also updates v."""
        share = (1 - self.beta2 ** (self.steps - self.refreshed)) / (1 - self.beta2**self.steps)
        weight = min(share, max(0.05, 1 - self.beta2))
        for t in range(len(self.x)):
            g = np.sum([worker[t] for worker in gradients], axis=0) / self.workers
            self.momentum[t] = self.beta1 * self.momentum[t] + (1 - self.beta1) * g
            self.variance[t] = (1 - weight) * self.variance[t] + weight * g**2
            self._move(t, self.variance[t])
        self._raise_to_floor()
        self.refreshes, self.refreshed = self.refreshes + 1, self.steps

    def _track(self, gradients: list[list[Vector]]) -> None:
        """Updates the running means of the squared norms of the workers' gradients, by tensor."""
        for t in range(len(self.x)):
            square = sum(float(worker[t] @ worker[t]) for worker in gradients) / self.workers
            self.squares[t] = self.beta2 * self.squares[t] + (1 - self.beta2) * square

    def _scale(self, t: int) -> float:
        """Returns the scale of the frozen v of a tensor."""
        if not self.options.track_scale or self.frozen_squares[t] == 0.0:
            return 1.0
        now = self.squares[t] / (1 - self.beta2**self.steps)
        return float(max(now / (self.frozen_squares[t] / self.frozen_weight), self.options.variance_floor) ** 0.5)

    def rewarm(self, steps: int) -> None:
        """Returns to Adam for some steps: all errors go into the momentum, and v goes on from the frozen one."""
        share = 1.0 if self.options.communicate == "momentum" else 1 - self.beta1
        for t in range(len(self.x)) if self.frozen else ():
            unsent = sum(errors[t] for errors in self.worker_errors) / self.workers + self.server_error[t]
            self.momentum[t] = self.momentum[t] + share / self.beta1 * unsent
            self.server_error[t] = np.zeros_like(unsent)
            for errors in self.worker_errors:
                errors[t] = np.zeros_like(unsent)
        if self.frozen:
            self._fold()
        self.frozen, self.until = False, self.steps + steps

    def _fold(self) -> None:
        """Multiplies the frozen v by the square of its scale, which is 1 afterwards."""
        self.variance = [v * self._scale(t) ** 2 for t, v in enumerate(self.variance)]
        self.frozen_squares = [
            now if then else 0.0 for now, then in zip(self.squares, self.frozen_squares, strict=True)
        ]
        self.frozen_weight = 1 - self.beta2**self.steps

    def _clip_frozen(self, gradients: list[list[Vector]]) -> None:
        if self.options.clip_norm is not None:
            squares = sum(float(g @ g) for worker in gradients for g in worker)
            clip = min(1.0, self.options.clip_norm / ((squares / self.workers) ** 0.5 + 1e-6))
            for worker in gradients:
                for g in worker:
                    g *= clip

    def _squeeze(self, gradients: list[list[Vector]]) -> None:
        """Runs lines 6 to 11, bucket by bucket, chunk by chunk."""
        compensated = []  # Lines 6 and 7: the values that each worker sends.
        for worker, errors in zip(gradients, self.worker_errors, strict=True):
            if self.options.communicate == "momentum":
                values = [self.beta1 * m + (1 - self.beta1) * g for m, g in zip(self.momentum, worker, strict=True)]
            else:
                values = worker
            compensated.append(self._flat([v + e for v, e in zip(values, errors, strict=True)]))
        server_error, flat_sent = self._flat(self.server_error), [np.zeros_like(c) for c in compensated]
        result = np.zeros_like(server_error)
        for number, (begin, end, compressor) in enumerate(self._buckets()):
            for k, (low, high) in enumerate(self._chunks(begin, end)):
                for rank in range(self.workers):  # Line 7, and line 8: to worker k.
                    key = self._key(rank, number, 0) + k
                    flat_sent[rank][low:high] = reference_compress(compressor, compensated[rank][low:high], key)
                average = sum(s[low:high] for s in flat_sent) / self.workers + server_error[low:high]  # Line 9.
                result[low:high] = reference_compress(compressor, average, self._key(k, number, 1))
                server_error[low:high] = average - result[low:high]
        self.server_error = self._tensors(server_error)
        for rank in range(self.workers):
            self.sent[rank] = self._tensors(flat_sent[rank])
            self.worker_errors[rank] = self._tensors(compensated[rank] - flat_sent[rank])
        for t, averaged in enumerate(self._tensors(result)):  # Lines 10 and 11.
            if self.options.communicate == "momentum":
                self.momentum[t] = averaged
            else:
                self.momentum[t] = self.beta1 * self.momentum[t] + (1 - self.beta1) * averaged
            self._move(t, self.variance[t] * self._scale(t) ** 2)

    def _move(self, t: int, variance: Vector) -> None:
        corrected = self.momentum[t] / (1 - self.beta1**self.steps)
        self.x[t] = self.x[t] * (1 - self.lr * self.weight_decay) - self.lr * corrected / (np.sqrt(variance) + self.eps)

    # --- layout: what shares a block with what ----------------------------------------------------------------

    def _order(self) -> list[int]:
        large = [t for t, x in enumerate(self.x) if len(x) >= SMALL]
        return large + [t for t, x in enumerate(self.x) if len(x) < SMALL]

    def _flat(self, tensors: Sequence[Vector]) -> Vector:
        return np.concatenate([tensors[t] for t in self._order()])

    def _tensors(self, flat: Vector) -> list[Vector]:
        tensors, begin = [np.empty(0)] * len(self.x), 0
        for t in self._order():
            tensors[t] = flat[begin : begin + len(self.x[t])].copy()
            begin += len(self.x[t])
        return tensors

    def _buckets(self) -> list[tuple[int, int, Compressor]]:
        large = sum(len(x) for x in self.x if len(x) >= SMALL)
        total = sum(len(x) for x in self.x)
        count = bucket_count(large, self.options.bucket_bytes)
        edges = [large * i // count // ALIGNMENT * ALIGNMENT for i in range(count)] + [large]
        buckets: list[tuple[int, int, Compressor]] = []
        for begin, end in itertools.pairwise(edges):
            if begin < end:
                buckets.append((begin, end, self.options.compressor or Uncompressed()))
        if large < total:
            buckets.append((large, total, Uncompressed()))
        return buckets

    def _chunks(self, begin: int, end: int) -> list[tuple[int, int]]:
        length = int(np.ceil((end - begin) / (self.workers * ALIGNMENT))) * ALIGNMENT
        return [(min(end, begin + k * length), min(end, begin + (k + 1) * length)) for k in range(self.workers)]

    def _key(self, rank: int, bucket: int, stage: int) -> int:
        return ((((self.steps - 1) * self.workers + rank) * 65536 + bucket) * 2 + stage) * 65536
