"""What all benchmarks share: alternating comparison, one JSON line per measure, the command line.

A benchmark file maps names to functions of a preset and ends with ``harness.main(MEASURES)``:

    MEASURES = {"store.insert": insert}     # insert(preset: str) -> Measure, several, or None (skipped)

Two things are compared in alternation within one run, and their ratio is stated, so that a slow machine, a busy one,
or one that warms up, is as unfair to one as to the other.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["PRESETS", "Measure", "main", "quantity", "ratio"]

PRESETS = ("smoke", "laptop", "full")
MIN_ROUNDS = 5


@dataclass(frozen=True)
class Measure:
    """One measured figure.

    Args:
        name: as in the documentation's table.
        value: the median.
        unit: of the value; "x ..." for ratios.
        target: what it must reach, or None if it is only reported.
        spread: half the interquartile range over the median.
        at_least: whether larger is better; otherwise the target is an upper bound.
        details: further facts for the JSON line, such as both sides of a ratio.
    """

    name: str
    value: float
    unit: str
    target: float | None = None
    spread: float = 0.0
    at_least: bool = True
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds(self) -> bool | None:
        """Whether the target is met; None without one."""
        if self.target is None:
            return None
        return self.value >= self.target if self.at_least else self.value <= self.target


Function = Callable[[str], Measure | Iterable[Measure] | None]


def ratio(
    name: str,
    *,
    ours: Callable[[], float],
    theirs: Callable[[], float],
    rounds: int = MIN_ROUNDS,
    unit: str,
    target: float | None = None,
) -> Measure:
    """Median over rounds of ours / theirs, both rates (larger is better), measured in alternating order."""
    pairs = []
    for number in range(max(rounds, MIN_ROUNDS)):
        if number % 2:
            b, a = theirs(), ours()
        else:
            a, b = ours(), theirs()
        pairs.append((a, b))
    details = {"ours": statistics.median(a for a, _ in pairs), "theirs": statistics.median(b for _, b in pairs)}
    return quantity(name, [a / b for a, b in pairs], unit, target, details=details)


def quantity(
    name: str,
    values: list[float],
    unit: str,
    target: float | None = None,
    *,
    at_least: bool = True,
    details: Mapping[str, Any] | None = None,
) -> Measure:
    """The median and spread of repeated measurements."""
    return Measure(name, statistics.median(values), unit, target, _spread(values), at_least, details or {})


def _spread(values: list[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / abs(middle) if middle else 0.0


def main(measures: Mapping[str, Function], argv: list[str] | None = None) -> None:
    """Runs the measures asked for and prints a JSON line for each, also to `--json FILE` (appended)."""
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--only", action="append", choices=sorted(measures), metavar="NAME", help="may be repeated")
    parser.add_argument("--preset", choices=PRESETS, default="laptop", help="how much work")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the lines to this file too")
    arguments = parser.parse_args(argv)
    for name in arguments.only or measures:
        found = measures[name](arguments.preset)
        if found is None:
            print(f"{name}: skipped", file=sys.stderr)
            continue
        for measure in [found] if isinstance(found, Measure) else found:
            _report(measure, name, arguments.preset, arguments.json)


def _report(measure: Measure, name: str, preset: str, file: Path | None) -> None:
    script = os.path.relpath(sys.argv[0])
    line = json.dumps(
        {
            "name": measure.name,
            "value": _rounded(measure.value),
            "unit": measure.unit,
            "target": measure.target,
            "holds": measure.holds,
            "spread": _rounded(measure.spread),
            "command": shlex.join(["python", script, "--only", name, "--preset", preset]),
            "commit": _commit(),
            "machine": _machine(),
            **{key: _rounded(value) for key, value in measure.details.items()},
        }
    )
    print(line, flush=True)
    if file is not None:
        with file.open("a") as stream:
            stream.write(line + "\n")


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.stdout.strip() or "unknown"


def _machine() -> str:
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"
