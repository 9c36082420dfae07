"""What it costs to look at a run.

    python -m benchmarks 'ui.*' [--preset smoke|laptop|full] [--json FILE]

ui.overhead   Training rate while the page of `persia train --ui` is served and read every second, over the rate without
              it; in one process, without a trace. A browser is not part of it.
ui.processor  The same passes by rows per second of processor time, which other programs of the machine disturb less.
ui.look_s     Processor time of the looks of a second: health, view and JSON once, and the AUC every five seconds.
ui.spans_off  Time of the spans of a step while no trace is taken, over the time of the step.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import persia
from benchmarks import runner
from persia.dashboard.server import serve_page
from persia.dashboard.view import asking, view
from persia.telemetry.tracing import Tracer
from persia.trainer.monitor import AUC_SECONDS

STEPS = {"smoke": 24, "laptop": 400, "full": 1600}
ROUNDS = {"smoke": 1, "laptop": 9, "full": 15}
SPANS = {"smoke": 1_000, "laptop": 100_000, "full": 1_000_000}
TRACED = 20
LOOKS = 20
BATCH = 1024


class Run:
    """Training of one model on the same batches, again and again."""

    def __init__(self, preset: str) -> None:
        torch.manual_seed(0)
        steps = STEPS[preset]
        data = persia.data.synthetic(steps * BATCH, id_features=16, ids_per_feature=10_000, batch_size=BATCH, seed=1)
        self.batches = list(data.batches())
        self.cluster = persia.cluster.Embedded()
        self.trainer = persia.Trainer(
            persia.nn.models.DeepFM(data.schema, hidden=(256, 128)),
            data.schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=persia.optim.Adagrad(lr=0.05),
            mode=persia.modes.Hybrid(4, warmup=0),
            cluster=self.cluster,
            options=persia.TrainerOptions(progress=False),
        )
        self.by_processor = 0.0
        self.watched_by_processor: list[float] = []
        self.plain_by_processor: list[float] = []
        self.rate()  # Rows, threads and memory are there from now on.

    def rate(self) -> float:
        """Rows per second of a pass."""
        began = time.process_time()
        result = self.trainer.fit(self.batches, again=True)
        self.by_processor = result.rows / (time.process_time() - began)
        return result.rows_per_second

    def watched_rate(self) -> float:
        """The same with a page that is read."""
        with serve_page(asking(self.cluster), 0) as url, reader(url):
            rate = self.rate()
        self.watched_by_processor.append(self.by_processor)
        return rate

    def plain_rate(self) -> float:
        """The same without one."""
        rate = self.rate()
        self.plain_by_processor.append(self.by_processor)
        return rate


@contextlib.contextmanager
def reader(url: str) -> Iterator[None]:
    """Reads the data of a page every second, as a browser does."""
    done = threading.Event()

    def read() -> None:
        since = 0.0
        while not done.wait(1.0):
            with urllib.request.urlopen(f"{url}views?since={since!r}", timeout=10) as answer:
                since = max([since, *(view["time"] for view in json.load(answer))])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def look(run: Run) -> float:
    """Processor seconds of the looks of a second, while nothing else runs."""
    ask = asking(run.cluster)
    before = ask()
    began = time.process_time()
    msgspec.json.encode(view(before, ask(), 1.0))
    looked = time.process_time()
    run.trainer.metrics.result()
    return looked - began + (time.process_time() - looked) / AUC_SECONDS


@runner.measures("ui.overhead", "ui.processor", "ui.look_s", "ui.spans_off")
def overhead(preset: str) -> Iterator[runner.Measure]:
    """A page that is watched, and spans that are not recorded."""
    run = Run(preset)
    of = "training with a page over training without"
    rounds = ROUNDS[preset]
    yield runner.ratio("ui.overhead", ours=run.watched_rate, theirs=run.plain_rate, of=of, rounds=rounds, at_least=0.99)
    pairs = zip(run.watched_by_processor, run.plain_by_processor, strict=True)
    yield runner.quantity("ui.processor", [ours / theirs for ours, theirs in pairs], "ratio", at_least=0.99)
    yield runner.quantity("ui.look_s", [look(run) for _ in range(LOOKS)], "s", at_most=0.01)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        with run.trainer.trace(path):
            run.trainer.fit(run.batches, max_steps=TRACED, again=True)
        events = json.loads(path.read_text())["traceEvents"]
    run.trainer.fit(run.batches)  # The rest of that pass.
    spans = sum(event["ph"] == "X" for event in events) / TRACED
    tracer = Tracer()
    began = time.perf_counter()
    for _ in range(SPANS[preset]):
        with tracer.span("forward", 1, 2):
            pass
    each = (time.perf_counter() - began) / SPANS[preset]
    step = BATCH / run.rate()
    facts = {"spans_per_step": spans, "span_s": each, "step_s": step}
    yield runner.Measure("ui.spans_off", spans * each / step, "fraction", at_most=0.001, details=facts)
