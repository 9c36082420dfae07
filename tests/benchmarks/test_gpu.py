"""The variants of `benchmarks/gpu.py` train without a GPU, too; and it is clear what they differ in."""

import numpy as np
import pytest
import torch
from benchmarks.baselines.step_torch import DenseOnly, Plain, Workload, generate

from benchmarks import gpu, step

WORK = Workload(features=3, dim=8, rows=200, batch=32, dense=2, batches=4)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(make, steps=1):
    """Of the network, in the last step. Only the first one depends on nothing but the data."""
    variant = make(WORK, generate(WORK))
    try:
        for _ in range(steps):
            variant.step()
    finally:
        variant.close()
    return [parameter.grad.numpy() for parameter in variant.net.parameters()]


@pytest.mark.parametrize(
    ("make", "tolerance"),
    [(gpu.blocking, 1e-6), (gpu.compressing, 1e-4), (gpu.narrow, 1e-3), (gpu.cached, 1e-6), (gpu.uncached, 1e-6)],
)
def test_the_way_of_the_rows_does_not_change_what_is_learned(make, tolerance):
    for mine, theirs in zip(gradients(make), gradients(gpu.persia), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=tolerance)


@pytest.mark.filterwarnings("default")  # Sparse tensors of plain torch.
def test_each_variant_trains_each_network():
    for make in (gpu.persia, Plain, DenseOnly):
        assert all(np.isfinite(values).all() for values in gradients(gpu.with_model(make, gpu.dlrm), 3))


def test_two_variants_are_compared(monkeypatch):
    monkeypatch.setitem(step.STEPS, "smoke", 1)
    found = step.compared("gpu.it", "smoke", WORK, gpu.persia, DenseOnly)
    assert found.value > 0
    assert found.details["ours"] > 0


def test_a_model_gets_the_embeddings_of_each_feature():
    given = {}

    class Spy(torch.nn.Module):
        def forward(self, dense, embeddings):
            given.update(embeddings, dense=dense)
            return dense[:, :1]

    values = torch.arange(2.0 * (3 * 8 + 2)).view(2, -1)
    gpu.SideBySide(lambda schema: Spy(), WORK)(values)
    assert torch.equal(torch.cat([given["f0"], given["f1"], given["f2"], given["dense"]], 1), values)
