"""Models of `persia.nn.models`: accuracy and speed beside plain PyTorch, and the switch of the GBA paper.

    python -m benchmarks 'zoo.*' [--preset smoke|laptop|full] [--json FILE]

zoo.auc.DATA.MODEL   Progressive AUC of one pass minus that of plain PyTorch with `nn.Embedding`, the same network,
                     first values of it and of the rows, optimizers and rates; paired by seed. TwoTower's logits rank
                     items by its softmax loss; the other models learn clicks. DATA is `globo`, `adult`, or
                     `sequences`: generated clicks on items like the newest of a history, whose best possible AUC is
                     known (`best`).
zoo.rate.DATA.MODEL  Rows/s of the same runs over those of plain PyTorch, whose ids are numbered and sequences padded
                     before its time begins. Both in alternation, in mode Sync, with all cores. The target is 1.0x, and
                     1.2x where lookup, backward and update of embeddings take 40 % of PyTorch's step
                     (`embedding_share`).
zoo.rate_by_default.globo.MODEL
                     The same as both are if nobody sets the threads of torch: a training computes with half of the
                     cores, plain PyTorch with all of them.
zoo.long_sequences.MODEL
                     Rows/s of training on histories of 1,000 ids, with ids/s, and the rate of plain PyTorch.
zoo.dien, zoo.youtubednn
                     The switch of GBA (NeurIPS 2022) on its models: test AUC after the first day in Gba, and after the
                     first day back in Sync, minus that of Sync throughout; the lower one. 4 NN workers, threads.
                     Generated sequences.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import runner
from benchmarks.zoo_runs import (
    LONG,
    MODELS,
    SEQUENCE_RATES,
    SEQUENTIAL,
    Clicks,
    Compared,
    adult,
    compare,
    days_of,
    embedding_share,
    globo,
    long_sequences,
    sequences,
    switched,
)
from persia.optim import Adagrad

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": tuple(range(10))}
ROWS = {"smoke": 4_096, "laptop": 204_800, "full": 2_048_000}
DAY_ROWS = {"smoke": 1_024, "laptop": 262_144, "full": 524_288}
LONG_ROWS = {"smoke": (8, 4), "laptop": (256, 32), "full": (2_048, 32)}
"""Samples with long histories, and those of a batch."""
LONG_MODELS = ("din", "sasrec", "hstu")
BY_DEFAULT = ("ffnn", "dcn_v2")
LARGE_SHARE = 0.4
"""Share of embeddings in PyTorch's step from which on more than its rate is asked for."""
WAY = ("sync", "sync", "sync", "gba", "sync")
"""Mode of each day."""
SWITCHES = {"zoo.dien": ("dien", SEQUENCE_RATES), "zoo.youtubednn": ("youtube_dnn", (Adagrad(lr=0.3), 3e-3))}
"""The models of the switch, and rates with which each is near its best after three days."""
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


def target_rate(share: float) -> float:
    """Returns what rows/s over PyTorch's should be, by the share of its step that embeddings take."""
    return 1.2 if share >= LARGE_SHARE else 1.0


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
        share = embedding_share(data, MODELS[model])
        said = {"rows": rows, "embedding_share": share}
        yield runner.paired_ratio(names[1], *rates, at_least=target_rate(share), details=said)


for _source, _model in CASES:
    _register(_source, _model)


@runner.measures(*(f"zoo.rate_by_default.globo.{model}" for model in BY_DEFAULT))
def by_default(preset: str) -> Iterator[runner.Measure]:
    """Rates with the threads that nobody has set."""
    for model in BY_DEFAULT:
        data = clicks("globo", model, preset)
        if data is None:
            return
        found = [compare(data, MODELS[model], seed, every_core=False) for seed in SEEDS[preset]]
        rates = [one.rate for one in found], [one.torch_rate for one in found]
        yield runner.paired_ratio(f"zoo.rate_by_default.globo.{model}", *rates)


@runner.measures(*(f"zoo.long_sequences.{model}" for model in LONG_MODELS))
def long_histories(preset: str) -> Iterator[runner.Measure]:
    """Rates on histories of 1,000 ids."""
    rows, batch_size = LONG_ROWS[preset]
    data = long_sequences(rows, batch_size)
    for model in LONG_MODELS:
        found = [compare(data, MODELS[model], seed) for seed in range(runner.rounds_of(preset))]
        rates = [one.rate for one in found]
        said = {
            "batch_size": batch_size,
            "ids_per_s": statistics.median(rates) * (LONG + 1),
            "torch_rows_per_s": statistics.median(one.torch_rate for one in found),
        }
        yield runner.quantity(f"zoo.long_sequences.{model}", rates, "rows/s", details=said)


def _register_switch(name: str) -> None:
    @runner.measures(name)
    def switches(preset: str) -> Iterator[runner.Measure]:
        """Sync to Gba and back."""
        model, rates = SWITCHES[name]
        ours: list[list[float]] = []
        theirs: list[list[float]] = []
        for seed in SEEDS[preset]:
            days, test = days_of(DAY_ROWS[preset], seed)
            days = [day._replace(rates=rates) for day in days]
            ours.append(switched(days, test, MODELS[model], WAY, seed))
            theirs.append(switched(days, test, MODELS[model], ("sync",) * len(WAY), seed))
        found = [
            runner.paired(
                f"{name}.{kind}", [one[day] for one in ours], [one[day] for one in theirs], "AUC", at_least=-0.001
            )
            for kind, day in (("to_gba", 3), ("to_sync", 4))
        ]
        worst = runner.worst(name, found)
        details = {f"{one.name}.interval": one.interval for one in found}
        yield replace(worst, details={**worst.details, **details, "switched_per_day": ours, "sync_per_day": theirs})


for _name in SWITCHES:
    _register_switch(_name)
