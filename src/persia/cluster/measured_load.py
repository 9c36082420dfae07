"""Computes what a `Scaler` decides by, from two answers of all processes of a cluster to a health check."""

from __future__ import annotations

from collections.abc import Sequence

from persia.cluster.scaler import MeasuredLoad
from persia.membership.observing import Answer
from persia.telemetry.metrics import Health

__all__ = ["NO_STEP", "measure"]

NO_STEP = "an NN worker made no step"
"""Problem of a window that is too short for a step."""

TRAINED = 0.8
"""Minimum share of a window in which NN workers train; they also evaluate, and write checkpoints."""

DELAYED_SECONDS = 10.0
"""Age of the last message read from a stream, from which on its data loaders are behind if there are more messages."""


def measure(
    before: Sequence[Answer],
    now: Sequence[Answer],
    seconds: float,
    *,
    reserved: int | None = None,
    rows_stay: bool = False,
    memory_bounded: bool = False,
) -> MeasuredLoad | str:
    """Returns what the processes did between two answers.

    Args:
        before: answers of all processes at the beginning.
        now: answers at the end.
        seconds: seconds between both.
        reserved: bytes that each embedding PS reserves; None if only the memory of its host bounds it.
        rows_stay: see `MeasuredLoad`.
        memory_bounded: see `MeasuredLoad`.

    Returns:
        What was measured; or why nothing was, such as `NO_STEP`.
    """
    if any(answer.health is None for answer in (*before, *now)):
        return "a process did not answer"
    if _identities(before) != _identities(now):
        return "a process joined, left or restarted"
    if any(answer.member.state == "leaving" for answer in now):
        return "a process is leaving"
    earlier = {(h.role, h.rank): h for h in _healths(before)}
    by_role: dict[str, list[tuple[Health, Health]]] = {}
    for health in _healths(now):
        by_role.setdefault(health.role, []).append((earlier[health.role, health.rank], health))
    servers, workers, loaders, trainers = (
        by_role.get(role, []) for role in ("embedding_ps", "embedding_worker", "data_loader", "nn_worker")
    )
    if not trainers or any(_grown("nn_step", pair) <= 0 for pair in trainers):
        return NO_STEP
    waits = [_duration("nn_wait_seconds", pair) for pair in trainers]
    trained = [wait + _duration("nn_step_seconds", pair) for wait, pair in zip(waits, trainers, strict=True)]
    if _mean(trained) < TRAINED * seconds:
        return f"NN workers trained for {_mean(trained) / seconds:.0%} of it, below {TRAINED:.0%}"
    trained = [max(of_all, 1e-9) for of_all in trained]
    loading = [min(_grown("nn_loading_seconds", pair), wait) for wait, pair in zip(waits, trainers, strict=True)]
    return MeasuredLoad(
        len(servers),
        len(workers),
        len(loaders),
        lookups=_mean([(wait - of) / of_all for wait, of, of_all in zip(waits, loading, trained, strict=True)]),
        loading=_mean([of / of_all for of, of_all in zip(loading, trained, strict=True)]),
        ps_memory=max((_memory(later, reserved) for _, later in servers), default=0.0),
        ps_processors=max((_processors(pair, seconds) for pair in servers), default=0.0),
        worker_processors=_mean([_processors(pair, seconds) for pair in workers]),
        loaders_busy=_mean([_busy(pair, seconds) for pair in loaders]),
        source_idle=_source_idle([later for _, later in loaders]),
        rows_stay=rows_stay,
        memory_bounded=memory_bounded,
    )


def _healths(answers: Sequence[Answer]) -> list[Health]:
    return [answer.health for answer in answers if answer.health is not None]


def _identities(answers: Sequence[Answer]) -> set[tuple[str, int, int, int, str]]:
    return {(h.role, h.rank, h.incarnation, h.pid, a.member.state) for a in answers if (h := a.health) is not None}


def _grown(counter: str, pair: tuple[Health, Health]) -> float:
    return max(0.0, pair[1].total(counter) - pair[0].total(counter))


def _duration(histogram: str, pair: tuple[Health, Health]) -> float:
    first, later = (sum(timed.seconds for timed in h.latencies if timed.name == histogram) for h in pair)
    return max(0.0, later - first)


def _busy(loader: tuple[Health, Health], seconds: float) -> float:
    if not any(metric.name == "loader_idle_seconds" for metric in loader[1].metrics):
        return 0.0  # It has no source.
    return max(0.0, 1 - _grown("loader_idle_seconds", loader) / seconds)


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
