"""Runs of benchmarks/fresh.py: a data set with a seed, trained along the timelines of all kinds."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

from benchmarks import gba_runs, modes_runs, paper_runs
from benchmarks.modes_runs import Rates
from persia.modes import Hybrid, Mode, Sync
from persia.replay import Setting, Summary, Timeline, simulate

__all__ = ["DATA", "DEPTHS", "KINDS", "LATENCIES", "Case", "Learned", "Source", "learned", "versions"]

DEPTHS = (1, 4, 16)
KINDS: dict[str, tuple[Mode, bool]] = {
    "sync": (Sync(), False),
    "sync_ahead": (Sync(), True),
    **{f"hybrid_{n}": (Hybrid(n, warmup=0), False) for n in DEPTHS},
    **{f"hybrid_{n}_refresh": (Hybrid(n, warmup=0), True) for n in DEPTHS},
}
"""Modes, and whether rows are refreshed."""
LATENCIES = {"quarter": 0.25, "whole": 1.0}
"""Of a lookup, and of a push, in compute times of a batch."""
DAYS = 8


class Source(NamedTuple):
    """A data set.

    Attributes:
        kind: "stationary" as in `modes.auc_hybrid`, "shape" as in `paper.table2`, "stream" as in `modes.globo`.
        rates: the best ones of Sync, as those benchmarks found them.
        ids: of each feature, of stationary data.
        zipf: exponent of how often they occur.
    """

    kind: str
    rates: Rates
    ids: int = 0
    zipf: float = 0.0


DATA = {
    "100000_1.05": Source("stationary", Rates(0.009, 0.1), 100_000, 1.05),
    "100000_0.7": Source("stationary", Rates(0.027, 0.05), 100_000, 0.7),
    "500_1.05": Source("stationary", Rates(0.009, 0.2), 500, 1.05),
    "globo": Source("shape", Rates(0.001, 0.2)),
    "taobao": Source("shape", Rates(0.001, 0.05)),
    "avazu": Source("shape", Rates(0.001, 0.05)),
    "criteo": Source("shape", Rates(0.001, 0.025)),
    "globo_in_order": Source("stream", Rates(0.003, 1.6)),
}


class Case(NamedTuple):
    """A data set, a seed, and the number of rows."""

    data: str
    seed: int
    rows: int


class Learned(NamedTuple):
    """AUC by day, or one AUC, and the totals of the timeline."""

    areas: tuple[float, ...]
    summary: Summary


class _Experiment(NamedTuple):
    """The number of batches, the cluster by latency, and the training along a timeline."""

    batches: int
    setting: Callable[[float], Setting]
    train: Callable[[Timeline], tuple[float, ...]]


def learned(case: Case) -> dict[str, Learned]:
    """Returns the result of each latency and kind, by "LATENCY.KIND".

    Runs in which every batch reads the same versions of rows are trained once: they differ in time, and in the order in
    which a PS sums the gradients of a step.
    """
    experiment = _EXPERIMENTS[DATA[case.data].kind](case)
    trained: dict[tuple[int, ...], tuple[float, ...]] = {}
    results = {}
    for latency, seconds in LATENCIES.items():
        for kind, (mode, refresh) in KINDS.items():
            timeline = simulate(mode, experiment.setting(seconds), experiment.batches, refresh=refresh)
            read = versions(timeline)
            if read not in trained:
                trained[read] = experiment.train(timeline)
                gc.collect()  # Servers refer to the training that made them.
            results[f"{latency}.{kind}"] = Learned(trained[read], timeline.summary())
    return results


def versions(timeline: Timeline) -> tuple[int, ...]:
    """Returns the version of the rows that each batch reads, in order of the batches."""
    reads = {event.batch: event.version for event in timeline.events if event.kind == "lookup"}
    return tuple(reads[batch] for batch in sorted(reads))


def _stationary(case: Case) -> _Experiment:
    source = DATA[case.data]
    plan = modes_runs.Plan(
        (Sync(),) * DAYS, source.rates, case.seed, case.rows // DAYS, ids=source.ids, zipf=source.zipf
    )
    return _Experiment(
        DAYS * (plan.rows // plan.local),
        lambda latency: plan._replace(latency=latency).setting(),
        lambda timeline: modes_runs.train_through_along(plan, timeline).areas,
    )


def _shape(case: Case) -> _Experiment:
    run = paper_runs.Run(case.data, "deepfm", Sync(), DATA[case.data].rates, case.seed, case.rows)
    return _Experiment(
        len(paper_runs.dataset(run.source, run.rows, run.seed).train) // paper_runs.LOCAL,
        lambda latency: paper_runs.setting(case.seed, latency),
        lambda timeline: (paper_runs.train_along(run, timeline).auc,),
    )


def _stream(case: Case) -> _Experiment:
    plan = gba_runs.Stream(Sync(), DATA[case.data].rates, case.seed, case.rows // 4, case.rows)
    return _Experiment(
        case.rows // gba_runs.STREAM_LOCAL,
        lambda latency: gba_runs.stream_setting(case.seed, latency=latency),
        lambda timeline: (gba_runs.scored_along(plan, timeline).auc,),
    )


_EXPERIMENTS: dict[str, Callable[[Case], _Experiment]] = {
    "stationary": _stationary,
    "shape": _shape,
    "stream": _stream,
}
