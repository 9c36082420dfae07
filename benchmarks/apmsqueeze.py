"""APMSqueeze against DDP: bytes, and times on slow networks. Whether it learns as well is in `apms_learning.py`.

    python -m benchmarks 'apms.*' [--preset smoke|laptop|full] [--json FILE]

Bandwidth is set between network namespaces that the benchmark makes and removes (`compressed/README.md`); that needs
iproute2 and the right to do it. Without, each TCP connection is paced (`compressed/paced.py`), with two ranks only, and
the line's "network" says so.

The network that is timed is the paper's FFNN, 12 M parameters, 32 rows a rank, one thread a rank. The communication
share of a step is the whole step less a step of these ranks without any communication (Adam, fused). All variants live
in the same processes and take turns. Who competes is in `compressed/variants.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks import runner
from benchmarks.compressed.network import Loopback
from benchmarks.compressed.ranks import Groups, Ranks
from persia.optim import OneBit

TIMED_LR = 1e-7
"""Of runs that are only timed: after two steps of warm-up v knows little, and a network that diverges sends nothing."""
WARMUP = 0.15
TIMED = {"smoke": "small_ffnn", "laptop": "paper_ffnn", "full": "paper_ffnn"}
SIZES = {"smoke": (2,), "laptop": (2, 4), "full": (2, 3, 4)}
ROUNDS = {"smoke": 1, "laptop": 9, "full": 15}
STEPS_A_ROUND = {0.1: 1, 1.0: 2, 2.0: 4, 10.0: 6}
TARGETS = {0.1: 15.0, 1.0: 8.0, 2.0: 5.0, 10.0: 1.5}
WHOLE_TARGETS = {0.1: 18.0, 1.0: 5.0, 2.0: 3.0, 10.0: 1.6}
NAMES = {0.1: "0g1", 1.0: "1g", 2.0: "2g", 10.0: "10g"}
HOOKS_AT = (0.1, 1.0, 2.0)
OTHERS = ["fp16", "power_sgd", "deepspeed"]
FIRST_STEPS = 6
"""Of a training that will be timed: past its warm-up of 2, and past DDP's rebuilding of its buckets."""

Function = Callable[[Groups, str], runner.Measure | Iterator[runner.Measure]]


def on_ranks(*names: str) -> Callable[[Function], Function]:
    """Returns a decorator for functions that need process groups, which all functions of a run share."""

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
    """Bytes that leave a rank in a step of DDP, divided by the bytes of APMSqueeze."""
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


def processors(ranks: Ranks, steps: int = 4) -> float:
    """Seconds in which all cores together do the work of a step of APMSqueeze on all ranks."""
    answers = ranks.call("time", variant="one_bit", steps=steps)
    return sum(answer["processor_seconds"] for answer in answers) / steps / len(os.sched_getaffinity(0))


class Steps(NamedTuple):
    """Seconds of a step by variant and round, seconds of all cores for a step, and the kind of the network."""

    seconds: dict[str, list[float]]
    processors: float
    network: str


@functools.cache
def steps_of(groups: Groups, preset: str, gbit: float, count: int) -> Steps:
    """Measures steps without communication, of DDP, and of APMSqueeze: once for all functions of a run."""
    variants = ["local", "adam", "one_bit"]
    ranks = ready(groups, count, preset, variants)
    return Steps(timed(ranks, variants, gbit, ROUNDS[preset]), processors(ranks), ranks.network.kind)


def step(gbit: float, groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """DDP's step over that of APMSqueeze, for each number of ranks, and the worst: the communication share, the whole.

    No way to send could make the whole step more than `most` times as fast: DDP's over a step that sends nothing. The
    cores need `processors_s` for a step of all ranks, packing and TCP included, so no link could make it faster.
    """
    name, whole_name = f"apms.step_{NAMES[gbit]}", f"apms.step_whole_{NAMES[gbit]}"
    measures: list[runner.Measure] = []
    wholes: list[runner.Measure] = []
    for count in SIZES[preset]:
        if count > 2 and isinstance(groups.of(count).network, Loopback):
            print(f"{count} ranks need network namespaces: skipped", file=sys.stderr)
            continue
        seconds, processors_s, network = steps_of(groups, preset, gbit, count)
        middle = {variant: statistics.median(each) for variant, each in seconds.items()}
        alone = middle["local"]
        pairs = list(zip(seconds["adam"], seconds["one_bit"], strict=True))
        details = {
            "ranks": count,
            **{f"{variant}_s": each for variant, each in middle.items()},
            "processors_s": processors_s,
            "network": network,
        }
        wholes.append(
            runner.quantity(
                f"{whole_name}.n{count}",
                [theirs / ours for theirs, ours in pairs],
                "ratio",
                at_least=WHOLE_TARGETS[gbit],
                details={"of": "whole step", "most": middle["adam"] / alone, **details},
            )
        )
        rounds = runner.quantity(
            f"{name}.n{count}",
            [(theirs - alone) / max(ours - alone, 1e-3) for theirs, ours in pairs],
            "ratio",
            at_least=TARGETS[gbit],
            details={"of": "communication share of a step", **details},
        )
        # Of the medians: where our share is small, a round's own ratio is mostly noise, as the spread then says.
        share = (middle["adam"] - alone) / max(middle["one_bit"] - alone, 1e-3)
        measures.append(dataclasses.replace(rounds, value=share))
    yield from measures
    yield runner.worst(name, measures)
    yield from wholes
    yield runner.worst(whole_name, wholes)


for speed, name in NAMES.items():
    on_ranks(
        *(f"apms.step_{name}{n}" for n in ("", *(f".n{count}" for count in SIZES["full"]))),
        *(f"apms.step_whole_{name}{n}" for n in ("", *(f".n{count}" for count in SIZES["full"]))),
    )(partial(step, speed))


@on_ranks("apms.vs_hooks", *(f"apms.vs_hooks.{other}_{NAMES[speed]}" for other in OTHERS for speed in HOOKS_AT))
def vs_hooks(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Step time of each competitor over ours at 0.1, 1 and 2 Gbit/s."""
    ranks = ready(groups, SIZES[preset][0], preset, [*OTHERS, "one_bit"])
    measures = []
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
            measures.append(measure)
    yield from measures
    yield runner.worst("apms.vs_hooks", measures)


PARTS = ("step", "_agree", "squares", "compress", "average", "apply", "wait")


@on_ranks(*(f"apms.profile.n{count}" for count in SIZES["full"]))
def profile(groups: Groups, preset: str) -> Iterator[runner.Measure]:
    """Seconds of `APMSqueeze.step` at 1 Gbit/s by what they go to, mean over the ranks; `wait` is for others."""
    for count in SIZES[preset]:
        ranks = ready(groups, count, preset, ["one_bit"])
        ranks.limit(1.0)
        profiles = ranks.call("profile", variant="one_bit", steps=4 * ROUNDS[preset])
        parts = {part: statistics.fmean(each.get(part, 0.0) for each in profiles) for part in PARTS}
        details = {"ranks": count, **parts, "network": ranks.network.kind}
        yield runner.Measure(f"apms.profile.n{count}", parts["step"], "s", details=details)


def end_to_end(gbit: float, groups: Groups, preset: str) -> runner.Measure:
    """A whole training, warm-up included: time of Adam over ours; at 1 Gbit/s over what the step ratio r promises.

    r is the ratio of whole steps in the measurement of `apms.step_1g.n2`: with that of the training's own late steps
    the promise would hold whatever they took.
    """
    count = SIZES[preset][0]
    steps = {"smoke": 8, "laptop": 20 if gbit < 1 else 60, "full": 100}[preset]
    rounds = {"smoke": 1, "laptop": 5, "full": 9}[preset]
    warmup = round(WARMUP * steps)
    seconds = steps_of(groups, preset, gbit, count).seconds
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
            if any(answer["skipped"] for answer in answers):
                raise RuntimeError(f"{variant} has diverged; a step that is skipped takes no time.")
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
