"""A discrete-event simulation of training on any number of hosts: which role waits for which, and for how long.

Batches pass through the roles as messages do: data loader, embedding worker, all PSs, back, the NN worker's step, and
the same way as gradients. Each host has cores, a network interface with two directions and optionally GPUs and an SSD;
each serves requests in order of arrival. Costs come from measured rates. A run is reproducible: only the time of a step
is random, and only if it has a spread.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from persia.errors import ConfigError
from persia.plan.load import BatchTraffic

__all__ = ["BatchCosts", "SimulatedCluster", "SimulatedHosts", "SimulatedMode", "SimulationResult", "simulate_training"]

AHEAD = 4
"""Number of batches that a data loader prepares ahead for each NN worker."""


class BatchCosts(NamedTuple):
    """Costs of a batch, independent of the cluster.

    Attributes:
        samples: number of samples.
        traffic: bytes of its messages.
        reader: core seconds of a data loader.
        worker: core seconds of an embedding worker, without its messages.
        request: core seconds of a PS for a lookup and a push, without their rows.
        lookup: core seconds of all PSs for its rows.
        update: core seconds of all PSs for its gradients.
        step: seconds of a step of an NN worker.
        call: core seconds of both sides of a message.
        byte: core seconds of both sides of a byte.
        misses: number of rows that are read from SSD.
        miss: core seconds of a PS for such a row, after it was read.
    """

    samples: int
    traffic: BatchTraffic
    reader: float
    worker: float
    request: float
    lookup: float
    update: float
    step: float
    call: float
    byte: float
    misses: float = 0.0
    miss: float = 0.0


class SimulatedHosts(NamedTuple):
    """The hosts of some roles.

    Attributes:
        number: number of hosts.
        cores: cores of each host.
        network: bytes/s of each host in each direction; None within one host.
        reads: random reads/s of the SSD of each host.
    """

    number: int
    cores: int
    network: float | None = None
    reads: float = math.inf


class SimulatedCluster(NamedTuple):
    """Processes and their hosts. The processes of a role are spread evenly over its hosts.

    Attributes:
        hosts: kinds of hosts by name.
        place: name of the hosts of each role.
        counts: number of processes by role.
        gpus: whether each NN worker computes on its own GPU; otherwise on a core of its host.
    """

    hosts: dict[str, SimulatedHosts]
    place: dict[str, str]
    counts: dict[str, int]
    gpus: bool = True


class SimulatedMode(NamedTuple):
    """Dependencies between steps.

    Attributes:
        depth: maximum number of own steps between a lookup and the applied gradient.
        barrier: whether NN workers average their gradients in each step; otherwise they train independently.
    """

    depth: int
    barrier: bool = True


class SimulationResult(NamedTuple):
    """Result of a simulation.

    Attributes:
        samples_per_second: rate of all NN workers, after the first steps.
        step_seconds: mean time between two steps of an NN worker.
        lookup_seconds: mean time from the request of a batch's rows to their arrival at the NN worker.
        busy: share of the time that the busiest resource of each kind is busy.
        bottleneck: the busiest resource; "latency" if none is busy for three quarters of the time.
    """

    samples_per_second: float
    step_seconds: float
    lookup_seconds: float
    busy: dict[str, float]
    bottleneck: str


class _Resource:
    """Servers that serve in order of arrival."""

    __slots__ = ("busy", "free")

    def __init__(self, servers: int = 1) -> None:
        self.free = [0.0] * servers
        self.busy = 0.0

    def use(self, now: float, seconds: float) -> float:
        """Serves for some seconds from `now` on, and returns the time at which that ends."""
        end = max(now, self.free[0]) + seconds
        heapq.heapreplace(self.free, end)
        self.busy += seconds
        return end


class _Host:
    __slots__ = ("cores", "disk", "incoming", "outgoing")

    def __init__(self, kind: SimulatedHosts) -> None:
        self.cores = _Resource(kind.cores)
        self.incoming, self.outgoing, self.disk = _Resource(), _Resource(), _Resource()


def simulate_training(
    costs: BatchCosts,
    cluster: SimulatedCluster,
    mode: SimulatedMode,
    steps: int = 40,
    spread: float = 0.0,
    seed: int = 0,
) -> SimulationResult:
    """Simulates a number of steps of each NN worker.

    Args:
        costs: costs of a batch.
        cluster: hosts and processes.
        mode: mode of training.
        steps: number of steps of each NN worker; the first third fills the queues and is not counted.
        spread: standard deviation of the logarithm of a step's time; 0 for equal steps.
        seed: seed of the random step times.

    Raises:
        ConfigError: there are too few steps.
    """
    if steps < 6:
        raise ConfigError(f"Invalid steps = {steps}; expected at least 6.", field="steps")
    return _Simulation(costs, cluster, mode, steps, spread, seed).run()


class _Simulation:
    def __init__(
        self, costs: BatchCosts, cluster: SimulatedCluster, mode: SimulatedMode, steps: int, spread: float, seed: int
    ) -> None:
        self.costs, self.cluster, self.mode, self.steps = costs, cluster, mode, steps
        self.hosts = {name: [_Host(kind) for _ in range(kind.number)] for name, kind in cluster.hosts.items()}
        counts = cluster.counts
        self.workers = counts["nn_worker"]
        # Processes that do one task at a time.
        self.loaders = [_Resource() for _ in range(counts["data_loader"])]
        self.networks = [_Resource() for _ in range(self.workers)]
        self.random = random.Random(seed)
        self.spread = spread
        self.heap: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = itertools.count()
        self.read: dict[tuple[int, int], bool] = {}
        self.requested_at: dict[tuple[int, int], float] = {}
        self.ready: set[tuple[int, int]] = set()
        self.done = [0] * self.workers  # steps computed, by NN worker
        self.stepping = [False] * self.workers
        self.applied = [0] * self.workers  # own steps whose gradients are applied
        self.arrived: dict[int, int] = defaultdict(int)  # pushes by step
        self.computed: dict[int, int] = defaultdict(int)  # NN workers by step
        self.missing: dict[tuple[str, int, int], int] = {}
        self.looked_up: list[float] = []
        self.ends: list[list[float]] = [[] for _ in range(self.workers)]

    # --- resources ------------------------------------------------------------------------------------------------

    def at(self, time: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self.heap, (time, next(self.order), call))

    def host(self, role: str, rank: int) -> _Host:
        hosts = self.hosts[self.cluster.place[role]]
        return hosts[rank % len(hosts)]

    def send(
        self, now: float, source: tuple[str, int], target: tuple[str, int], size: float, then: Callable[[float], None]
    ) -> None:
        """Sends a message: uses cores and network of the sender, then network and cores of the receiver."""
        sender, receiver = self.host(*source), self.host(*target)
        cost = (self.costs.call / 2 + size * self.costs.byte) / 2  # A call has a message each way.
        out, into = (self.cluster.hosts[self.cluster.place[role]].network for role in (source[0], target[0]))

        def arrive(time: float) -> None:
            self.at(receiver.cores.use(time, cost), then)

        def receive(time: float) -> None:
            assert into is not None
            self.at(receiver.incoming.use(time, size / into), arrive)

        def leave(time: float) -> None:
            if sender is receiver or out is None or into is None:
                arrive(time)
            else:
                self.at(sender.outgoing.use(time, size / out), receive)

        self.at(sender.cores.use(now, cost), leave)

    # --- the path of a batch --------------------------------------------------------------------------------------

    def run(self) -> SimulationResult:
        for worker in range(self.workers):
            for step in range(min(AHEAD, self.steps)):
                self.load(0.0, worker, step)
        while self.heap:
            time, _, call = heapq.heappop(self.heap)
            call(time)
        return self.result()

    def load(self, now: float, worker: int, step: int) -> None:
        """Simulates a data loader that reads a batch and registers it."""
        loader = worker % self.cluster.counts["data_loader"]

        def sent(time: float) -> None:
            self.send(
                time, ("data_loader", loader), ("embedding_worker", self.owner(worker, step)),
                self.costs.traffic.ids, registered,
            )  # fmt: skip

        def registered(time: float) -> None:
            self.read[worker, step] = True
            self.request(time, worker)

        started = self.loaders[loader].use(now, self.costs.reader) - self.costs.reader
        self.at(self.host("data_loader", loader).cores.use(started, self.costs.reader), sent)

    def owner(self, worker: int, step: int) -> int:
        return (worker + step * self.workers) % self.cluster.counts["embedding_worker"]

    def request(self, now: float, worker: int) -> None:
        """Simulates an NN worker that requests the rows of all batches that the mode admits."""
        step = sum(
            1
            for _ in itertools.takewhile(lambda s: (worker, s) in self.requested_at, itertools.count(self.done[worker]))
        )
        step += self.done[worker]
        while step <= self.applied[worker] + self.mode.depth and self.read.get((worker, step)):
            self.requested_at[worker, step] = now
            self.look_up(now, worker, step)
            step += 1

    def look_up(self, now: float, worker: int, step: int) -> None:
        """Simulates an embedding worker that queries all PSs, and answers once all have answered."""
        owner, servers, costs = self.owner(worker, step), self.cluster.counts["embedding_ps"], self.costs
        source = ("embedding_worker", owner)
        key = ("lookup", worker, step)
        self.missing[key] = servers

        def fan_out(time: float) -> None:
            for server in range(servers):
                self.send(time, source, ("embedding_ps", server), costs.traffic.keys / servers, serve(server))

        def serve(server: int) -> Callable[[float], None]:
            host = self.host("embedding_ps", server)

            def respond(time: float) -> None:
                self.send(time, ("embedding_ps", server), source, costs.traffic.rows / servers, answered)

            def looked(time: float) -> None:
                reads = self.cluster.hosts[self.cluster.place["embedding_ps"]].reads
                self.at(host.disk.use(time, costs.misses / servers / reads) if costs.misses else time, moved)

            def moved(time: float) -> None:
                seconds = costs.misses / servers * costs.miss
                self.at(host.cores.use(time, seconds) if seconds else time, respond)

            return lambda time: self.at(host.cores.use(time, costs.request / 2 + costs.lookup / servers), looked)

        def answered(time: float) -> None:
            self.missing[key] -= 1
            if not self.missing[key]:
                self.at(self.host(*source).cores.use(time, costs.worker / 4), joined)

        def joined(time: float) -> None:
            self.send(time, source, ("nn_worker", worker), costs.traffic.answers + costs.traffic.dense, arrived)

        def arrived(time: float) -> None:
            self.looked_up.append(time - self.requested_at[worker, step])
            self.ready.add((worker, step))
            self.compute(time, worker)

        self.at(self.host(*source).cores.use(now, costs.worker / 4), fan_out)

    def compute(self, now: float, worker: int) -> None:
        """Simulates the next step of an NN worker, if it is idle and has the rows."""
        step = self.done[worker]
        if self.stepping[worker] or (worker, step) not in self.ready:
            return
        self.ready.remove((worker, step))
        self.stepping[worker] = True
        seconds = self.costs.step
        if self.spread:
            seconds *= math.exp(self.random.gauss(-(self.spread**2) / 2, self.spread))
        device = self.networks[worker] if self.cluster.gpus else self.host("nn_worker", worker).cores

        def computed(time: float) -> None:
            if not self.mode.barrier:
                self.finish(time, worker, step)
                return
            self.computed[step] += 1
            if self.computed[step] == self.workers:
                end = time + self.reduce_seconds()
                for other in range(self.workers):
                    self.networks[other].busy += end - time
                    self.at(end, lambda t, w=other: self.finish(t, w, step))  # type: ignore[misc]

        self.at(device.use(now, seconds), computed)

    def reduce_seconds(self) -> float:
        """Returns the time of the all-reduce. Each host sends and receives once for all its NN workers."""
        if self.workers == 1:
            return 0.0
        network = self.cluster.hosts[self.cluster.place["nn_worker"]].network
        size = self.costs.traffic.reduced
        return size / network if network is not None else size * self.costs.byte

    def finish(self, now: float, worker: int, step: int) -> None:
        """Ends a step of an NN worker: it pushes its gradients and continues."""
        self.stepping[worker] = False
        self.done[worker] = step + 1
        self.ends[worker].append(now)
        if step + AHEAD < self.steps:
            self.load(now, worker, step + AHEAD)
        self.push(now, worker, step)
        self.compute(now, worker)

    def push(self, now: float, worker: int, step: int) -> None:
        """Simulates an embedding worker that routes gradients to the PSs, which apply them."""
        owner, servers, costs = self.owner(worker, step), self.cluster.counts["embedding_ps"], self.costs
        source = ("embedding_worker", owner)
        key = ("push", worker, step)
        self.missing[key] = servers
        size = (costs.traffic.keys + costs.traffic.gradients) / servers

        def received(time: float) -> None:
            self.at(self.host(*source).cores.use(time, costs.worker / 2), fan_out)

        def fan_out(time: float) -> None:
            for server in range(servers):
                self.send(time, source, ("embedding_ps", server), size, apply(server))

        def apply(server: int) -> Callable[[float], None]:
            seconds = costs.request / 2 + costs.update / servers
            return lambda time: self.at(self.host("embedding_ps", server).cores.use(time, seconds), applied)

        def applied(time: float) -> None:
            self.missing[key] -= 1
            if not self.missing.get(key):
                del self.missing[key]
                self.count(time, worker, step)

        self.send(now, ("nn_worker", worker), source, costs.traffic.pushed, received)

    def count(self, now: float, worker: int, step: int) -> None:
        """Counts a batch whose gradients have arrived at all PSs; with a barrier, a step needs all NN workers."""
        self.arrived[step] += 1
        if not self.mode.barrier:
            self.applied[worker] += 1
            self.request(now, worker)
        elif self.arrived[step] == self.workers:
            for other in range(self.workers):
                self.applied[other] = max(self.applied[other], step + 1)
                self.request(now, other)

    # --- the result -----------------------------------------------------------------------------------------------

    def result(self) -> SimulationResult:
        first = self.steps // 3
        gaps = [(ends[-1] - ends[first]) / (len(ends) - 1 - first) for ends in self.ends]
        rate = sum(self.costs.samples / gap for gap in gaps)
        end = max(ends[-1] for ends in self.ends)
        busy: dict[str, float] = {}
        for name, hosts in self.hosts.items():
            for what in ("cores", "incoming", "outgoing", "disk"):
                used = max(getattr(host, what).busy / len(getattr(host, what).free) for host in hosts) / end
                if used:
                    busy[f"{name} {what}"] = used
        if self.cluster.gpus:
            busy["NN workers"] = max(network.busy for network in self.networks) / end
        most = max(busy, key=lambda name: busy[name])
        return SimulationResult(
            rate,
            sum(gaps) / len(gaps),
            sum(self.looked_up) / len(self.looked_up),
            busy,
            most if busy[most] > 0.75 else "latency",
        )
