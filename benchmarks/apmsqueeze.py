"""APMSqueeze against DDP: bytes, times on slow networks, and whether it learns as well.

    python benchmarks/apmsqueeze.py [--only NAME] [--preset smoke|laptop|full] [--json FILE]

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
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from benchmarks import harness
from benchmarks.compressed.network import Loopback
from benchmarks.compressed.ranks import Groups, Ranks

from persia.optim import OneBit

LR = 1e-3
TIMED_LR = 1e-7
"""Where only time counts: after two steps of warm-up v knows little, and a network that diverges sends nothing."""
WARMUP = 0.15
TIMED = {"smoke": "small_ffnn", "laptop": "paper_ffnn", "full": "paper_ffnn"}
SIZES = {"smoke": (2,), "laptop": (2, 4), "full": (2, 3, 4)}
ROUNDS = {"smoke": 2, "laptop": 9, "full": 15}
STEPS_A_ROUND = {0.1: 1, 1.0: 2, 2.0: 4, 10.0: 6}
TARGETS = {0.1: 15.0, 1.0: 8.0, 2.0: 5.0, 10.0: 1.5}
NAMES = {0.1: "0g1", 1.0: "1g", 2.0: "2g", 10.0: "10g"}
OTHERS = ["fp16", "power_sgd", "deepspeed"]
RATES = {
    "smoke": (1e-3,),
    "laptop": (2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
    "full": (5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3),
}
SEEDS = {"smoke": 1, "laptop": 3, "full": 5}
FIRST_STEPS = 6
"""Of a training that will be timed: past its warm-up of 2, and past DDP's rebuilding of its buckets."""

# --- bytes and times ----------------------------------------------------------------------------------------------


def ready(groups: Groups, count: int, preset: str, variants: list[str]) -> Ranks:
    """A group with these trainings past their warm-up."""
    ranks = groups.of(count)
    ranks.call("prepare", task=TIMED[preset], variants=variants, lr=TIMED_LR, warmup=2, steps=FIRST_STEPS)
    return ranks


def sent(groups: Groups, preset: str) -> harness.Measure:
    """Bytes that leave a rank in a step of DDP, over those of APMSqueeze."""
    ranks = ready(groups, SIZES[preset][0], preset, ["adam", "one_bit"])
    steps = 5
    bytes_of = {}
    for variant in ("adam", "one_bit"):
        before = sum(ranks.sent())
        ranks.time(variant, steps)
        bytes_of[variant] = (sum(ranks.sent()) - before) / steps / SIZES[preset][0]
    details = {"network": ranks.network.kind, "ranks": SIZES[preset][0], **bytes_of}
    details["statistics"] = ranks.call("statistics", variant="one_bit")[0]
    return harness.Measure("apms.bytes", bytes_of["adam"] / bytes_of["one_bit"], "x fewer bytes", 30.0, details=details)


def timed(ranks: Ranks, variants: list[str], gbit: float, rounds: int) -> dict[str, list[float]]:
    """Seconds a step of each variant, round by round, in turns."""
    ranks.limit(gbit)
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    for number in range(rounds):
        for variant in variants if number % 2 else reversed(variants):
            seconds[variant].append(ranks.time(variant, STEPS_A_ROUND[gbit]))
    return seconds


def step(gbit: float, groups: Groups, preset: str) -> Iterator[harness.Measure]:
    """Communication share of DDP's step over that of APMSqueeze, for each number of ranks."""
    variants = ["local", "adam", "one_bit"]
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
        rounds = harness.quantity(
            f"apms.step_{NAMES[gbit]}",
            shares,
            "x communication share of a step",
            TARGETS[gbit],
            details={
                "ranks": count,
                "whole_step": middle["adam"] / middle["one_bit"],
                **{f"{variant}_ms": 1e3 * each for variant, each in middle.items()},
                "network": ranks.network.kind,
            },
        )
        # Of the medians: where our share is small, a round's own ratio is mostly noise, as the spread then says.
        share = (middle["adam"] - alone) / max(middle["one_bit"] - alone, 1e-3)
        yield dataclasses.replace(rounds, value=share)


def vs_hooks(groups: Groups, preset: str) -> Iterator[harness.Measure]:
    """Step time of each competitor over ours at 0.1, 1 and 2 Gbit/s."""
    ranks = ready(groups, SIZES[preset][0], preset, [*OTHERS, "one_bit"])
    for gbit in (0.1, 1.0, 2.0):
        seconds = timed(ranks, [*OTHERS, "one_bit"], gbit, ROUNDS[preset])
        for other in OTHERS:
            yield harness.quantity(
                f"apms.vs_hooks.{other}_{NAMES[gbit]}",
                [a / b for a, b in zip(seconds[other], seconds["one_bit"], strict=True)],
                "x step time",
                1.0,
                details={
                    "ranks": SIZES[preset][0],
                    "ours_ms": 1e3 * statistics.median(seconds["one_bit"]),
                    "theirs_ms": 1e3 * statistics.median(seconds[other]),
                    "network": ranks.network.kind,
                },
            )


PARTS = ("step", "_agree", "sum_of_squares", "compress", "average", "apply", "wait")


def profile(groups: Groups, preset: str) -> Iterator[harness.Measure]:
    """Milliseconds of `APMSqueeze.step` at 1 Gbit/s by what they go to, mean over the ranks; `wait` is for others."""
    for count in SIZES[preset]:
        ranks = ready(groups, count, preset, ["one_bit"])
        ranks.limit(1.0)
        found = ranks.call("profile", variant="one_bit", steps=4 * ROUNDS[preset])
        parts = {part: statistics.fmean(each.get(part, 0.0) for each in found) for part in PARTS}
        details = {"ranks": count, **parts, "network": ranks.network.kind}
        yield harness.Measure("apms.profile", parts["step"], "ms in step()", details=details)


def end_to_end(gbit: float, groups: Groups, preset: str) -> harness.Measure:
    """A whole training, warm-up included: time of Adam over ours; at 1 Gbit/s over what the step ratio r promises.

    The ratio is that of the steps after the warm-up, of the same two trainings.
    """
    count = SIZES[preset][0]
    steps = {"smoke": 8, "laptop": 20 if gbit < 1 else 60, "full": 100}[preset]
    rounds = {"smoke": 2, "laptop": 3, "full": 9}[preset]
    warmup = round(WARMUP * steps)
    ranks = groups.of(count)
    ranks.limit(gbit)
    settings = {"task": TIMED[preset], "seed": 0, "lr": TIMED_LR, "warmup": warmup, "steps": steps}
    reached, promised, ratios = [], [], []
    for number in range(rounds):
        took: dict[str, dict[str, float]] = {}
        for variant in ("adam", "one_bit") if number % 2 else ("one_bit", "adam"):
            answers = ranks.call("train", variant=variant, **settings)
            took[variant] = {name: max(answer[name] for answer in answers) for name in ("seconds", "warmup_seconds")}
        late = {variant: each["seconds"] - each["warmup_seconds"] for variant, each in took.items()}
        ratios.append(late["one_bit"] / late["adam"])
        promised.append(1 / (warmup / steps + (1 - warmup / steps) * ratios[-1]))
        reached.append(took["adam"]["seconds"] / took["one_bit"]["seconds"])
    details = {
        "ranks": count, "steps": steps, "warmup": warmup, "step_ratio": 1 / statistics.median(ratios),
        "promised": statistics.median(promised), "reached": statistics.median(reached), "network": ranks.network.kind,
    }  # fmt: skip
    name = f"apms.end_to_end_{NAMES[gbit]}"
    if gbit < 1:
        return harness.quantity(name, reached, "x faster than Adam", 4.0, details=details)
    kept = [a / b for a, b in zip(reached, promised, strict=True)]
    return harness.quantity(name, kept, "x of what r promises", 0.9, details=details)


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
    groups: Groups, preset: str, task: str, variants: list[str], count: int = 4, lr: float = LR, seeds: int = 0
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


def losses(groups: Groups, preset: str, name: str, task: str, variants: list[str]) -> Iterator[harness.Measure]:
    """Mean over seeds of each variant's test loss less Adam's; what is ours may lose the range of Adam's own seeds."""
    found = results(groups, preset, task, ["adam", *variants])
    theirs = column(found["adam"], "loss")
    spread = max(theirs) - min(theirs)
    for variant in variants:
        ours = column(found[variant], "loss")
        details: dict[str, Any] = {"loss": ours, "adam_loss": theirs}
        for figure in set(found[variant][0]) - {"loss", "seconds", "warmup_seconds"}:
            details |= {figure: column(found[variant], figure), f"adam_{figure}": column(found["adam"], figure)}
        yield harness.Measure(
            f"{name}.{variant}",
            statistics.fmean(ours) - statistics.fmean(theirs),
            "test loss - Adam's",
            spread if variant in ("one_bit", "uncompressed") else None,
            at_least=False,
            details=details,
        )


def auc(name: str, variants: list[str], groups: Groups, preset: str) -> Iterator[harness.Measure]:
    """AUC on fresh rows, paired by seed."""
    found = results(groups, preset, "click_through", ["adam", *variants])
    theirs = column(found["adam"], "auc")
    for variant in variants:
        apart = [a - b for a, b in zip(column(found[variant], "auc"), theirs, strict=True)]
        held = variant in ("one_bit", "uncompressed")
        mean = statistics.fmean(apart)
        yield harness.Measure(
            f"{name}.{variant}",
            abs(mean) if held else mean,
            "AUC apart" if held else "AUC - Adam's",
            0.001 if held else None,
            at_least=False,
            details={"adam": theirs, "apart": apart},
        )


def scale(groups: Groups, preset: str) -> harness.Measure:
    """AUC of the default scale less that of the paper's L2, paired by seed: the ablation behind the default."""
    found = results(groups, preset, "click_through", ["one_bit", "one_bit_l2"])
    mean, l2 = column(found["one_bit"], "auc"), column(found["one_bit_l2"], "auc")
    apart = [a - b for a, b in zip(mean, l2, strict=True)]
    details = {"mean": mean, "l2": l2, "apart": apart}
    return harness.Measure("apms.scale", statistics.fmean(apart), "AUC, mean less l2", details=details)


def resnet(groups: Groups, preset: str) -> Iterator[harness.Measure]:
    variants = ["one_bit", "uncompressed", "one_bit_l2", "naive"]
    yield from losses(groups, preset, "apms.resnet", "digits", variants)


def resnet_200(groups: Groups, preset: str) -> Iterator[harness.Measure]:
    """The same for as many epochs as the paper trains its ResNet (section 5.3): v settles before it is frozen."""
    yield from losses(groups, preset, "apms.resnet_200", "digits_200", ["one_bit", "uncompressed"])


def transformer(groups: Groups, preset: str) -> Iterator[harness.Measure]:
    variants = ["one_bit", "uncompressed", "naive"]
    yield from losses(groups, preset, "apms.transformer", "language", variants)


def vs_hooks_loss(groups: Groups, preset: str) -> Iterator[harness.Measure]:
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
    for other in OTHERS:
        theirs = found[other]
        yield harness.Measure(
            f"apms.vs_hooks_loss.{other}",
            statistics.fmean(ours) - statistics.fmean(theirs),
            "test loss, ours - theirs",
            max(theirs) - min(theirs),
            at_least=False,
            details={"ours": ours, "theirs": theirs, "lr": rates["one_bit"], "their_lr": rates[other], "ranks": count},
        )


# --- packing ------------------------------------------------------------------------------------------------------


def pack(preset: str) -> harness.Measure:
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
        rates.append(4e-9 * count / (time.perf_counter() - begin))
    return harness.quantity("apms.pack", rates[3:], "GB/s of float32", 8.0, details={"values": count})


MEASURES = {
    "apms.bytes": sent,
    **{f"apms.step_{NAMES[gbit]}": partial(step, gbit) for gbit in TARGETS},
    "apms.vs_hooks": vs_hooks,
    "apms.vs_hooks_loss": vs_hooks_loss,
    "apms.profile": profile,
    "apms.end_to_end_0g1": partial(end_to_end, 0.1),
    "apms.end_to_end_1g": partial(end_to_end, 1.0),
    "apms.auc": partial(auc, "apms.auc", ["one_bit", "uncompressed"]),
    "apms.auc_others": partial(auc, "apms.auc_others", ["top_k", "gradient", "ternary", "naive"]),
    "apms.scale": scale,
    "apms.resnet": resnet,
    "apms.resnet_200": resnet_200,
    "apms.transformer": transformer,
    "apms.pack": lambda _, preset: pack(preset),
}

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that networks are taken down.
    with Groups() as groups:
        harness.main({name: partial(measure, groups) for name, measure in MEASURES.items()})
