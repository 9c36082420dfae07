"""The benchmarks' plain peers do what they claim, on tiny inputs."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from benchmarks.baselines import delayed_torch, globo_torch, one_bit_torch, step_torch
from torch import nn
from torch.nn import functional as F

from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.nn.models import FFNN
from persia.optim import SGD, Adagrad, Adam, OneBit, RowwiseAdagrad
from persia.schema import IdFeature, Schema


@pytest.fixture
def files(tmp_path):
    rng = np.random.default_rng(0)
    paths = []
    for day in range(2):
        rows = 1500
        columns = {
            "label": rng.integers(0, 2, rows).astype(np.int8),
            "timestamp_ms": np.arange(rows),
            "user_id": rng.integers(0, 50, rows).astype(np.int32),
            "article_id": rng.integers(0, 30, rows).astype(np.int32),
            "history": pa.array([rng.integers(0, 40, k % 4).tolist() for k in range(rows)], pa.list_(pa.int32())),
            **{name: rng.integers(0, 5, rows).astype(np.int16) for name in globo_torch.CONTEXTS},
        }
        paths.append(tmp_path / f"day={day:02}.parquet")
        pq.write_table(pa.table(columns), paths[-1])
    return paths


def test_globo_baseline(files):
    result = globo_torch.run(0, files=files)
    assert result["rows"] == 3000
    assert len(result["auc_per_day"]) == 2
    assert result["auc_mean"] == pytest.approx(np.mean(result["auc_per_day"]))
    assert 0.4 < result["auc_all"] < 0.6  # labels are coin flips
    assert globo_torch.run(0, files=files)["auc_per_day"] == result["auc_per_day"]
    assert globo_torch.run(0, files=files, days=1)["auc_per_day"] == result["auc_per_day"][:1]
    assert globo_torch.run(0, files=files, max_rows=1024)["rows"] == 1024


def test_globo_baseline_with_delays(files):
    late = globo_torch.run(0, files=files, delay=1)
    assert late["auc_per_day"] == globo_torch.run(0, files=files, delays=[1] * 4)["auc_per_day"]
    assert late["auc_per_day"] != globo_torch.run(0, files=files)["auc_per_day"]


def test_auc_of_the_baselines():
    assert globo_torch.auc(np.array([0, 1, 0, 1]), np.array([0.1, 0.3, 0.3, 0.7])) == 0.875
    assert math.isnan(globo_torch.auc(np.ones(3), np.arange(3)))


TINY = step_torch.Workload(features=3, dim=4, rows=50, batch=32, dense=2, batches=4)


@pytest.mark.parametrize("kind", [step_torch.Plain, step_torch.DenseOnly])
def test_step_variants(kind):
    data = step_torch.generate(TINY)
    assert all(s.ids.min() >= 0 and s.ids.max() < 50 for s in data)
    variant = kind(TINY, data)
    before = [p.detach().clone() for p in variant.net.parameters()]
    assert variant.time(6) > 0
    assert all(not torch.equal(a, b) for a, b in zip(before, variant.net.parameters(), strict=True))
    variant.close()


@pytest.mark.processes
@pytest.mark.skipif(step_torch.TorchRec.python() is None, reason="build/torchrec-env has not been created")
@pytest.mark.parametrize(("layer", "dtype"), [("fbgemm", "float32"), ("fbgemm", "float16"), ("torchrec", "float32")])
def test_torchrec_variant(layer, dtype):
    with step_torch.TorchRec(TINY, threads=1, layer=layer, dtype=dtype) as variant:
        assert variant.time(2) > 0
        assert variant.time(2) > 0


def clicks(count=12, rows=16, vocabulary=20):
    rng = np.random.default_rng(0)
    schema = Schema([IdFeature("a", dim=4), IdFeature("b", dim=4, table="a", pooling="mean"), IdFeature("c", dim=4)])
    batches = []
    for _ in range(count):
        lengths = rng.integers(0, 4, rows)
        columns = {
            "a": IdColumn(rng.integers(0, vocabulary, rows).astype(np.uint64)),
            "b": IdColumn(
                rng.integers(0, vocabulary, lengths.sum()).astype(np.uint64), np.concatenate([[0], lengths.cumsum()])
            ),
            "c": IdColumn(rng.integers(0, 5, rows).astype(np.uint64)),
        }
        labels = rng.integers(0, 2, (rows, 1)).astype(np.float32)
        batches.append(Batch(columns, np.zeros((rows, 0), np.float32), labels))
    return schema, batches


def rows_of(table, ids):
    """Some initial rows, a function of table and id."""
    return np.stack([np.sin(ids.astype(np.float64) * (k + 1) + len(table)) / 100 for k in range(4)], 1)


def textbook(schema, batches, test):
    """Synchronous training with nn.Embedding and torch.optim."""
    tables = nn.ModuleDict({n: nn.Embedding(20, 4) for n in ("a", "c")})
    for name, table in tables.items():
        table.weight.data = torch.from_numpy(rows_of(name, np.arange(20)).astype(np.float32))
    torch.manual_seed(3)
    net = FFNN(schema, hidden=(8,))
    sgd = torch.optim.Adagrad(tables.parameters(), 0.05, initial_accumulator_value=0.01)
    adam = torch.optim.Adam(net.parameters(), 1e-3)

    def forward(batch):
        ids = {n: torch.from_numpy(c.values.astype(np.int64)) for n, c in batch.id_features.items()}
        bag = F.embedding_bag(
            ids["b"],
            tables["a"].weight,
            torch.from_numpy(batch.id_features["b"].offsets),
            mode="mean",
            include_last_offset=True,
        )
        return net(torch.from_numpy(batch.dense), {"a": tables["a"](ids["a"]), "b": bag, "c": tables["c"](ids["c"])})

    logits = []
    for batch in batches:
        out = forward(batch)
        sgd.zero_grad()
        adam.zero_grad()
        F.binary_cross_entropy_with_logits(out, torch.from_numpy(batch.labels)).backward()
        sgd.step()
        adam.step()
        logits.append(out.detach())
    return torch.cat(logits).numpy(), forward(test).detach().numpy()


def test_replay_without_delay_is_ordinary_training():
    schema, (*batches, test) = clicks()
    result = delayed_torch.replay(batches, schema, 3, initial_rows=rows_of, network=small, test=[test])
    logits, test_logits = textbook(schema, batches, test)
    np.testing.assert_allclose(result.logits, logits, atol=1e-5)
    np.testing.assert_allclose(result.test_logits, test_logits, atol=1e-5)


def small(schema):
    return FFNN(schema, hidden=(8,))


def test_replay_delays():
    schema, batches = clicks()
    sync = delayed_torch.replay(batches, schema, network=small)
    late = delayed_torch.replay(batches, schema, delay=2, network=small)
    np.testing.assert_array_equal(late.logits[:16], sync.logits[:16])
    assert not np.array_equal(late.logits, sync.logits)
    dense_late = delayed_torch.replay(batches, schema, dense_delay=2, network=small)
    np.testing.assert_array_equal(dense_late.logits[:16], sync.logits[:16])
    assert not np.array_equal(dense_late.logits, sync.logits)


def delayed(batches, schema, versions, nn_workers=1, optimizer=delayed_torch.ADAGRAD):
    return delayed_torch.delayed_sync(
        batches, schema, 0, versions, nn_workers, rows_of, network=small, embedding_optimizer=optimizer
    )


def test_delayed_sync_has_the_recorded_delays():
    schema, batches = clicks()
    for delay in (0, 2):
        versions = [max(0, i - delay) for i in range(len(batches))]
        expected = delayed_torch.replay(batches, schema, delay=delay, initial_rows=rows_of, network=small)
        assert delayed(batches, schema, versions).auc == pytest.approx(expected.auc, abs=1e-6)
    with pytest.raises(ValueError, match="Batch 1 of step 1 has no version, or one after 1"):
        delayed(batches, schema, [0, 2])
    with pytest.raises(ValueError, match="Batch 3 of step 1"):
        delayed(batches, schema, [0, 0, 1], nn_workers=2)


OPTIMIZERS = [SGD(lr=0.5), Adagrad(lr=0.05), Adam(lr=0.01)]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_delayed_sync_makes_one_step_of_all_nn_workers_batches(optimizer):
    schema, batches = clicks(13)
    batches[3] = batches[3].slice(0, 5)
    joined = [Batch.concat(batches[at : at + 3]) for at in range(0, 13, 3)]
    whole = delayed(joined, schema, [0, 0, 1, 1, 2], 1, optimizer)
    split = delayed(batches, schema, [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2], 3, optimizer)
    torch.testing.assert_close(split.tables.rows, whole.tables.rows, rtol=0, atol=1e-6)
    for mine, theirs in zip(split.network.parameters(), whole.network.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda o: type(o).__name__)
def test_rows_of_delayed_sync_move_as_those_of_torch(optimizer):
    """Where every row is in every step: lazy Adam counts the updates of a row."""
    schema, batches = clicks(1)
    tables = delayed_torch.Tables(batches, schema, 0, rows_of, optimizer)
    theirs = nn.Parameter(tables.rows.clone())
    make = {
        SGD: lambda: torch.optim.SGD([theirs], optimizer.lr),
        Adagrad: lambda: torch.optim.Adagrad([theirs], optimizer.lr, initial_accumulator_value=1e-6),
        Adam: lambda: torch.optim.Adam([theirs], optimizer.lr),
    }[type(optimizer)]()
    for _ in range(5):
        theirs.grad = torch.randn_like(theirs)
        tables.apply(torch.arange(len(theirs)), theirs.grad)
        make.step()
    torch.testing.assert_close(tables.rows.data, theirs.data, rtol=0, atol=1e-6)


def test_delayed_sync_refuses_what_it_does_not_know():
    schema, batches = clicks(1)
    for optimizer in (SGD(lr=0.1, momentum=0.9), Adagrad(lr=0.1, weight_decay=0.1), RowwiseAdagrad(lr=0.1)):
        with pytest.raises(ValueError, match="knows SGD, Adagrad and Adam"):
            delayed_torch.Tables(batches, schema, 0, None, optimizer)


def test_replay_scores_unknown_ids_as_zeros():
    schema, batches = clicks(3)
    strange = Batch(
        {
            "a": IdColumn(np.full(2, 99, np.uint64)),
            "b": IdColumn(np.empty(0, np.uint64), np.zeros(3, np.int64)),
            "c": IdColumn(np.full(2, 9, np.uint64)),
        },
        np.zeros((2, 0), np.float32),
        np.zeros((2, 1), np.float32),
    )
    models = []
    result = delayed_torch.replay(
        batches, schema, network=lambda s: models.append(FFNN(s)) or models[-1], test=[strange]
    )
    zeros = models[0](torch.zeros(2, 0), {name: torch.zeros(2, 4) for name in "abc"})
    np.testing.assert_allclose(result.test_logits, zeros.detach().numpy(), atol=1e-6)


def test_example_data_is_well_formed():
    schema, batches = delayed_torch.example(4096, features=4, vocabulary=100)
    assert len(batches) == 4
    result = delayed_torch.replay(batches, schema)
    assert result.logits.shape == (4096, 1)


@pytest.fixture
def alone():
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def train(make, steps: int) -> torch.Tensor:
    torch.manual_seed(0)
    net, inputs = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1)), torch.randn(16, 7)
    optimizer = make(net.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def test_naive_one_bit_warms_up_as_adam(alone):
    ours = train(lambda p: one_bit_torch.NaiveOneBit(p, 1e-2, warmup=5), 5)
    assert torch.allclose(ours, train(lambda p: torch.optim.Adam(p, 1e-2), 5), atol=1e-6)
    later = train(lambda p: one_bit_torch.NaiveOneBit(p, 1e-2, warmup=5), 8)
    assert torch.isfinite(later).all()
    assert not torch.equal(later, ours)


def test_naive_one_bit_loses_what_our_compressor_loses():
    values = torch.randn(5000)
    payload = torch.empty(OneBit().payload_bytes(len(values)), dtype=torch.uint8)
    left, seen = values.clone(), torch.empty_like(values)
    OneBit().compress(left, payload, 0)
    OneBit().decompress(payload, seen)
    assert torch.allclose(one_bit_torch.lossy(values), seen, atol=1e-6)


def test_deepspeed_formulas(alone):
    values, error = torch.randn(64), torch.randn(64)
    corrected, kept = values + error, error.clone()
    signs, scale = one_bit_torch._compress(values.clone(), kept)
    assert float(scale) == pytest.approx(float(corrected.square().mean().sqrt()))
    assert torch.allclose(one_bit_torch.unpack(signs) * scale + kept, corrected, atol=1e-6)
    first = train(lambda p: one_bit_torch.OneBitAdam(p, 1e-2, warmup=3), 1)
    assert torch.equal(first, train(lambda p: torch.optim.SGD(p, 0.0), 1))  # The first gradient is dropped.
    assert not torch.equal(first, train(lambda p: one_bit_torch.OneBitAdam(p, 1e-2, warmup=3), 5))
