"""Cohorts: parameters with the same first training step, which warm up together and are compressed together."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from persia.batching.native import ThreadPool
from persia.optim.buckets import Bucket, Flat, Rule, ranges
from persia.optim.compressors import Uncompressed
from persia.optim.exchange import Exchange
from persia.optim.native_buckets import bucket_class
from persia.optim.options import APMSqueezeOptions
from persia.optim.tracked_scale import TrackedScale
from persia.optim.variance_refresh import VarianceRefresh
from persia.telemetry.logs import get_logger

__all__ = ["Cohort", "Phase"]

_log = get_logger("persia.optim")

Phase = Literal["warmup", "compressed"]

STABLE = 0.04
"""Relative change of ||v||_1 over a window that counts as stable."""

SHORT = 20
"""Minimum steps of a warm-up for which no element of v is tiny by chance."""


class Cohort:
    """Parameters that started training at the same step. Parameters that are unfrozen later form another cohort.

    Args:
        parameters: parameters on one device.
        beta2: largest beta2 of the parameters.
        options: options of the optimizer.
        exchange: collectives with the other workers.
        pool: threads of the core, if the device is the host.

    Attributes:
        phase: "warmup" or "compressed".
        steps: number of steps so far.
        until: first step at which the warm-up may end.
        scale: scale of the frozen v by parameter of `flat`, if it is tracked.
        refresh: schedule of the updates of the frozen v, if any.
        corrected: whether the bias of v has been corrected, at the first end of the warm-up.
        updates: number of steps in which a parameter of `flat` had a gradient, by parameter.
        norms: bias-corrected ||v||_1 after the last steps, for `warmup="auto"`.
        rates: learning rates in the same steps, by parameter group.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        beta2: float,
        options: APMSqueezeOptions,
        exchange: Exchange,
        pool: ThreadPool | None,
    ) -> None:
        self.phase: Phase = "warmup"
        self.steps = self.until = 0
        self.corrected = False
        self.flat = Flat(parameters, pool)
        self.updates = [0] * len(self.flat.parameters)
        self._options, self._exchange = options, exchange
        self.scale = TrackedScale(len(self.flat.parameters), options.variance_floor) if options.track_scale else None
        self.refresh = VarianceRefresh(options.refresh_variance) if options.refresh_variance is not None else None
        self._window = math.ceil(1.0 / (1.0 - beta2)) if beta2 < 1.0 else 1
        self.norms: deque[float] = deque(maxlen=self._window + 1)
        self.rates: deque[tuple[float, ...]] = deque(maxlen=self._window + 1)
        workers = (exchange.size, exchange.rank)
        self.buckets = [
            bucket_class(self.flat, compressor)(self.flat, begin, end, compressor, workers)
            for begin, end, compressor in ranges(self.flat, options.bucket_bytes, options.compressor or Uncompressed())
        ]

    def observe(self, bias2: Sequence[float], rates: Sequence[float]) -> None:
        """Records ||v||_1 after a step of the warm-up, for `warmup="auto"`.

        Args:
            bias2: divisor for the bias correction of v, by parameter.
            rates: learning rates of the step, by parameter group.
        """
        if self._options.warmup == "auto":
            sums = [v.sum() / b for v, b in zip(self.flat.views(self.flat.variance), bias2, strict=True)]
            self.norms.append(float(torch.stack(sums).sum()))
            self.rates.append(tuple(rates))

    def ready(self) -> bool:
        """Whether this worker would end the warm-up now.

        "auto": | ||v_t||_1 - ||v_(t-w)||_1 | <= 0.04 ||v_(t-w)||_1, and no learning rate is larger in step t than in
        step t - w, where w = 1 / (1 - beta2). Gradients may not change in size while the learning rate is still so low
        that the network hardly changes. (Section 5.1 of arXiv 2008.11343 sets a number of steps.)
        """
        if self.phase == "compressed" or self.steps < self.until:
            return False
        if self.corrected:  # A warm-up by `rewarm`.
            return True
        if self._options.warmup != "auto":
            return self.steps >= self._options.warmup
        if self.steps < 2 * self._window or len(self.norms) <= self._window:
            return False
        # Empty after loading a checkpoint without rates. Groups may have been added since.
        if self.rates and any(late > early for early, late in zip(self.rates[0], self.rates[-1], strict=False)):
            return False
        return abs(self.norms[-1] - self.norms[0]) <= STABLE * self.norms[0]

    def freeze(self, bias2: Sequence[float]) -> None:
        """Ends the warm-up: corrects the bias of v, raises its tiny elements, and freezes it. Blocks.

        Args:
            bias2: divisor for the bias correction of v, by parameter; unused if it is already corrected.
        """
        for v, bias in zip(self.flat.views(self.flat.variance), bias2, strict=True):
            v.div_(1.0 if self.corrected else bias)
        self._raise_to_floor("end of the warm-up")
        if self.scale is not None:
            self.scale.freeze()
        if self.refresh is not None:
            self.refresh.restart(self.steps)
        self.flat.error.zero_()
        self.norms.clear()
        self.rates.clear()
        self.phase, self.corrected = "compressed", True
        _log.info("APMSqueeze: v frozen after %d steps; compressed from now on", self.steps)
        if self.steps < SHORT:
            _log.warning(
                "APMSqueeze: v was frozen after only %d steps. A mean of so few squares is far too small for some "
                "elements by chance, so their steps will be far too large and the network may diverge. Warm up for at "
                "least %d steps, as a rule for 15 %% of the run.",
                self.steps,
                SHORT,
            )

    def _raise_to_floor(self, what: str) -> None:
        """Raises the tiny elements of v. Blocks."""
        views = list(self.flat.views(self.flat.variance))
        overall = self.flat.variance.mean()
        means = torch.stack([v.mean() if v.numel() else overall for v in views])
        means = torch.where(means > 0, means, overall if overall > 0 else torch.ones_like(overall))
        # Workers may round a sum differently, so all use the sum of one worker.
        self._exchange.broadcast(means, what)
        for v, mean in zip(views, means, strict=True):
            v.clamp_(min=self._options.variance_floor * mean)
        if self._options.variance_floor == 0.0:
            self.flat.variance.masked_fill_(self.flat.variance == 0.0, math.inf)  # Such elements do not change.

    # --- full precision ---------------------------------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the current step is an Adam step at full precision: in the warm-up, or to update the frozen v."""
        return self.phase == "warmup" or (self.refresh is not None and self.refresh.due(self.steps))

    def full_rules(self, rules: list[Rule]) -> list[Rule]:
        """Prepares momentum and v for a step at full precision, and returns its rules."""
        if self.phase == "warmup":
            return rules
        assert self.refresh is not None
        self.settle()
        self.fold_scale()
        self.flat.variance.masked_fill_(torch.isinf(self.flat.variance), 0.0)  # See `_raise_to_floor`.
        weights = [self.refresh.weight(r.beta2, self.steps, n) for r, n in zip(rules, self.updates, strict=True)]
        return [rule._replace(beta2=1.0 - weight) for rule, weight in zip(rules, weights, strict=True)]

    def scratch(self, bucket: Bucket) -> torch.Tensor:
        """Returns an array for the gradients of a step at full precision. Reuses the errors in the warm-up."""
        return bucket.error if self.phase == "warmup" else torch.empty_like(bucket.error)

    def end_full(self, bias2: Sequence[float], rates: Sequence[float]) -> None:
        """Ends a step at full precision. Blocks if it has updated a frozen v.

        Args:
            bias2: divisor for the bias correction of v, by parameter.
            rates: learning rates of the step, by parameter group.
        """
        if self.phase == "warmup":
            self.observe(bias2, rates)
        elif self.refresh is not None:
            self._raise_to_floor("update of v")
            self.refresh.updated(self.steps)

    def rewarm(self, steps: int) -> None:
        """Continues with Adam from the frozen v for a number of steps. The errors must be zero."""
        self.until = self.steps + steps
        if self.phase == "compressed":
            self.fold_scale()
            self.phase = "warmup"
            self.flat.variance.masked_fill_(torch.isinf(self.flat.variance), 0.0)  # See `_raise_to_floor`.

    def track(self, rules: Sequence[Rule], squares: Mapping[int, float]) -> None:
        """Observes the gradients of a step, if the scale of v is tracked.

        Args:
            rules: rules by parameter.
            squares: mean of the squared norms of the workers' clipped gradients, by id of the parameter.
        """
        for number, (parameter, rule) in enumerate(zip(self.flat.parameters, rules, strict=True)):
            if rule.active and self.scale is not None:
                self.scale.observe(number, squares[id(parameter)], rule.beta2)

    def scaled(self, rules: list[Rule]) -> list[Rule]:
        """Returns rules whose updates are divided by the scale of v.

        m / (s sqrt(v) + eps) = (1 / s) m / (sqrt(v) + eps / s).
        """
        if self.scale is None:
            return rules
        factors = self.scale.factors()
        return [r._replace(rate=r.rate / s, eps=r.eps / s) for r, s in zip(rules, factors, strict=True)]

    def fold_scale(self) -> None:
        """Multiplies the frozen v by the square of its tracked scale, which is 1 afterwards."""
        if self.scale is not None and self.phase == "compressed":
            for v, factor in zip(self.flat.views(self.flat.variance), self.scale.fold(), strict=True):
                v.mul_(factor**2)

    def settle(self) -> None:
        """Updates the momentum so that it can be read."""
        for bucket in self.buckets:
            bucket.settle()

    def server_error(self) -> torch.Tensor:
        """Returns the server error of the whole Flat, zero except for this worker's part."""
        whole = torch.zeros_like(self.flat.error)
        for bucket in self.buckets:
            whole[bucket.begin : bucket.end][bucket.own] = bucket.server_error
        return whole

    def set_scales(self, values: list[tuple[float, float, float]]) -> None:
        """Sets the tracked scales of a loaded state. If they are no longer tracked, v keeps the current scale."""
        if self.scale is not None:
            self.scale.values = values
            return
        tracked = TrackedScale(len(values), self._options.variance_floor)
        tracked.values = values
        for view, factor in zip(self.flat.views(self.flat.variance), tracked.factors(), strict=True):
            view.mul_(factor**2)

    def set_server_error(self, whole: torch.Tensor) -> None:
        """Sets the server error to this worker's part of `whole`."""
        for bucket in self.buckets:
            bucket.server_error.copy_(whole[bucket.begin : bucket.end][bucket.own])
