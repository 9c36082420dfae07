"""Metrics of all NN workers as one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import safetensors.numpy

from persia.metrics import Metrics

__all__ = ["merged_metrics"]


def merged_metrics(metrics: Metrics, gather: Callable[[bytes], list[bytes]]) -> Metrics:
    """The rows of all NN workers, counted together, in the order of ranks: the same on each. Blocks.

    Args:
        metrics: of this NN worker; they stay as they are.
        gather: `AllReduce.gather`, or that of an NN worker alone.
    """
    state = {name: np.asarray(value) for name, value in metrics.state_dict().items() if name != "labels"}
    payloads = gather(safetensors.numpy.save(state))
    if len(payloads) == 1:
        return metrics
    total = Metrics(metrics.labels, max_days=metrics.max_days)
    for payload in payloads:
        part = Metrics(metrics.labels, max_days=metrics.max_days)
        part.load_state_dict({**safetensors.numpy.load(payload), "labels": metrics.labels})
        total.merge(part)
    return total
