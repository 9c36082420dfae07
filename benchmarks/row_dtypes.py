"""What 16-bit rows cost in accuracy: the data and networks of `paper.table2`, in virtual time.

    python -m benchmarks 'quality.bf16*' 'quality.fp16.*' [--preset smoke|laptop|full] [--json FILE]

quality.bf16.DATA.NETWORK, quality.fp16.DATA.NETWORK
    Test AUC after one pass in Hybrid(4), with its warm-up, with rows of bfloat16, or float16, less that of the same run
    with rows of float32, paired by seed. DATA and NETWORK are those of `paper.table2`. Adagrad, whose sums are float32.
quality.bf16_adam.DATA.NETWORK
    The same with Adam, whose moments are bfloat16, too, against Adam with float32.
quality.bf16.NETWORK, quality.fp16.NETWORK, quality.bf16_adam.NETWORK
    The same of the mean of the AUCs on all DATA that is here.

The rates are the same for both and not tuned: a pair differs by the dtype alone. Any rounding leads a run another
way, by about 0.001 for one seed, so it takes twenty of them to see a difference of 0.0005. Runs are spread over the
cores, and kept in the file of PERSIA_RUNS.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

from benchmarks import runner
from benchmarks.modes_runs import FIRST, everywhere
from benchmarks.paper_runs import FILES, NETWORKS, SOURCES, Outcome, Run, train_and_test
from benchmarks.public_data import is_here
from persia.modes import Hybrid
from persia.optim import Adam
from persia.types.half_floats import Dtype

SEEDS = {"smoke": range(1), "laptop": range(20), "full": range(5)}
ROWS = {"smoke": 2_048, "laptop": 1_000_000, "full": 12_000_000}
"""Rows of both parts; globo has 5.8 million."""
ROW_ADAM = Adam(lr=0.005, eps=1e-6)
KINDS: dict[str, tuple[Dtype, Literal["adagrad", "adam"]]] = {
    "bf16": ("bfloat16", "adagrad"),
    "fp16": ("float16", "adagrad"),
    "bf16_adam": ("bfloat16", "adam"),
}


class StoredRun(NamedTuple):
    """A run with rows of a dtype."""

    run: Run
    dtype: Dtype
    optimizer: Literal["adagrad", "adam"]


def train_stored(plan: StoredRun) -> Outcome:
    """Trains one pass over the training rows, and evaluates the test rows."""
    return train_and_test(plan.run, plan.dtype, ROW_ADAM if plan.optimizer == "adam" else None)


@functools.cache
def trained(preset: str, source: str, network: str) -> Mapping[str, list[Outcome]]:
    """Outcomes by kind, and by optimizer for rows of float32, seed by seed.

    Nothing for a source whose file is not here, and in preset smoke for all networks but one.
    """
    if preset == "smoke" and network != next(iter(NETWORKS)):
        return {}
    if source in FILES and not is_here(FILES[source]):
        return {}
    runs = [Run(source, network, Hybrid(4), FIRST, seed, ROWS[preset]) for seed in SEEDS[preset]]
    float32 = {optimizer: ("float32", optimizer) for _, optimizer in KINDS.values()}
    kinds = {**KINDS, **float32}
    # Seed by seed, as a process keeps the rows of one.
    plans = [StoredRun(run, dtype, optimizer) for run in runs for dtype, optimizer in kinds.values()]
    outcomes = everywhere(train_stored, plans, Outcome)
    return {kind: outcomes[at :: len(kinds)] for at, kind in enumerate(kinds)}


def auc_of_dtypes(preset: str, *, source: str, network: str) -> Iterator[runner.Measure]:
    """Test AUC less that with rows of float32."""
    runs = trained(preset, source, network)
    for kind, (_, optimizer) in KINDS.items() if runs else ():
        yield runner.paired(
            f"quality.{kind}.{source}.{network}",
            [one.auc for one in runs[kind]],
            [one.auc for one in runs[optimizer]],
            "AUC",
            at_least=-0.0005,
            details={"train_rows": runs[kind][0].train_rows, "test_rows": runs[kind][0].test_rows},
        )


def mean_auc_of_dtypes(preset: str, *, network: str) -> Iterator[runner.Measure]:
    """The same of the mean over all sources that are here, seed by seed."""
    each = {source: runs for source in SOURCES if (runs := trained(preset, source, network))}

    def means(kind: str) -> list[float]:
        seeds = zip(*(runs[kind] for runs in each.values()), strict=True)
        return [statistics.mean(one.auc for one in outcomes) for outcomes in seeds]

    for kind, (_, optimizer) in KINDS.items() if each else ():
        yield runner.paired(
            f"quality.{kind}.{network}",
            means(kind),
            means(optimizer),
            "AUC",
            at_least=-0.0005,
            details={"sources": list(each)},
        )


for _network in NETWORKS:
    for _source in SOURCES:
        _names = (f"quality.{_kind}.{_source}.{_network}" for _kind in KINDS)
        runner.measures(*_names)(functools.partial(auc_of_dtypes, source=_source, network=_network))
    _names = (f"quality.{_kind}.{_network}" for _kind in KINDS)
    runner.measures(*_names)(functools.partial(mean_auc_of_dtypes, network=_network))
