"""Whether APMSqueeze learns as well as Adam and as other ways to send less.

    python -m benchmarks apms.resnet 'apms.resnet.*' [--preset smoke|laptop|full] [--json FILE]

What learns is in `compressed/tasks.py`, who competes in `compressed/variants.py`. A pair has the same seed, so the same
data and first values. Every training warms up for 15 % of its steps, unless its function says otherwise. The file of
PERSIA_RUNS keeps finished trainings, as for benchmarks/modes_runs.py.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import runner
from benchmarks.apmsqueeze import SIZES, WARMUP, on_ranks
from benchmarks.compressed.ranks import Groups, Ranks

LR = 1e-3
SEEDS = {"smoke": 1, "laptop": 3, "full": 5}
TUNING_SEED = 99
STEPS = {
    "click_through": {"smoke": 4, "laptop": 976, "full": 976},
    "digits": {"smoke": 4, "laptop": 300, "full": 1000},
    "language": {"smoke": 4, "laptop": 400, "full": 3000},
}
HELD = ("one_bit", "uncompressed")
"""Variants that must learn as well as Adam; the others are shown."""
TRANSFORMER = (*HELD, "naive")
SHOWN = ("top_k", "gradient", "ternary", "naive")
OTHERS = ["fp16", "power_sgd", "deepspeed"]

RESNET = ("one_bit", "tracked", "refreshed", "uncompressed", "naive")
RESNET_SEEDS = {"smoke": 1, "laptop": 8, "full": 8}

EPOCHS = {"smoke": 0.4, "laptop": 40, "full": 200}
STEPS_AN_EPOCH = 1438 / 128
RESNET_200_WARMUP = 13 / 200
RATES = {"sgd": (0.5, 0.1, 0.01, 0.001), "adam": (1e-2, 1e-3, 1e-4, 1e-5)}
"""Grids of section 5.3 of the paper: the first one for SGD, the second one for all others."""
RESNET_200 = ("one_bit", "sgd", "gradient", "top_k", "naive")
NAIVE_LOSES = {"digits": 0.02, "language": 0.2}
"""Test loss that `naive`, which has no error feedback, loses to Adam: `apms.resnet.naive`, `apms.transformer.naive`."""


class Run(NamedTuple):
    """One training.

    Attributes:
        task: name in `compressed/tasks.py`; one that ends with "_tuning" is tested on a part of the training rows.
        variant: name in `compressed/variants.py`.
        ranks: number of workers.
        seed: seed of data and first values.
        lr: learning rate.
        warmup: number of steps before compression.
        steps: number of steps.
        drop: step from which the learning rate is a tenth; 0 for none.
    """

    task: str
    variant: str
    ranks: int
    seed: int
    lr: float
    warmup: int
    steps: int
    drop: int = 0


Result = dict[str, float]


@functools.cache
def _kept() -> dict[str, Result]:
    """Results by run: of this process, and of the file."""
    path = Path(os.environ.get("PERSIA_RUNS", ""))
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return {json.dumps(line["run"]): line["result"] for line in lines}


def trained(groups: Groups, runs: Sequence[Run]) -> list[Result]:
    """Figures of each training. The loss of one that diverged is infinite."""
    kept, measured, ranks = _kept(), [], dict[int, Ranks]()
    for run in runs:
        key = json.dumps([type(run).__name__, *run])
        if key not in kept:
            if run.ranks not in ranks:
                ranks[run.ranks] = groups.of(run.ranks)
            settings = {name: value for name, value in run._asdict().items() if name != "ranks"}
            kept[key] = ranks[run.ranks].call("train", **settings)[0]
            line = json.dumps({"run": json.loads(key), "result": kept[key]})
            print(line, file=sys.stderr, flush=True)
            if path := os.environ.get("PERSIA_RUNS"):
                with Path(path).open("a") as file:
                    file.write(line + "\n")
        result = kept[key]
        diverged = bool(result["skipped"]) or not math.isfinite(result.get("loss", 0.0))
        measured.append(result | ({"loss": math.inf} if diverged else {}))
    return measured


def results(groups: Groups, preset: str, task: str, variants: Sequence[str], seeds: int = 0) -> dict[str, list[Result]]:
    """Figures of each variant by seed, at Adam's default rate; of `seeds` seeds, or as many as the preset has."""
    count, steps = 2 if preset == "smoke" else 4, STEPS[task][preset]
    tried = range(seeds or SEEDS[preset])
    name = task_of(preset, task)
    runs = [Run(name, v, count, seed, LR, round(WARMUP * steps), steps) for seed in tried for v in variants]
    done = dict(zip(runs, trained(groups, runs), strict=True))
    return {variant: [done[run] for run in runs if run.variant == variant] for variant in variants}


def task_of(preset: str, task: str) -> str:
    """Returns the name of a task in `compressed/tasks.py`: in a smoke run, of the same one with few data."""
    return task if preset != "smoke" or task.startswith("digits") else f"small_{task}"


def column(runs: Sequence[Result], name: str) -> list[float]:
    """Returns a figure of each result."""
    return [each[name] for each in runs]


def details_of_both(ours: Sequence[Result], theirs: Sequence[Result]) -> dict[str, Any]:
    """All figures of both but the times, as details."""
    names = sorted(set().union(*ours) - {"seconds", "warmup_seconds", "skipped"})
    return {name: column(ours, name) for name in names} | {f"their_{name}": column(theirs, name) for name in names}


def losses(
    name: str, ours: Sequence[Result], theirs: Sequence[Result], *, drop: bool = True, **options: Any
) -> runner.Measure:
    """Our loss less theirs. A run of ours that diverged makes it infinite.

    Args:
        name: of the measure.
        ours: results by seed.
        theirs: the results of the other variant.
        drop: leaves out the seeds on which theirs has diverged; without any other seed the difference is NaN.
        **options: of `runner.paired`.
    """
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if not drop or math.isfinite(b["loss"])]
    dropped = len(ours) - len(pairs)
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    details = {**details_of_both(ours, theirs), "dropped": dropped, **options.pop("details", {})}
    return runner.paired(name, column(ours, "loss"), column(theirs, "loss"), "loss", details=details, **options)


def not_worse(measure: runner.Measure, below: float) -> runner.Measure:
    """A difference of losses whose target is an interval that is not wholly above 0, and below a bound.

    Args:
        measure: the difference.
        below: bound of the upper end. Without one, the wider an interval is, the easier the target would be.
    """
    target = f"the interval is not wholly above 0, and below {below}"
    if measure.interval is None:  # Of one pair, or of runs that diverged.
        return replace(measure, at_most=0.0, details={**measure.details, "target": target})
    low, high = measure.interval
    half = (high - low) / 2
    details = {**measure.details, "mean_interval": (low, high), "target": target}
    return replace(measure, interval=None, at_most=min(half, below - half), details=details)


# --- at Adam's rate -----------------------------------------------------------------------------------------------


def auc_of(name: str, variants: Sequence[str], groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """AUC on fresh rows less Adam's, and the lowest."""
    runs = results(groups, preset, "click_through", ["adam", *variants])
    measured = []
    for variant in variants:
        target = runner.within(0.001) if variant in HELD else {}
        ours, theirs = column(runs[variant], "auc"), column(runs["adam"], "auc")
        measured.append(runner.paired(f"{name}.{variant}", ours, theirs, "AUC", target_on_mean=True, **target))
    yield from measured
    yield runner.worst(name, measured)


@on_ranks("apms.auc", *(f"apms.auc.{variant}" for variant in HELD))
def auc(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    yield from auc_of("apms.auc", HELD, groups, preset)


@on_ranks("apms.auc_others", *(f"apms.auc_others.{variant}" for variant in SHOWN))
def auc_others(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    yield from auc_of("apms.auc_others", SHOWN, groups, preset)


@on_ranks("apms.scale")
def scale(groups: Groups, preset: str) -> runner.Measure:
    """AUC of the default scale less that of the paper's L2: the ablation behind the default."""
    runs = results(groups, preset, "click_through", ["one_bit", "one_bit_l2"])
    return runner.paired("apms.scale", column(runs["one_bit"], "auc"), column(runs["one_bit_l2"], "auc"), "AUC")


@on_ranks("apms.resnet", *(f"apms.resnet.{variant}" for variant in RESNET))
def resnet(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Test loss of a short training less Adam's, by variant; the scale of v that is tracked has the target."""
    runs = results(groups, preset, "digits", ["adam", *RESNET], RESNET_SEEDS[preset])
    for variant in RESNET:
        target = 0.002 if variant == "tracked" else None
        measure = losses(f"apms.resnet.{variant}", runs[variant], runs["adam"], at_most=target)
        yield measure
        if variant == "tracked":
            yield replace(measure, name="apms.resnet")


@on_ranks("apms.transformer", *(f"apms.transformer.{variant}" for variant in TRANSFORMER))
def transformer(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Test loss less Adam's, by variant; what is ours may lose the range of Adam's own seeds."""
    runs = results(groups, preset, "language", ["adam", *TRANSFORMER])
    theirs = [loss for loss in column(runs["adam"], "loss") if math.isfinite(loss)]
    measured = []
    for variant in TRANSFORMER:
        target = max(theirs, default=0.0) - min(theirs, default=0.0) if variant in HELD else None
        name = f"apms.transformer.{variant}"
        measured.append(losses(name, runs[variant], runs["adam"], target_on_mean=True, at_most=target))
    yield from measured
    yield runner.worst("apms.transformer", [each for each in measured if each.at_most is not None])


# --- each at its best rate ----------------------------------------------------------------------------------------


@on_ranks("apms.resnet_200", *(f"apms.resnet_200.{variant}" for variant in RESNET_200))
def resnet_200(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """The paper's protocol for its ResNet (section 5.3), on digits: test losses, each variant at its best rate.

    A rate of the paper's grid by the loss on a held-out fifth of the training rows, with a separate seed; a
    tenth of it from half of the epochs on, and 6.5 % of them as warm-up. The paper has 200 epochs, as the preset full
    (64 minutes on 2 cores); laptop has 40. APMSqueeze is held against Adam, and the others against APMSqueeze.
    `interior` says whether a rate lies inside of its grid.
    """
    count, steps = 2 if preset == "smoke" else 4, round(EPOCHS[preset] * STEPS_AN_EPOCH)
    warmup = max(1, round(RESNET_200_WARMUP * steps))
    seeds = {"smoke": 1, "laptop": 5, "full": 5}[preset]
    runs, rates, interior = {}, {}, {}
    for variant in ("adam", *RESNET_200):
        first = Run("digits_tuning", variant, count, TUNING_SEED, 0.0, warmup, steps, drop=steps // 2)
        grid = RATES["sgd" if variant == "sgd" else "adam"]
        tuned = [0.0] if preset == "smoke" else column(trained(groups, [first._replace(lr=lr) for lr in grid]), "loss")
        rates[variant] = min(zip(tuned, grid, strict=False))[1]
        interior[variant] = rates[variant] in grid[1:-1]
        best = first._replace(task="digits", lr=rates[variant])
        runs[variant] = trained(groups, [best._replace(seed=seed) for seed in range(seeds)])
    measured = []
    for variant in RESNET_200:
        against = "adam" if variant == "one_bit" else "one_bit"
        details = {
            "against": against,
            "epochs": EPOCHS[preset],
            "lr": rates[variant],
            "their_lr": rates[against],
            "interior": interior[variant],
            "their_interior": interior[against],
        }
        name, target = f"apms.resnet_200.{variant}", 0.0 if variant in ("sgd", "gradient") else None
        if variant == "one_bit":
            each = losses(name, runs[variant], runs[against], details=details)
            measured.append(not_worse(each, NAIVE_LOSES["digits"]))
        else:  # `theirs` is APMSqueeze: a run of it that diverged has to count.
            options: dict[str, Any] = {"drop": False, "target_on_mean": True, "at_least": target, "details": details}
            measured.append(losses(name, runs[variant], runs[against], **options))
    yield from measured
    yield runner.worst("apms.resnet_200", [each for each in measured if each.holds is not None])


def best_rate(loss: Callable[[float], float], first: float = 4e-3, most: int = 16) -> float:
    """The learning rate with the lowest loss: doubled and halved until the best one lies between two others.

    Args:
        loss: loss at a learning rate.
        first: the one to begin with.
        most: number of rates that are tried at most.

    Raises:
        RuntimeError: after the last try, the best rate still does not lie between two others.
    """
    tried = {0: loss(first)}
    best = 0
    while new := [at for at in (best - 1, best + 1) if at not in tried]:
        if len(tried) >= most:
            raise RuntimeError(f"The best of {len(tried)} learning rates, {first * 2.0**best:g}, is the first or last.")
        tried |= {at: loss(first * 2.0**at) for at in new}
        best = min(tried, key=lambda at: (tried[at], at))  # Downwards while all diverge.
    return first * 2.0**best


@on_ranks("apms.vs_hooks_loss", *(f"apms.vs_hooks_loss.{other}" for other in OTHERS))
def vs_hooks_loss(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Our test loss of the transformer less each competitor's, on as many ranks as their times, each at its best rate.

    The same number is not the same step for all: without bias correction DeepSpeed's formulas make steps that are
    several times longer. Rates are tuned on a seed of their own and on a held-out part of the training text.
    """
    count, steps = SIZES[preset][0], STEPS["language"][preset]
    runs, rates = {}, {}
    for variant in ("one_bit", *OTHERS):
        tuning = task_of(preset, "language_tuning")
        first = Run(tuning, variant, count, TUNING_SEED, 0.0, max(3, round(WARMUP * steps)), steps)

        def loss(lr: float, first: Run = first) -> float:
            return trained(groups, [first._replace(lr=lr)])[0]["loss"]

        rates[variant] = LR if preset == "smoke" else best_rate(loss)
        best = first._replace(task=task_of(preset, "language"), lr=rates[variant])
        runs[variant] = trained(groups, [best._replace(seed=seed) for seed in range(1 if preset == "smoke" else 5)])
    measured = []
    for other in OTHERS:
        details = {"lr": rates["one_bit"], "their_lr": rates[other], "ranks": count}
        measure = losses(f"apms.vs_hooks_loss.{other}", runs["one_bit"], runs[other], details=details)
        measured.append(not_worse(measure, NAIVE_LOSES["language"]))
    yield from measured
    yield runner.worst("apms.vs_hooks_loss", measured)
