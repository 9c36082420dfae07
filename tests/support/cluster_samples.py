"""What the cluster tests train; importable in the processes of the roles."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

import persia
from persia import IdColumn
from persia.dense import AllReduce
from persia.nn.models import FFNN
from persia.nn.replicas import SingleReplica

if TYPE_CHECKING:
    from persia.cluster import Ray, RayOptions

BATCH = 64


def options(**changes: Any) -> RayOptions:
    """Processes import torch before they are ready, which takes a minute where much else runs.

    Rows travel as they are, also between hosts, so that numbers are those of one process.
    """
    from persia.cluster import RayOptions  # Needs Ray, unlike other parts of this module.

    as_they_are = {"compression": "none", "pool_at": "nn_worker"}
    return RayOptions(threads=1, timeout=180.0, **{**as_they_are, **changes})


def reader(batches: int, epoch_seed: int = 1) -> Any:
    return persia.data.synthetic(
        batches * BATCH, id_features=4, ids_per_feature=500, dense_features=2, batch_size=BATCH, dim=8, seed=epoch_seed
    )


def make_trainer(cluster: Any, mode: Any = None, table: Any = None, **changes: Any) -> persia.Trainer:
    torch.manual_seed(0)
    base = reader(1).schema
    # Declared, so that shares of a capacity pass through deaths and restarts.
    tables = [persia.Table("id_0", 8, capacity=5000, **(table or {}))]
    schema = persia.Schema(base.id_features, base.dense_features, base.labels, tables)
    return persia.Trainer(
        FFNN(schema, hidden=(16,), dropout=0.1),
        schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-2),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=mode or persia.modes.Sync(),
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=60.0, **changes),
    )


def losses(cluster: Any, batches: int, mode: Any = None) -> list[float]:
    """A bare loop on one NN worker's share of the batches."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = reader(batches)
    embeddings = persia.nn.EmbeddingCollection(
        data.schema, optimizer=persia.optim.Adagrad(lr=0.05), mode=mode or persia.modes.Sync(), cluster=cluster
    )
    net = torch.nn.Sequential(torch.nn.Linear(4 * 8 + 2, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    found = []
    for batch in embeddings.prefetch(data):
        logits = net(torch.cat([*embeddings(batch).values(), batch.dense], 1))
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def pids(cluster: Ray, role: str | None = None) -> list[int]:
    """Of the living processes."""
    assert cluster._roles.processes is not None
    return [p.info.pid for p in cluster._roles.processes.all() if p.info is not None and role in (None, p.role)]


def running(pid: int) -> bool:
    """Whether a process of this host runs."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def watched(cluster: Any) -> Callable[[], list[int]]:
    """Returns a function that returns those of the present processes that still run, on whichever host."""
    from persia.cluster.ray.processes import run_on

    assert cluster._roles.processes is not None
    by_node: dict[str, list[int]] = {}
    for process in cluster._roles.processes.all():
        if process.info is not None:
            by_node.setdefault(process.info.node, []).append(process.info.pid)

    def left() -> list[int]:
        found = [run_on(node, lambda pids=pids: [p for p in pids if running(p)]) for node, pids in by_node.items()]
        return [pid for of_node in found for pid in of_node]

    return left


def signal_process(cluster: Any, role: str, rank: int = 0, number: int = signal.SIGKILL) -> None:
    """Signals a living process of a role, on whichever host it is."""
    from persia.cluster.ray.processes import run_on

    assert cluster._roles.processes is not None
    info = [process.info for process in cluster._roles.processes.of(role) if process.info is not None][rank]
    run_on(info.node, functools.partial(os.kill, info.pid, number))


def eventually(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds:g} s: {what}"
        time.sleep(0.02)


def counted(cluster: Any, role: str, counter: str | None) -> float:
    """What a role has counted so far; NN workers and the coordinator count nothing, embedding PSs do."""
    watched = role if role not in ("nn_worker", "coordinator") else "embedding_ps"
    found = [counters for name, counters in cluster.statistics().items() if name.startswith(watched)]
    return sum(counters.get(counter or "rpc.calls", 0.0) for counters in found)


def kill_once_training(cluster: Any, role: str, counter: str | None, rank: int = 0) -> None:
    """SIGKILL for one process of a role, once it has counted on. For data without end; see `killing`."""
    eventually(lambda: bool(pids(cluster, role)), "it starts")
    before = counted(cluster, role, counter)
    eventually(lambda: counted(cluster, role, counter) > before + 20, "it trains", 60.0)
    signal_process(cluster, role, rank)


class Gated:
    """The batches of a reader, of which those from number `first` on come once a test has made the file `gate`.

    What a test does to a cluster that trains thus comes before the end of the data, however late it is.
    """

    batch_size = BATCH

    def __init__(self, source: Any, first: int, gate: Path) -> None:
        self.source, self.first, self.gate = source, first, gate

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
        for number, batch in enumerate(self.source.batches(epoch, start), start):
            if number >= self.first:
                eventually(self.gate.exists, "the test opens the gate", 240.0)
            yield batch

    def __iter__(self) -> Iterator[persia.Batch]:
        return self.batches()

    def fingerprint(self) -> Any:
        return self.source.fingerprint()

    def shard(self, index: int, count: int) -> Gated:
        return Gated(self.source.shard(index, count), -(-max(0, self.first - index) // count), self.gate)


@contextlib.contextmanager
def killing(
    cluster: Any,
    role: str,
    counter: str | None = None,
    rank: int = 0,
    once: Callable[[], bool] = lambda: True,
) -> Iterator[Callable[[Any], Gated]]:
    """SIGKILL for one process of a role while the block trains on what the yielded function makes of a reader.

    It comes once the role has counted on and `once` is true, and before batch 100.
    """
    before = counted(cluster, role, counter)
    with tempfile.TemporaryDirectory() as folder:
        gate = Path(folder) / "killed"

        def kill() -> None:
            eventually(once, "it may be killed", 60.0)
            eventually(lambda: counted(cluster, role, counter) > before + 20, "it trains", 120.0)
            signal_process(cluster, role, rank)
            gate.touch()

        thread = threading.Thread(target=kill)
        thread.start()
        try:
            yield lambda source: Gated(source, 100, gate)
        finally:
            thread.join(190)
        assert not thread.is_alive()


def bare_host(role: str = "embedding_ps") -> type:
    """As little of a process of a role as can be. Local, so that it is pickled whole: nobody there could import it."""

    class Bare:
        def __init__(self) -> None:
            self.incarnation = 1
            self.log = logging.getLogger("bare")
            print("bare 0 says hello", flush=True)

        def info(self) -> Any:
            import ray

            from persia.cluster.ray.process_plan import ProcessInfo

            node = ray.get_runtime_context().get_node_id()
            logs = [os.path.realpath(f"/proc/self/fd/{number}") for number in (1, 2)]
            return ProcessInfo(os.getpid(), "here", node, logs, self.incarnation, "")

        def rejoin(self) -> Any:
            if role == "embedding_worker":
                from persia.cluster.ray.hosts import EmbeddingWorkerHost

                return EmbeddingWorkerHost.rejoin(self)  # type: ignore[arg-type]
            self.incarnation += 1
            return self.info()

        def watch(self) -> None:
            threading.Event().wait()

        def release(self) -> None:
            pass

    return Bare


LOOKUPS = ("lookup", "lookup_ahead")
DELAYED = (*LOOKUPS, "refresh", "push", "register", "take")


def delayed_host(host: type, seed: int) -> type:
    """A host whose role answers late, by up to 20 ms, in random order. A PS counts how late pushes follow lookups."""

    class Delaying:
        def __init__(self, role: Any) -> None:
            self.role, self.random, self.lock = role, random.Random(seed), threading.Lock()
            self.lookups = self.pushes = self.behind = 0

        def __getattr__(self, name: str) -> Any:
            method = getattr(self.role, name)

            def call(*arguments: Any) -> Any:
                with self.lock:
                    pause = self.random.random() * 0.02
                    if name in LOOKUPS:
                        self.lookups += 1
                        self.behind = max(self.behind, self.lookups - 1 - self.pushes)
                time.sleep(pause)
                try:
                    return method(*arguments)
                finally:
                    time.sleep(pause)
                    if name == "push":
                        with self.lock:
                            self.pushes += 1

            return functools.update_wrapper(call, method) if name in DELAYED else method

    class Delayed(host):  # type: ignore[misc,valid-type]
        def serve(self, service: object, protocol: type, address: str = "") -> str:
            self.delaying = Delaying(service)
            return super().serve(self.delaying, protocol, address)

        def counters(self) -> dict[str, float]:
            return {**super().counters(), "behind": float(self.delaying.behind)}

    return Delayed


@contextlib.contextmanager
def one_torch_thread() -> Iterator[None]:
    """In this process, as in those of a cluster with `options()`."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


GLOBAL = persia.Schema(
    [persia.IdFeature("trained", 4), persia.IdFeature("fixed", 4)],
    tables=[
        persia.Table("trained", 4, optimizer=persia.optim.SGD(lr=0.5)),
        persia.Table("fixed", 4, optimizer=persia.optim.SGD(lr=1e-30)),
    ],
)
GLOBAL_IDS = 40


def global_losses(
    cluster: Any, nn_workers: int, feature: str, dtype: str, steps: int, parts: int
) -> dict[str, NDArray[Any]]:
    """Network and rows after so many steps of `parts` batches each, on one NN worker as one batch.

    The batches of a step have different sizes, so that the mean over them is not the mean over their rows.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    rng = np.random.default_rng(3)
    pieces: list[persia.Batch] = []
    for number in range(steps * parts):
        size = 3 + number % 5
        columns = {name: IdColumn(rng.integers(0, GLOBAL_IDS, size).astype(np.uint64)) for name in ("trained", "fixed")}
        labels = (rng.random((size, 1)) < 0.5).astype(np.float32)
        pieces.append(persia.Batch(columns, np.zeros((size, 0), np.float32), labels))
    if nn_workers == 1:
        batches = [_joined(pieces[i : i + parts]) for i in range(0, len(pieces), parts)]
    else:
        batches = pieces[torch.distributed.get_rank() :: nn_workers]
    embeddings = persia.nn.EmbeddingCollection(
        GLOBAL, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Sync(reduction="global"), cluster=cluster
    )
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to(kind)
    optimizer = torch.optim.SGD(net.parameters(), 0.5, momentum=0.9)
    replicas: Any = AllReduce(net, nn_workers) if nn_workers > 1 else SingleReplica(net)
    for batch in embeddings.prefetch(batches, equal_steps=replicas):
        with replicas.batch(batch.dummy, True):
            logits = replicas.model(embeddings(batch)[feature].to(kind))
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.to(kind))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    embeddings.eval()
    ids = np.arange(GLOBAL_IDS, dtype=np.uint64)
    every = persia.Batch(
        {name: IdColumn(ids) for name in ("trained", "fixed")},
        np.zeros((len(ids), 0), np.float32),
        np.zeros((len(ids), 1), np.float32),
    )
    found = {name: value.detach().numpy() for name, value in net.state_dict().items()}
    with torch.no_grad():
        for batch in embeddings.prefetch([every]):
            found["rows"] = embeddings(batch)[feature].numpy().copy()
    return found


def _joined(batches: list[persia.Batch]) -> persia.Batch:
    names = batches[0].id_features
    return persia.Batch(
        {name: IdColumn(np.concatenate([b.id_features[name].values for b in batches])) for name in names},
        np.concatenate([b.dense for b in batches]),
        np.concatenate([b.labels for b in batches]),
    )


class NumberedBatches:
    """A source in which every sample has an id of its own: 0, 1, 2, ..."""

    rows = 8
    schema = persia.Schema([persia.IdFeature("id", 4)])

    def __init__(self, count: int) -> None:
        self.count = count

    def batches(self, epoch: int = 0, start: int = 0) -> Iterator[persia.Batch]:
        for number in range(start, self.count):
            ids = np.arange(number * self.rows, (number + 1) * self.rows, dtype=np.uint64)
            yield persia.Batch(
                {"id": IdColumn(ids)}, np.zeros((self.rows, 0), np.float32), np.zeros((self.rows, 1), np.float32)
            )
