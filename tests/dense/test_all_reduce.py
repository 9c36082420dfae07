"""Several NN workers train one network: the same as one with larger batches, whatever data each of them has."""

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.dense import AllReduce, AllReduceOptions
from persia.errors import DeadlineError, StaleBatchError
from persia.modes import Hybrid, Sync
from persia.nn.prepared import dummy_batch
from persia.optim import SGD
from support.nn_processes import Model, Services, fit, parameters, resume, trainer
from support.processes import Processes

pytestmark = pytest.mark.processes

IDS = 40
SCHEMA = persia.Schema(
    id_features=[
        persia.IdFeature("item", dim=4),
        persia.IdFeature("history", dim=4, table="item", pooling="mean"),
        persia.IdFeature("user", dim=3),
    ],
    dense_features=["price"],
    labels=["click"],
)


def make_batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    batches = []
    for size in sizes:
        lengths = rng.integers(0, 4, size)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        columns = {name: IdColumn(rng.integers(0, IDS, size).astype(np.uint64)) for name in ("item", "user")}
        columns["history"] = IdColumn(rng.integers(0, IDS, offsets[-1]).astype(np.uint64), offsets)
        labels = (rng.random((size, 1)) < 0.5).astype(np.float32)
        batches.append(Batch(columns, rng.random((size, 1), np.float32), labels))
    return batches


@pytest.fixture(scope="module")
def two():
    with Processes(2) as processes:
        yield processes


@pytest.fixture(scope="module")
def four():
    with Processes(4) as processes:
        yield processes


def equals_one_large_batch(processes, count):
    sizes = [5 + i % 3 for i in range(10 * count)]  # Unequal: a mean over workers would be another number.
    batches = make_batches(sizes)
    with Services(SCHEMA, batches, count, Sync("global")) as services:
        results = processes.run(fit, count, services.addresses, SCHEMA, Sync("global"))
        rows = {table: services.rows(table, IDS) for table in ("item", "user")}
    torch.manual_seed(0)
    together = [Batch.concat(batches[i : i + count]) for i in range(0, len(batches), count)]
    one = persia.Trainer(
        Model(SCHEMA),
        SCHEMA,
        optimizer=lambda p: torch.optim.SGD(p, 0.5, momentum=0.5),
        embedding_optimizer=SGD(lr=0.1),
        mode=Sync(),
        options=persia.TrainerOptions(progress=False),
    )
    expected = one.fit(together)
    for result, found in results:
        assert result.steps == expected.steps == 10
        assert result.rows == expected.rows == sum(sizes)
        assert result.progressive.rows == expected.rows
        assert result.progressive.log_loss == pytest.approx(expected.progressive.log_loss, rel=1e-5)
        assert repr(result) == repr(results[0][0])
        for name, value in parameters(one.model).items():
            np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)
    every = np.arange(IDS, dtype=np.uint64)
    for table, mine in rows.items():
        theirs = one.embeddings.connection.servers[0].lookup({table: every}, train=False)[table]
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_two_workers_equal_one_with_batches_twice_as_large(two):
    equals_one_large_batch(two, 2)


@pytest.mark.slow
def test_four_workers_equal_one_with_batches_four_times_as_large(four):
    equals_one_large_batch(four, 4)


def network64():
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)).double()


def samples64(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    rows = 4 + (step + rank) % 5
    return (
        torch.randn(rows, 6, dtype=torch.float64, generator=generator),
        torch.randn(rows, 1, dtype=torch.float64, generator=generator),
    )


def train64(rank, count, accumulation, device="cpu"):
    model = network64().to(device)
    if rank:
        for parameter in model.parameters():
            parameter.data.zero_()  # It gets those of the first one.
    replicas = AllReduce(model, count)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(50 * accumulation):
        x, y = (values.to(device) for values in samples64(step, rank))
        last = step % accumulation == accumulation - 1
        replicas.start(len(x), has_data=True)
        with replicas.batch(last=last):
            (torch.nn.functional.mse_loss(replicas.model(x), y) / accumulation).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
    return parameters(model.cpu())


def dense_equals_one(processes, count, device="cpu"):
    """Rows of embeddings are float32; what float64 can show is the network alone."""
    found = processes.run(train64, count, 1, device)
    model = network64()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(50):
        xs, ys = zip(*(samples64(step, rank) for rank in range(count)), strict=True)
        torch.nn.functional.mse_loss(model(torch.cat(xs)), torch.cat(ys)).backward()
        optimizer.step()
        optimizer.zero_grad()
    for mine in found:
        for name, value in parameters(model).items():
            np.testing.assert_allclose(mine[name], value, rtol=0, atol=1e-9)


def test_dense_part_equals_one_worker_in_float64(two):
    dense_equals_one(two, 2)


@pytest.mark.slow
def test_dense_part_of_four_workers_in_float64(four):
    dense_equals_one(four, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_dense_part_on_cuda():
    count = min(2, torch.cuda.device_count())
    with Processes(count, "nccl") as processes:
        dense_equals_one(processes, count, "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_two_nn_workers_share_a_gpu_with_gloo(two):
    dense_equals_one(two, 2, "cuda:0")


def test_accumulation_agrees_across_workers(two):
    first, second = two.run(train64, 2, 3)
    for name, value in first.items():
        np.testing.assert_array_equal(second[name], value)


def rows_after_a_discarded_update(rank):
    replicas = AllReduce(torch.nn.Linear(1, 1))
    replicas.start(5 + rank, True)  # One is waited for, the other one not.
    replicas.rows()
    replicas.start(7, True)
    replicas.discard()
    replicas.start(2 + rank, True)
    return replicas.rows()


def test_rows_of_a_discarded_update_do_not_count(two):
    assert two.run(rows_after_a_discarded_update) == [5, 5]


@pytest.mark.parametrize("batches", [1, 4, 7])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, warmup=0)], ids=["sync", "hybrid"])
def test_uneven_data_neither_hang_nor_lose_rows(two, batches, accumulation, mode):
    sizes = [3 + i for i in range(batches)]
    with Services(SCHEMA, make_batches(sizes), 2, mode, accumulation=accumulation) as services:
        results = two.run(
            fit_options, services.addresses, mode, {"accumulation_steps": accumulation, "clip_norm": 1.0}, {"epochs": 2}
        )
        assert sum(server.statistics()["item"]["rows"] for server in services.servers) > 0
        assert all(worker.buffered == 0 for worker in services.workers)
    (first, mine), (second, theirs) = results
    assert repr(first) == repr(second)  # NaN where a label has one class only
    assert first.rows == first.progressive.rows + first.training.rows == 2 * sum(sizes)
    rounds = (batches + 1) // 2
    assert first.steps == 2 * ((rounds + accumulation - 1) // accumulation)
    assert first.lost_batches == first.released_batches == 0
    assert first.staleness_max <= (0 if mode == Sync() else 2)
    for name, value in mine.items():
        assert np.isfinite(value).all()
        if "running" not in name:
            np.testing.assert_array_equal(theirs[name], value)


def fit_options(rank, addresses, mode, options, call):
    return fit(rank, 2, addresses, SCHEMA, mode, norm=True, calls=(call,), **options)


CACHED = persia.Schema(
    SCHEMA.id_features, SCHEMA.dense_features, SCHEMA.labels, tables=[persia.Table("item", 4, cache_rows=100)]
)


def fit_with_copies(rank, addresses):
    t = trainer(rank, 2, addresses, CACHED, Hybrid(4, warmup=0))
    result = t.fit(None)
    return result.staleness_max, t.embeddings.cached, parameters(t.model)


def test_copies_of_rows_serve_several_nn_workers(two):
    """Through embedding workers in another process, two of them."""
    batches = make_batches([8] * 24)
    with Services(CACHED, batches, 2, Hybrid(4, warmup=0)) as services:
        (first, counts, mine), (second, others, theirs) = two.run(fit_with_copies, services.addresses)
        assert all(worker.buffered == 0 for worker in services.workers)
    assert first <= 4
    assert second <= 4
    assert min(counts.hits, counts.misses, others.hits, others.misses) > 0
    for name, value in mine.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(theirs[name], value)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_agrees_across_workers(two, precision):
    with Services(SCHEMA, make_batches([6] * 9), 2) as services:
        options = {"precision": precision, "accumulation_steps": 2, "clip_norm": 0.1}
        (first, mine), (second, theirs) = two.run(fit_options, services.addresses, Sync(), options, {})
    assert repr(first) == repr(second)  # NaN where a label has one class only
    for name, value in mine.items():
        assert np.isfinite(value).all()
        np.testing.assert_array_equal(theirs[name], value)


def train_on_nothing(rank):
    """Only the first one has data."""
    torch.manual_seed(0)
    model = Model(SCHEMA, norm=True)
    replicas = AllReduce(model, 2)
    before = parameters(model)
    for _ in range(3):
        dummy = rank == 1
        batch = dummy_batch(SCHEMA, 1, torch.device("cpu"))
        rows = 1 if dummy else 6
        found = {f.name: torch.randn(rows, f.dim) * (not dummy) for f in SCHEMA.id_features}
        replicas.start(0 if dummy else rows, has_data=not dummy)
        with replicas.batch(dummy):
            dense = batch.dense if dummy else torch.randn(rows, 1)
            logits = replicas.model(dense, found)
            assert bool(torch.isnan(logits).all()) == dummy
            logits.mean().backward()
        assert replicas.rows() == 6
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        assert model.batch_norm.training
    replicas.start(0, has_data=False)
    assert replicas.over()
    after = parameters(model)
    replicas.settle()
    return before, after, parameters(model)


def test_made_up_batches_leave_no_trace(two):
    (before, first, _), (_, second, settled) = two.run(train_on_nothing)
    statistics = [name for name in before if "running" in name or "tracked" in name]
    assert len(statistics) == 3
    for name in before:
        if name in statistics:
            assert not np.array_equal(first[name], before[name])
            np.testing.assert_array_equal(second[name], before[name])
        else:
            assert not np.array_equal(first[name], before[name])
            np.testing.assert_array_equal(second[name], first[name])
        np.testing.assert_array_equal(settled[name], first[name])


class Losing:
    """An embedding worker that forgets batches: of its n-th lookup, or before its n-th push of gradients."""

    def __init__(self, worker, lookup=None, push=None):
        self.worker, self.on_lookup, self.on_push = worker, lookup, push
        self.lookups, self.pushes = itertools.count(1), itertools.count(1)  # Calls may come at the same time.

    def lookup(self, batch_id, train=True, pool=False):
        self._lose(batch_id)
        return self.worker.lookup(batch_id, train, pool)

    def lookup_ahead(self, batch_id, pool=False, recent=0):
        self._lose(batch_id)
        return self.worker.lookup_ahead(batch_id, pool, recent)

    def _lose(self, batch_id):
        if next(self.lookups) == self.on_lookup:
            self.worker.release(batch_id)

    def refresh(self, batch_id, seen, left_out=None):
        return self.worker.refresh(batch_id, seen, left_out)

    def push(self, header, contributions):
        if contributions and next(self.pushes) == self.on_push:
            raise StaleBatchError("Gone.", batch_id=contributions[0].batch_id)
        return self.worker.push(header, contributions)

    def register(self, id_features):
        return self.worker.register(id_features)

    def release(self, batch_id):
        self.worker.release(batch_id)

    def evaluate(self, id_features, pool=False):
        return self.worker.evaluate(id_features, pool)

    def statistics(self):
        return self.worker.statistics()


@pytest.mark.parametrize("mode", [Sync(), Hybrid(1, warmup=0)], ids=["sync", "hybrid"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lost_batches_are_steps_of_no_weight(two, mode, accumulation):
    sizes = [3] * 12

    def wrap(worker):
        return Losing(worker, lookup=2, push=2)

    with Services(SCHEMA, make_batches(sizes), 2, mode, wrap=wrap, accumulation=accumulation) as services:
        results = two.run(fit_options, services.addresses, mode, {"accumulation_steps": accumulation}, {})
    (first, mine), (second, theirs) = results
    assert repr(first) == repr(second)  # NaN where a label has one class only
    assert first.steps == 6 // accumulation
    assert first.lost_batches == 2
    assert first.lost_gradients == 2
    assert first.rows == 30
    for name in mine:
        if "running" not in name:
            np.testing.assert_array_equal(theirs[name], mine[name])


def test_a_resumed_run_is_the_same(two, tmp_path):
    """Dropout included, which draws from generators of each NN worker's own."""
    batches = make_batches([4 + i % 3 for i in range(11)])
    with Services(SCHEMA, batches, 2) as services:
        whole = two.run(fit_options_plain, services.addresses, {"dropout": 0.5}, {})
    directory = str(tmp_path / "checkpoints")
    with Services(SCHEMA, batches, 2) as services:
        two.run(fit_options_plain, services.addresses, {"dropout": 0.5, "checkpoint_dir": directory}, {"max_steps": 3})
    with Services(SCHEMA, batches, 2) as services:
        rest = two.run(resume, 2, services.addresses, SCHEMA, directory, 0.5)
    for (before, mine), (after, theirs) in zip(whole, rest, strict=True):
        assert after.global_step == before.global_step == 6
        assert after.rows == sum(len(b) for b in batches[6:])
        assert after.progressive.rows == after.rows
        assert after.history.auc == before.history.auc
        assert after.history.log_loss == pytest.approx(before.history.log_loss, rel=1e-12)  # Sums, in parts.
        for name, value in mine.items():
            np.testing.assert_array_equal(theirs[name], value)


def fit_options_plain(rank, addresses, options, call):
    return fit(rank, 2, addresses, SCHEMA, calls=(call,), **options)


def test_buffers_begin_as_those_of_the_first(two):
    assert two.run(first_mean) == [0.0, 0.0]


def first_mean(rank):
    norm = torch.nn.BatchNorm1d(1)
    norm.running_mean.fill_(float(rank))
    replicas = AllReduce(norm, 2)
    return replicas.model.module.running_mean.item()


def test_evaluation_is_shared(two):
    batches = make_batches([5] * 3)
    with Services(SCHEMA, batches, 2) as services:
        (first, _), (second, _) = two.run(fit_evaluated, services.addresses, make_batches([4] * 5, seed=1))
    assert repr(first) == repr(second)  # NaN where a label has one class only
    assert first.evaluation.rows == 20


def fit_evaluated(rank, addresses, data):
    return fit(rank, 2, addresses, SCHEMA, evaluate=data)


def wait_for_the_other(rank, at):
    """The second one stops before it counts a batch, or before it averages gradients."""
    model = torch.nn.Linear(1, 1)
    dist.barrier()  # From here on they are equally fast.
    replicas = AllReduce(model, 2, AllReduceOptions(timeout=5.0))
    if rank == 0 or at == "gradients":
        replicas.start(3, has_data=True)
    if at == "gradients":
        replicas._control._timeout = 60.0  # Both count it.
        replicas.rows()
        replicas._control._timeout = 5.0
    if rank == 1:
        return None
    with pytest.raises(DeadlineError) as caught, replicas.batch():
        replicas.model(torch.ones(3, 1)).sum().backward()
    return caught.value.fields, str(caught.value)


@pytest.mark.parametrize("at", ["count", "gradients"])
def test_who_was_late_is_named(at):
    with Processes(2) as processes:
        (fields, message), _ = processes.run(wait_for_the_other, at)
    assert at in fields["operation"]
    assert fields["late"] == [1]
    assert "Late: NN worker 1." in message
    assert not dist.is_initialized()
