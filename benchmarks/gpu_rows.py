"""Rows on a GPU without a network: a lookup and an update of 1.05 M distinct ids of dim 128 with Adam.

    python -m benchmarks 'gpu.rows_1m_128*' [--preset smoke|laptop|full] [--json FILE]

Twice as many rows are in host memory. Their gradients are made on the device, of their values.

gpu.rows_1m_128          seconds of a step: all rows from host memory, updated there
gpu.rows_1m_128_cached   the same with 80 % of the rows of each batch on the device, with their optimizer state
gpu.rows_1m_128_vs_uva   rows/s of the first over plain PyTorch, whose tables are pinned host memory that kernels on the
                         device read and write over the bus (UVA), without a hash table: ids are places

Needs a CUDA device, but for preset smoke.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import runner
from benchmarks.gpu import device_of
from benchmarks.step_dispatches import Blocks
from benchmarks.store import ids_of
from persia import IdFeature, Schema
from persia.batching import default_threads
from persia.modes import Sync
from persia.nn.owned_rows import HotRows, OwnershipRule
from persia.nn.row_access import RowAccess
from persia.nn.row_updates import RowUpdates
from persia.nn.staging import Staging, staging_for
from persia.ps import EmbeddingServer
from persia.schema import Adam
from persia.types import Gradients, Ids, Packed, PushHeader

TABLE, DIM, ADAM = "item", 128, Adam(lr=0.01)
IDS = {"smoke": 1 << 10, "laptop": 1 << 20, "full": 1 << 20}
STEPS = {"smoke": 1, "laptop": 5, "full": 20}
BATCHES = 4
CACHED = 0.8
NEVER_IDLE = 1 << 40


class Parts(NamedTuple):
    """What all sides share.

    Attributes:
        server: has the rows.
        access: reads and sets them.
        staging: of the device.
    """

    server: EmbeddingServer
    access: RowAccess
    staging: Staging

    @classmethod
    def made(cls, device: str) -> Parts:
        """Returns a PS without rows, with the threads that it has in training."""
        schema = Schema([IdFeature(TABLE, dim=DIM)])
        server = EmbeddingServer(schema.resolved_tables(), ADAM, Sync(), 0, default_threads())
        return cls(server, RowAccess(schema, [server]), Blocks() if device == "cpu" else staging_for(device))

    def look_up(self, ids: Ids) -> Tensor:
        """Returns rows `[n, dim]` on the device."""
        rows = self.server.lookup(Packed.of({TABLE: ids}, np.uint64), True)
        tensors, ready = self.staging.to_device({"rows": rows.buffer})
        ready()
        return tensors["rows"].view(len(ids), DIM)

    def push(self, ids: Ids, gradients: Tensor, step: int) -> None:
        """Updates rows at the PS."""
        arrived = self.staging.to_host({"rows": gradients.reshape(-1)})
        rows = arrived()["rows"].reshape(len(ids), DIM)
        self.server.push(PushHeader(1, 0, step + 1, step, len(ids)), {TABLE: Gradients(ids, rows)})


def gradients_of(rows: Tensor) -> Tensor:
    """Returns gradients that depend on the rows."""
    return rows * 0.1 + 1e-3


class FromHost:
    """All rows come from host memory, and are updated there."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def step(self, ids: Ids, number: int) -> None:
        """Looks up and updates rows."""
        self._parts.push(ids, gradients_of(self._parts.look_up(ids)), number)


class Owning:
    """A device owns some rows, of which no batch changes the choice."""

    def __init__(self, parts: Parts, ids: Ids) -> None:
        self._parts = parts
        table, rule = Schema([IdFeature(TABLE, dim=DIM)]).resolved_tables()[TABLE], OwnershipRule(NEVER_IDLE)
        self.owned = HotRows(table, ADAM, parts.access, len(ids) // 2, parts.staging.device, rule)
        for part in np.array_split(ids, 16):  # The first id of each slot has it from then on.
            plan = self.owned.plan(part)
            self.owned.assemble(plan, parts.look_up(part[plan.missing]))

    def step(self, ids: Ids, number: int) -> None:
        """Looks up and updates rows."""
        plan = self.owned.plan(ids)
        batch = self.owned.assemble(plan, self._parts.look_up(ids[plan.missing]))
        rest = self.owned.update(batch, gradients_of(batch.values), number)
        self._parts.push(ids[batch.pushed], rest, number)


class Mapped:
    """Pinned host memory as an array of the device, which reads and writes it over the bus.

    Args:
        array: float32, pinned.
    """

    def __init__(self, array: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(array.shape),
            "typestr": array.numpy().dtype.str,
            "data": (array.data_ptr(), False),
            "version": 3,
        }


class Uva:
    """Plain PyTorch on pinned tables: rows, moments and counts by place, with the update rule of torch operations."""

    def __init__(self, rows: int, device: str) -> None:
        self._device = device
        self._host = [torch.zeros(rows, width, pin_memory=device != "cpu") for width in (DIM, 2 * DIM)]
        self._host[0].uniform_(-0.01, 0.01)
        self._rows, self._state = (
            array if device == "cpu" else torch.as_tensor(Mapped(array), device=device) for array in self._host
        )
        self._counts = torch.zeros(rows, dtype=torch.int64, device=device)
        self._rule = RowUpdates(ADAM)

    def step(self, places: np.ndarray, number: int) -> None:
        """Looks up and updates rows."""
        at = torch.from_numpy(places).to(self._device, non_blocking=True)
        rows, state, counts = (array.index_select(0, at) for array in (self._rows, self._state, self._counts))
        found = self._rule.update(gradients_of(rows), rows, state, counts, number)
        for array, new in ((self._rows, found.values), (self._state, found.state), (self._counts, found.counts)):
            array.index_copy_(0, at, new)


class Timed:
    """Times steps of one side, which go on from call to call."""

    def __init__(self, step: Callable[[Any, int], None], batches: Sequence[Any], device: str, numbers: Iterator[int]):
        self._step = step
        self._batches = batches
        self._device = device
        self._numbers = numbers
        self._at = 0

    def seconds(self, steps: int) -> float:
        """Returns the time of a step."""
        self._wait()
        began = time.perf_counter()
        for _ in range(steps):
            self._step(self._batches[self._at % len(self._batches)], next(self._numbers))
            self._at += 1
        self._wait()
        return (time.perf_counter() - began) / steps

    def _wait(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize(self._device)


@runner.measures("gpu.rows_1m_128", "gpu.rows_1m_128_cached", "gpu.rows_1m_128_vs_uva")
def rows(preset: str) -> Iterator[runner.Measure]:
    """Prints each figure as soon as it is known."""
    found = device_of("gpu.rows_1m_128", preset)
    if found is None:
        return
    device, said = found
    count, steps, rounds = IDS[preset], STEPS[preset], runner.rounds_of(preset)
    random = np.random.default_rng(0)
    parts = Parts.made(device)
    places = [random.permutation(2 * count)[:count] for _ in range(BATCHES)]
    every = ids_of(np.arange(2 * count))
    for part in np.array_split(every, 16):
        parts.server.lookup(Packed.of({TABLE: part}, np.uint64), True)
    details = {"ids": count, "rows": 2 * count, "threads": default_threads(), **said}
    numbers = iter(range(1 << 62))  # A PS expects steps in their order, whichever side makes them.

    host = Timed(FromHost(parts).step, [every[at] for at in places], device, numbers)
    host.seconds(BATCHES)
    values = [host.seconds(steps) for _ in range(rounds)]
    yield runner.quantity("gpu.rows_1m_128", values, "s", at_most=0.024, details=details)

    owning = Owning(parts, every)
    plan = owning.owned.plan(every)
    on_device, elsewhere = every[~plan.missing], every[plan.missing]
    hits = min(int(CACHED * count), len(on_device))
    batches = []
    for _ in range(BATCHES):
        ids = np.concatenate([random.choice(on_device, hits, False), random.choice(elsewhere, count - hits, False)])
        batches.append(random.permutation(ids))
    cached = Timed(owning.step, batches, device, numbers)
    cached.seconds(BATCHES)
    values = [cached.seconds(steps) for _ in range(rounds)]
    shares = {"hits": hits / count, "owned": len(on_device)}
    yield runner.quantity("gpu.rows_1m_128_cached", values, "s", at_most=0.012, details=details | shares)
    del owning, cached

    uva = Timed(Uva(2 * count, device).step, places, device, iter(range(1 << 62)))
    uva.seconds(BATCHES)
    yield runner.ratio(
        "gpu.rows_1m_128_vs_uva",
        ours=lambda: count / host.seconds(steps),
        theirs=lambda: count / uva.seconds(steps),
        of="rows/s",
        rounds=rounds,
        details=details,
    )
