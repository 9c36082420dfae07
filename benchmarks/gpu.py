"""A whole training step with the network on a GPU: persia, whose rows are in host memory, against plain PyTorch.

    python -m benchmarks 'gpu.*' [--preset smoke|laptop|full] [--json FILE]

Needs a CUDA device; without one each measure is skipped, and says so, but for preset smoke, which runs on tensors of
the CPU that go the way of a GPU. The work is `benchmarks/step.py`'s, or a larger network. The tables of plain PyTorch
are in the memory of the GPU, so `*vs_torch` says what it costs to keep rows where there is room for any number of them;
`*vs_dense_only` says how much of that the prefetching hides.

The others compare two ways of persia in one process, which train in turn. `gpu.one_thread*` compares lookups and pushes
in the thread that trains with those in threads of their own, and in Sync with lookups after the push;
`gpu.pooled_together` compares with features that are pooled one by one, `gpu.compile*` with a network that is not
compiled, `gpu.copy_overlap` with copies that wait, `gpu.fp16_wire` with rows that cross as float32, `gpu.bf16_rows*`
with rows that are stored as float32, and `gpu.cache_rows` with a step without copies of rows on the device.

`tests/gpu.sh` says which come first. Rows without a network are in `gpu_rows.py`, a server in `gpu_serve.py`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import runner
from benchmarks.baselines.step_torch import DenseOnly, Plain, Samples, Variant, Workload, generate, network_optimizer
from benchmarks.compiled_step import Compiled, tracing_only
from benchmarks.step import FIRST, WORK, Make, Persia, compared
from benchmarks.step_dispatches import go_the_way_of_a_gpu
from persia import Batch, IdColumn, IdFeature, Schema, Table
from persia.batching import default_threads
from persia.modes import Hybrid, Mode, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.nn.compiled_training import CompileMode
from persia.nn.models import DLRM, FFNN
from persia.nn.staging import Ready, Then, copied_array, nothing_to_do, staging_for
from persia.ps import EmbeddingServer
from persia.schema import Adagrad, EmbeddingOptimizer
from persia.services import Connection
from persia.worker import Worker, WorkerOptions

ADAGRAD = Adagrad(lr=0.05, initial_accumulator=FIRST)
SMOKE = Workload(features=3, dim=8, rows=500, batch=32, dense=2, batches=2)
ZIPF = 1.05


class SideBySide(nn.Module):
    """A model of `persia.nn.models` whose input is all embeddings and the dense features side by side."""

    def __init__(self, model_of: Callable[[Schema], nn.Module], work: Workload) -> None:
        super().__init__()
        self.names = [f"f{i}" for i in range(work.features)]
        self.dim = work.dim
        self.model = model_of(
            Schema([IdFeature(name, dim=work.dim) for name in self.names], [f"d{i}" for i in range(work.dense)])
        )

    def forward(self, values: Tensor) -> Tensor:
        """Returns logits `[batch, 1]`."""
        width = len(self.names) * self.dim
        embeddings = values[:, :width].unflatten(1, (len(self.names), self.dim)).unbind(1)
        logits: Tensor = self.model(values[:, width:], dict(zip(self.names, embeddings, strict=True)))
        return logits


class Stale(Persia):
    """The step of `benchmarks/step.py` in Hybrid(8), with or without copies of rows on the device."""

    def __init__(self, work: Workload, data: list[Samples], cache_rows: int) -> None:
        Variant.__init__(self, work, data)
        names = [f"f{i}" for i in range(work.features)]
        schema = Schema(
            [IdFeature(name, dim=work.dim) for name in names],
            [f"d{i}" for i in range(work.dense)],
            tables=[Table(name, work.dim, cache_rows=cache_rows) for name in names],
        )
        self.embeddings = EmbeddingCollection(
            schema, optimizer=ADAGRAD, mode=Hybrid(8, warmup=0), options=CollectionOptions(work.device)
        )
        batches = [
            Batch({n: IdColumn(ids.astype(np.uint64)) for n, ids in zip(names, s.ids, strict=True)}, s.dense, s.labels)
            for s in data
        ]
        self.prefetched: Iterator[Any] = self.embeddings.prefetch(itertools.cycle(batches))


class Blocking:
    """Staging without overlap: every copy waits, from and to memory that is not pinned."""

    on_host = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def to_device(self, arrays: Mapping[str, Any], then: Then | None = None) -> tuple[dict[str, Tensor], Ready]:
        """Copies in the stream of the network."""
        tensors = {name: copied_array(array).to(self.device) for name, array in arrays.items()}
        return (tensors if then is None else then(tensors)), nothing_to_do

    def to_host(self, tensors: Mapping[str, Tensor]) -> Callable[[], dict[str, Any]]:
        """Copies at once."""
        arrays = {name: tensor.cpu().numpy() for name, tensor in tensors.items()}
        return lambda: arrays

    def free_bytes(self) -> int:
        """Returns what the staging that it stands for does."""
        return staging_for(str(self.device)).free_bytes()


class Compressing:
    """All roles in this process, and yet rows and gradients travel as fp16."""

    def connect(self, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        """Creates a PS and an embedding worker."""
        threads = default_threads()  # As in Embedded.
        server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, threads)
        return Connection(Worker(schema, [server], threads, options=WorkerOptions("fp16")), [server])


def of_device(made: Persia) -> Persia:
    """Returns a variant whose tensors go the way of a GPU, also on a CPU."""
    if made.work.device == "cpu":
        go_the_way_of_a_gpu(made.embeddings)
    return made


def persia(work: Workload, data: list[Samples]) -> Persia:
    """The step of `benchmarks/step.py`."""
    return of_device(Persia(work, data, ADAGRAD))


def compressing(work: Workload, data: list[Samples]) -> Persia:
    """The same with fp16 on the wire."""
    return of_device(Persia(work, data, ADAGRAD, Compressing()))


def narrow(work: Workload, data: list[Samples]) -> Persia:
    """The same with rows of bfloat16, which are widened on the device."""
    return of_device(Persia(work, data, ADAGRAD, dtype="bfloat16"))


def one_thread(work: Workload, data: list[Samples]) -> Persia:
    """The same without threads that look up and push: one step in flight."""
    return of_device(Persia(work, data, ADAGRAD, one_thread=True))


def in_sync(work: Workload, data: list[Samples]) -> Persia:
    """The same in Sync: the thread that trains looks up after it has pushed."""
    return of_device(Persia(work, data, ADAGRAD, mode=Sync()))


def one_thread_in_sync(work: Workload, data: list[Samples]) -> Persia:
    """The same in Sync: it looks up while the GPU computes, and reads again what a push has changed."""
    return of_device(Persia(work, data, ADAGRAD, mode=Sync(), one_thread=True))


def blocking(work: Workload, data: list[Samples]) -> Persia:
    """The same with copies that wait."""
    made = of_device(Persia(work, data, ADAGRAD))
    made.embeddings._transfer._staging = Blocking(torch.device(work.device))
    return made


def one_by_one(work: Workload, data: list[Samples]) -> Persia:
    """The same with features that are pooled one by one, as before docs/decisions/0036."""
    made = of_device(Persia(work, data, ADAGRAD))
    made.embeddings._transfer._expander = None
    return made


def cached(work: Workload, data: list[Samples]) -> Persia:
    """Hybrid(8) with copies of a tenth of the rows."""
    return of_device(Stale(work, data, work.rows // 10))


def uncached(work: Workload, data: list[Samples]) -> Persia:
    """Hybrid(8) without copies."""
    return of_device(Stale(work, data, 0))


def with_model(make: Make, model_of: Callable[[Schema], nn.Module]) -> Make:
    """Returns `make` with another network."""

    def made(work: Workload, data: list[Samples]) -> Variant:
        variant: Variant = make(work, data)
        torch.manual_seed(work.seed)
        variant.net = SideBySide(model_of, work).to(work.device)
        variant.optimizer = network_optimizer(variant.net)
        return variant

    return made


def zipf(work: Workload) -> list[Samples]:
    """Batches as `generate` makes them, whose ids have a Zipf distribution; frequent ids are spread over the table."""
    random = np.random.default_rng(work.seed)
    shares = np.cumsum(np.arange(1, work.rows + 1) ** -ZIPF)
    ids_by_rank = random.permutation(work.rows)
    return [
        samples._replace(ids=ids_by_rank[np.searchsorted(shares, shares[-1] * random.random(samples.ids.shape))])
        for samples in generate(work)
    ]


def device_of(name: str, preset: str) -> tuple[str, dict[str, Any]] | None:
    """Returns the device to measure on, with what a line says of it; None, and a message, if it is missing."""
    if torch.cuda.is_available():
        return "cuda", {"gpu": torch.cuda.get_device_name(0)}
    if preset == "smoke":
        return "cpu", {"gpu": None}
    print(f"{name} is skipped: torch {torch.__version__} sees no CUDA device.", file=sys.stderr)
    return None


def on_gpu(
    name: str,
    preset: str,
    ours_of: Make,
    theirs_of: Make,
    model_of: Callable[[Schema], nn.Module] | None = None,
    target: float | None = None,
    samples_of: Callable[[Workload], list[Samples]] = generate,
) -> runner.Measure | None:
    """Compares on the first CUDA device; None without one. Networks other than the usual one have rows of dim 128."""
    device = device_of(name, preset)
    if device is None:
        return None
    work = replace(SMOKE if preset == "smoke" else WORK[preset], device=device[0])
    if model_of is not None:  # Fewer ids and batches, so that tables are filled within seconds.
        if preset != "smoke":
            work = replace(work, dim=128, rows=min(work.rows, 200_000), batches=min(work.batches, 16))
        ours_of, theirs_of = with_model(ours_of, model_of), with_model(theirs_of, model_of)
    return compared(name, preset, work, ours_of, theirs_of, target, device[1], data=samples_of(work))


def dlrm(schema: Schema) -> nn.Module:
    if schema.resolved_tables()["f0"].dim == SMOKE.dim:
        return DLRM(schema, hidden=(16, 8), bottom=(16,))
    return DLRM(schema, hidden=(1024, 1024, 512, 256), bottom=(512, 256))


def ffnn_paper(schema: Schema) -> nn.Module:
    if schema.resolved_tables()["f0"].dim == SMOKE.dim:
        return FFNN(schema, hidden=(16, 8))
    return FFNN.paper(schema)


# --- the table, in its order ------------------------------------------------------------------------------------------


@runner.measures("gpu.step_vs_dense_only")
def step_vs_dense_only(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.step_vs_dense_only", preset, persia, DenseOnly, target=0.7)


@runner.measures("gpu.dlrm_128_vs_dense_only")
def dlrm_vs_dense_only(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.dlrm_128_vs_dense_only", preset, persia, DenseOnly, dlrm, 0.75)


@runner.measures("gpu.ffnn_paper_vs_dense_only")
def ffnn_paper_vs_dense_only(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.ffnn_paper_vs_dense_only", preset, persia, DenseOnly, ffnn_paper, 0.97)


@runner.measures("gpu.cache_rows")
def cache_rows(preset: str) -> runner.Measure | None:
    """Copies of rows: values only, which serve for a few batches; see docs/decisions/0009."""
    return on_gpu("gpu.cache_rows", preset, cached, uncached, dlrm, 1.3, zipf)


# --- two ways of persia -----------------------------------------------------------------------------------------------


@runner.measures("gpu.pooled_together")
def pooled_together(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.pooled_together", preset, persia, one_by_one)


def compiled(name: str, preset: str, mode: CompileMode) -> runner.Measure | None:
    """Compares a network that is compiled; a smoke run on a CPU only traces it."""

    def made(work: Workload, data: list[Samples]) -> Persia:
        return of_device(Compiled(work, data, mode))

    with tracing_only(device_of(name, preset) == ("cpu", {"gpu": None})):
        return on_gpu(name, preset, made, persia)


@runner.measures("gpu.compile")
def compile_default(preset: str) -> runner.Measure | None:
    return compiled("gpu.compile", preset, "default")


@runner.measures("gpu.compile_graphs")
def compile_graphs(preset: str) -> runner.Measure | None:
    return compiled("gpu.compile_graphs", preset, "reduce-overhead")


@runner.measures("gpu.copy_overlap")
def copy_overlap(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.copy_overlap", preset, persia, blocking)


@runner.measures("gpu.one_thread")
def one_thread_vs_threads(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.one_thread", preset, one_thread, persia)


@runner.measures("gpu.one_thread_dlrm_128")
def one_thread_dlrm(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.one_thread_dlrm_128", preset, one_thread, persia, dlrm)


@runner.measures("gpu.one_thread_sync")
def one_thread_sync(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.one_thread_sync", preset, one_thread_in_sync, in_sync)


@runner.measures("gpu.fp16_wire")
def fp16_wire(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.fp16_wire", preset, compressing, persia)


@runner.measures("gpu.bf16_rows")
def bf16_rows(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.bf16_rows", preset, narrow, persia)


@runner.measures("gpu.bf16_rows_dlrm_128")
def bf16_rows_dlrm(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.bf16_rows_dlrm_128", preset, narrow, persia, dlrm)


# --- plain PyTorch, whose tables are in the memory of the GPU ---------------------------------------------------------


@runner.measures("gpu.step_vs_torch")
def step_vs_torch(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.step_vs_torch", preset, persia, Plain)


@runner.measures("gpu.dlrm_128_vs_torch")
def dlrm_vs_torch(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.dlrm_128_vs_torch", preset, persia, Plain, dlrm)


@runner.measures("gpu.ffnn_paper_vs_torch")
def ffnn_paper_vs_torch(preset: str) -> runner.Measure | None:
    return on_gpu("gpu.ffnn_paper_vs_torch", preset, persia, Plain, ffnn_paper)
