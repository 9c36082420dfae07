"""APMSqueeze against DDP: bytes, times on slow networks, and whether it learns as well.

    python -m benchmarks 'apms.*' [--preset smoke|laptop|full] [--json FILE]

Bandwidth is set between network namespaces that the benchmark makes and removes (`compressed/README.md`); that needs
iproute2 and the right to do it. Without, each TCP connection is paced (`compressed/paced.py`), with two ranks only, and
the line's "network" says so.

The network that is timed is the paper's FFNN, 12 M parameters, 32 rows a rank, one thread a rank. The communication
share of a step is the whole step less that of the same ranks without any communication (Adam, fused). All variants live
in the same processes and take turns. What learns is in `compressed/tasks.py`, who competes in `compressed/variants.py`.
Every training warms up for 15 % of its steps.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks import runner
from benchmarks.compressed.network import Loopback
from benchmarks.compressed.ranks import Groups, Ranks
from persia.optim import OneBit

LR = 1e-3
TIMED_LR = 1e-7
"""Where only time counts: after two steps of warm-up v knows little, and a network that diverges sends nothing."""
WARMUP = 0.15
TIMED = {"smoke": "small_ffnn", "laptop": "paper_ffnn", "full": "paper_ffnn"}
SIZES = {"smoke": (2,), "laptop": (2, 4), "full": (2, 3, 4)}
ROUNDS = {"smoke": 5, "laptop": 9, "full": 15}
STEPS_A_ROUND = {0.1: 1, 1.0: 2, 2.0: 4, 10.0: 6}
TARGETS = {0.1: 15.0, 1.0: 8.0, 2.0: 5.0, 10.0: 1.5}
NAMES = {0.1: "0g1", 1.0: "1g", 2.0: "2g", 10.0: "10g"}
HOOKS_AT = (0.1, 1.0, 2.0)
OTHERS = ["fp16", "power_sgd", "deepspeed"]
RATES = {
    "smoke": (1e-3,),
    "laptop": (2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
    "full": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
}
SEEDS = {"smoke": 1, "laptop": 3, "full": 5}
FIRST_STEPS = 6
"""Of a training that will be timed: past its warm-up of 2, and past DDP's rebuilding of its buckets."""

Function = Callable[[Groups, str], runner.Measure | Iterator[runner.Measure]]


def on_ranks(*names: str) -> Callable[[Function], Function]:
    """Registers a function that needs process groups; all functions of a run share them."""

    def register(function: Function) -> Function:
        runner.measures(*names)(lambda preset: function(_shared_groups(), preset))
        return function

    return register


_OPEN: list[Groups] = []


def _shared_groups() -> Groups:
    if not _OPEN:
        _OPEN.append(runner.RESOURCES.enter_context(Groups()))
        runner.RESOURCES.callback(_OPEN.clear)
    return _OPEN[0]


# --- bytes and times ----------------------------------------------------------------------------------------------


def ready(groups: Groups, count: int, preset: str, variants: list[str]) -> Ranks:
    """A group with these trainings past their warm-up."""
    ranks = groups.of(count)
    ranks.call("prepare", task=TIMED[preset], variants=variants, lr=TIMED_LR, warmup=2, steps=FIRST_STEPS)
    return ranks


@on_ranks("apms.bytes")
def sent(groups: Groups, preset: str) -> runner.Measure:
    """Bytes that leave a rank in a step of DDP, over those of APMSqueeze."""
    ranks = ready(groups, SIZES[preset][0], preset, ["adam", "one_bit"])
    steps = 5
    bytes_of = {}
    for variant in ("adam", "one_bit"):
        before = sum(ranks.sent())
        ranks.time(variant, steps)
        bytes_of[variant] = (sum(ranks.sent()) - before) / steps / SIZES[preset][0]
    details = {"of": "bytes", "network": ranks.network.kind, "ranks": SIZES[preset][0], **bytes_of}
    details["statistics"] = ranks.call("statistics", variant="one_bit")[0]
    return runner.Measure("apms.bytes", bytes_of["adam"] / bytes_of["one_bit"], "ratio", at_least=30.0, details=details)


def timed(ranks: Ranks, variants: list[str], gbit: float, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each variant, round by round, in turns."""
    ranks.limit(gbit)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in variants if number % 2 else reversed(variants):
            seconds[variant].append(ranks.time(variant, STEPS_A_ROUND[gbit]))
    return seconds


def step(gbit: float, groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Communication share of DDP's step over that of APMSqueeze, for each number of ranks, and the worst."""
    variants = ["local", "adam", "one_bit"]
    name, found = f"apms.step_{NAMES[gbit]}", []
    for count in SIZES[preset]:
        ranks = ready(groups, count, preset, variants)
        if count > 2 and isinstance(ranks.network, Loopback):
            print(f"{count} ranks need network namespaces: skipped", file=sys.stderr)
            continue
        seconds = timed(ranks, variants, gbit, ROUNDS[preset])
        middle = {variant: statistics.median(each) for variant, each in seconds.items()}
        alone = middle["local"]
        pairs = zip(seconds["adam"], seconds["one_bit"], strict=True)
        shares = [(theirs - alone) / max(ours - alone, 1e-3) for theirs, ours in pairs]
        rounds = runner.quantity(
            f"{name}.n{count}",
            shares,
            "ratio",
            at_least=TARGETS[gbit],
            details={
                "of": "communication share of a step",
                "ranks": count,
                "whole_step": middle["adam"] / middle["one_bit"],
                **{f"{variant}_s": each for variant, each in middle.items()},
                "network": ranks.network.kind,
            },
        )
        # Of the medians: where our share is small, a round's own ratio is mostly noise, as the spread then says.
        share = (middle["adam"] - alone) / max(middle["one_bit"] - alone, 1e-3)
        found.append(dataclasses.replace(rounds, value=share))
    yield from found
    yield runner.worst(name, found)


for speed, name in NAMES.items():
    on_ranks(f"apms.step_{name}", *(f"apms.step_{name}.n{count}" for count in SIZES["full"]))(partial(step, speed))


@on_ranks("apms.vs_hooks", *(f"apms.vs_hooks.{other}_{NAMES[speed]}" for other in OTHERS for speed in HOOKS_AT))
def vs_hooks(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Step time of each competitor over ours at 0.1, 1 and 2 Gbit/s."""
    ranks = ready(groups, SIZES[preset][0], preset, [*OTHERS, "one_bit"])
    found = []
    for gbit in HOOKS_AT:
        seconds = timed(ranks, [*OTHERS, "one_bit"], gbit, ROUNDS[preset])
        for other in OTHERS:
            measure = runner.quantity(
                f"apms.vs_hooks.{other}_{NAMES[gbit]}",
                [a / b for a, b in zip(seconds[other], seconds["one_bit"], strict=True)],
                "ratio",
                at_least=1.0,
                details={
                    "of": "step time",
                    "ranks": SIZES[preset][0],
                    "ours_s": statistics.median(seconds["one_bit"]),
                    "theirs_s": statistics.median(seconds[other]),
                    "network": ranks.network.kind,
                },
            )
            found.append(measure)
    yield from found
    yield runner.worst("apms.vs_hooks", found)


HELD = ("one_bit", "uncompressed")
"""Variants that must learn as well as Adam; the others are shown."""
RESNET = (*HELD, "one_bit_l2", "naive")
TRANSFORMER = (*HELD, "naive")
SHOWN = ("top_k", "gradient", "ternary", "naive")
PARTS = ("step", "_agree", "squares", "compress", "average", "apply", "wait")


@on_ranks(*(f"apms.profile.n{count}" for count in SIZES["full"]))
def profile(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Seconds of `APMSqueeze.step` at 1 Gbit/s by what they go to, mean over the ranks; `wait` is for others."""
    for count in SIZES[preset]:
        ranks = ready(groups, count, preset, ["one_bit"])
        ranks.limit(1.0)
        found = ranks.call("profile", variant="one_bit", steps=4 * ROUNDS[preset])
        parts = {part: statistics.fmean(each.get(part, 0.0) for each in found) for part in PARTS}
        details = {"ranks": count, **parts, "network": ranks.network.kind}
        yield runner.Measure(f"apms.profile.n{count}", parts["step"], "s", details=details)


def end_to_end(gbit: float, groups: Groups, preset: str) -> runner.Measure:
    """A whole training, warm-up included: time of Adam over ours; at 1 Gbit/s over what the step ratio r promises.

    The ratio is that of prepared steps, which are timed before, as in `apms.step_1g`: with r of the training's own late
    steps the promise would hold whatever they took.
    """
    count = SIZES[preset][0]
    steps = {"smoke": 8, "laptop": 20 if gbit < 1 else 60, "full": 100}[preset]
    rounds = {"smoke": 5, "laptop": 5, "full": 9}[preset]
    warmup = round(WARMUP * steps)
    ranks = ready(groups, count, preset, ["adam", "one_bit"])
    seconds = timed(ranks, ["adam", "one_bit"], gbit, ROUNDS[preset])
    ratio = statistics.median(a / b for a, b in zip(seconds["adam"], seconds["one_bit"], strict=True))
    promised = 1 / (warmup / steps + (1 - warmup / steps) / ratio)
    ranks = groups.of(count)
    ranks.limit(gbit)
    settings = {"task": TIMED[preset], "seed": 0, "lr": TIMED_LR, "warmup": warmup, "steps": steps}
    reached = []
    for number in range(rounds):
        took: dict[str, float] = {}
        for variant in ("adam", "one_bit") if number % 2 else ("one_bit", "adam"):
            answers = ranks.call("train", variant=variant, **settings)
            took[variant] = max(answer["seconds"] for answer in answers)
        reached.append(took["adam"] / took["one_bit"])
    details = {
        "ranks": count, "steps": steps, "warmup": warmup, "step_ratio": ratio,
        "promised": promised, "reached": statistics.median(reached), "network": ranks.network.kind,
    }  # fmt: skip
    name = f"apms.end_to_end_{NAMES[gbit]}"
    if gbit < 1:
        return runner.quantity(name, reached, "ratio", at_least=4.0, details={"of": "time of Adam", **details})
    kept = [a / promised for a in reached]
    return runner.quantity(name, kept, "ratio", at_least=0.9, details={"of": "speed that r promises", **details})


on_ranks("apms.end_to_end_0g1")(partial(end_to_end, 0.1))
on_ranks("apms.end_to_end_1g")(partial(end_to_end, 1.0))


# --- learning -----------------------------------------------------------------------------------------------------

STEPS = {
    "click_through": {"smoke": 8, "laptop": 976, "full": 976},
    "digits": {"smoke": 8, "laptop": 300, "full": 1000},
    "digits_200": {"smoke": 8, "laptop": 2245, "full": 2245},
    "language": {"smoke": 8, "laptop": 400, "full": 3000},
}


KNOWN: dict[str, dict[str, float]] = {}
"""Results of this process's trainings: measures that compare the same ones share them."""


def results(
    groups: Groups, preset: str, task: str, variants: Sequence[str], count: int = 4, lr: float = LR, seeds: int = 0
) -> dict[str, list[dict[str, float]]]:
    """What each variant reaches, by seed; `seeds` of them, or as many as the preset has."""
    count = 2 if preset == "smoke" else count
    ranks = groups.of(count)
    steps = STEPS[task][preset]
    found: dict[str, list[dict[str, float]]] = {variant: [] for variant in variants}
    for seed in range(seeds or SEEDS[preset]):
        for variant in variants:
            settings = {"seed": seed, "lr": lr, "warmup": round(WARMUP * steps), "steps": steps}
            training = {"task": task, "variant": variant, **settings}
            key = json.dumps({"ranks": count, **training})
            if key not in KNOWN:
                KNOWN[key] = ranks.call("train", **training)[0]
                print(json.dumps({"ranks": count, **training, **KNOWN[key]}), file=sys.stderr, flush=True)
            found[variant].append(KNOWN[key])
    return found


def column(found: list[dict[str, float]], name: str) -> list[float]:
    return [each[name] for each in found]


def losses(groups: Groups, preset: str, name: str, task: str, variants: Sequence[str]) -> Iterator[runner.Measure]:
    """Mean over seeds of each variant's test loss less Adam's; what is ours may lose the range of Adam's own seeds."""
    found = results(groups, preset, task, ["adam", *variants])
    theirs = column(found["adam"], "loss")
    spread = max(theirs) - min(theirs)
    measured = []
    for variant in variants:
        ours = column(found[variant], "loss")
        details: dict[str, Any] = {"loss": ours, "adam_loss": theirs}
        for figure in set(found[variant][0]) - {"loss", "seconds", "warmup_seconds"}:
            details |= {figure: column(found[variant], figure), f"adam_{figure}": column(found["adam"], figure)}
        measure = runner.Measure(
            f"{name}.{variant}",
            statistics.fmean(ours) - statistics.fmean(theirs),
            "loss",
            at_most=spread if variant in HELD else None,
            details=details,
        )
        measured.append(measure)
    yield from measured
    yield runner.worst(name, [each for each in measured if each.at_most is not None])


def auc_of(name: str, variants: Sequence[str], groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """AUC on fresh rows less Adam's, paired by seed, and the lowest."""
    found = results(groups, preset, "click_through", ["adam", *variants])
    theirs = column(found["adam"], "auc")
    measured = []
    for variant in variants:
        apart = [a - b for a, b in zip(column(found[variant], "auc"), theirs, strict=True)]
        measure = runner.Measure(
            f"{name}.{variant}",
            statistics.fmean(apart),
            "AUC",
            **(runner.within(0.001) if variant in HELD else {}),
            details={"adam": theirs, "apart": apart},
        )
        measured.append(measure)
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
    """AUC of the default scale less that of the paper's L2, paired by seed: the ablation behind the default."""
    found = results(groups, preset, "click_through", ["one_bit", "one_bit_l2"])
    mean, l2 = column(found["one_bit"], "auc"), column(found["one_bit_l2"], "auc")
    apart = [a - b for a, b in zip(mean, l2, strict=True)]
    details = {"mean": mean, "l2": l2, "apart": apart}
    return runner.Measure("apms.scale", statistics.fmean(apart), "AUC", details=details)


@on_ranks("apms.resnet", *(f"apms.resnet.{variant}" for variant in RESNET))
def resnet(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    yield from losses(groups, preset, "apms.resnet", "digits", RESNET)


@on_ranks("apms.resnet_200", *(f"apms.resnet_200.{variant}" for variant in HELD))
def resnet_200(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """The same for as many epochs as the paper trains its ResNet (section 5.3): v settles before it is frozen."""
    yield from losses(groups, preset, "apms.resnet_200", "digits_200", HELD)


@on_ranks("apms.transformer", *(f"apms.transformer.{variant}" for variant in TRANSFORMER))
def transformer(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    yield from losses(groups, preset, "apms.transformer", "language", TRANSFORMER)


@on_ranks("apms.vs_hooks_loss", *(f"apms.vs_hooks_loss.{other}" for other in OTHERS))
def vs_hooks_loss(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Mean over seeds of our test loss less each competitor's, on as many ranks as their times.

    Each has the learning rate that serves it best on the first seed, doubled until it serves worse, as the same number
    is not the same step for all: without bias correction DeepSpeed's formulas make steps that are several times longer.
    Equal is what is apart by no more than the competitor's own seeds.
    """
    count = SIZES[preset][0]
    rates: dict[str, float] = {}
    found: dict[str, list[float]] = {}
    for variant in (*OTHERS, "one_bit"):
        tried: dict[float, float] = {}
        for lr in RATES[preset]:
            loss = results(groups, preset, "language", [variant], count, lr, seeds=1)[variant][0]["loss"]
            tried[lr] = math.inf if math.isnan(loss) else loss
            if tried[lr] > min(tried.values()):
                break  # The best one lies between two others.
        rates[variant] = min(tried, key=tried.__getitem__)
        found[variant] = column(results(groups, preset, "language", [variant], count, rates[variant])[variant], "loss")
    ours = found["one_bit"]
    measured = []
    for other in OTHERS:
        theirs = found[other]
        measure = runner.Measure(
            f"apms.vs_hooks_loss.{other}",
            statistics.fmean(ours) - statistics.fmean(theirs),
            "loss",
            at_most=max(theirs) - min(theirs),
            details={"ours": ours, "theirs": theirs, "lr": rates["one_bit"], "their_lr": rates[other], "ranks": count},
        )
        measured.append(measure)
    yield from measured
    yield runner.worst("apms.vs_hooks_loss", measured)


# --- packing ------------------------------------------------------------------------------------------------------


@runner.measures("apms.pack")
def pack(preset: str) -> runner.Measure:
    """Float32 that one core packs into signs and scales, and unpacks again, a second; errors are kept as in a step."""
    core = importlib.import_module("persia._core").onebit
    compressor, count = OneBit(), 100_000 if preset == "smoke" else 12_000_000
    values = np.random.default_rng(0).standard_normal(count, np.float32)
    out, payload = np.empty_like(values), np.empty(compressor.payload_bytes(count), np.uint8)
    rates = []
    for _ in range(3 + ROUNDS[preset]):
        work = values.copy()
        begin = time.perf_counter()
        core.pack(work, payload, compressor.block, False)
        core.unpack(payload, out, compressor.block, False)
        rates.append(4 * count / (time.perf_counter() - begin))
    return runner.quantity("apms.pack", rates[3:], "bytes/s", at_least=8e9, details={"values": count})
