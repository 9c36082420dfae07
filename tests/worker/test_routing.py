"""Several PSs: the same numbers as one; and what an embedding worker does with repeated pushes."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia import batching, rpc
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.errors import ConfigError, StaleBatchError, StaleMapError, StoreError
from persia.modes import Hybrid, Sync
from persia.nn import transfer
from persia.nn.push_log import PushCounts
from persia.optim import SGD, Adagrad
from persia.ps.ownership import Ownership
from persia.services import Connection, EmbeddingWorker
from persia.types import BucketMap, Contribution, Packed, PushHeader, UpdateCounts
from persia.worker import Worker, WorkerOptions
from support.bucket_maps import bucket_maps
from support.examples import examples
from support.several_ps import several_servers

TIMEOUT = 20.0
SCHEMA = persia.Schema(
    id_features=[
        persia.IdFeature("item", dim=4),
        persia.IdFeature("history", dim=4, table="item", pooling="sum"),
        persia.IdFeature("user", dim=3),
    ],
    dense_features=[],
    labels=["click"],
)


class SeveralServers:
    """A cluster of `count` PSs in this process, with the first map or another."""

    def __init__(self, count, nn_workers=1, buckets=None):
        self.count, self.nn_workers, self.buckets = count, nn_workers, buckets or BucketMap.even(count)

    def connect(self, schema, optimizer, mode, seed):
        hold = {"nn_workers": self.nn_workers, "timeout": TIMEOUT, "buckets": self.buckets}
        servers = several_servers(self.count, schema.resolved_tables(), optimizer, mode, seed, **hold)
        return Connection(Worker(schema, servers), servers)


def connect(servers, nn_workers=1, mode=None, optimizer=None, buckets=None):
    cluster = SeveralServers(servers, nn_workers, buckets)
    return cluster.connect(SCHEMA, optimizer or Adagrad(lr=0.1), mode or Sync(), 5)


def features(draw_ids, samples):
    """Ids by feature; `history` has two per sample."""
    columns = {name: IdColumn(draw_ids(samples)) for name in ("item", "user")}
    return columns | {"history": IdColumn(draw_ids(2 * samples), np.arange(0, 2 * samples + 1, 2, dtype=np.int64))}


def drawn(rng, ids):
    return lambda n: rng.integers(0, ids, n).astype(np.uint64)


def header(step, rank=0, rows=1, part=0, parts=1):
    return PushHeader(1, rank, step + 1, step, rows, part, parts)


def rows_of(found):
    """Rows as each feature sees them: the order of the unique rows is the embedding worker's own business."""
    table = {feature.name: feature.table_name for feature in SCHEMA.id_features}
    return {name: found.rows[table[name]][inverse] for name, inverse in found.inverse.items()}


def gradients_for(ids_of, found):
    """A gradient that depends on the id and its row only."""
    result = {}
    for table, rows in found.rows.items():
        result[table] = (rows + (ids_of[table] % np.uint64(7)).astype(np.float32)[:, None]).astype(np.float32)
    return result


@settings(deadline=None, max_examples=examples(30))
@given(
    st.lists(st.tuples(st.integers(0, 2**32), st.integers(0, 12), st.integers(1, 2)), max_size=5),
    bucket_maps(3),
)
def test_rows_are_the_same_to_the_bit_with_1_2_and_3_servers_and_any_map(steps, buckets):
    results = []
    for buckets_of_run in (*map(BucketMap.even, (1, 2, 3)), buckets):
        connection = connect(buckets_of_run.servers, buckets=buckets_of_run)
        worker, seen, counts = connection.worker, [], []
        for step, (seed, samples, batches) in enumerate(steps):
            rng = np.random.default_rng(seed)
            contributions = []
            for _ in range(batches):
                batch_id = worker.register(features(drawn(rng, 20), samples))
                found = worker.lookup(batch_id)
                seen.append(rows_of(found))
                with worker._buffer.use(batch_id) as (entry, _):
                    ids = entry.ids
                contributions.append(Contribution(batch_id, gradients_for(ids, found)))
            counts.append(worker.push(header(step), contributions))
        results.append((seen, counts))
        assert worker.buffered == 0
        for number, server in enumerate(connection.servers):
            for chunk in server.export_rows():
                assert (batching.owners(chunk.table, chunk.arrays["ids"], buckets_of_run) == number).all()
        if buckets_of_run == BucketMap.even(3) and sum(samples for _, samples, _ in steps) > 30:
            assert all(sum(t["rows"] for t in server.statistics().values()) for server in connection.servers)
    for seen, counts in results[1:]:
        assert counts == results[0][1]
        for found, expected in zip(seen, results[0][0], strict=True):
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])


@pytest.mark.parametrize("servers", [1, 3])
def test_a_push_in_part_updates_these_rows_as_a_whole_one_does(servers):
    found = []
    rng = np.random.default_rng(0)
    columns = features(drawn(rng, 20), 12)
    for in_part in (False, True):
        connection = connect(servers)
        worker = connection.worker
        batch_id = worker.register(columns)
        before = worker.lookup(batch_id)
        ids = worker.distinct_ids(batch_id)
        part = {table: own % np.uint64(3) > 0 for table, own in ids.items()}
        gradients = gradients_for(ids, before)
        contribution = Contribution(batch_id, Packed.of(gradients, np.float32))
        if in_part:
            rows = Packed.of({"item": gradients["item"][part["item"]]}, np.float32)  # The loss depends on one table.
            contribution = Contribution(batch_id, rows, part=Packed.of(part, np.bool_))
        counts = worker.push(header(0), [contribution])
        rows = worker.evaluate(columns).rows
        found.append((rows, counts["item"].applied))
    (whole, everything), (rows, some) = found
    chosen = part["item"]
    assert some == chosen.sum() < everything
    np.testing.assert_array_equal(rows["item"][chosen], whole["item"][chosen])
    np.testing.assert_array_equal(rows["item"][~chosen], before.rows["item"][~chosen])
    np.testing.assert_array_equal(rows["user"], before.rows["user"])


def test_a_push_in_part_of_other_rows_is_refused():
    worker = connect(2).worker
    batch_id = worker.register(features(drawn(np.random.default_rng(0), 20), 12))
    gradients = gradients_for(worker.distinct_ids(batch_id), worker.lookup(batch_id))
    short = Packed.of({table: np.ones(len(rows) - 1, np.bool_) for table, rows in gradients.items()}, np.bool_)
    with pytest.raises(StoreError, match="one flag for each of the distinct ids"):
        worker.push(header(0), [Contribution(batch_id, Packed.of(gradients, np.float32), part=short)])


def a_trainer(data, servers, accumulation=1):
    torch.manual_seed(0)
    return persia.Trainer(
        persia.nn.models.FFNN(data.schema, hidden=(8,)),
        data.schema,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=SeveralServers(servers),
        options=persia.TrainerOptions(progress=False, accumulation_steps=accumulation),
    )


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_run_has_the_same_losses_with_1_2_and_3_servers(accumulation):
    outcomes = []
    for servers in (1, 2, 3):
        data = persia.data.synthetic(2_000, id_features=3, ids_per_feature=300, dense_features=1, batch_size=100)
        trainer = a_trainer(data, servers, accumulation)
        result = trainer.fit(data, eval_data=data)
        outcomes.append((result.progressive.log_loss, result.evaluation.auc, result.stored_rows))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_run_with_several_servers_is_saved_and_resumed(tmp_path):
    data = persia.data.synthetic(2_000, id_features=2, ids_per_feature=300, dense_features=1, batch_size=100)
    straight, first, second = (a_trainer(data, 2) for _ in range(3))
    expected = straight.fit(data)
    first.fit(data, max_steps=7)
    first.save(tmp_path)
    second.load(tmp_path)
    result = second.fit(data)
    assert result.history.auc == expected.history.auc
    assert result.history.log_loss == pytest.approx(expected.history.log_loss, rel=1e-12)
    assert result.stored_rows == expected.stored_rows
    for one, two in zip(second.embeddings.connection.servers, straight.embeddings.connection.servers, strict=True):
        for a, b in zip(one.export_rows(), two.export_rows(), strict=True):
            for name in set(a.arrays) - {"stamp"}:  # Lookups run ahead of pushes, both of which count.
                np.testing.assert_array_equal(a.arrays[name], b.arrays[name])


def test_an_empty_step_is_pushed_if_others_wait_for_it():
    """Two NN workers; the second one's batches have no backward pass."""
    shared = SeveralServers(2, nn_workers=2).connect(SCHEMA, SGD(lr=1.0), Sync(), 5)
    rng = np.random.default_rng(2)
    batches = [
        Batch(features(drawn(rng, 9), 6), np.zeros((6, 0), np.float32), np.zeros((6, 1), np.float32)) for _ in range(4)
    ]

    class OfRank:
        def __init__(self, rank):
            self.rank = rank

        def connect(self, *_):
            return shared._replace(rank=self.rank, nn_workers=2)

    def train(rank):
        embeddings = persia.nn.EmbeddingCollection(SCHEMA, optimizer=SGD(lr=1.0), mode=Sync(), cluster=OfRank(rank))
        for batch in embeddings.prefetch(batches):
            if rank == 0:
                sum(e.sum() for e in embeddings(batch).values()).backward()
        return embeddings.global_step, embeddings.pushed, embeddings.staleness.max

    with ThreadPoolExecutor(2) as threads:
        first, second = (call.result(TIMEOUT) for call in [threads.submit(train, rank) for rank in (0, 1)])
    assert (first[0], second[0]) == (4, 4)
    assert first[1].applied > 0
    assert second[1] == PushCounts(released=4)
    assert first[2] == second[2] == 0


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_global_reduction_over_workers_is_one_large_batch(servers):
    """3 NN workers of 4, 8 and 0 rows against one of 12, gradients of a mean loss."""
    rng = np.random.default_rng(1)
    together = connect(2, optimizer=SGD(lr=1.0))
    apart = connect(servers, 3, Sync("global"), SGD(lr=1.0))
    with ThreadPoolExecutor(3) as threads:
        for step in range(4):
            whole = features(drawn(rng, 9), 12)
            split = [{name: column.slice(a, b) for name, column in whole.items()} for a, b in ((0, 4), (4, 12))]
            large = mean_gradient(together.worker, whole)
            together.worker.push(header(step, rows=12), [large])
            parts = [mean_gradient(apart.worker, part) for part in split]
            calls = [
                threads.submit(apart.worker.push, header(step, 0, 4), [parts[0]]),
                threads.submit(apart.worker.push, header(step, 1, 8), [parts[1]]),
                threads.submit(apart.worker.push, header(step, 2, 0), []),
            ]
            counts = [call.result(TIMEOUT) for call in calls]
            assert counts[1:] == [{}, {}]
            assert sum(c.applied for c in counts[0].values()) > 0
    every = {name: IdColumn(np.arange(9, dtype=np.uint64)) for name in ("item", "user", "history")}
    found, expected = (rows_of(c.worker.evaluate(every)) for c in (apart, together))
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, atol=1e-6)


def mean_gradient(worker, columns):
    """Of the mean over samples of the sum of squares of all rows that a sample reads, by table."""
    batch_id = worker.register(columns)
    found = worker.lookup(batch_id)
    samples = len(columns["item"])
    gradients = {table: np.zeros_like(rows) for table, rows in found.rows.items()}
    for feature in SCHEMA.id_features:
        rows = found.rows[feature.table_name]
        inverse = found.inverse[feature.name]
        np.add.at(gradients[feature.table_name], inverse, 2 * rows[inverse] / samples)
    return Contribution(batch_id, gradients)


def test_a_repeated_push_gets_the_answer_of_the_first():
    connection = connect(2)
    worker = connection.worker
    contribution = mean_gradient(worker, features(lambda n: np.arange(n, dtype=np.uint64), 6))
    counts = worker.push(header(0), [contribution])
    assert worker.push(header(0), [contribution]) == counts
    assert sum(c.applied for c in counts.values()) == 12 + 6
    assert all(t["duplicates"] == 0 for server in connection.servers for t in server.statistics().values())
    with pytest.raises(StaleBatchError):
        worker.push(header(1), [contribution])
    assert worker.statistics() == {
        "buffered": 0, "registered": 1, "looked_up": 1, "pushed": 1, "released": 0, "expired": 0, "stale": 1,
        "gradient_rows": 18,
    }  # fmt: skip


def test_any_of_the_last_pushes_may_be_repeated():
    """An NN worker has several in flight: the reply of an older one may be lost when later ones have ended."""
    worker = connect(2, mode=Hybrid(4)).worker
    columns = features(lambda n: np.arange(n, dtype=np.uint64), 6)
    sent = [(header(step), [mean_gradient(worker, columns)]) for step in range(8)]
    counts = [worker.push(*push) for push in sent]
    assert all(sum(c.applied for c in of_one.values()) for of_one in counts)
    assert [worker.push(*push) for push in sent] == counts


def test_a_push_that_reached_some_servers_is_completed_by_repeat():
    """One PS applied it, the other's reply failed: at the second attempt each row is updated once in all."""
    connection = connect(2, mode=Hybrid(1), optimizer=SGD(lr=1.0))
    worker, broken = connection.worker, connection.servers[1]
    contribution = mean_gradient(worker, features(lambda n: np.arange(n, dtype=np.uint64), 6))
    healthy, failing = broken.push, [True]

    def push(*args):
        if failing.pop() if failing else False:
            raise StoreError("not there")
        return healthy(*args)

    broken.push = push
    with pytest.raises(StoreError):
        worker.push(header(0), [contribution])
    counts = worker.push(header(0), [contribution])
    assert sum(c.duplicate for c in counts.values()) > 0
    counts_in_rows = [chunk.arrays["update_count"] for server in connection.servers for chunk in server.export_rows()]
    assert set(np.concatenate(counts_in_rows).tolist()) == {1}


def test_batches_that_were_routed_by_another_map_are_refused():
    """Registered before the PSs changed their map: neither looked up nor pushed, also with batches of the new map."""
    connection = connect(2, optimizer=SGD(lr=1.0))
    worker = connection.worker
    contribution = mean_gradient(worker, features(lambda n: np.arange(n, dtype=np.uint64), 6))
    for server in connection.servers:
        server._owned.ownership = Ownership(BucketMap.even(2).reassigned(0, 1))
    before = [chunk for server in connection.servers for chunk in server.export_rows()]
    calls = [
        lambda: worker.lookup(contribution.batch_id),
        lambda: worker.lookup_ahead(contribution.batch_id),
        lambda: worker.push(header(0), [contribution]),
        lambda: worker.push(header(0), []),
        lambda: worker.evaluate(features(lambda n: np.arange(n, dtype=np.uint64), 6)),
    ]
    for call in calls:
        with pytest.raises(StaleMapError, match="by bucket map 0, and it has bucket map 1"):
            call()
    worker._router.buckets = connection.servers[0].buckets()
    other = worker.register(features(lambda n: np.arange(n, dtype=np.uint64), 6))
    both = [contribution, Contribution(other, contribution.gradients)]
    for batches in (both, both[::-1]):
        with pytest.raises(StaleMapError):
            worker.push(header(0), batches)
    after = [chunk for server in connection.servers for chunk in server.export_rows()]
    for chunk, expected in zip(after, before, strict=True):
        for name, array in expected.arrays.items():
            np.testing.assert_array_equal(chunk.arrays[name], array)
    worker.push(header(0), [])


def test_an_embedding_worker_needs_all_ps_of_the_map():
    servers = connect(3).servers
    with pytest.raises(ConfigError, match="2 embedding PSs, and their bucket map has 3"):
        Worker(SCHEMA, servers[:2])


def test_evaluation_lookups_forget_the_batch_and_change_nothing():
    connection = connect(2)
    worker = connection.worker
    batch_id = worker.register(features(lambda n: np.arange(n, dtype=np.uint64), 3))
    assert not any(rows.any() for rows in worker.lookup(batch_id, train=False).rows.values())
    assert worker.buffered == 0
    assert sum(t["rows"] for server in connection.servers for t in server.statistics().values()) == 0
    with pytest.raises(StaleBatchError):
        worker.lookup(batch_id)


def test_float16_gradients_with_scales_are_taken():
    worker = connect(2, optimizer=SGD(lr=1.0)).worker
    columns = features(lambda n: np.arange(n, dtype=np.uint64), 4)
    contribution = mean_gradient(worker, columns)
    halves = {table: np.ones(g.shape, np.float16) for table, g in contribution.gradients.items()}
    scales = {table: np.full(len(g), 0.25, np.float32) for table, g in contribution.gradients.items()}
    before = rows_of(worker.evaluate(columns))
    worker.push(header(0), [Contribution(contribution.batch_id, halves, scales)])
    for name, rows in rows_of(worker.evaluate(columns)).items():
        np.testing.assert_allclose(rows, before[name] - 0.25, atol=1e-6)


@pytest.mark.parametrize("how", ["here", "rpc"])
def test_compressed_rows_and_gradients_are_exact_within_float16(how):
    """And non-finite gradients are still seen, and counted, by the PS."""
    plain = connect(2, optimizer=SGD(lr=1.0))
    servers = connect(2, optimizer=SGD(lr=1.0)).servers
    role = Worker(SCHEMA, servers, options=WorkerOptions(compression="fp16"))
    with contextlib.ExitStack() as stack:
        worker = role
        if how == "rpc":
            server = stack.enter_context(rpc.serve(role, protocol=EmbeddingWorker))
            worker = rpc.connect(server.address, EmbeddingWorker, timeout=TIMEOUT)
            stack.callback(rpc.close, worker)
        rng = np.random.default_rng(3)
        for step in range(3):
            columns = features(drawn(rng, 30), 20)
            contribution = mean_gradient(plain.worker, columns)
            batch_id = worker.register(columns)
            found = worker.lookup(batch_id)
            assert {rows.dtype for rows in found.rows.values()} == {np.dtype(np.float16)}
            exact = plain.worker.lookup(contribution.batch_id)
            decoded = transfer.decode(found.rows, found.scales)
            for table, rows in decoded.items():
                np.testing.assert_allclose(rows, exact.rows[table], rtol=2e-3, atol=1e-6)
            gradients = {table: values.copy() for table, values in contribution.gradients.items()}
            gradients["user"][0, 0] = np.inf if step else np.nan
            halves, scales = transfer.encode(gradients)
            plain_counts = plain.worker.push(header(step), [contribution._replace(gradients=gradients)])
            assert worker.push(header(step), [Contribution(batch_id, halves, scales)]) == plain_counts
            assert plain_counts["user"].non_finite == 1


def test_counts_are_summed_over_servers():
    worker = connect(3).worker
    contribution = mean_gradient(worker, features(lambda n: np.arange(n, dtype=np.uint64), 50))
    assert worker.push(header(0), [contribution]) == {"item": UpdateCounts(100), "user": UpdateCounts(50)}
