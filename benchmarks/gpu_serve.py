"""The predictor in process with its network on a GPU.

    python -m benchmarks 'gpu.serve*' [--preset smoke|laptop|full] [--json FILE]

The work is that of `serve.p99_in_process`: 26 features of dim 16, MLP 256-128, batches of 256.

gpu.serve_requests   requests/s, one after another, over those of the same predictor on the CPU
gpu.serve_hot_rows   the same with copies of rows on the GPU (`ServeOptions.device_rows`), over without
gpu.serve_compiled   the same with a compiled network, over without

Needs a CUDA device, but for preset smoke, which runs on tensors of the CPU, and compiles nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

import persia
from benchmarks import runner
from benchmarks.gpu import device_of
from benchmarks.serve_predict import FEATURES, REQUESTS, ROUNDS, ROWS, click_data, highest_rate, network_of, served
from benchmarks.step_dispatches import Blocks
from persia.serve import Predictor, view_updater

SLOTS = 4
"""Copies, over the rows of a table: a row shares its slot with few others."""


@contextlib.contextmanager
def predictor_of(
    schema: persia.Schema, data: Sequence[persia.Batch], device: str, *, here: bool = False, **options: Any
) -> Iterator[Predictor]:
    """Serves from a device; if it is the CPU, and not to be used as such, its tensors go the way of a GPU."""
    way: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if device == "cpu" and not here:
        way = mock.patch.object(view_updater, "staging_for", return_value=Blocks())
    with way, served(network_of, schema, data, device="cpu" if here else device, **options) as (_, predictor):
        yield predictor


@runner.measures("gpu.serve_requests", "gpu.serve_hot_rows", "gpu.serve_compiled")
def requests(preset: str) -> Iterator[runner.Measure]:
    """Prints each ratio as soon as it is known."""
    found = device_of("gpu.serve_requests", preset)
    if found is None:
        return
    device, said = found
    count = REQUESTS[preset] // 4
    schema, data = click_data(preset, 20 if preset == "smoke" else 100)
    unlabelled = [persia.Batch(batch.id_features, batch.dense, batch.labels[:, :0]) for batch in data]

    def compared(name: str, ours: Predictor, theirs: Predictor) -> runner.Measure:
        def rate(predictor: Predictor) -> float:
            return highest_rate(lambda number: predictor.predict(unlabelled[number % len(unlabelled)]), count)

        for predictor in (ours, theirs):
            rate(predictor)
        details = {"rows": ROWS[preset] * FEATURES, **said}
        return runner.ratio(
            name,
            ours=lambda: rate(ours),
            theirs=lambda: rate(theirs),
            of="requests/s",
            rounds=ROUNDS[preset],
            details=details,
        )

    with predictor_of(schema, data, device) as plain:
        with predictor_of(schema, data, device, here=True) as host:
            yield compared("gpu.serve_requests", plain, host)
        with predictor_of(schema, data, device, device_rows=SLOTS * ROWS[preset]) as hot:
            measure = compared("gpu.serve_hot_rows", hot, plain)
            shares = {"hits": hot.cached.hits / max(1, sum(hot.cached)), "slots": SLOTS * ROWS[preset]}
            yield replace(measure, details={**measure.details, **shares})
        with predictor_of(schema, data, device, compiled=torch.cuda.is_available()) as compiled:
            yield compared("gpu.serve_compiled", compiled, plain)
