"""Computes what a `Scaler` decides by, from two answers of all processes of a cluster to a health check."""

from __future__ import annotations

from collections.abc import Sequence

from persia.cluster.scaler import MeasuredLoad
from persia.membership.observing import Answer
from persia.telemetry.metrics import Health

__all__ = ["measure"]

DELAYED_SECONDS = 10.0
"""Age of the last message read from a stream, from which on its data loaders are behind if there are more messages."""


def measure(
    before: Sequence[Answer],
    now: Sequence[Answer],
    seconds: float,
    *,
    reserved: int | None = None,
    rows_stay: bool = False,
) -> MeasuredLoad | None:
    """Returns what the processes did between two answers.

    Args:
        before: answers of all processes at the beginning.
        now: answers at the end.
        seconds: seconds between both.
        reserved: bytes that each embedding PS reserves; None if only the memory of its host bounds it.
        rows_stay: see `MeasuredLoad`.

    Returns:
        None if they do not compare: a process joined, left, restarted or did not answer, or nothing was trained.
    """
    if any(answer.health is None for answer in (*before, *now)) or _identities(before) != _identities(now):
        return None
    earlier = {(h.role, h.rank): h for h in _healths(before)}
    by_role: dict[str, list[tuple[Health, Health]]] = {}
    for health in _healths(now):
        by_role.setdefault(health.role, []).append((earlier[health.role, health.rank], health))
    servers, workers, loaders, trainers = (
        by_role.get(role, []) for role in ("embedding_ps", "embedding_worker", "data_loader", "nn_worker")
    )
    if not trainers or any(_grown("nn_step", pair) <= 0 for pair in trainers):
        return None
    waits = [_waited(later) - _waited(first) for first, later in trainers]
    loading = [_grown("nn_loading_seconds", pair) for pair in trainers]
    return MeasuredLoad(
        len(servers),
        len(workers),
        len(loaders),
        lookups=_mean([max(0.0, wait - of) / seconds for wait, of in zip(waits, loading, strict=True)]),
        loading=_mean([of / seconds for of in loading]),
        ps_memory=max((_memory(later, reserved) for _, later in servers), default=0.0),
        ps_processors=max((_processors(pair, seconds) for pair in servers), default=0.0),
        worker_processors=_mean([_processors(pair, seconds) for pair in workers]),
        loaders_busy=_mean([max(0.0, 1 - _grown("loader_idle_seconds", pair) / seconds) for pair in loaders]),
        source_idle=_source_idle([later for _, later in loaders]),
        rows_stay=rows_stay,
    )


def _healths(answers: Sequence[Answer]) -> list[Health]:
    return [answer.health for answer in answers if answer.health is not None]


def _identities(answers: Sequence[Answer]) -> set[tuple[str, int, int, int, str]]:
    return {(h.role, h.rank, h.incarnation, h.pid, a.member.state) for a in answers if (h := a.health) is not None}


def _grown(counter: str, pair: tuple[Health, Health]) -> float:
    return max(0.0, pair[1].total(counter) - pair[0].total(counter))


def _waited(health: Health) -> float:
    return sum(latency.seconds for latency in health.latencies if latency.name == "nn_wait_seconds")


def _processors(pair: tuple[Health, Health], seconds: float) -> float:
    return _grown("cpu_seconds", pair) / seconds / max(1.0, pair[1].total("process_processors"))


def _memory(health: Health, reserved: int | None) -> float:
    of_reserved = health.total("process_bytes") / reserved if reserved else 0.0
    return max(health.total("host_memory_share"), of_reserved)


def _source_idle(loaders: Sequence[Health]) -> bool:
    """Returns whether data loaders read a stream, and none of them is behind."""
    if not any(metric.name.startswith("stream_") for loader in loaders for metric in loader.metrics):
        return False
    return not any(
        loader.total("stream_lag") > 0 and loader.total("stream_delay_seconds") > DELAYED_SECONDS for loader in loaders
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
