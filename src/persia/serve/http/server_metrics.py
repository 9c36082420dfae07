"""Metrics of a prediction server."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from persia.telemetry.metrics import Histogram, Latency, Metric, Readings, metrics_of
from persia.telemetry.process import process_metrics

if TYPE_CHECKING:
    from persia.serve.http.batcher import BatcherCounts
    from persia.serve.options import ServeState
    from persia.serve.retriever import RetrieverState

__all__ = ["ServerMetrics", "least_step"]


class ServerMetrics:
    """Counts requests, and collects the metrics of all parts of a server. Thread-safe.

    Args:
        routes: paths to count separately; all other paths are counted together.
    """

    def __init__(self, routes: frozenset[str]) -> None:
        self._routes = routes
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = {route: Histogram() for route in (*sorted(routes), "other")}
        self._parts = {name: Histogram() for name in ("queue", "compute")}

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Adds a request. Called from the event loop only."""
        route = path if path in self._routes else "other"
        self._requests[route, status] += 1
        self._seconds[route].add(seconds)

    def timed(self, part: str, seconds: float) -> None:
        """Adds the time of a part of a request: "queue" or "compute"."""
        self._parts[part].add(seconds)

    def readings(
        self,
        counts: BatcherCounts,
        held_bytes: int,
        ready: bool,
        state: Callable[[], ServeState],
        index: RetrieverState | None = None,
    ) -> Readings:
        """Returns the current metrics.

        Args:
            counts: counts of the batcher.
            held_bytes: size of the bodies of current requests.
            ready: whether the server is ready.
            state: returns the state of the predictor.
            index: index of items; None without one.
        """
        requests = [
            Metric("serve_requests", float(count), {"route": route, "status": str(status)})
            for (route, status), count in list(self._requests.items())
        ]
        values: dict[str, float] = {**counts._asdict(), "held_bytes": held_bytes, "ready": ready}
        metrics = [*requests, *metrics_of("serve", values), *(_of_state(state()) if ready else ()), *process_metrics()]
        if index is not None:
            metrics += _of_index(index)
        latencies: list[Latency] = [
            histogram.latency("serve_request_seconds", {"route": route}) for route, histogram in self._seconds.items()
        ]
        latencies += [histogram.latency(f"serve_{name}_seconds") for name, histogram in self._parts.items()]
        return Readings(metrics, latencies)


def _of_state(state: ServeState) -> list[Metric]:
    values = {
        "epoch": state.epoch,
        "network_step": state.network_step,
        "row_step": least_step(state),
        "rows_age_seconds": state.rows_age_seconds,
        "network_age_seconds": state.network_age_seconds,
        "stored_rows": state.rows,
        "failing": bool(state.problem),
    }
    psi = [Metric("serve_psi", index, {"feature": name}) for name, index in state.drift.items()]
    shares = [
        Metric("serve_input_share", share, {"column": name, "what": what})
        for name, of_column in state.inputs.items()
        for what, share in of_column.items()
    ]
    numbers = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    return [*metrics_of("serve", numbers), *psi, *shares]


def _of_index(index: RetrieverState) -> list[Metric]:
    values: dict[str, float] = {
        "items": index.items,
        "items_step": index.step,
        "items_waiting": index.waiting,
        "items_failing": bool(index.problem),
    }
    return metrics_of("serve", values)


def least_step(state: ServeState) -> int:
    """Returns the number of global steps that all rows contain; -1 if there are none."""
    return min(state.row_steps.values(), default=-1)
