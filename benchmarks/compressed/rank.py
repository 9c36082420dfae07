"""One rank of a benchmark: obeys JSON lines on standard input, answers with JSON lines on standard output.

Started by `ranks.Ranks`, in a network namespace of its own where there is one. Every rank gets the same commands.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import logging
import os
import pstats
import sys
import time
import warnings
from collections import Counter
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.compressed import paced
from benchmarks.compressed.tasks import TASKS
from benchmarks.compressed.variants import DEADLINE_S, prepare

from persia.optim import APMSqueeze

LOSSES_KEPT = 50
DEADLINE = timedelta(seconds=DEADLINE_S)


class Training:
    """One variant on one task, step by step.

    Args:
        task: name.
        variant: name.
        seed: of data and model.
        lr: step length.
        warmup: steps before compression.
    """

    def __init__(self, task: str, variant: str, seed: int, lr: float, warmup: int) -> None:
        self.task = TASKS[task](dist.get_rank(), dist.get_world_size(), seed)
        self.plain = self.task.model()
        self.model, self.optimizer = prepare(variant, self.plain, lr, warmup)
        self.steps = 0

    def step(self) -> torch.Tensor:
        """One step; this rank's loss before it."""
        loss = self.task.loss(self.model, self.steps)
        self.optimizer.zero_grad()
        loss.backward()
        self.task.after_backward()
        self.optimizer.step()
        self.steps += 1
        return loss.detach()

    def skipped(self) -> int:
        """How many steps were skipped because the network had diverged; they took no time and sent nothing."""
        return self.optimizer.statistics()["skipped_steps"] if isinstance(self.optimizer, APMSqueeze) else 0

    def divide_rates(self, by: float) -> None:
        """Makes later steps shorter."""
        for group in self.optimizer.param_groups:
            group["lr"] /= by

    def evaluate(self) -> dict[str, float]:
        """The task's figures of the model as it is."""
        self.plain.eval()
        with torch.no_grad():
            return self.task.evaluate(self.plain)


class Commands:
    """The commands that a rank accepts; `prepare` fills `trainings`."""

    def __init__(self) -> None:
        self.trainings: dict[str, Training] = {}

    def prepare(self, task: str, variants: list[str], lr: float, warmup: int, steps: int) -> None:
        """Makes trainings and takes their first steps; past the warm-up, they send as they will go on to."""
        self.trainings.clear()
        gc.collect()
        for variant in variants:
            training = self.trainings[variant] = Training(task, variant, 0, lr, warmup)
            for _ in range(steps):
                training.step()

    def time(self, variant: str, steps: int) -> dict[str, float]:
        """Seconds of `steps` steps of a prepared training, and processor seconds, all threads together."""
        training = self.trainings[variant]
        dist.barrier()
        begin, worked = time.perf_counter(), time.process_time()
        for _ in range(steps):
            training.step()
        seconds, worked = time.perf_counter() - begin, time.process_time() - worked
        if training.skipped():
            raise RuntimeError(f"APMSqueeze has skipped steps: {training.optimizer.statistics()}.")
        return {"seconds": seconds, "processor_seconds": worked}

    def profile(self, variant: str, steps: int) -> dict[str, float]:
        """Seconds a step, of a prepared training, that functions of `persia.optim` take with what they call."""
        training = self.trainings[variant]
        dist.barrier()
        with cProfile.Profile() as profiler:
            for _ in range(steps):
                training.step()
        seconds: Counter[str] = Counter()
        for (file, _, name), (*_, cumulative, _) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
            if "/persia/optim/" in file:
                seconds[name] += cumulative
        return {name: value / steps for name, value in seconds.items()}

    def train(
        self, task: str, variant: str, seed: int, lr: float, warmup: int, steps: int, drop: int = 0
    ) -> dict[str, Any]:
        """A whole training, with a tenth of the rate from step `drop` on.

        Its figures, mean training loss of the last steps, number of skipped steps, seconds of all and of the warm-up.
        """
        training = Training(task, variant, seed, lr, warmup)
        dist.barrier()
        begin = time.perf_counter()
        losses: list[torch.Tensor] = []
        for number in range(steps):
            if number == warmup:
                warm = time.perf_counter() - begin
            if drop and number == drop:
                training.divide_rates(10.0)
            losses.append(training.step())
        seconds = time.perf_counter() - begin
        last = torch.stack(losses[-LOSSES_KEPT:]).mean().view(1)
        dist.all_reduce(last)
        figures = {"train_loss": float(last) / dist.get_world_size(), "skipped": training.skipped()}
        return {**figures, "seconds": seconds, "warmup_seconds": warm, **training.evaluate()}

    def limit(self, gbit: float | None) -> None:
        """Paces this rank's connections."""
        paced.pace(gbit)

    def sent(self) -> int:
        """Payload bytes sent so far."""
        return paced.sent()

    def statistics(self, variant: str) -> Any:
        """What the optimizer says of itself."""
        statistics = self.trainings[variant].optimizer.statistics()
        fields = statistics if isinstance(statistics, dict) else vars(statistics)
        return {name: value for name, value in fields.items() if isinstance(value, int | float | str)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--address", required=True, help="of rank 0")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--interface", required=True)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("persia.optim").setLevel(logging.ERROR)  # What is only timed warms up for 2 steps, knowingly.
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    torch.set_num_threads(1)
    store = dist.TCPStore(
        arguments.address, arguments.port, arguments.ranks, is_master=arguments.rank == 0, timeout=DEADLINE
    )
    dist.init_process_group("gloo", store=store, rank=arguments.rank, world_size=arguments.ranks, timeout=DEADLINE)
    commands = Commands()
    print(json.dumps(None), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(commands, order.pop("do"))(**order)
        print(json.dumps(answer), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
