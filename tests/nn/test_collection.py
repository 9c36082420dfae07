"""EmbeddingCollection against plain torch, and its manners in a loop."""

import multiprocessing
import threading
import time

import numpy as np
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.cluster import Embedded
from persia.errors import DataError, PersiaError, StaleBatchError
from persia.modes import Hybrid, Sync
from persia.nn import CollectionOptions, EmbeddingCollection
from persia.optim import SGD, Adagrad
from support.processes import PRELOADED
from support.waiting import wait_until

DEADLINE = 30.0
SCHEMA = persia.Schema(
    id_features=[
        persia.IdFeature("item", dim=4),
        persia.IdFeature("history", dim=4, table="item", pooling="mean"),
        persia.IdFeature("tags", dim=3, pooling="sqrtn"),
        persia.IdFeature("bag", dim=3, table="tags", pooling="sum", max_length=2),
        persia.IdFeature("clicks", dim=4, table="item", pooling=None, max_length=3),
    ],
    dense_features=["price"],
    labels=["click"],
)


@pytest.fixture(params=["near", "far"], autouse=True)
def place(request, monkeypatch):
    """Each test with rows in memory, where the training thread looks up in `Sync`, and as if they were elsewhere."""
    if request.param == "far":
        connect = Embedded.connect
        monkeypatch.setattr(Embedded, "connect", lambda *arguments: connect(*arguments)._replace(near=False))
    return request.param


def make_batch(rng, size=16, ids=30):
    def ragged():
        lengths = rng.integers(0, 5, size)
        offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        return IdColumn(rng.integers(0, ids, offsets[-1]).astype(np.uint64), offsets)

    columns = {"item": IdColumn(rng.integers(0, ids, size).astype(np.uint64))}
    columns |= {name: ragged() for name in ("history", "tags", "bag", "clicks")}
    dense = rng.random((size, 1), np.float32)
    return Batch(columns, dense, (rng.random((size, 1)) < 0.5).astype(np.float32))


def make_batches(count, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [make_batch(rng, **options) for _ in range(count)]


def collection(optimizer=None, mode=None, schema=SCHEMA, **options):
    return EmbeddingCollection(
        schema, optimizer=optimizer or SGD(lr=0.1), mode=mode or Sync(), options=CollectionOptions(**options)
    )


def flat(found):
    return torch.cat(
        [v.values.flatten(1) if isinstance(v, persia.nn.SequenceEmbedding) else v for v in found.values()], dim=1
    )


def row(embeddings, table, id_):
    """The stored row of an id, read-only."""
    server = embeddings.connection.servers[0]
    return server.lookup({table: np.array([id_], np.uint64)}, train=False)[table][0]


class TorchTwin:
    """The same tables as dense parameters, pooled sample by sample."""

    def __init__(self, embeddings, ids=30):
        server = embeddings.connection.servers[0]
        every = np.arange(ids, dtype=np.uint64)
        self.tables = {
            name: torch.from_numpy(server.lookup({name: every}, train=True)[name].copy()).requires_grad_()
            for name in ("item", "tags")
        }

    def __call__(self, batch):
        outputs = []
        for feature in SCHEMA.id_features:
            rows = self.tables[feature.table_name]
            column = batch.id_features[feature.name]
            offsets = column.offsets if column.offsets is not None else np.arange(len(batch) + 1)
            samples = []
            for i in range(len(batch)):
                ids = torch.from_numpy(
                    column.values[offsets[i] : offsets[i + 1]][: feature.max_length].astype(np.int64)
                )
                found = rows[ids]
                if feature.pooling is None:
                    padded = torch.zeros(feature.max_length, rows.shape[1])
                    padded[: len(ids)] = found
                    samples.append(padded.flatten())
                else:
                    count = max(1, len(ids))
                    divisor = {"sum": 1, "mean": count, "sqrtn": count**0.5}[feature.pooling]
                    samples.append(found.sum(0) / divisor)
            outputs.append(torch.stack(samples))
        return torch.cat(outputs, dim=1)


def test_training_equals_plain_torch():
    embeddings = collection()
    twin = TorchTwin(embeddings)
    weights = torch.randn(3 * 4 + 2 * 3 + 2 * 4, 1)
    batches = make_batches(10)
    optimizer = torch.optim.SGD(twin.tables.values(), 0.1)
    for batch, prepared in zip(batches, embeddings.prefetch(batches), strict=True):
        ours = flat(embeddings(prepared))
        theirs = twin(batch)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        (ours @ weights).square().mean().backward()
        (theirs @ weights).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert embeddings.pushed.applied > 0
    for name, table in twin.tables.items():
        every = np.arange(30, dtype=np.uint64)
        stored = embeddings.connection.servers[0].lookup({name: every}, train=False)[name]
        np.testing.assert_allclose(stored, table.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_a_plain_batch_is_looked_up_on_the_spot():
    embeddings = collection()
    batch = make_batches(1)[0]
    flat(embeddings(batch)).sum().backward()
    assert embeddings.pushed.applied > 0
    assert embeddings.global_step == 1


def test_sequences_come_with_a_mask():
    embeddings = collection()
    batch = make_batches(1)[0]
    found = embeddings(batch)["clicks"]
    lengths = np.minimum(np.diff(batch.id_features["clicks"].offsets), 3)
    assert found.values.shape == (16, 3, 4)
    np.testing.assert_array_equal(found.mask.sum(1).numpy(), lengths)
    assert not found.values[~found.mask].any()


@pytest.mark.parametrize("staleness", [1, 3])
def test_staleness_never_exceeds_the_bound_and_is_used(staleness):
    embeddings = collection(mode=Hybrid(staleness, warmup=0, refresh=False))
    embeddings.gate.versions = []
    rng = np.random.default_rng(1)
    for number, batch in enumerate(embeddings.prefetch(make_batches(60))):
        time.sleep(rng.random() * 0.004)
        if number % 4:  # Else lookups are as fast as they are.
            ahead = min(staleness, 59 - number)
            wait_until(lambda ahead=ahead: embeddings.ready >= ahead)
        flat(embeddings(batch)).sum().backward()
    delays = [i - version for i, version in enumerate(embeddings.gate.versions)]
    assert max(delays) <= staleness
    assert max(delays) == embeddings.staleness.max
    assert np.mean(delays) == pytest.approx(embeddings.staleness.mean)
    assert embeddings.staleness.mean > staleness / 2


def test_sync_has_no_staleness():
    embeddings = collection(mode=Sync())
    for batch in embeddings.prefetch(make_batches(20)):
        flat(embeddings(batch)).sum().backward()
    assert embeddings.staleness == (0.0, 0, 20)


def test_unbounded_staleness_runs_ahead():
    embeddings = collection(mode=Hybrid(None, refresh=False))
    for number, batch in enumerate(embeddings.prefetch(make_batches(40))):
        if number == 0:
            wait_until(lambda: embeddings.ready == 39)
        flat(embeddings(batch)).sum().backward()
    assert embeddings.staleness.max == 39


def test_leaving_the_loop_early_applies_computed_gradients():
    embeddings = collection(mode=Hybrid(4, warmup=0))
    before = set(threading.enumerate())
    for number, batch in enumerate(embeddings.prefetch(make_batches(50))):
        flat(embeddings(batch)).sum().backward()
        if number == 5:
            break
    assert set(threading.enumerate()) <= before  # Those of other tests may have ended.
    assert embeddings.global_step == 6
    assert embeddings.connection.worker.buffered == 0
    for batch in embeddings.prefetch(make_batches(3)):
        flat(embeddings(batch)).sum().backward()
    assert embeddings.global_step == 9


def test_an_error_in_the_loop_stops_all_threads():
    embeddings = collection(mode=Hybrid(2, warmup=0))
    before = set(threading.enumerate())

    def loop():
        for _ in embeddings.prefetch(make_batches(50)):
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        loop()
    assert set(threading.enumerate()) <= before  # Those of other tests may have ended.


def test_batches_without_backward_are_released_and_counted():
    embeddings = collection(mode=Sync())
    for number, batch in enumerate(embeddings.prefetch(make_batches(10))):
        found = flat(embeddings(batch))
        if number % 2:
            found.sum().backward()
    assert embeddings.pushed.released == 5
    assert embeddings.connection.worker.buffered == 0


def test_a_late_backward_is_an_error():
    embeddings = collection(mode=Hybrid(4, warmup=0))
    losses = []
    with pytest.raises(StaleBatchError, match="Call backward once per batch"):
        for batch in embeddings.prefetch(make_batches(4)):
            losses.append(flat(embeddings(batch)).sum())
            if len(losses) == 2:
                losses[0].backward()


def test_a_second_backward_is_an_error():
    embeddings = collection()
    for batch in embeddings.prefetch(make_batches(1)):
        loss = flat(embeddings(batch)).square().sum()
        loss.backward(retain_graph=True)
        with pytest.raises(StaleBatchError):
            loss.backward()
        with pytest.raises(StaleBatchError, match="used up"):
            embeddings(batch)


def test_features_outside_the_loss_get_no_gradient():
    embeddings = collection()
    for batch in embeddings.prefetch(make_batches(3)):
        embeddings(batch)["tags"].sum().backward()
    counts = embeddings.statistics()
    assert counts["tags"]["applied"] > 0
    assert counts["item"]["applied"] == 0


def test_accumulation_equals_one_large_batch():
    batches = make_batches(8, size=8)
    together = [Batch.concat(batches[i : i + 4]) for i in (0, 4)]
    small = collection(Adagrad(lr=0.1), accumulation_steps=4)
    large = collection(Adagrad(lr=0.1))
    for batch in small.prefetch(batches):
        (flat(small(batch)).square().mean() / 4).backward()
    for batch in large.prefetch(together):
        flat(large(batch)).square().mean().backward()
    assert small.global_step == large.global_step == 2
    for id_ in range(30):
        np.testing.assert_allclose(row(small, "item", id_), row(large, "item", id_), rtol=1e-4, atol=1e-7)


def test_accumulation_with_staleness_and_a_rest():
    embeddings = collection(mode=Hybrid(1, warmup=0), accumulation_steps=3)
    embeddings.gate.versions = []
    for batch in embeddings.prefetch(make_batches(10)):
        flat(embeddings(batch)).sum().backward()
    assert embeddings.global_step == 4
    assert max(i // 3 - v for i, v in enumerate(embeddings.gate.versions)) <= 1


def test_evaluation_reads_only():
    embeddings = collection()
    for batch in embeddings.prefetch(make_batches(5)):
        flat(embeddings(batch)).sum().backward()
    before = embeddings.statistics()
    embeddings.eval()
    for batch in embeddings.prefetch(make_batches(5, seed=9, ids=1000)):
        assert not flat(embeddings(batch)).requires_grad
    after = embeddings.statistics()
    assert after == before
    assert embeddings.staleness.lookups == 5


def test_evaluation_in_the_middle_of_training():
    embeddings = collection(mode=Hybrid(2, warmup=0))
    for number, batch in enumerate(embeddings.prefetch(make_batches(10))):
        flat(embeddings(batch)).sum().backward()
        if number == 4:
            embeddings.eval()
            assert sum(1 for _ in embeddings.prefetch(make_batches(3))) == 3
            embeddings.train()
    assert embeddings.global_step == 10


def test_a_second_training_pass_at_once_is_refused():
    embeddings = collection()
    first = embeddings.prefetch(make_batches(3))
    next(first)
    with pytest.raises(PersiaError, match="under way"):
        next(embeddings.prefetch(make_batches(3)))
    with pytest.raises(PersiaError, match="in a `prefetch` loop"):
        embeddings(make_batches(1)[0])
    first.close()


def test_a_bad_batch_names_its_origin_after_earlier_ones_trained():
    embeddings = collection()
    batches = make_batches(4)
    bad = Batch(
        {**batches[2].id_features, "item": IdColumn(np.zeros(3, np.uint64))}, batches[2].dense, batches[2].labels
    )
    trained = 0
    with pytest.raises(DataError, match="item") as caught:
        for batch in embeddings.prefetch([*batches[:2], bad, batches[3]]):
            flat(embeddings(batch)).sum().backward()
            trained += 1
    assert trained == 2
    assert "lookup of batch 2 of prefetch" in caught.value.__notes__[0]
    assert embeddings.global_step == 2


def test_an_error_of_the_loader_surfaces_with_its_origin():
    def loader():
        yield from make_batches(2)
        raise OSError("disk on fire")

    embeddings = collection()
    with pytest.raises(OSError, match="disk on fire") as caught:
        for batch in embeddings.prefetch(loader()):
            flat(embeddings(batch)).sum().backward()
    assert "reading thread of prefetch, at batch 2" in caught.value.__notes__[0]


def test_an_error_of_a_push_surfaces_at_the_next_draw(monkeypatch):
    embeddings = collection()

    def broken(*_):
        raise PersiaError("no room")

    monkeypatch.setattr(embeddings.connection.worker, "push", broken)
    with pytest.raises(PersiaError, match="no room") as caught:
        for batch in embeddings.prefetch(make_batches(5)):
            flat(embeddings(batch)).sum().backward()
    assert "Raised by a push of prefetch." in caught.value.__notes__[0]


def test_a_late_loader_is_named(monkeypatch, place):
    stop = threading.Event()

    def loader():
        yield make_batches(1)[0]
        stop.wait(DEADLINE)

    embeddings = collection(timeout=DEADLINE)
    passing = embeddings.prefetch(loader())
    batch = next(passing)
    flat(embeddings(batch)).sum().backward()
    part = embeddings._pass.runner
    if place == "far":
        wait_until(lambda: part._doing == "data loader: batch 1")
        get = part._ready.get
        monkeypatch.setattr(part._ready, "get", lambda _: get(0.1))  # Of the draw alone.
    else:
        part._timeout = 0.1
    monkeypatch.setattr("persia.nn.reading_thread.LOADER_GRACE", 0.1)
    with pytest.raises(PersiaError, match=r"was not ready.*data loader"):
        next(passing)
    stop.set()


def test_non_finite_gradient_rows_are_dropped_and_counted():
    embeddings = collection()
    batch = make_batches(1)[0]
    before = {id_: row(embeddings, "item", id_) for id_ in range(30)}
    for prepared in embeddings.prefetch([batch]):
        found = embeddings(prepared)["item"]
        before = {int(i): row(embeddings, "item", i) for i in batch.id_features["item"].values}
        found.register_hook(lambda g: torch.full_like(g, float("nan")).where(torch.arange(16)[:, None] == 0, g))
        found.sum().backward()
    assert embeddings.pushed.non_finite == 1
    poisoned = int(batch.id_features["item"].values[0])
    np.testing.assert_array_equal(row(embeddings, "item", poisoned), before[poisoned])


def test_loss_scaling_is_undone_before_gradients_leave():
    batches = make_batches(3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaled = EmbeddingCollection(SCHEMA, optimizer=SGD(lr=0.1), mode=Sync(), grad_scaler=scaler)
    plain = collection()
    for batch in scaled.prefetch(batches):
        scaler.scale(flat(scaled(batch)).square().mean()).backward()
    for batch in plain.prefetch(batches):
        flat(plain(batch)).square().mean().backward()
    for id_ in range(30):
        np.testing.assert_allclose(row(scaled, "item", id_), row(plain, "item", id_), rtol=1e-6)


class _Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from make_batches(6)[info.id :: info.num_workers]


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")  # On one core.
@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_torch_dataloader_workers(context):
    """`spawn` pickles the data set as `forkserver` does, but each worker would import torch."""
    if context == "forkserver":
        multiprocessing.get_context(context).set_forkserver_preload(PRELOADED)
    loader = torch.utils.data.DataLoader(_Stream(), batch_size=None, num_workers=2, multiprocessing_context=context)
    embeddings = collection(mode=Hybrid(1, warmup=0))
    for _ in range(2):
        for batch in embeddings.prefetch(loader):
            flat(embeddings(batch)).sum().backward()
    assert embeddings.global_step == 12


def test_two_collections_with_per_table_optimizers_coexist():
    schema = persia.Schema(
        [persia.IdFeature("a", dim=2), persia.IdFeature("b", dim=5)],
        labels=["y"],
        tables=[persia.Table("b", 5, optimizer=SGD(lr=1.0), initializer=persia.Zeros())],
    )
    one, two = collection(schema=schema), collection(schema=schema, seed=1)
    ids = IdColumn(np.arange(4, dtype=np.uint64))
    batch = Batch({"a": ids, "b": ids}, np.zeros((4, 0), np.float32), np.zeros((4, 1), np.float32))
    found = one(batch)
    assert not found["b"].any()
    assert not torch.equal(found["a"], two(batch)["a"])
    found["b"].sum().backward()
    np.testing.assert_array_equal(row(one, "b", 0), -np.ones(5, np.float32))


def test_batches_without_prefetch_do_not_hold_the_gate_of_a_loop():
    embeddings = collection(mode=Sync(), accumulation_steps=3, timeout=20)
    for batch in make_batches(2):
        flat(embeddings(batch)).sum().backward()
    for batch in embeddings.prefetch(make_batches(6)):
        flat(embeddings(batch)).sum().backward()
    assert embeddings.global_step == 3
    flat(embeddings(make_batches(1)[0])).sum().backward()
    embeddings.flush()
    assert embeddings.global_step == 4


def test_a_batch_abandoned_by_an_error_is_no_step():
    embeddings = collection(mode=Sync())
    with pytest.raises(RuntimeError, match="mine"):
        for number, batch in enumerate(embeddings.prefetch(make_batches(9))):
            if number == 4:
                raise RuntimeError("mine")
            flat(embeddings(batch)).sum().backward()
    assert embeddings.global_step == 4


def test_a_failed_push_before_leaving_is_raised_by_the_next_call(monkeypatch):
    embeddings = collection()

    def broken(*_):
        raise PersiaError("no room")

    monkeypatch.setattr(embeddings.connection.worker, "push", broken)
    for batch in embeddings.prefetch(make_batches(5)):
        flat(embeddings(batch)).sum().backward()
        break
    assert embeddings.connection.worker.buffered == 0
    with pytest.raises(PersiaError, match="no room"):
        next(embeddings.prefetch(make_batches(1)))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_equals_cpu():
    batches = make_batches(5)
    stored = {}
    for device in ("cpu", "cuda"):
        embeddings = collection(device=device)
        for batch in embeddings.prefetch(batches):
            found = flat(embeddings(batch))
            assert found.device.type == device
            found.square().mean().backward()
        stored[device] = np.stack([row(embeddings, "item", i) for i in range(30)])
    np.testing.assert_allclose(stored["cuda"], stored["cpu"], rtol=1e-5, atol=1e-7)
