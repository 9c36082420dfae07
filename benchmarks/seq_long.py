"""Long histories: training without padding against training with it.

    python -m benchmarks 'seq.long.*' [--preset smoke|laptop|full] [--json FILE]

seq.long.rate.BACKBONE    Rows/s of one pass of `NextItem` in batches by a budget of events, without padding, over those
                          of batches of 32 histories, padded to 1,000. Histories of 1 to 1,000 events, 250 in the mean;
                          both have the same rows and network, and about equally many events a batch.
seq.long.memory.BACKBONE  Peak memory of the same runs, above what the process had before: medians, as a ratio.
seq.long.full.BACKBONE    Rows/s of histories that all have 1,000 events, and their peak memory.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

from benchmarks import runner
from benchmarks.elsewhere import AS_A_PROGRAM, Elsewhere
from persia import IdFeature, Schema, Trainer, TrainerOptions, data
from persia.modes import Sync
from persia.nn.models import NextItem, event_layout
from persia.nn.models.next_item import Backbone
from persia.optim import Adagrad

LENGTH, MEAN, DIM, ITEMS, NEGATIVES = 1_000, 250, 64, 100_000, 128
SCALE = 255
"""Of the exponential distribution of lengths, which is cut at `LENGTH`: its mean is `MEAN`."""
SAMPLES = 32
"""Of a padded batch."""
ROWS = {"smoke": (4, 1), "laptop": (160, 40), "full": (4_096, 1_024)}
"""Histories of all lengths, and of the longest."""
BACKBONES: tuple[Backbone, ...] = ("sasrec", "hstu")
LEAST = 1.5
"""Rows/s without padding over rows/s with it."""
SCHEMA = Schema([IdFeature("item", dim=DIM), IdFeature("history", table="item", pooling=None, max_length=LENGTH)])


class Outcome(NamedTuple):
    """Speed of a pass, and the memory that it took at its peak."""

    rows_per_s: float
    peak_bytes: float


@functools.cache
def histories(rows: int, full: bool, seed: int) -> Any:
    """Returns a table of histories, popular items first."""
    import pyarrow as pa

    draw = np.random.default_rng(seed)
    lengths = np.full(rows, LENGTH) if full else draw.exponential(SCALE, rows).astype(int).clip(1, LENGTH)
    offsets = np.concatenate([[0], lengths.cumsum()])
    past, item = (ITEMS * draw.random(offsets[-1]) ** 2).astype(int), (ITEMS * draw.random(rows) ** 2).astype(int)
    return pa.table({"item": item, "history": pa.ListArray.from_arrays(offsets, past), "label": np.ones(rows)})


def train(backbone: Backbone, jagged: bool, rows: int, full: bool, seed: int) -> Outcome:
    """Trains one pass, without padding or with it."""
    budget: Any = {"tokens_per_batch": SAMPLES * MEAN} if jagged else {}
    samples = data.arrow(histories(rows, full, seed), SCHEMA, 1_024 if jagged else SAMPLES, **budget)
    fewest = SAMPLES * MEAN // LENGTH if jagged else SAMPLES
    each = -(-NEGATIVES // min(fewest, rows))
    catalog = data.item_catalog(samples, ["item"], history=["history"])
    reader = data.shared_negatives(samples, ["item"], NEGATIVES, catalog=catalog, per_sample=each, seed=seed)
    torch.manual_seed(seed)
    model = NextItem(reader.schema, backbone=backbone, negatives=["negative_item"])
    trainer = Trainer(
        model,
        reader.schema,
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        embedding_optimizer=Adagrad(lr=0.05),
        mode=Sync(),
        options=TrainerOptions(seed=seed, device="cpu", progress=False),
    )
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # Begins a new peak; others' peaks are inherited.
    before = _peak()
    with mock.patch.object(event_layout, "can_be_jagged", return_value=jagged):
        result = trainer.fit(reader)
    return Outcome(result.rows_per_second, float(_peak() - before))


def _peak() -> int:
    """Returns the peak of the resident memory of this process, in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _register(backbone: Backbone) -> None:
    rate, memory, longest = (f"seq.long.{what}.{backbone}" for what in ("rate", "memory", "full"))

    @runner.measures(rate, memory, longest)
    def compared(preset: str, selected: set[str]) -> Iterator[runner.Measure]:
        """Trains with and without padding, in an order that alternates."""
        rows, full_rows = ROWS[preset]
        rounds = runner.rounds_of(preset)
        if {rate, memory} & selected:
            runs: dict[bool, list[Outcome]] = {True: [], False: []}
            with _side(preset) as with_padding, _side(preset) as without:
                for number in range(rounds):
                    for jagged in (True, False) if number % 2 else (False, True):
                        call = without if jagged else with_padding
                        runs[jagged].append(call(train, backbone, jagged, rows, False, number))
            ours, theirs = ([one.rows_per_s for one in runs[jagged]] for jagged in (True, False))
            said = {"rows": rows, "batch_events": SAMPLES * MEAN}
            yield runner.paired_ratio(rate, ours, theirs, at_least=None if preset == "smoke" else LEAST, details=said)
            peaks = {
                name: statistics.median(one.peak_bytes for one in runs[jagged])
                for name, jagged in (("ours", True), ("theirs", False))
            }
            yield runner.Measure(memory, peaks["ours"] / max(peaks["theirs"], 1.0), "ratio", details=peaks)
        if longest in selected:
            with _side(preset) as call:
                found = [call(train, backbone, True, full_rows, True, number) for number in range(rounds)]
            rates = [one.rows_per_s for one in found]
            peak = statistics.median(one.peak_bytes for one in found)
            said = {"events_per_s": statistics.median(rates) * LENGTH, "peak_bytes": peak}
            yield runner.quantity(longest, rates, "rows/s", details=said)


@contextlib.contextmanager
def _side(preset: str) -> Iterator[Callable[..., Any]]:
    """Calls functions in a process of their own; in a smoke run, whose figures mean nothing, in this one."""
    if preset == "smoke":
        yield lambda function, *arguments: function(*arguments)
        return
    process = Elsewhere(AS_A_PROGRAM)
    try:
        yield process.call
    finally:
        process.close()


for _backbone in BACKBONES:
    _register(_backbone)
