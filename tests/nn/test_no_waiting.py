"""A forward and backward pass never waits for the device, loss scaling included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import persia
from persia.nn.dense_step import DenseStep, StepOptions
from persia.nn.options import CollectionOptions

SCHEMA = persia.Schema(
    [
        persia.IdFeature("item", dim=8),
        persia.IdFeature("history", dim=8, table="item", pooling="sqrtn"),
        persia.IdFeature("last", dim=4, pooling=None, max_length=3),
    ],
    dense_features=["price"],
    labels=["click"],
)

READS = {torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__bool__}


class Waits(TorchDispatchMode):
    """Counts the operations that read a value of a tensor: on a GPU, each waits for all work before it."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.count += 1
        return function(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Counts reads of whole tensors, which are no operations on a CPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.count += function in READS
        return function(*args, **(kwargs or {}))


def test_the_counters_of_waits_count():
    with Waits() as waits, Reads() as reads:
        value = torch.ones(3).sum()
        value.item(), float(value), bool(value > 0), value.cpu(), torch.ones(2).nonzero()
    assert waits.count >= 4
    assert reads.count >= 4


def make_batches(count, size=16):
    rng = np.random.default_rng(0)
    offsets = np.arange(0, 2 * size + 1, 2, dtype=np.int64)

    def ids(count):
        return rng.integers(0, 50, count).astype(np.uint64)

    return [
        persia.Batch(
            {
                "item": persia.IdColumn(ids(size)),
                "history": persia.IdColumn(ids(2 * size), offsets),
                "last": persia.IdColumn(ids(2 * size), offsets),
            },
            rng.random((size, 1), np.float32),
            (rng.random((size, 1)) < 0.5).astype(np.float32),
        )
        for _ in range(count)
    ]


def steps(device, precision, around):
    """Trains; `around` surrounds the forward and backward pass of each batch. Returns the losses."""
    torch.manual_seed(0)
    network = DenseStep(
        persia.nn.models.FFNN(SCHEMA, hidden=(8,)),
        lambda parameters: torch.optim.SGD(parameters, 0.1),
        torch.device(device),
        StepOptions(precision=precision),
        SCHEMA,
    )
    embeddings = persia.nn.EmbeddingCollection(
        SCHEMA,
        optimizer=persia.optim.Adagrad(lr=0.1),
        mode=persia.modes.Sync(),
        grad_scaler=network.scaler,
        options=CollectionOptions(device=device),
    )
    if device == "cpu":  # The way of a GPU.
        embeddings._expander.on_host = embeddings._transfer._on_host = False
    losses = []
    for batch in embeddings.prefetch(make_batches(4)):
        with around(batch):
            _, loss = network.forward_backward(batch, embeddings(batch), all_reduce=True)
        network.apply()
        losses.append(loss)
    assert embeddings.pushed.applied > 0
    return [float(loss) for loss in losses]


@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_forward_and_backward_pass_reads_no_value(precision):
    waits, reads = Waits(), Reads()

    class Both:
        def __init__(self, _):
            pass

        def __enter__(self):
            waits.__enter__()
            reads.__enter__()

        def __exit__(self, *error):
            reads.__exit__(*error)
            waits.__exit__(*error)

    steps("cpu", precision, Both)
    assert (waits.count, reads.count) == (0, 0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("precision", ["float32", "bf16", "fp16"])
def test_a_forward_and_backward_pass_never_waits_for_the_device(precision):
    class Strict:
        def __init__(self, _):
            pass

        def __enter__(self):
            torch.cuda.set_sync_debug_mode("error")

        def __exit__(self, *_):
            torch.cuda.set_sync_debug_mode("default")

    steps("cuda", precision, Strict)


def test_gradients_of_scaled_losses_are_those_of_plain_ones():
    """Rows after training with a scaled loss have the same bits: the scale is a power of two."""
    schema = persia.Schema([persia.IdFeature("item", dim=8)], labels=["click"])
    ids = np.arange(16, dtype=np.uint64)
    batch = persia.Batch({"item": persia.IdColumn(ids)}, np.zeros((16, 0), np.float32), np.zeros((16, 1), np.float32))
    rows = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**10), torch.amp.GradScaler("cpu", enabled=False)):
        embeddings = persia.nn.EmbeddingCollection(
            schema, optimizer=persia.optim.SGD(lr=0.1), mode=persia.modes.Sync(), grad_scaler=scaler
        )
        for prepared in embeddings.prefetch([batch] * 3):
            loss = embeddings(prepared)["item"].square().mean()
            (loss if scaler is None else scaler.scale(loss)).backward()
        rows.append(embeddings.rows("item", ids).values)
    for other in rows[1:]:
        np.testing.assert_array_equal(other, rows[0])
