"""Asynchronous modes train the same bits, whoever pools the features and sums their gradients by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Mode
from persia.nn import EmbeddingCollection
from persia.nn.prepared import PreparedBatch
from persia.nn.token_pass import TokenPass
from persia.optim import SGD, Adagrad
from persia.schema import EmbeddingOptimizer, Schema
from persia.services import Connection
from persia.testing import Threads
from persia.types import Contribution, LookedUp, PushHeader
from persia.worker import WorkerOptions
from support.examples import examples
from support.pooled_roles import POOLABLE, SCHEMA, WIDTH, Cluster, Watched, batch_of

ADAGRAD = Adagrad(lr=0.5)
ROWS = 6
NN_WORKERS = 3
MODES: dict[str, Mode] = {
    "async": Async(),
    "bsp": Bsp(3),
    "bsp per id": Bsp(2, "per_id"),
    "hop_bs": HopBs(1),
    "hop_bw": HopBw(1),
    "hop_bw per id": HopBw(1, "per_id"),
    "gba": Gba(2 * ROWS, tolerance=1),
    "gba per id": Gba(3 * ROWS, tolerance=0, reduction="per_id"),
}


class Outcome:
    """Rows and their staleness after some pushes, and the answers to lookups."""

    def __init__(self, cluster: Cluster) -> None:
        self.stored = cluster.stored()
        self.staleness = [server.row_staleness() for server in cluster.servers]
        self.answers: list[LookedUp] = cluster.worker.answers

    @property
    def stale(self) -> int:
        """Number of gradients of rows that were too old."""
        return sum(counts.stale for counts in self.staleness)


def pushed(
    mode: Mode,
    pool_at: Any,
    seed: int,
    *,
    ahead: bool,
    ids: int,
    compression: Any = "none",
    optimizer: EmbeddingOptimizer = ADAGRAD,
) -> Outcome:
    """Trains 12 batches, up to 4 at a time, as NN workers do that take any time for their batches.

    Args:
        mode: an asynchronous mode.
        pool_at: see `WorkerOptions`.
        seed: of the batches, and of the order of their pushes.
        ahead: whether rows are found ahead, and refreshed when they are used.
        ids: number of ids of each feature.
        compression: see `WorkerOptions`.
        optimizer: of the rows.
    """
    cluster = Cluster(pool_at, compression=compression, nn_workers=NN_WORKERS)
    embeddings = EmbeddingCollection(SCHEMA, optimizer=optimizer, mode=mode, cluster=cluster)
    for server in cluster.servers:
        server.switch(mode, 1, 0)
    rng, group = np.random.default_rng(seed), mode.group(NN_WORKERS, ROWS)
    waiting: list[tuple[PreparedBatch, Any, int]] = []
    drawn = sequence = 0

    def push(batch: PreparedBatch, token: int) -> None:
        nonlocal sequence
        step, slot = divmod(sequence, group)
        sequence += 1
        header = PushHeader(1, 0, sequence, step, len(batch), slot=slot, group=group, token=token)
        gradients = embeddings._gradients.take(batch, 0)()
        assert batch.batch_id is not None
        cluster.worker.push(header, [Contribution(batch.batch_id, *gradients)])

    while drawn < 12 or waiting:
        if drawn < 12 and (len(waiting) < 2 or (len(waiting) < 4 and rng.random() < 0.5)):
            token = mode.token(drawn, sequence // group, group)
            registered = embeddings._lookup.register(batch_of(1000 * seed + drawn, ROWS, 4, ids))
            # The order in which a batch is used and pushed is that of `waiting`.
            prepared, ready = embeddings._lookup.look_up(registered, lambda _: None, refreshed=ahead, final=not ahead)
            waiting.append((prepared, ready, token))
            drawn += 1
            continue
        prepared, ready, token = waiting.pop(rng.integers(len(waiting)))
        if ahead:
            embeddings._lookup.refresh(prepared)()
        ready()
        loss = torch.zeros(())
        for number, each in enumerate(embeddings(prepared).values()):
            values = each if isinstance(each, torch.Tensor) else each.values
            loss = loss + (values * (1 + number) + values.square()).sum() * rng.normal()
        loss.backward()
        push(prepared, token)
    if held := sequence % group:
        for server in cluster.servers:
            server.drain(1, sequence // group, held)
    return Outcome(cluster)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=examples(20))
@given(seed=st.integers(0, 1000), ahead=st.booleans(), ids=st.sampled_from([3, 20, 500]))
def test_pushes_in_any_order_leave_the_same_rows(mode, seed, ahead, ids):
    """Sums by row, the number of gradients that have an id, the age of each row, and the step of its last update."""
    expected = pushed(MODES[mode], "nn_worker", seed, ahead=ahead, ids=ids)
    assert not any(answer.pooled for answer in expected.answers)
    for pool_at in ("embedding_worker", "auto"):
        found = pushed(MODES[mode], pool_at, seed, ahead=ahead, ids=ids)
        assert found.stored == expected.stored
        assert found.staleness == expected.staleness
        assert pool_at == "auto" or all(set(answer.pooled or ()) == POOLABLE for answer in found.answers)


def test_these_pushes_decay_and_are_counted_by_id():
    """Else the test above would not see a change of either."""
    outcomes = [
        pushed(Gba(2 * ROWS, tolerance=0, reduction=reduction), "embedding_worker", 0, ahead=True, ids=20)
        for reduction in ("global", "per_id")
    ]
    assert min(outcome.stale for outcome in outcomes) > 0
    assert outcomes[0].stored != outcomes[1].stored


@pytest.mark.parametrize("mode", ["async", "gba per id"])
def test_float16_is_close_in_any_mode(mode):
    """The sum of a row's gradients is rounded before it is sent, or its parts are. SGD does not amplify that."""

    def trained(pool_at: Any, compression: Any) -> Outcome:
        optimizer = SGD(0.01)
        return pushed(MODES[mode], pool_at, 0, ahead=True, ids=20, compression=compression, optimizer=optimizer)

    plain = trained("embedding_worker", "none")
    for pool_at in ("nn_worker", "embedding_worker"):
        found = trained(pool_at, "fp16")
        assert found.stored != plain.stored
        for name, row in plain.stored.items():
            np.testing.assert_allclose(found.stored[name], row, rtol=0.01, atol=0.005, err_msg=name)


class Apart(Threads):
    """One NN worker, which may be on another host than its embedding worker.

    Args:
        pool_at: where features are pooled.
        near: whether rows are looked up after the token is drawn; else they are found before.
    """

    def __init__(self, pool_at: Any, *, near: bool) -> None:
        super().__init__(1, ps=2, timeout=30.0)
        self.options, self.near = WorkerOptions(pool_at=pool_at), near

    def connect_as(self, rank: int, schema: Schema, optimizer: EmbeddingOptimizer, mode: Mode, seed: int) -> Connection:
        connection = super().connect_as(rank, schema, optimizer, mode, seed)
        self.watched = Watched(schema, connection.servers, options=self.options)
        return connection._replace(worker=self.watched, near=self.near, pools=True)


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(WIDTH, 1)

    def forward(self, dense: torch.Tensor, embeddings: persia.nn.Embeddings) -> torch.Tensor:
        inputs = [v if isinstance(v, torch.Tensor) else v.values.flatten(1) for v in embeddings.values()]
        return self.linear(torch.cat(inputs, 1))


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize(
    "mode", [Async(), Bsp(2, "per_id"), HopBs(1), HopBw(0), Gba(2 * ROWS, reduction="per_id")], ids=str
)
def test_a_trainer_has_the_same_rows_and_predictions(mode, near, monkeypatch):
    # A token that is drawn while the network computes makes the age of a batch depend on time.
    monkeypatch.setattr(TokenPass, "may_look_up", lambda self: self._client.pass_lookup())
    data = [batch_of(number, ROWS, 4, 20) for number in range(8)]

    def train(cluster: Apart) -> tuple[Any, ...]:
        def work(member: Any) -> tuple[Any, ...]:
            trainer = persia.Trainer(
                Net(),
                SCHEMA,
                optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
                embedding_optimizer=ADAGRAD,
                mode=mode,
                cluster=member,
                options=persia.TrainerOptions(progress=False, timeout=30.0),
            )
            trainer.fit(data)
            cluster.trained = len(cluster.watched.answers)
            return trainer.evaluate(data).auc, [part.tolist() for part in trainer.predict(data)]

        return cluster.run(work)[0]

    expected = train(Apart("nn_worker", near=near))
    for pool_at in ("embedding_worker", "auto"):
        cluster = Apart(pool_at, near=near)
        assert train(cluster) == expected
        assert len(cluster.watched.answers) > cluster.trained >= len(data)
        assert pool_at == "auto" or all(answer.pooled for answer in cluster.watched.answers)
        assert all((answer.seen is None) == near for answer in cluster.watched.answers[: len(data)])
