"""Python time per batch of each role: an embedding PS, an embedding worker and an NN worker, a process each.

    python -m benchmarks 'roles.*' [--preset smoke|laptop|full] [--json FILE]

The workload is that of `benchmarks/step.py`: 26 features with a table each, dimension 16, batches of 4,096, Hybrid(4),
no compression; the NN worker registers, looks up, pools, trains the network and pushes. What is counted is said in
`benchmarks/python_time.py`. Of the NN worker's main thread it is what happens inside persia: drawing a batch, the call
of the collection, its part of backward; torch's own work in there (tensors, autograd nodes) counts as well.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

from benchmarks import runner
from benchmarks.elsewhere import methods
from benchmarks.python_time import PythonTime

TARGETS = {"embedding_ps": 0.3e-3, "embedding_worker": 0.5e-3, "nn_worker": 1.5e-3}
STEPS = {"smoke": 10, "laptop": 60, "full": 1000}
ROUNDS = {"smoke": 1, "laptop": 5, "full": 15}
WARM = {"smoke": 10, "laptop": 130, "full": 130}
DEADLINE = 60.0


def serve(pipe: Pipe, make: Callable[[int, str], tuple[Any, type]], preset: str, servers: str) -> None:
    """A role in this process: tells its address, then its Python seconds whenever it is asked."""
    spent = PythonTime()
    spent.apart()
    from persia import rpc

    service, protocol = make(preset, servers)
    with rpc.serve(service, protocol=protocol) as server:
        pipe.send(server.address)
        while pipe.recv():
            pipe.send(spent.seconds())


def schema(preset: str) -> Any:
    from benchmarks.step import WORK
    from persia import IdFeature, Schema

    return Schema([IdFeature(f"f{i}", dim=WORK[preset].dim) for i in range(WORK[preset].features)])


def embedding_ps(preset: str, _: str) -> tuple[Any, type]:
    from persia.modes import Hybrid
    from persia.ps import EmbeddingServer
    from persia.schema import Adagrad
    from persia.services import EmbeddingPS

    tables = schema(preset).resolved_tables()
    return EmbeddingServer(tables, Adagrad(lr=0.05), Hybrid(4), 0, 1), EmbeddingPS


def embedding_worker(preset: str, servers: str) -> tuple[Any, type]:
    from persia import rpc
    from persia.services import EmbeddingPS, EmbeddingWorker
    from persia.worker import Worker

    ps = rpc.connect(servers, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)
    return Worker(schema(preset), [ps]), EmbeddingWorker


def nn_worker(pipe: Pipe, addresses: tuple[str, str], preset: str) -> None:
    """Trains the number of steps in each request, and answers with its Python seconds."""
    spent = PythonTime()
    spent.apart()
    import torch

    from benchmarks.baselines.step_torch import generate
    from benchmarks.step import WORK, Persia
    from persia import rpc
    from persia.nn import pooling, prepared
    from persia.schema import Adagrad
    from persia.services import Connection, EmbeddingPS, EmbeddingWorker

    torch.set_num_threads(1)
    for owner, name in (
        (pooling._TakePooled, "backward"),
        (prepared.PreparedBatch, "_on_gradient"),
        (prepared.PreparedBatch, "_end_of_backward"),
    ):
        function = spent.counted(getattr(owner, name))
        setattr(owner, name, staticmethod(function) if name == "backward" else function)

    class Processes:
        def connect(self, *_: Any) -> Connection:
            ps, worker = addresses
            return Connection(
                rpc.connect(worker, EmbeddingWorker, peer="embedding worker 0", timeout=DEADLINE),
                [rpc.connect(ps, EmbeddingPS, peer="embedding PS 0", timeout=DEADLINE)],
            )

    work = WORK[preset]
    variant = Persia(work, generate(work), Adagrad(lr=0.05), Processes())

    def step() -> None:
        with spent.within():
            batch = next(variant.prefetched)
            rows = list(variant.embeddings(batch).values())
        variant.backward(rows, batch)

    try:
        while steps := pipe.recv():
            before = spent.seconds()
            for _ in range(steps):
                step()
            pipe.send(spent.seconds() - before)
    finally:
        variant.close()


@runner.measures("roles.python_s", *(f"roles.python_s.{role}" for role in TARGETS))
def python_s(preset: str) -> list[runner.Measure]:
    """Seconds of Python per batch; the aggregate is the role farthest from its target."""
    pipes: dict[str, Pipe] = {}
    processes: list[Any] = []

    def start(role: str, function: Callable[..., None], *arguments: Any) -> None:
        pipes[role], there = methods().Pipe()
        processes.append(process := methods().Process(target=function, args=(there, *arguments), daemon=True))
        process.start()

    def ask(role: str, what: int) -> Any:
        pipes[role].send(what)
        return answer_of(role)

    def answer_of(role: str) -> Any:
        assert pipes[role].poll(10 * DEADLINE), f"the {role} says nothing"
        return pipes[role].recv()

    seconds_of: dict[str, list[float]] = {role: [] for role in TARGETS}
    steps = STEPS[preset]
    try:
        start("embedding_ps", serve, embedding_ps, preset, "")
        ps = answer_of("embedding_ps")
        start("embedding_worker", serve, embedding_worker, preset, ps)
        start("nn_worker", nn_worker, (ps, answer_of("embedding_worker")), preset)
        ask("nn_worker", WARM[preset])
        for _ in range(ROUNDS[preset]):
            before = {role: ask(role, 1) for role in ("embedding_ps", "embedding_worker")}
            seconds_of["nn_worker"].append(ask("nn_worker", steps) / steps)
            for role, seconds in before.items():
                seconds_of[role].append((ask(role, 1) - seconds) / steps)
        for pipe, process in zip(reversed(pipes.values()), reversed(processes), strict=True):
            pipe.send(0)  # One after another: who ends releases what it has at those that serve it.
            process.join(DEADLINE)
    finally:
        for process in processes:
            process.kill()
    measured = [
        runner.quantity(f"roles.python_s.{role}", values, "s", at_most=TARGETS[role])
        for role, values in seconds_of.items()
    ]
    return [*measured, runner.worst("roles.python_s", measured)]
