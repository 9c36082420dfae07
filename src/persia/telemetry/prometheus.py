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

__all__ = ["PORTS", "Endpoint"]

PORTS = 256
"""Processes of one host that are asked for the same port take the next free ones, so many at most."""


class Endpoint:
    """Serves the figures of a process over HTTP, as Prometheus reads them; threads of its own do the work.

    Args:
        port: the first that is tried; 0 for any free one.
        host: interface to listen at: "127.0.0.1" for this host only, "0.0.0.0" for all.
        health: called for each reading, from any thread.

    Raises:
        MissingExtraError: prometheus_client is not installed.
        ConfigError: no port is free.
    """

    def __init__(self, port: int, host: str, health: Callable[[], Health]) -> None:
        try:
            import prometheus_client
        except ImportError as error:
            raise MissingExtraError(
                'prometheus_port needs prometheus_client: pip install "persia[prometheus]", or leave it out.',
                extra="prometheus",
            ) from error
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(_Collector(health))
        tried: Iterable[int] = range(port, min(port + PORTS, 1 << 16)) if port else (0,)
        for candidate in tried:
            try:
                self._server, self._thread = prometheus_client.start_http_server(candidate, host, registry)
                break
            except OSError as error:
                failure = error
        else:
            raise ConfigError(
                f"prometheus_port = {port}: none of the {PORTS} ports from there on is free at {host} ({failure}). "
                "Give another one.",
                field="prometheus_port",
            )
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops; the port is free afterwards. A second call does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collector:
    """Makes metrics of Prometheus when they are read."""

    def __init__(self, health: Callable[[], Health]) -> None:
        self._health = health

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        health = self._health()
        whose = {"role": health.role, "rank": str(health.rank)}
        families: dict[str, Any] = {}
        makers = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}

        def family(name: str, labels: dict[str, str]) -> tuple[Any, list[str]]:
            named = {**whose, **labels}
            if name not in families:
                kind = CATALOGUE[name]
                families[name] = makers[kind.type](f"persia_{name}", kind.meaning, labels=list(named))
            return families[name], list(named.values())

        for figure in health.figures:
            made, values = family(figure.name, figure.labels)
            made.add_metric(values, figure.value)
        for latency in health.latencies:
            made, values = family(latency.name, latency.labels)
            below = itertools.accumulate(latency.counts)
            buckets = [(str(bound), count) for bound, count in zip((*BOUNDS, "+Inf"), below, strict=True)]
            made.add_metric(values, buckets, latency.seconds)
        up = GaugeMetricFamily("persia_uptime_seconds", "since the role was made", labels=[*whose, "incarnation"])
        up.add_metric([*whose.values(), str(health.incarnation)], health.uptime)
        yield up
        yield from families.values()
