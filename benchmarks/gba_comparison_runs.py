"""Runs of benchmarks/gba_comparisons.py: models of histories in virtual time, day by day."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from benchmarks.modes_runs import LOCAL, TWO_SLOW, Day, Rates, area, joined
from benchmarks.zoo_runs import MODELS, Clicks, sequences
from persia.modes import Mode
from persia.optim import Adagrad
from persia.replay import Setting, simulate, steady
from persia.replay.virtual import VirtualTraining

__all__ = ["Histories", "days_of"]

TEST_ROWS = 32_768


class Histories(NamedTuple):
    """One run on generated histories.

    Attributes:
        model: name in `zoo_runs.MODELS`.
        modes: mode of each day.
        rates: of Adam for the network, and of Adagrad for rows.
        seed: of data, network and rows.
        rows: of a day.
    """

    model: str
    modes: tuple[Mode, ...]
    rates: Rates
    seed: int
    rows: int


@functools.lru_cache(maxsize=1)
def _data(rows: int, seed: int) -> Clicks:
    """Returns generated histories; only the newest, as all runs of a seed follow each other."""
    return sequences.__wrapped__(rows, LOCAL, seed)


def days_of(plan: Histories) -> list[Day]:
    """Trains day by day, each in its mode, and tests on the same rows after each day."""
    torch.set_num_threads(1)
    per_day = plan.rows // LOCAL
    data = _data(plan.rows * len(plan.modes), plan.seed)
    test = joined(sequences(min(plan.rows, TEST_ROWS), LOCAL, 1_000 + plan.seed).batches)
    torch.manual_seed(plan.seed)
    run = VirtualTraining(
        MODELS[plan.model](data.schema, data.newest_first),
        data.schema,
        data.batches.__getitem__,
        lambda parameters: torch.optim.Adam(parameters, plan.rates.dense, fused=True),
        Adagrad(lr=plan.rates.rows),
        seed=plan.seed,
    )
    days, step, time = [], 0, 0.0
    for day, mode in enumerate(plan.modes):
        numbers = range(day * per_day, (day + 1) * per_day)
        timeline = simulate(mode, Setting(steady(TWO_SLOW), local_batch=LOCAL), numbers, step=step, start=time)
        run.run(timeline)
        step, time = timeline.end_step, timeline.end
        days.append(Day(area(test, run.evaluate(test)), timeline.summary(), time))
        run.logits.clear()
    return days
