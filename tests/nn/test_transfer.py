"""Compressed rows and gradients: decoded on the host or on the device, the bits are the same."""

import numpy as np
import pytest
import torch

import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.nn.pooling import Expander
from persia.nn.staging import CpuStaging
from persia.nn.transfer import Transfer, joined
from persia.optim import Adagrad
from persia.ps import EmbeddingServer
from persia.services import Connection
from persia.worker import Worker, WorkerOptions

SCHEMA = persia.Schema(
    [persia.IdFeature("item", dim=8), persia.IdFeature("history", dim=8, table="item", pooling="mean")],
    dense_features=["price"],
)


def make_batches(count, size=12, seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.arange(0, 2 * size + 1, 2, dtype=np.int64)
    return [
        Batch(
            {
                "item": IdColumn(rng.integers(0, 30, size).astype(np.uint64)),
                "history": IdColumn(rng.integers(0, 30, 2 * size).astype(np.uint64), offsets),
            },
            rng.random((size, 1), np.float32),
            (rng.random((size, 1)) < 0.5).astype(np.float32),
        )
        for _ in range(count)
    ]


class Compressing:
    """In this process, and yet with compression."""

    def connect(self, schema, optimizer, mode, seed):
        self.server = EmbeddingServer(schema.resolved_tables(), optimizer, mode, seed, 1)
        return Connection(Worker(schema, [self.server], options=WorkerOptions("fp16")), [self.server])


def trained(on_host):
    """Losses and rows of a loop; without the native core everything goes the way that it goes for a GPU."""
    torch.manual_seed(0)
    cluster = Compressing()
    embeddings = persia.nn.EmbeddingCollection(
        SCHEMA, optimizer=Adagrad(lr=0.1), mode=persia.modes.Sync(), cluster=cluster
    )
    embeddings._expander.on_host = on_host
    embeddings._transfer._on_host = on_host
    net = torch.nn.Linear(17, 1)
    seen = []
    for batch in embeddings.prefetch(make_batches(6)):
        assert all(rows.dtype == torch.float32 for rows in batch.rows.values())
        seen.append({name: rows.detach().clone() for name, rows in batch.rows.items()})
        logits = net(torch.cat([*embeddings(batch).values(), batch.dense], 1))
        # In float64, as the two ways of pooling need not add up in the same order.
        torch.nn.functional.binary_cross_entropy_with_logits(logits.double(), batch.labels.double()).backward()
    return seen


def test_training_through_tensors_equals_the_native_core():
    for here, there in zip(trained(on_host=True), trained(on_host=False), strict=True):
        for name, rows in here.items():
            torch.testing.assert_close(there[name], rows, rtol=0, atol=2e-4)


@pytest.mark.parametrize("train", [True, False])
def test_rows_and_gradients_have_the_same_bits_on_both_ways(train):
    (batch,) = make_batches(1)
    worker = Compressing().connect(SCHEMA, Adagrad(lr=0.1), persia.modes.Sync(), 3).worker
    found = worker.lookup(worker.register(batch.id_features), train)
    assert found.scales is not None
    staging = CpuStaging()
    expander, tables = Expander(SCHEMA, staging.device), SCHEMA.resolved_tables()
    host, device = (Transfer(staging, on_host, tables, expander=expander) for on_host in (True, False))
    (mine, _), (theirs, _) = host.rows(batch, found), device.rows(batch, found)
    for name, rows in mine.rows.items():
        assert torch.equal(theirs.rows[name], rows)
    # What the device has is enough to expand them there.
    expanded = theirs.pooled.embeddings()
    for name, values in expander(mine.rows, mine.inverse, mine.offsets).items():
        torch.testing.assert_close(expanded[name], values)
    gradients = {name: torch.randn_like(rows) for name, rows in mine.rows.items()}
    for (halves, scales), (others, their_scales) in [[t.gradients(gradients, True)() for t in (host, device)]]:
        for name in gradients:
            assert halves[name].dtype == np.float16
            np.testing.assert_array_equal(others[name], halves[name])
            np.testing.assert_array_equal(their_scales[name], scales[name])
    plain, scales = device.gradients(gradients, False)()
    assert scales is None
    np.testing.assert_array_equal(plain["item"], gradients["item"].numpy())


def test_neighbours_in_one_storage_are_joined_without_a_copy():
    whole = torch.arange(12.0)
    first, second, third = (part.view(2, 2) for part in whole.split(4))
    both = joined([second, third])
    assert torch.equal(both, whole[4:])
    assert both.data_ptr() == second.data_ptr()
    for apart in ([first, third], [third, second], [first, second.clone()], [first.t(), second]):
        copied = joined(apart)
        assert torch.equal(copied, torch.cat([part.reshape(-1) for part in apart]))
        assert copied.data_ptr() != apart[0].data_ptr()
    assert joined([]).numel() == 0


class RefusesHost(CpuStaging):
    """Copies nothing that is not on its device."""

    device = torch.device("meta")

    def to_host(self, tensors):
        assert all(tensor.device == self.device for tensor in tensors.values())
        return super().to_host(tensors)


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_no_gradients_are_sent_without_a_copy(compressed, clip_norm):
    transfer = Transfer(RefusesHost(), False, SCHEMA.resolved_tables(), clip_norm)
    gradients, scales = transfer.gradients({}, compressed)()
    assert (len(gradients), gradients.buffer.size) == (0, 0)
    assert (scales is not None) == compressed


def test_gradients_are_sent_without_a_copy_after_backward():
    schema = persia.Schema([persia.IdFeature(name, dim=4) for name in ("a", "b", "c")])
    expander = Expander(schema, torch.device("cpu"))
    buffer = torch.rand(3 * 8 * 4)
    rows = {name: part.view(8, 4).requires_grad_() for name, part in zip("abc", buffer.split(32), strict=True)}
    inverse = dict.fromkeys("abc", np.arange(8, dtype=np.uint16))
    sum(values.sum() for values in expander(rows, inverse, dict.fromkeys("abc")).values()).backward()
    gradients = {name: leaf.grad for name, leaf in rows.items()}
    packed, scales = Transfer(CpuStaging(), True, schema.resolved_tables()).gradients(gradients, False)()
    assert scales is None
    assert packed.buffer.ctypes.data == gradients["a"].data_ptr()
    assert (packed["c"] == 1).all()
