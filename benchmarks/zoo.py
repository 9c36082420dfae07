"""Models of `persia.nn.models`: accuracy and speed compared with plain PyTorch, and the switch of the GBA paper.

    python -m benchmarks 'zoo.*' [--preset smoke|laptop|full] [--json FILE]

zoo.auc.DATA.MODEL   Progressive AUC of one pass minus that of plain PyTorch with `nn.Embedding`, the same network,
                     first values of it and of the rows, optimizers and rates; paired by seed. TwoTower's logits rank
                     items by its softmax loss; the other models learn clicks. DATA is `globo`, `adult`, or
                     `sequences`: generated clicks on items like the newest of a history, whose best possible AUC is
                     known (`best`).
zoo.rate.DATA.MODEL  Rows/s of the same runs over those of plain PyTorch, whose ids are numbered and sequences padded
                     before its time begins. Both in alternation, in mode Sync, each in a process as it is started by
                     somebody who sets nothing of torch's threads. The target is 0.97x. `embedding_share` is what
                     lookup, backward and update of embeddings take of PyTorch's step. With `--beside` on a fifth of the
                     rows, and with three seeds.
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
from collections.abc import Iterator
from dataclasses import replace

from benchmarks import runner
from benchmarks.baselines.zoo_torch import Result
from benchmarks.elsewhere import AS_A_PROGRAM, Elsewhere
from benchmarks.public_data import is_here
from benchmarks.zoo_runs import (
    LONG,
    MODELS,
    SEQUENCE_RATES,
    SEQUENTIAL,
    Clicks,
    adult,
    days_of,
    embedding_share,
    globo,
    long_sequences,
    sequences,
    switched,
    train,
    train_in_torch,
)
from persia.optim import Adagrad

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": tuple(range(10))}
ROWS = {"smoke": 2_048, "laptop": 204_800, "full": 2_048_000}
DAY_ROWS = {"smoke": 1_024, "laptop": 262_144, "full": 524_288}
LONG_ROWS = {"smoke": (8, 4), "laptop": (256, 32), "full": (2_048, 32)}
"""Samples with long histories, and the samples of a batch."""
LONG_MODELS = ("din", "sasrec", "hstu")
BESIDE_SEEDS = 3
BESIDE_SHARE = 5
"""Beside other processes, this part of the rows is trained."""
LEAST_RATE = 0.97
"""Rows/s over the rows/s of plain PyTorch."""
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
def clicks(source: str, model: str, preset: str, share: int = 1) -> Clicks | None:
    """Returns the data of a case, one of `share` parts of them; None if they are not here."""
    if source == "long":
        return long_sequences(*LONG_ROWS[preset])
    rows = ROWS[preset] // share
    if source == "globo":
        return globo(rows, model in SEQUENTIAL)
    return adult(rows) if source == "adult" else sequences(rows)


@functools.cache
def sides() -> tuple[Elsewhere, Elsewhere]:
    """The processes of persia and of plain PyTorch."""
    ours, theirs = Elsewhere(AS_A_PROGRAM), Elsewhere(AS_A_PROGRAM)
    for close in (sides.cache_clear, ours.close, theirs.close):
        runner.RESOURCES.callback(close)
    return ours, theirs


def trained(source: str, model: str, preset: str, seed: int, share: int = 1) -> Result | None:
    """Trains one pass; None without the data."""
    data = clicks(source, model, preset, share)
    return None if data is None else train(data, MODELS[model], seed)


def trained_in_torch(source: str, model: str, preset: str, seed: int, share: int = 1) -> Result | None:
    """Trains the same in plain PyTorch."""
    data = clicks(source, model, preset, share)
    return None if data is None else train_in_torch(data, MODELS[model], seed)


def share_of_embeddings(source: str, model: str, preset: str) -> float:
    """Returns the share of PyTorch's step that embeddings take."""
    data = clicks(source, model, preset)
    assert data is not None
    return embedding_share(data, MODELS[model])


def in_turn(source: str, model: str, preset: str, seed: int, share: int = 1) -> tuple[Result, Result]:
    """Returns the results of both sides, in an order that alternates with the seed."""
    both = list(zip(sides(), (trained, trained_in_torch), strict=True))
    runs = [
        side.call(function, source, model, preset, seed, share) for side, function in (both[::-1] if seed % 2 else both)
    ]
    ours, theirs = runs[::-1] if seed % 2 else runs
    return ours, theirs


def _register(source: str, model: str) -> None:
    names = (f"zoo.auc.{source}.{model}", f"zoo.rate.{source}.{model}")

    @runner.measures(*names)
    def compared(preset: str, beside: int = 0) -> Iterator[runner.Measure]:
        share = BESIDE_SHARE if beside else 1
        data = clicks(source, model, preset, share)
        if data is None:
            is_here("globo_ctr" if source == "globo" else source)  # Says where to get it.
            return
        seeds = SEEDS[preset][:BESIDE_SEEDS] if beside else SEEDS[preset]
        runs = [in_turn(source, model, preset, seed, share) for seed in seeds]
        details: dict[str, object] = {"rows": sum(map(len, data.batches))}
        best = {} if data.best is None else {"best": data.best}
        areas = [[one.auc for one in side] for side in zip(*runs, strict=True)]
        yield runner.paired(names[0], *areas, "AUC", at_least=-0.001, details=details | best)
        rates = [[one.rows_per_s for one in side] for side in zip(*runs, strict=True)]
        _, theirs = sides()
        said = (
            details
            if beside
            else {**details, "embedding_share": theirs.call(share_of_embeddings, source, model, preset)}
        )
        yield runner.paired_ratio(names[1], *rates, at_least=LEAST_RATE, details=said)


for _source, _model in CASES:
    _register(_source, _model)


@runner.measures(*(f"zoo.long_sequences.{model}" for model in LONG_MODELS))
def long_histories(preset: str) -> Iterator[runner.Measure]:
    """Rates on histories of 1,000 ids."""
    for model in LONG_MODELS:
        runs = [in_turn("long", model, preset, seed) for seed in range(runner.rounds_of(preset))]
        rates = [ours.rows_per_s for ours, _ in runs]
        said = {
            "batch_size": LONG_ROWS[preset][1],
            "ids_per_s": statistics.median(rates) * (LONG + 1),
            "torch_rows_per_s": statistics.median(theirs.rows_per_s for _, theirs in runs),
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
        measures = [
            runner.paired(
                f"{name}.{kind}", [one[day] for one in ours], [one[day] for one in theirs], "AUC", at_least=-0.001
            )
            for kind, day in (("to_gba", 3), ("to_sync", 4))
        ]
        worst = runner.worst(name, measures)
        details = {f"{one.name}.interval": one.interval for one in measures}
        yield replace(worst, details={**worst.details, **details, "switched_per_day": ours, "sync_per_day": theirs})


for _name in SWITCHES:
    _register_switch(_name)
