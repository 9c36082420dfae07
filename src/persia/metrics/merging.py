"""Merges the metrics of all NN workers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import safetensors.numpy

from persia.metrics.grouped import GroupedMetrics
from persia.metrics.streaming import Metrics

__all__ = ["merged_grouped", "merged_metrics"]


def merged_metrics(metrics: Metrics, gather: Callable[[bytes], list[bytes]]) -> Metrics:
    """Merges the metrics of all NN workers in the order of ranks, with the same result on each. Blocks.

    Args:
        metrics: metrics of this NN worker; not modified.
        gather: `AllReduce.gather`, or `SingleReplica.gather`.
    """
    state = {name: np.asarray(value) for name, value in metrics.state_dict().items() if name != "labels"}
    payloads = gather(safetensors.numpy.save(state))
    if len(payloads) == 1:
        return metrics
    total = Metrics(metrics.targets, max_days=metrics.max_days)
    for payload in payloads:
        part = Metrics(metrics.targets, max_days=metrics.max_days)
        part.load_state_dict({**safetensors.numpy.load(payload), "labels": metrics.labels})
        total.merge(part)
    return total


def merged_grouped(metrics: GroupedMetrics, gather: Callable[[bytes], list[bytes]]) -> GroupedMetrics:
    """Merges the grouped metrics of all NN workers, as `merged_metrics` does. Each receives the rows of all."""
    payloads = gather(safetensors.numpy.save(metrics.state_dict()))
    if len(payloads) == 1:
        return metrics
    total = GroupedMetrics(metrics.at, binary=metrics.binary)
    for payload in payloads:
        part = GroupedMetrics(metrics.at, binary=metrics.binary)
        part.load_state_dict(safetensors.numpy.load(payload))
        total.merge(part)
    return total
