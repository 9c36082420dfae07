"""Features that an embedding worker pools train the same bits as features that the NN worker pools."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import persia
from persia import IdColumn, IdFeature, Schema
from persia.errors import PersiaError, StoreError
from persia.membership.directory import Directory
from persia.membership.embedding_workers import EmbeddingWorkers
from persia.modes import Hybrid, Mode, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.optim import Adagrad
from persia.rpc.array_encoding import encode
from persia.rpc.limits import Limits
from persia.schema.pooled_features import values_name
from persia.services import Connection
from persia.types import Contribution, Packed, PushHeader
from support.pooled_roles import POOLABLE, SCHEMA, WIDTH, Cluster, batch_of


def trained(
    cluster: Cluster, mode: Mode, batches: list[persia.Batch], *, on_host: bool = True, **options: Any
) -> dict[str, Any]:
    """Losses, and rows by table and id."""
    torch.manual_seed(0)
    embeddings = EmbeddingCollection(
        SCHEMA, optimizer=Adagrad(lr=0.5), mode=mode, cluster=cluster, options=CollectionOptions(**options)
    )
    embeddings._expander.on_host = embeddings._transfer._on_host = on_host
    net = torch.nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found: dict[str, Any] = {"losses": []}
    for batch in embeddings.prefetch(batches):
        inputs = [v if isinstance(v, torch.Tensor) else v.values.flatten(1) for v in embeddings(batch).values()]
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(torch.cat(inputs, 1)), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(loss.item())
    return found | cluster.stored()


MODES: dict[str, Mode] = {"sync": Sync(), "hybrid": Hybrid(2, warmup=0), "paper": Hybrid(2, warmup=0, refresh=False)}


@pytest.mark.parametrize("mode", MODES)
@given(
    servers=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
    size=st.integers(1, 12),
    most=st.integers(1, 6),
    ids=st.sampled_from([3, 20, 500]),
)
def test_the_bits_are_those_of_pooling_at_the_nn_worker(mode, servers, seed, size, most, ids):
    # Hybrid depends on time, but for the first batch and batches without common rows.
    count = 6 if mode == "sync" else 1
    batches = [batch_of(seed + number, size, most, ids) for number in range(count)]
    expected = trained(Cluster("nn_worker", servers), MODES[mode], batches)
    for pool_at in ("embedding_worker", "auto"):
        cluster = Cluster(pool_at, servers)
        assert trained(cluster, MODES[mode], batches) == expected
        for answer in cluster.worker.answers:
            assert set(answer.pooled or ()) <= POOLABLE
            assert pool_at == "auto" or set(answer.pooled or ()) == POOLABLE


@pytest.mark.parametrize("pool_at", ["embedding_worker", "auto"])
def test_a_device_gets_the_same_values_and_sends_the_same_gradients(pool_at):
    batches = [batch_of(number, 9, 6, 20) for number in range(4)]
    expected = trained(Cluster("nn_worker"), Sync(), batches, on_host=False)
    found = trained(Cluster(pool_at), Sync(), batches, on_host=False)
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5, err_msg=name)


def test_float16_is_close():
    batches = [batch_of(number, 9, 6, 20) for number in range(4)]
    expected = trained(Cluster("nn_worker"), Sync(), batches)
    found = trained(Cluster("embedding_worker", compression="fp16"), Sync(), batches)
    assert found["losses"] != expected["losses"]
    np.testing.assert_allclose(found["losses"], expected["losses"], atol=1e-3)


def sent_bytes(value: Any) -> int:
    payload, arrays = encode(value, Limits().arrays)
    return len(payload) + sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("compression", ["none", "fp16"])
@pytest.mark.parametrize(("ids", "most"), [(2000, 20), (2000, 2), (50, 20), (3, 1)])
def test_auto_sends_no_more_than_either(compression, ids, most):
    batch = batch_of(0, 64, most, ids)
    nbytes = {}
    for pool_at in ("nn_worker", "embedding_worker", "auto"):
        cluster = Cluster(pool_at, 1, compression)
        trained(cluster, Sync(), [batch])
        (answer,) = cluster.worker.answers
        # A push has a gradient for each float32 value of an answer.
        gradients = answer.rows.buffer.nbytes + (0 if answer.scales is None else answer.scales.buffer.nbytes)
        nbytes[pool_at] = sent_bytes(answer) + gradients
    headers = 400  # Names.
    assert nbytes["auto"] <= min(nbytes["nn_worker"], nbytes["embedding_worker"]) + headers
    if most == 20 and ids == 2000:
        assert nbytes["auto"] < nbytes["nn_worker"] / 2


def test_a_refresh_has_the_samples_whose_rows_have_changed():
    cluster = Cluster("embedding_worker")
    schema = Schema([IdFeature("bag", dim=2, pooling="mean"), IdFeature("one", dim=2, table="bag")])
    worker = cluster.connect(schema, Adagrad(lr=0.5), Sync(), 0).worker
    bags = IdColumn(np.array([1, 2, 3, 4, 5], np.uint64), np.array([0, 2, 2, 5]))
    first = worker.register({"bag": bags, "one": IdColumn(np.array([7, 7, 2], np.uint64))})
    worker.lookup_ahead(first, pool=True)
    found = worker.lookup_ahead(first, pool=True, recent=1)
    assert found.left_out is None  # All rows are needed for the values.
    assert list(found.rows) == ["bag/bag", "bag/one"]
    assert found.pooled == {"bag": 6}
    assert not found.inverse
    assert found.rows["bag/bag"][1].tolist() == [0.0, 0.0]
    # Another batch changes the row of id 2.
    other = worker.register(
        {"bag": IdColumn(np.empty(0, np.uint64), np.array([0, 0])), "one": IdColumn(np.array([2], np.uint64))}
    )
    worker.lookup(other)
    gradient = Packed.of({"bag": np.ones((1, 2), np.float32)}, np.float32)
    worker.push(PushHeader(1, 0, 1, 0, 1), [Contribution(other, gradient)])
    assert found.seen is not None
    for _ in range(2):  # Its reply may be lost.
        fresh = worker.refresh(first, found.seen)
        assert {name: places.tolist() for name, places in fresh.places.items()} == {"bag/bag": [0], "bag/one": [2]}
        now = worker.evaluate({"bag": bags, "one": IdColumn(np.array([7, 7, 2], np.uint64))})
        rows = now.rows["bag"]
        index = now.inverse
        assert fresh.rows["bag/one"].tolist() == [rows[index["one"][2]].tolist()]
        np.testing.assert_allclose(fresh.rows["bag/bag"][0], rows[index["bag"][:2]].mean(0), rtol=1e-6)
    assert worker.refresh(first, fresh.seen).places.buffer.size == 0


class Gate:
    """Lets the first call of a PS that has read its rows wait until it is opened; also the lock of a batch.

    A call that would wait for the lock opens it: the other call is the one that waits here.
    """

    def __init__(self, server: Any, name: str) -> None:
        self.call, self.lock = getattr(server, name), threading.Lock()
        self.has_read, self.opened = threading.Event(), threading.Event()
        setattr(server, name, self.called)

    def called(self, *arguments: Any) -> Any:
        answer, first = self.call(*arguments), not self.has_read.is_set()
        self.has_read.set()
        if first:
            assert self.opened.wait(20)
        return answer

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.opened.set()
            assert self.lock.acquire(timeout=20)

    def __exit__(self, *_: object) -> None:
        self.lock.release()


@pytest.mark.parametrize("repeated", ["refresh", "lookup_ahead"])
def test_a_call_that_overlaps_with_its_repetition_keeps_no_older_rows(repeated: str):
    """Calls are repeated after a reconnection, while the first one may still run."""
    cluster = Cluster("embedding_worker", servers=1)
    schema = Schema([IdFeature("bag", dim=2, pooling="mean")])
    worker = cluster.connect(schema, Adagrad(lr=0.5), Sync(), 0).worker
    columns = {"bag": IdColumn(np.array([1, 2], np.uint64), np.array([0, 2]))}
    batch_id, sequence = worker.register(columns), itertools.count(1)

    def update(id_: int) -> None:
        other = worker.register({"bag": IdColumn(np.array([id_], np.uint64), np.array([0, 1]))})
        worker.lookup(other)
        gradient = Packed.of({"bag": np.ones((1, 2), np.float32)}, np.float32)
        number = next(sequence)
        worker.push(PushHeader(1, 0, number, number - 1, 1), [Contribution(other, gradient)])

    found = worker.lookup_ahead(batch_id, pool=True)
    update(1)
    gate = Gate(cluster.servers[0], repeated)
    with worker._buffer.use(batch_id) as (_, state):
        state.lock = gate

    def call() -> Any:
        return worker.refresh(batch_id, found.seen) if repeated == "refresh" else worker.lookup_ahead(batch_id, True)

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(call)
        assert gate.has_read.wait(20)
        update(1)
        answered = call()  # While the first call still has the row from before that update.
        gate.opened.set()
        first.result(20)
    update(2)
    fresh = worker.refresh(batch_id, answered.seen)
    np.testing.assert_allclose(fresh.rows["bag/bag"][0], worker.evaluate(columns).rows["bag"].mean(0), rtol=1e-6)


def test_clipped_gradients_are_those_of_rows():
    batches = [batch_of(number, 9, 6, 20) for number in range(3)]
    cluster = Cluster("embedding_worker")
    found = trained(cluster, Sync(), batches, clip_embedding_norm=0.01)
    assert found == trained(Cluster("nn_worker"), Sync(), batches, clip_embedding_norm=0.01)
    assert not any(answer.pooled for answer in cluster.worker.answers)


def test_rows_that_are_not_here_are_an_error():
    embeddings = EmbeddingCollection(
        SCHEMA, optimizer=Adagrad(lr=0.5), mode=Sync(), cluster=Cluster("embedding_worker")
    )
    data = batch_of(0, 4, 3, 20)
    words = np.concatenate([data.id_features[name].values for name in ("tags", "title")])
    for batch in embeddings.prefetch([data]):
        assert batch.rows["page"].shape[1] == 2
        assert batch.id_counts()["word"] == len(np.unique(words))  # By which `Sync` limits how far it looks ahead.
        with pytest.raises(PersiaError, match=r"no rows of table 'word'.*pool_at=\"nn_worker\""):
            batch.rows["word"]
        costs = {cost.name: cost for cost in embeddings.feature_costs(batch)}
        assert costs.keys() == {feature.name for feature in SCHEMA.id_features}
        assert costs["tags"].ids == 4  # The values of the samples are all that there is to do.


def test_gradients_of_another_shape_are_refused():
    worker = Cluster("embedding_worker").connect(SCHEMA, Adagrad(lr=0.5), Sync(), 0).worker
    batch_id = worker.register(batch_of(0, 4, 3, 20).id_features)
    worker.lookup(batch_id, pool=True)
    name = values_name(SCHEMA.feature("tags"))
    wrong = Contribution(batch_id, Packed.of({name: np.ones((5, 4), np.float32)}, np.float32))
    with pytest.raises(
        StoreError, match=r"Gradients of feature 'tags', which was pooled, must be \[4, 4\]; got \[5, 4\]"
    ):
        worker.push(PushHeader(1, 0, 1, 0, 4), [wrong])


def pooled_anew(embeddings: EmbeddingCollection, batches: list[persia.Batch]) -> list[Any]:
    """Returns the values of all features of batches that are only read: with `prefetch`, and without."""
    found = []
    embeddings.eval()
    with torch.no_grad():
        for prepared, plain in zip(embeddings.prefetch(batches), batches, strict=True):
            for values in (embeddings(prepared).values(), embeddings(plain).values()):
                found.append([v.tolist() if isinstance(v, torch.Tensor) else v.values.tolist() for v in values])
    return found


@pytest.mark.parametrize("on_host", [True, False])
@given(seed=st.integers(0, 1000), size=st.integers(1, 12), most=st.integers(1, 6), ids=st.sampled_from([3, 20, 500]))
def test_what_is_only_read_has_the_same_bits(on_host, seed, size, most, ids):
    batches = [batch_of(seed + number, size, most, ids) for number in range(3)]
    found = []
    for pool_at in ("nn_worker", "embedding_worker", "auto"):
        cluster = Cluster(pool_at)
        embeddings = EmbeddingCollection(SCHEMA, optimizer=Adagrad(lr=0.5), mode=Sync(), cluster=cluster)
        cluster.worker.lookup(cluster.worker.register(batches[0].id_features))  # Makes rows.
        cluster.worker.answers.clear()
        embeddings._expander.on_host = embeddings._transfer._on_host = on_host
        found.append(pooled_anew(embeddings, batches))
        assert len(cluster.worker.answers) == 2 * len(batches)
        pooled = [set(answer.pooled or ()) for answer in cluster.worker.answers]
        assert all(tables <= POOLABLE for tables in pooled)
        assert pool_at != "embedding_worker" or all(tables == POOLABLE for tables in pooled)
        assert pool_at != "nn_worker" or not any(pooled)
    if on_host:
        assert found[0] == found[1] == found[2]
    else:
        for other in found[1:]:
            for mine, theirs in zip(itertools.chain(*found[0]), itertools.chain(*other), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)


def test_the_batch_that_was_trained_last_is_read_with_its_new_rows():
    found = []
    for pool_at in ("nn_worker", "embedding_worker"):
        cluster = Cluster(pool_at)
        embeddings = EmbeddingCollection(SCHEMA, optimizer=Adagrad(lr=0.5), mode=Sync(), cluster=cluster)
        for batch in embeddings.prefetch([batch_of(0, 9, 6, 20)]):
            before = embeddings(batch)["tags"]
            before.square().sum().backward()
            embeddings.await_pushes()
            with torch.no_grad():
                again = embeddings(embeddings.looked_up_again(batch))["tags"]
        assert not torch.equal(before, again)
        assert set(cluster.worker.answers[-1].pooled or ()) == (POOLABLE if pool_at == "embedding_worker" else set())
        found.append(again)
    assert torch.equal(*found)


def test_without_gradients_fewer_bytes_decide():
    """10 values of 4 bytes are fewer than 7 rows and 10 indices of 2 bytes, unless a gradient follows for each."""
    schema = Schema([IdFeature("one", dim=1)])
    worker = Cluster("auto", 1).connect(schema, Adagrad(lr=0.5), Sync(), 0).worker
    columns = {"one": IdColumn(np.array([0, 1, 2, 3, 4, 5, 6, 0, 0, 0], np.uint64))}
    assert worker.lookup(worker.register(columns), pool=True).pooled is None
    assert worker.evaluate(columns).pooled is None
    assert worker.evaluate(columns, pool=True).pooled == {"one": 7}
    assert worker.lookup(worker.register(columns), train=False, pool=True).pooled == {"one": 7}
    everyone = EmbeddingWorkers(Directory.fixed("embedding_worker", [worker]))
    assert everyone.evaluate(columns, True).pooled == {"one": 7}
    pushed = worker.register(columns)
    worker.lookup(pushed)
    worker.push(PushHeader(1, 0, 1, 0, 10), [Contribution(pushed, Packed.of({}, np.float32))])
    assert worker.lookup(pushed, train=False, pool=True).pooled == {"one": 7}


def test_a_cluster_whose_roles_share_a_host_pools_nothing():
    class Near(Cluster):
        def connect(self, *arguments: Any) -> Connection:
            return super().connect(*arguments)._replace(pools=False)

    cluster = Near("embedding_worker")
    embeddings = EmbeddingCollection(SCHEMA, optimizer=Adagrad(lr=0.5), mode=Sync(), cluster=cluster)
    pooled_anew(embeddings, [batch_of(0, 9, 6, 20)])
    assert cluster.worker.answers
    assert not any(answer.pooled for answer in cluster.worker.answers)


@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_a_gradient_that_is_not_finite_is_blamed_on_its_feature(compression):
    """The sums by row do not tell which feature it was; the values that were sent do."""
    embeddings = EmbeddingCollection(
        SCHEMA, optimizer=Adagrad(lr=0.5), mode=Sync(), cluster=Cluster("embedding_worker", compression=compression)
    )
    for batch in embeddings.prefetch([batch_of(0, 9, 6, 20)]):
        values = embeddings(batch)
        (values["tags"].sum() + (values["title"] * torch.inf).sum()).backward()
    (found,) = embeddings.push_log.non_finite.found()
    assert (found.table, found.features) == ("word", ["title"])
