"""A Prometheus endpoint of a process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from persia.errors import ConfigError, MissingExtraError
from persia.telemetry.catalogue import CATALOGUE
from persia.telemetry.metrics import BOUNDS, Health

if TYPE_CHECKING:
    from prometheus_client import Metric

__all__ = ["PORTS", "Endpoint", "exposition"]

PORTS = 256
"""Number of ports to try. Processes of one host with the same configured port take the next free ones."""


class Endpoint:
    """Serves the metrics of a process over HTTP for Prometheus, in its own threads.

    Args:
        port: first port to try; 0 for any free port.
        host: interface to listen on: "127.0.0.1" for this host only, "0.0.0.0" for all.
        health: called for each scrape, from any thread.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ConfigError: no port is free.
    """

    def __init__(self, port: int, host: str, health: Callable[[], Health]) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError(
                'prometheus_port needs prometheus_client: pip install "persia-recsys[prometheus]", or leave it out.',
                extra="prometheus",
            ) from error
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(health))
        candidates: Iterable[int] = range(port, min(port + PORTS, 1 << 16)) if port else (0,)
        for candidate in candidates:
            try:
                self._server, self._thread = prometheus_client.start_http_server(candidate, host, registry)
                break
            except OSError as error:
                failure = error
        else:
            raise ConfigError(
                f"No free port on {host} among the {PORTS} ports from prometheus_port = {port} ({failure}). "
                "Choose another port.",
                field="prometheus_port",
            )
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops the endpoint and frees the port. A second call is a no-op."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposition(health: Callable[[], Health]) -> Callable[[], bytes]:
    """Returns a function that returns the current metrics in Prometheus' text format. Thread-safe if `health` is.

    Raises:
        MissingExtraError: prometheus_client is not installed.
    """
    try:
        import prometheus_client
    except ImportError as error:
        raise MissingExtraError(
            '/metrics needs prometheus_client: pip install "persia-recsys[serve]".', extra="serve"
        ) from error
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(_Collector(health))
    return lambda: bytes(prometheus_client.generate_latest(registry))


class _Collector:
    """Converts metrics to Prometheus metrics at each scrape."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        health = self._health()
        common = {"role": health.role, "rank": str(health.rank)}
        families: dict[str, Any] = {}
        makers = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}

        def family(name: str, labels: dict[str, str]) -> tuple[Any, list[str]]:
            all_labels = {**common, **labels}
            if name not in families:
                kind = CATALOGUE[name]
                families[name] = makers[kind.type](f"persia_{name}", kind.meaning, labels=list(all_labels))
            return families[name], list(all_labels.values())

        for metric in health.metrics:
            exported, values = family(metric.name, metric.labels)
            exported.add_metric(values, metric.value)
        for latency in health.latencies:
            exported, values = family(latency.name, latency.labels)
            below = itertools.accumulate(latency.counts)
            buckets = [(str(bound), count) for bound, count in zip((*BOUNDS, "+Inf"), below, strict=True)]
            exported.add_metric(values, buckets, latency.seconds)
        up = GaugeMetricFamily(
            "persia_uptime_seconds", "time since the role was created", labels=[*common, "incarnation"]
        )
        up.add_metric([*common.values(), str(health.incarnation)], health.uptime)
        yield up
        yield from families.values()
