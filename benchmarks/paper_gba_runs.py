"""Runs of benchmarks/paper_gba.py: a training that is continued in several ways from one base."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from benchmarks.modes_runs import Day, Plan, Rates, area, joined, synthetic, training
from benchmarks.paper import cluster
from persia import Batch, Schema
from persia.modes import Gba, Mode, Sync
from persia.replay import Setting, simulate, steady

__all__ = ["GLOBAL", "Continued", "Strained", "Way", "continued", "strained"]

DRIFT = 0.1
REPLICAS, REPLICA_LOCAL = 8, 400
"""NN workers of Sync and their rows, before the switch."""
WORKERS, LOCAL = 32, 100
"""NN workers of Gba and their rows."""
GLOBAL = REPLICAS * REPLICA_LOCAL
TOLERANCE = 4
TRACE_BATCHES = 512
"""Of each NN worker until its speeds repeat."""


class _Branch:
    """A training, from its start or from a copy of another one.

    Args:
        plan: how the data were made, and the seed.
        data: schema, and all batches of `plan.local` rows.
        rates: learning rates.
        base: what it continues; None for a start.
    """

    def __init__(self, plan: Plan, data: tuple[Schema, list[Batch]], rates: Rates, base: _Branch | None = None) -> None:
        schema, self._batches = data
        self._plan = plan
        self._today: dict[int, Batch] = {}
        self._run = training(plan._replace(rates=rates), schema, self._today.__getitem__)
        self._step, self._time = 0, 0.0
        if base is not None:
            state = base._run.state_dict()
            for group in state["optimizer"]["param_groups"]:
                group["lr"] = rates.dense
            self._run.load_state_dict(state)
            self._step, self._time = base._step, base._time

    def train(self, mode: Mode, setting: Setting, day: int, test: Sequence[Batch]) -> Day:
        """Trains the batches of a day, drains, and tests."""
        per_day = self._plan.rows // self._plan.local
        first = day * per_day
        parts = joined(self._batches[first : first + per_day], setting.local_batch // self._plan.local)
        numbers = range(first, first + len(parts))
        self._today.clear()
        self._today.update(zip(numbers, parts, strict=True))
        timeline = simulate(mode, setting, numbers, step=self._step, start=self._time)
        self._run.run(timeline)
        self._step, self._time = timeline.end_step, timeline.end
        result = Day(area(test, self._run.evaluate(test)), timeline.summary(), self._time)
        self._run.logits.clear()
        return result


# --- Table 5.3 --------------------------------------------------------------------------------------------------------


class Strained(NamedTuple):
    """Days of Sync, and then days of Sync and of Gba in each state of the cluster.

    Attributes:
        ids: of each feature.
        rates: learning rates of all days.
        seed: of data, model and cluster.
        rows: of a day.
        base_days: of Sync, before the switch.
        days: after it.
        states: by name, the standard deviation of the NN workers' speeds over their mean, and the probability of a
            stall.
    """

    ids: int
    rates: Rates
    seed: int
    rows: int
    base_days: int
    days: int
    states: Mapping[str, tuple[float, float]]


def strained(plan: Strained) -> dict[str, list[Day]]:
    """Returns the days after the base by state, and of Sync; each is tested on the next day."""
    torch.set_num_threads(1)
    rows = Plan((), plan.rates, plan.seed, plan.rows, DRIFT, local=LOCAL, ids=plan.ids)
    data = synthetic(rows, plan.base_days + plan.days + 1)
    batches = data[1]
    per_day = rows.rows // LOCAL

    def train(branch: _Branch, mode: Mode, setting: Setting, days: range) -> list[Day]:
        return [
            branch.train(mode, setting, day, joined(batches[(day + 1) * per_day : (day + 2) * per_day])) for day in days
        ]

    replicas = Setting(steady([1.0] * REPLICAS), local_batch=REPLICA_LOCAL)
    base = _Branch(rows, data, plan.rates)
    train(base, Sync(), replicas, range(plan.base_days))
    days = range(plan.base_days, plan.base_days + plan.days)
    results = {}
    for state, (deviation, stalls) in plan.states.items():
        trace = cluster(WORKERS, deviation, stalls, TRACE_BATCHES, plan.seed)
        branch = _Branch(rows, data, plan.rates, base)
        results[state] = train(branch, Gba(GLOBAL, TOLERANCE), Setting(trace, local_batch=LOCAL), days)
        del branch
        gc.collect()  # Servers refer to the training that made them.
    results["sync"] = train(base, Sync(), replicas, days)
    return results


# --- Figure 2 ---------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """A mode, and the learning rates with which it trains."""

    mode: Mode
    rates: Rates


class Continued(NamedTuple):
    """The first half of the pieces in one way, the second half in several.

    Attributes:
        ids: of each feature.
        zipf: exponent of how often they occur.
        seed: of data and model.
        rows: of a piece.
        pieces: number of pieces.
        base: the way of the first half.
        ways: those of the second half, by name.
    """

    ids: int
    zipf: float
    seed: int
    rows: int
    pieces: int
    base: Way
    ways: Mapping[str, Way]


def continued(plan: Continued) -> dict[str, list[float]]:
    """Returns the AUC on unseen rows after each piece, of the first half ("base") and of each way."""
    torch.set_num_threads(1)
    rows = Plan((), plan.base.rates, plan.seed, plan.rows, ids=plan.ids, zipf=plan.zipf)
    data = synthetic(rows, plan.pieces + 1)
    test = joined(data[1][plan.pieces * (plan.rows // rows.local) :])
    half = plan.pieces // 2

    def train(branch: _Branch, mode: Mode, pieces: range) -> list[float]:
        return [branch.train(mode, rows.setting(), piece, test).auc for piece in pieces]

    base = _Branch(rows, data, plan.base.rates)
    results = {"base": train(base, plan.base.mode, range(half))}
    for name, way in plan.ways.items():
        branch = _Branch(rows, data, way.rates, base)
        results[name] = train(branch, way.mode, range(half, plan.pieces))
        del branch
        gc.collect()  # Servers refer to the training that made them.
    return results
