"""Comparisons of the GBA paper (arXiv 2205.11048) in virtual time: local all-reduce, and the switch of other models.

    python -m benchmarks 'paper.local_all_reduce.*' 'paper.switch.*' [--preset smoke|laptop|full] [--json FILE]

How it is measured: benchmarks/modes.py. Rates are the best for Sync, as other benchmarks have found.

paper.local_all_reduce.DATA.WAY_KIND.*
    Local all-reduce with SwarmSGD's pairing, for which the paper expects a loss: test AUC on the first day after a
    switch, and the mean of all days after it, less that of Sync throughout. DATA and NN workers as in
    `modes.auc_switch_others`: 500 or 100,000 (sparse) ids of each feature. WAY is `to` local all-reduce, or `from` it
    to Sync. KIND says how PSs apply gradients of rows: `combined`, 8 together as in Sync, or `on_arrival`.
paper.switch.MODEL.WAY_KIND.*
    Figure 6 for the models of its other two data sets, DIEN and YouTubeDNN, whose data are not public: on generated
    histories (`benchmarks/zoo_runs.py`), 8 NN workers of which 2 are 4 times slower. KIND is `gba` or `async`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping, Sequence

from benchmarks import runner
from benchmarks.gba_comparison_runs import Histories, days_of
from benchmarks.modes import AFTER, DRIFT, DRIFTING, ROWS_PER_DAY, SEEDS, drifts, mean_of, switches, with_half
from benchmarks.modes import DAYS as DAYS_OF_CLICKS
from benchmarks.modes_runs import GLOBAL, WORKERS, Day, Plan, Rates, everywhere
from benchmarks.zoo import SWITCHES
from persia.modes import Async, Gba, Mode, Sync
from persia.replay import LocalAllReduce

SYNC = Sync()
RATES = {500: Rates(0.003, 0.2), 100_000: Rates(0.003, 0.1)}
"""By ids of each feature: the best for Sync, which `modes.auc_sync_to_gba` found for the same data."""
WAYS = ("to", "from")
LOCAL: dict[str, LocalAllReduce] = {"combined": LocalAllReduce(WORKERS), "on_arrival": LocalAllReduce(1)}
SETS = {suffix.lstrip(".") or "dense": ids for suffix, ids in DRIFTING.items()}
"""Ids of each feature, by DATA."""
MODELS = ("dien", "youtube_dnn")
SWITCHED: dict[str, Mode] = {"gba": Gba(GLOBAL), "async": Async()}
DAYS = {"smoke": 2, "laptop": 6, "full": 6}
ROWS = {
    "dien": {"smoke": 1_024, "laptop": 65_536, "full": 262_144},
    "youtube_dnn": {"smoke": 1_024, "laptop": 131_072, "full": 524_288},
}
"""Of a day. YouTubeDNN, which sees the mean of a history, learns more slowly."""


@runner.measures(
    *(
        f"paper.local_all_reduce.{data}.{way}_{kind}.{part}"
        for data in SETS
        for way in WAYS
        for kind in LOCAL
        for part in AFTER
    )
)
def local_all_reduce(preset: str) -> Iterator[runner.Measure]:
    """Sync to local all-reduce, and local all-reduce to Sync."""
    for suffix, ids in drifts(preset):
        plan = Plan((SYNC,) * DAYS_OF_CLICKS[preset], RATES[ids], 0, ROWS_PER_DAY[preset], DRIFT, ids=ids)
        data = suffix.lstrip(".") or "dense"
        ways = {
            f"paper.local_all_reduce.{data}.{way}_{kind}": with_half(plan, mode, first=way == "from")
            for kind, mode in LOCAL.items()
            for way in WAYS
        }
        yield from switches(preset, plan, ways)


def compared(
    name: str, ours: Sequence[Sequence[Day]], sync: Sequence[Sequence[Day]], rates: Rates
) -> Iterator[runner.Measure]:
    """Returns AUC after the switch less Sync's: on the first day, and the mean of all days."""
    half = len(sync[0]) // 2
    details: Mapping[str, object] = {
        "rates": list(rates),
        "sync_per_day": [round(statistics.fmean(day.auc for day in each), 5) for each in zip(*sync, strict=True)],
        "rate_per_day": [
            round(statistics.fmean(day.summary.rate for day in each), 3) for each in zip(*ours, strict=True)
        ],
        **mean_of([day.summary for run in ours for day in run]),
    }
    for part, days in zip(AFTER, (slice(half, half + 1), slice(half, None)), strict=True):
        areas, theirs = ([statistics.fmean(day.auc for day in run[days]) for run in of] for of in (ours, sync))
        target = -0.0005 if name.endswith("_gba") else None
        yield runner.paired(f"{name}.{part}", areas, theirs, "AUC", at_least=target, details=details)


def models(preset: str, model: str) -> Iterator[runner.Measure]:
    """Sync to the other mode, and back."""
    half, (optimizer, dense) = DAYS[preset] // 2, SWITCHES[f"zoo.{model.replace('_', '')}"][1]
    rates = Rates(dense, optimizer.lr)

    def trained(first: Mode, second: Mode) -> list[list[Day]]:
        modes = (first,) * half + (second,) * half
        plans = [Histories(model, modes, rates, seed, ROWS[model][preset]) for seed in SEEDS[preset]]
        return everywhere(days_of, plans, list[Day])

    sync = trained(SYNC, SYNC)
    for kind, mode in SWITCHED.items():
        for way, modes in (("to", (SYNC, mode)), ("from", (mode, SYNC))):
            yield from compared(f"paper.switch.{model}.{way}_{kind}", trained(*modes), sync, rates)


for _model in MODELS:
    _names = (f"paper.switch.{_model}.{way}_{kind}.{part}" for way in WAYS for kind in SWITCHED for part in AFTER)
    runner.measures(*_names)(functools.partial(models, model=_model))
