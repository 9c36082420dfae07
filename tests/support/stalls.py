"""An NN worker that stalls after it has drawn a token, and others that train: real roles, a network without a loss."""

import contextlib
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from persia import IdFeature, Schema
from persia.batching.id_column import IdColumn
from persia.coordinator import TokenScheduler
from persia.dense import DenseServer, SharedNetwork
from persia.errors import DeadlineError
from persia.nn.token_client import TokenClient
from persia.optim import SGD
from persia.services import DenseMaker, TrainingPhase
from persia.types import Caller, Contribution, QuiesceResult
from persia.worker import Worker
from support.several_ps import several_servers

PLACES = ("before it arrives", "before its rows", "within its network")
"""Where it stalls: before the token scheduler places its gradient, after that, and at one of two dense PSs."""

ROWS = 8
SCHEMA = Schema([IdFeature("item", dim=1)], dense_features=[], labels=["click"])


class Stall:
    """Forwards calls to a role, and stalls before those of one name until it is released."""

    def __init__(self, role, name, deadline):
        self.role = role
        self.name = name
        self.deadline = deadline
        self.reached, self.released = threading.Event(), threading.Event()

    def __getattr__(self, name):
        method = getattr(self.role, name)
        return functools.partial(self._stalled, method) if name == self.name else method

    def _stalled(self, method, *arguments):
        self.reached.set()
        assert self.released.wait(self.deadline)
        return method(*arguments)


class NNWorker:
    """An NN worker that trains batches of one id, with the gradient 1, and a network with two tensors."""

    def __init__(self, tokens, rank, worker, dense, deadline):
        self.parameters = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        self.network = SharedNetwork(self.parameters, _optimizer(self.parameters), None, dense, deadline)
        self.worker = worker
        self.client = TokenClient(tokens, Caller(1, 1, rank), worker, self.network, 0)
        self.numbers = self.client.batches(lambda number: number)

    def train(self, item):
        next(self.numbers)
        token = self.client.draw(ROWS)
        token.adopt()
        batch_id = self.worker.register({"item": IdColumn(np.full(ROWS, item, np.uint64))})
        found = self.worker.lookup(batch_id)
        for parameter in self.parameters:
            parameter.grad = torch.ones_like(parameter)
        contributions = [Contribution(batch_id, {name: np.ones_like(rows) for name, rows in found.rows.items()})]
        self.client.push(token.sequence, ROWS, self.network.version, contributions, self.network.gradients())


class StallOutcome(NamedTuple):
    """Outcome of a run.

    Attributes:
        made: number of batches that the others have trained during the stall.
        versions: versions of the dense PSs at the end of the stall.
        end: the point at which the phase was quiesced; None if the others have not trained all batches.
        changes: amount that was subtracted from the row of each NN worker, by rank.
    """

    made: int
    versions: list[int]
    end: QuiesceResult | None
    changes: dict[int, float]


def train_beside_stall(mode, place, batches, nn_workers=3, deadline=10.0):
    """Trains while the NN worker of the highest rank stalls in its first batch, and after that to the end.

    Args:
        mode: an asynchronous mode.
        place: one of `PLACES`.
        batches: number of batches that each of the others trains during the stall, in turn.
        nn_workers: number of NN workers.
        deadline: deadline of each wait in seconds; a batch that exceeds it ends the stall.

    Raises:
        PersiaError: a PS has not got each push once.
    """
    rows = several_servers(2, SCHEMA.resolved_tables(), SGD(1.0), mode, 0)
    dense = [DenseServer(DenseMaker(_optimizer), rank, 2, deadline) for rank in range(2)]
    tokens, worker, last = TokenScheduler(deadline), Worker(SCHEMA, rows), nn_workers - 1
    others = [NNWorker(tokens, rank, worker, dense, deadline) for rank in range(last)]
    stall_deadline = 60 * deadline
    if place == "before it arrives":
        stall = Stall(tokens, "arrive", stall_deadline)
        stalled = NNWorker(stall, last, worker, dense, deadline)
    elif place == "before its rows":
        stall = Stall(worker, "push", stall_deadline)
        stalled = NNWorker(tokens, last, stall, dense, deadline)
    else:
        stall = Stall(dense[0], "push", stall_deadline)
        stalled = NNWorker(tokens, last, worker, [stall, dense[1]], deadline)
    others[0].network.load(1, 0, mode)
    for server in rows:
        server.switch(mode, 1, 0)
    ids = np.arange(nn_workers, dtype=np.uint64)
    worker.lookup(worker.register({"item": IdColumn(ids)}))  # Admits them.
    before = _values(rows, ids)
    tokens.begin(TrainingPhase(1, 1, mode, nn_workers, 0, 0, 0, None, ROWS))
    made = 0
    with ThreadPoolExecutor(nn_workers) as threads:
        late = threads.submit(stalled.train, last)
        assert stall.reached.wait(deadline)
        with contextlib.suppress(DeadlineError):
            for _ in range(batches):
                for rank, other in enumerate(others):
                    other.train(rank)
                    made += 1
        versions = [server.statistics()["version"] for server in dense]
        stall.released.set()
        late.result(deadline)
        end = None
        if made == batches * last:
            everyone = [*others, stalled]
            for nn_worker in everyone:
                nn_worker.client.close()
            calls = [threads.submit(nn_worker.client.quiesce) for nn_worker in everyone]
            end = calls[0].result()
            for server in [*rows, *dense]:
                server.drain(1, end.step, end.held)
    return StallOutcome(made, versions, end, {id_: before[id_] - value for id_, value in _values(rows, ids).items()})


def _optimizer(parameters):
    return torch.optim.SGD(parameters, 1.0)


def _values(rows, ids):
    """Returns the value of each row, from its PS."""
    stored = [server.read_rows("item", ids, False) for server in rows]
    return {id_: value for s in stored for id_, value in zip(ids[s.found].tolist(), s.values[s.found, 0], strict=True)}
