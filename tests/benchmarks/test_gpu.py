"""The variants of `benchmarks/gpu.py` train without a GPU, too; and it is clear what they differ in."""

import numpy as np
import pytest
import torch
from benchmarks.baselines.step_torch import DenseOnly, Plain, Workload, generate

from benchmarks import gpu, gpu_rows, gpu_threads, runner, step

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
    [
        (gpu.blocking, 1e-6),
        (gpu.compressing, 1e-4),
        (gpu.narrow, 1e-3),
        (gpu.one_by_one, 1e-6),
        (gpu.cached, 1e-6),
        (gpu.uncached, 1e-6),
        (gpu.one_thread, 1e-6),
        (gpu.in_sync, 1e-6),
        (gpu.one_thread_in_sync, 1e-6),
    ],
)
def test_the_way_of_the_rows_does_not_change_what_is_learned(make, tolerance):
    for mine, theirs in zip(gradients(make), gradients(gpu.persia), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=tolerance)


@pytest.mark.filterwarnings("default")  # Sparse tensors of plain torch.
def test_each_variant_trains_each_network():
    for make in (gpu.persia, Plain, DenseOnly):
        assert all(np.isfinite(values).all() for values in gradients(gpu.with_model(make, gpu.dlrm), 3))


def test_one_thread_is_compared_with_threads():
    threads = [gpu.persia, gpu.in_sync]
    made = [make(WORK, generate(WORK)) for make in (gpu.one_thread, gpu.one_thread_in_sync, *threads)]
    assert [variant.embeddings.options.one_thread for variant in made] == [True, True, None, None]
    for variant in made:
        variant.close()


def test_parts_of_a_batch_are_profiled_by_the_number_of_threads(monkeypatch):
    small = gpu_threads.Scale(WORK, 1, 1)
    monkeypatch.setitem(gpu_threads.SCALES, "smoke", small)
    found = gpu_threads.by_threads("smoke", "cpu")
    of_one = found.details["by_threads"][1]
    assert of_one["rows_per_s"] > 0
    assert {f"{part}_ms" for part in gpu_threads.PARTS} <= of_one["beside_training"].keys() <= of_one.keys()
    assert found.value == found.details["by_threads"][found.details["threads"]]["rows_per_s"] / of_one["rows_per_s"]
    assert gpu_threads.steps_by_threads("smoke", "cpu").value > 0


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


def test_without_a_gpu_a_smoke_run_goes_its_way_on_tensors_of_the_cpu():
    """Pooled together, and copied as blocks."""
    made = gpu.persia(WORK, generate(WORK))
    try:
        batch = next(made.prefetched)
    finally:
        made.close()
    assert type(batch.pooled).__name__ == "PooledTogether"
    assert gpu.one_by_one(WORK, generate(WORK)).embeddings._transfer._expander is None


def test_zipf_ids_are_skewed_and_spread():
    work = Workload(features=2, dim=4, rows=1000, batch=5000, dense=1, batches=1)
    (samples,) = gpu.zipf(work)
    assert samples.ids.shape == (2, 5000)
    counts = np.bincount(samples.ids.reshape(-1), minlength=1000)
    assert len(counts) == 1000
    top = np.argsort(counts)[::-1]
    assert counts[top[0]] / 10_000 == pytest.approx(1 / sum(k**-1.05 for k in range(1, 1001)), rel=0.15)
    assert top[:5].std() > 10


def test_owned_rows_and_rows_from_the_host_learn_the_same(monkeypatch):
    """What `gpu.rows_1m_128*` compare, in one order of steps; four fifths of the rows are owned."""
    monkeypatch.setattr(gpu_rows, "DIM", 4)
    ids = gpu_rows.ids_of(np.arange(64))
    batches = [np.random.default_rng(seed).permutation(ids)[:40] for seed in range(6)]
    host, owner = (gpu_rows.Parts.made("cpu") for _ in range(2))
    host.look_up(ids)
    owning = gpu_rows.Owning(owner, ids)
    for number, batch in enumerate(batches):
        gpu_rows.FromHost(host).step(batch, number)
        owning.step(batch, number)
    assert 16 < len(owning.owned) <= 32
    owning.owned.write_back()
    mine, theirs = (parts.access.read("item", ids, True) for parts in (owner, host))
    np.testing.assert_array_equal(mine.values, theirs.values)
    np.testing.assert_array_equal(mine.state.values, theirs.state.values)


def test_plain_torch_on_pinned_tables_updates_rows():
    uva = gpu_rows.Uva(8, "cpu")
    before = uva._rows.clone()
    uva.step(np.array([1, 5]), 0)
    changed = (uva._rows != before).any(1).nonzero().squeeze(1).tolist()
    assert changed == [1, 5]
    assert uva._counts.tolist() == [0, 1, 0, 0, 0, 1, 0, 0]


@pytest.mark.filterwarnings("default")  # Of torch about itself.
@pytest.mark.parametrize(("pattern", "lines"), [("gpu.rows_1m_128*", 3), ("gpu.serve*", 3), ("gpu.cache_rows", 1)])
def test_a_row_of_the_table_runs_on_tensors_of_the_cpu(pattern, lines):
    found = list(runner.run([pattern], "smoke"))
    assert len(found) == lines
    assert all(measure.value > 0 for measure in found)
