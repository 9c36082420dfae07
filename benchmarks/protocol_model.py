"""How many states of the protocol are checked, and how many cases violate an invariant.

    python -m benchmarks 'model.*' [--preset smoke|laptop|full] [--json FILE]

Nothing is timed: a model checker visits all states of the model in tests/protocol, case by case. The trace of a
violation is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from benchmarks import runner
from benchmarks.elsewhere import tests_module


@runner.measures("model.states", "model.violations")
def states(preset: str) -> Iterator[runner.Measure]:
    """States that were visited, and cases with a violation; the small cases in a smoke run, else all."""
    explore = tests_module("protocol.model_checker").explore
    protocol = tests_module("protocol.model_protocol").Protocol
    rules = tests_module("protocol.model_rules")
    cases = {f"{name}, small": case for name, case in rules.CASES.items()}
    if preset != "smoke":
        cases |= rules.LARGE
    visited, wrong, deepest = {}, [], 0
    for name, case in cases.items():
        found = explore(protocol(case))
        visited[name] = found.states
        deepest = max(deepest, found.depth)
        if found.violation is not None:
            print(f"{name}:\n{found.violation}", file=sys.stderr)
            wrong.append(name)
    at_least = None if preset == "smoke" else 1_000_000
    details = {"by_case": visited, "deepest": deepest}
    yield runner.Measure("model.states", sum(visited.values()), "states", at_least=at_least, details=details)
    yield runner.Measure("model.violations", len(wrong), "violations", at_most=0, details={"cases": wrong})
