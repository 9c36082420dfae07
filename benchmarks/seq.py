"""Models of sequences: do they learn chains whose rule is known?

    python -m benchmarks 'seq.*' [--preset smoke|laptop|full] [--json FILE]

seq.chain.MODEL.KIND.LENGTH
                   HR@1 among all items over that of the best possible answers to the same histories, of the last of
                   some epochs; mean over seeds. The next item is a function of the newest event (`first`), of the
                   second newest (`second`), of the one five events ago, for each user another cycle (`periodic`), or
                   of the one of a day ago, before 0 to 4 of the last minutes that mean nothing (`time`, on which
                   SASRec, that reads no times, has no target). LENGTH is the number of events of each history.
seq.first_epoch.KIND.LENGTH
                   The same after the first epoch: HSTU's less SASRec's.
seq.time.LENGTH    The same after the last epoch, where time matters: HSTU's less SASRec's.
seq.next_item.hr   HR@10 of `NextItem` among all items less that of the same network and loss in plain PyTorch with
                   `nn.Embedding`, on generated sessions; seeds paired.
seq.next_item.rate Rows/s of the same runs over PyTorch's, whose negatives are drawn before the clock starts.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterator

from benchmarks import runner
from benchmarks.seq_next_item import Amount, train, train_in_torch
from benchmarks.seq_runs import MODELS, Size, hit_rates
from benchmarks.zoo import sides

SEEDS = {"smoke": (0,), "laptop": (0, 1, 2, 3, 4), "full": tuple(range(10))}
SIZES = {"smoke": Size(1, 2, 4, 20), "laptop": Size(5, 150, 32, 400), "full": Size(10, 300, 32, 1_000)}
LENGTHS = {"first": (1, 10, 100, 500), "second": (10, 100, 500), "periodic": (10, 100, 500), "time": (10, 100, 500)}
"""Lengths at which the rule says what comes next."""
SMOKE_LENGTH = 10
"""The longest of a smoke run: others take seconds."""
LEAST = 0.9
"""HR@1 over the best possible answers'."""
AMOUNTS = {"smoke": Amount(100, 3, 50), "laptop": Amount(2_000, 300, 4_000), "full": Amount(20_000, 2_000, 20_000)}
"""Of sessions, for `seq.next_item`."""
BEHIND = -0.1
"""HR@1 of HSTU's first epoch less SASRec's."""


@functools.cache
def rates(model: str, kind: str, length: int, preset: str) -> list[list[float]]:
    """Returns HR@1 over the best possible answers', of each seed after each epoch."""
    return [hit_rates(model, kind, length, seed, SIZES[preset]) for seed in SEEDS[preset]]


def _register(kind: str, length: int) -> None:
    where = f"{kind}.{length}"
    names = [*(f"seq.chain.{model}.{where}" for model in MODELS), f"seq.first_epoch.{where}"]
    if kind == "time":
        names.append(f"seq.time.{length}")

    @runner.measures(*names)
    def learnt(preset: str) -> Iterator[runner.Measure]:
        """How well each model learns a kind of chain."""
        trained = min(length, SMOKE_LENGTH) if preset == "smoke" else length
        by_model = {model: rates(model, kind, trained, preset) for model in MODELS}
        for model, of_model in by_model.items():
            last = [each[-1] for each in of_model]
            target = None if (kind, model) == ("time", "sasrec") else LEAST
            details = {"per_seed": last, "by_epoch": [statistics.fmean(each) for each in zip(*of_model, strict=True)]}
            yield runner.Measure(
                f"seq.chain.{model}.{where}", statistics.fmean(last), "ratio", at_least=target, details=details
            )
        ours, theirs = by_model["hstu"], by_model["sasrec"]
        for name, epoch, target in ((f"seq.first_epoch.{where}", 0, BEHIND), (f"seq.time.{length}", -1, 0.0)):
            if name in names:
                yield runner.paired(
                    name, [each[epoch] for each in ours], [each[epoch] for each in theirs], "ratio", at_least=target
                )


for _kind, _lengths in LENGTHS.items():
    for _length in _lengths:
        _register(_kind, _length)


@runner.measures("seq.next_item.hr", "seq.next_item.rate")
def next_item(preset: str) -> Iterator[runner.Measure]:
    """Compares `NextItem` with plain PyTorch, in processes of their own, in an order that alternates."""
    runs = []
    for seed in SEEDS[preset]:
        both = list(zip(sides(), (train, train_in_torch), strict=True))
        order = both[::-1] if seed % 2 else both
        found = [side.call(function, AMOUNTS[preset], seed) for side, function in order]
        runs.append(found[::-1] if seed % 2 else found)
    ours, theirs = zip(*runs, strict=True)
    hit_rates_of = [[one.hit_rate for one in side] for side in (ours, theirs)]
    yield runner.paired("seq.next_item.hr", *hit_rates_of, "fraction", at_least=-0.002)
    rates_of = [[one.rows_per_s for one in side] for side in (ours, theirs)]
    yield runner.paired_ratio("seq.next_item.rate", *rates_of, at_least=1.0)
