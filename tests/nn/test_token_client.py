"""Deaths of NN workers in asynchronous modes: each PS has some of their pushes, and all divide by the same rows.

And the calls that a batch takes.
"""

import itertools
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia import IdFeature, Schema
from persia.batching.id_column import IdColumn
from persia.coordinator import TokenScheduler
from persia.dense import DenseServer, SharedNetwork
from persia.modes import Async, Bsp, Gba, HopBw
from persia.nn.token_client import TokenClient
from persia.optim import SGD
from persia.services import DenseMaker, TrainingPhase
from persia.types import Caller, Contribution
from persia.worker import Worker
from support.examples import examples
from support.several_ps import several_servers

DEADLINE = 20.0
IDS = np.arange(24, dtype=np.uint64)
ROWS = 8
SCHEMA = Schema([IdFeature("item", dim=1)], dense_features=[], labels=["click"])
EMBEDDING, DENSE = ("ps-0", "ps-1"), ("dense-0", "dense-1")
EVERY = frozenset([*EMBEDDING, *DENSE])


def optimizer(parameters):
    return torch.optim.SGD(parameters, 1.0)


class Unreached:
    """A server that gets no push, as the NN worker dies before."""

    def __init__(self, server):
        self.server = server

    def __getattr__(self, name):
        return getattr(self.server, name)

    def push(self, header, gradients, map_version=0):
        return {}


class NNWorker:
    """An NN worker whose network has one tensor for each dense PS, and no loss.

    Args:
        tokens: the token scheduler.
        rank: its rank.
        servers: all PSs by name.
        reached: names of those that get its pushes.
    """

    def __init__(self, tokens, rank, servers, reached=EVERY):
        rows, dense = (
            [servers[name] if name in reached else Unreached(servers[name]) for name in names]
            for names in (EMBEDDING, DENSE)
        )
        self.parameters = torch.nn.ParameterList([torch.zeros(1), torch.zeros(1)])
        self.network = SharedNetwork(self.parameters, optimizer(self.parameters), None, dense, DEADLINE)
        self.worker = Worker(SCHEMA, rows)
        self.client = TokenClient(tokens, Caller(1, 1, rank), self.worker, self.network, 0)

    def draw(self, rows):
        next(self.client.batches(lambda number: number))
        self.client.draw(rows).adopt()

    def train(self, ids, value):
        """Trains a batch of one id per sample. All of its gradients are `value`."""
        self.draw(len(ids))
        batch_id = self.worker.register({"item": IdColumn(np.array(ids, np.uint64))})
        found = self.worker.lookup(batch_id)
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, value)
        gradients = {name: np.full_like(rows, value) for name, rows in found.rows.items()}
        self.client.push(1, len(ids), 0, [Contribution(batch_id, gradients)], self.network.gradients())


def step(mode, batches, reached):
    """Applies one step, all of whose NN workers push one batch, and some die within their push.

    Args:
        mode: with as many gradients in a step as there are batches.
        batches: ids and gradient of each, by rank.
        reached: names of the servers that have got the push of a dead NN worker, by rank.

    Returns:
        The sums that were applied: by name of the PS, those of its ids, and that of its tensor.
    """
    rows = several_servers(len(EMBEDDING), SCHEMA.resolved_tables(), SGD(1.0), mode, 0)
    servers = dict(zip(EMBEDDING, rows, strict=True))
    servers |= {name: DenseServer(DenseMaker(optimizer), rank, 2, DEADLINE) for rank, name in enumerate(DENSE)}
    tokens = TokenScheduler(DEADLINE)
    last = NNWorker(tokens, len(batches), servers)
    last.network.load(1, 0, mode)
    for name in EMBEDDING:
        servers[name].switch(mode, 1, 0)
    last.worker.lookup(last.worker.register({"item": IdColumn(IDS)}))  # Admits all ids.
    before = {name: servers[name].read_rows("item", IDS, False) for name in EMBEDDING}
    tokens.begin(TrainingPhase(1, 1, mode, len(batches) + 1, 0, 0, 0, None, ROWS))
    for rank, (ids, value) in enumerate(batches):
        NNWorker(tokens, rank, servers, reached.get(rank, EVERY)).train(ids, value)
    for rank in reached:
        assert tokens.cancel(1, rank)
    last.draw(ROWS)  # Fills the abandoned pushes first.
    last.network.pull(1, lambda: True)()
    changes = {}
    for name, old in before.items():
        change = old.values - servers[name].read_rows("item", IDS, False).values
        changes[name] = dict(zip(IDS[old.found].tolist(), change[old.found, 0].tolist(), strict=True))
    return changes | {name: -p.item() for name, p in zip(DENSE, last.parameters, strict=True)}


@pytest.mark.parametrize("mode", [Bsp(3), Gba(3 * ROWS)], ids=str)
def test_an_abandoned_push_changes_nothing_but_its_own_gradient(mode):
    """It has reached PS 0 of each kind. The others lack its gradient, and apply those of the others unchanged."""
    half, rest = IDS[:12].tolist(), IDS[12:20].tolist()
    batches = [(half, 3.0), (rest, 6.0), (rest, 9.0)]
    undisturbed = step(mode, batches, {})
    found = step(mode, batches, {0: {"ps-0", "dense-0"}})
    assert found["ps-0"] == pytest.approx(undisturbed["ps-0"])
    assert found["dense-0"] == pytest.approx(undisturbed["dense-0"])
    others = {id_: 0.0 if id_ in half else sum_ for id_, sum_ in undisturbed["ps-1"].items()}
    assert found["ps-1"] == pytest.approx(others)
    assert found["dense-1"] == pytest.approx(undisturbed["dense-1"] - 3.0 * 12 / 28)


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_all_servers_divide_a_step_by_the_same_rows(data):
    """Whichever servers have the pushes of the NN workers that die, and however many of these there are."""
    reduction = data.draw(st.sampled_from(["global", "per_id"]), "reduction")
    some = st.lists(st.sampled_from(IDS.tolist()), min_size=1, unique=True)
    batches = data.draw(st.lists(st.tuples(some, st.integers(-3, 3)), min_size=1, max_size=4), "batches")
    dead = st.dictionaries(st.integers(0, len(batches) - 1), st.frozensets(st.sampled_from(sorted(EVERY))))
    reached = data.draw(dead, "servers reached by the dead")
    found = step(Bsp(len(batches), reduction), batches, reached)
    rows = sum(len(ids) for ids, _ in batches)
    for name in EVERY:
        here = [(ids, value) for rank, (ids, value) in enumerate(batches) if name in reached.get(rank, EVERY)]
        if name in DENSE:
            assert found[name] == pytest.approx(sum(len(ids) * value for ids, value in here) / rows, abs=1e-5)
            continue
        for id_, change in found[name].items():
            having = [(len(ids), value) for ids, value in here if id_ in ids]
            divisor = rows if reduction == "global" else sum(weight for weight, _ in having)
            expected = sum(weight * value for weight, value in having) / max(1, divisor)
            assert change == pytest.approx(expected, abs=1e-5)


class Counting(TokenScheduler):
    """Counts calls by name."""

    def __init__(self):
        super().__init__(DEADLINE)
        self.calls = Counter()

    def take(self, *arguments):
        self.calls["take"] += 1
        return super().take(*arguments)

    def draw(self, *arguments):
        self.calls["draw"] += 1
        return super().draw(*arguments)

    def arrive(self, *arguments):
        self.calls["arrive"] += 1
        return super().arrive(*arguments)


@pytest.mark.parametrize(
    ("mode", "steps", "takes"),
    [
        (Async(), None, 1),
        (Gba(ROWS), 5, 1),
        (HopBw(0), 5, 2),  # After its last token, it waits for the gradient: it might be dropped.
    ],
    ids=str,
)
def test_a_batch_takes_two_calls(mode, steps, takes):
    """Its token brings the next batch."""
    tokens = Counting()
    tokens.begin(TrainingPhase(1, 1, mode, 1, 0, 0, 0, steps, ROWS))
    worker = SimpleNamespace(push=lambda header, contributions: {})
    network = SimpleNamespace(version=0, pull=lambda *_: lambda: None, push_empty=lambda header: None)
    client = TokenClient(tokens, Caller(1, 1, 0), worker, network, 0)
    trained = []
    for number in itertools.islice(client.batches(lambda number: number if number < 5 else None), 6):
        client.push(client.draw(ROWS).sequence, ROWS, 0, [], None)
        trained.append(number)
    assert trained == [0, 1, 2, 3, 4]
    assert tokens.calls == {"take": takes, "draw": 5, "arrive": 5}
    assert client.quiesce().position == 5
