"""Models of `persia.nn.models`: accuracy and speed beside plain PyTorch, and the switch of the GBA paper.

    python -m benchmarks 'zoo.*' [--preset smoke|laptop|full] [--json FILE]

zoo.auc.DATA.MODEL   Progressive AUC of one pass minus that of plain PyTorch with `nn.Embedding`, the same network and
                     initial parameters of it, optimizers and rates; paired by seed. All models but TwoTower, whose
                     logits are not of clicks. DATA is `globo`, `adult`, or `sequences`: generated clicks on
                     items like the newest of a history, whose best possible AUC is known (`best`).
zoo.rate.DATA.MODEL  Rows/s of the same runs over those of plain PyTorch, whose ids are numbered and sequences padded
                     before its time begins. Both in alternation, in mode Sync.
zoo.dien, zoo.youtubednn
                     The switch of GBA (NeurIPS 2022) on its models: test AUC after the first day in Gba, and after the
                     first day back in Sync, minus that of Sync throughout; the lower one. 4 NN workers, threads.
                     Generated sequences.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import runner
from benchmarks.zoo_runs import (
    MODELS,
    SEQUENTIAL,
    Clicks,
    Compared,
    adult,
    compare,
    days_of,
    globo,
    sequences,
    switched,
)

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2), "full": (0, 1, 2, 3, 4)}
ROWS = {"smoke": 4_096, "laptop": 204_800, "full": 2_048_000}
DAY_ROWS = {"smoke": 1_024, "laptop": 65_536, "full": 262_144}
WAY = ("sync", "sync", "sync", "gba", "sync")
"""Mode of each day."""
SWITCHES = {"zoo.dien": "dien", "zoo.youtubednn": "youtube_dnn"}
CASES = [
    *(("globo", model) for model in MODELS if model not in ("mmoe", "ple")),
    *(("adult", model) for model in MODELS if model not in SEQUENTIAL),
    *(("sequences", model) for model in SEQUENTIAL),
]
"""MMoE and PLE are for several labels: one data set suffices, as none has several."""


@functools.cache
def clicks(source: str, model: str, preset: str) -> Clicks | None:
    """Returns the data of a case; None if they are not here."""
    if source == "globo":
        return globo(ROWS[preset], model in SEQUENTIAL)
    return adult(ROWS[preset]) if source == "adult" else sequences(ROWS[preset])


@functools.cache
def runs(source: str, model: str, preset: str) -> list[Compared] | None:
    """Runs of all seeds; None without the data."""
    found = clicks(source, model, preset)
    if found is None:
        print(f"{source} is not here; set PERSIA_DATA to the directory that holds it.", file=sys.stderr)
        return None
    return [compare(found, MODELS[model], seed) for seed in SEEDS[preset]]


def _register(source: str, model: str) -> None:
    names = (f"zoo.auc.{source}.{model}", f"zoo.rate.{source}.{model}")

    @runner.measures(*names)
    def compared(preset: str) -> Iterator[runner.Measure]:
        found = runs(source, model, preset)
        data = clicks(source, model, preset)
        if found is None or data is None:
            return
        rows = sum(map(len, data.batches))
        details: dict[str, object] = {"rows": rows}
        if data.best is not None:
            details["best"] = data.best
        yield runner.paired(
            names[0],
            [one.auc for one in found],
            [one.torch_auc for one in found],
            "AUC",
            at_least=-0.001,
            details=details,
        )
        rates = [one.rate for one in found], [one.torch_rate for one in found]
        yield runner.paired_ratio(names[1], *rates, at_least=1.0, details={"rows": rows})


for _source, _model in CASES:
    _register(_source, _model)


@runner.measures(*SWITCHES)
def switches(preset: str) -> Iterator[runner.Measure]:
    """Sync to Gba and back."""
    for name, model in SWITCHES.items():
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for seed in SEEDS[preset]:
            days, test = days_of(DAY_ROWS[preset], seed)
            ours.append(switched(days, test, MODELS[model], WAY, seed))
            theirs.append(switched(days, test, MODELS[model], ("sync",) * len(WAY), seed))
        found = [
            runner.paired(
                f"{name}.{kind}", [one[day] for one in ours], [one[day] for one in theirs], "AUC", at_least=-0.001
            )
            for kind, day in (("to_gba", 3), ("to_sync", 4))
        ]
        worst = runner.worst(name, found)
        yield replace(worst, details={**worst.details, "switched_per_day": ours, "sync_per_day": theirs})
