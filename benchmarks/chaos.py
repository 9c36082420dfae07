"""Training while processes fail, rows move, and the network between hosts loses, delays and cuts what it carries.

    python -m benchmarks 'chaos.*' scale.ps_lost [--preset laptop|full] [--json FILE]

Runs `tests/chaos/chaos_network.py --scale` in each mode, over three hosts in namespaces, which needs root; and
`tests/chaos/chaos_run.py --moves` on one host. Both are skipped in smoke runs, as a run takes minutes;
`tests/chaos/test_chaos*.py` have short ones.

scale.ps_lost           Invariants that do not hold once rows have moved to other PSs, and processes of every role were
                        killed: updates that are lost or doubled, rows on two PSs, rows with another value.
chaos.hosts             Share of the time in which samples were trained, over all runs.
chaos.hosts.violations  Invariants that do not hold at the end of a run, such as rows with another value.
chaos.hosts.faults      Faults of all runs, and changes of the numbers of processes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks import runner
from benchmarks.elsewhere import TESTS, tests_support

MODES = ("sync", "hybrid", "gba")


class Plan(NamedTuple):
    """How much is tried in each mode.

    Attributes:
        seeds: of the schedules.
        faults: of each schedule.
        pause: seconds after each fault.
    """

    seeds: Sequence[int]
    faults: int
    pause: float


PLANS = {"laptop": Plan((1,), 24, 10.0), "full": Plan((1, 2, 3), 220, 8.0)}
"""A fault lasts 7 s in the mean, and training goes on some seconds later: a run of "full" takes about an hour."""


MOVES = {"laptop": 100, "full": 400}
"""Moves and kills; more than half of them are moves."""
SECONDS_OF_A_FAULT = 4.0


def lines_of(program: str, *arguments: object) -> Iterator[dict[str, Any]]:
    """Runs a program of `tests/chaos`; yields the line of each seed that it prints."""
    paths = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, str(TESTS / "chaos" / program), *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    ) as process:
        assert process.stdout is not None
        yield from (json.loads(line) for line in process.stdout if line.startswith("{"))  # Ray prints there, too.


@runner.measures("scale.ps_lost")
def lost(preset: str) -> runner.Measure | None:
    """Invariants that do not hold after moves of rows with kills of every role."""
    if preset not in MOVES:
        print("scale.ps_lost is skipped: it takes minutes", file=sys.stderr)
        return None
    count = MOVES[preset]
    arguments = ("--moves", "--only", "kill", "--faults", count, "--seconds", SECONDS_OF_A_FAULT * count, "--seeds", 1)
    (line,) = lines_of("chaos_run.py", *arguments)
    details = {"made": line["made"], "compared": line["compared"], "counted": line["counted"], "wrong": line["wrong"]}
    return runner.Measure("scale.ps_lost", float(len(line["wrong"])), "violations", at_most=0.0, details=details)


@runner.measures("chaos.hosts", "chaos.hosts.violations", "chaos.hosts.faults")
def hosts(preset: str) -> list[runner.Measure] | None:
    """Share of the time with training, violations and faults of all runs."""
    if preset not in PLANS:
        print("chaos.hosts is skipped: it takes minutes", file=sys.stderr)
        return None
    support = tests_support("hosts")
    try:
        support.Hosts(1).close()
    except support.UnavailableError as reason:
        print(f"chaos.hosts is skipped: {reason}", file=sys.stderr)
        return None
    plan = PLANS[preset]
    lines: list[dict[str, Any]] = []
    for mode in MODES:
        arguments = ("--scale", "--mode", mode, "--faults", plan.faults, "--pause", plan.pause)
        lines += lines_of("chaos_network.py", *arguments, "--seeds", *plan.seeds)
    if len(lines) < len(MODES) * len(plan.seeds):
        raise RuntimeError(f"only {len(lines)} runs have printed what came of them; what they logged is above")
    seconds = sum(line.get("seconds", 0.0) for line in lines)  # A run that has failed has none.
    trained = sum(line["value"] * line.get("seconds", 0.0) for line in lines)
    made: Counter[str] = Counter()
    for line in lines:
        made.update(line["made"])
    wrong = {f"{line['mode']} {line['seed']}": line["wrong"] for line in lines if line["wrong"]}
    details = {
        "seconds": seconds,
        "kinds": dict(made),
        "by_run": {f"{line['mode']} {line['seed']}": line["value"] for line in lines},
        "scaled": sum(len(line.get("scaled", ())) for line in lines),
        "not_scaled": [reason for line in lines for reason in line.get("not_scaled", ())],
    }
    violations = float(sum(map(len, wrong.values())))
    share = trained / seconds if seconds else 0.0
    return [
        runner.Measure("chaos.hosts", share, "fraction", at_least=0.85, details=details),
        runner.Measure("chaos.hosts.violations", violations, "violations", at_most=0.0, details={"wrong": wrong}),
        runner.Measure(
            "chaos.hosts.faults",
            float(made.total()),
            "operations",
            at_least=200.0 if preset == "full" else None,
            details={"kinds": dict(made)},
        ),
    ]
