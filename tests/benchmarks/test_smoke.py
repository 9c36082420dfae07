"""Every benchmark runs at preset `smoke`, in process, and prints names that it is registered under."""

import math

import pytest

from benchmarks import runner

FAST = {
    "batch.unique", "batch.unique_zipf", "batch.pool_forward", "batch.pool_backward", "store.bytes_per_row",
    "modes.bound.static.hybrid", "ps.clients", "ps.imbalance", "ps.imbalance_patterns", "scale.moved",
}  # fmt: skip
"""Below a second. The others run in `make test-all`; the gate runs all of them by `make bench-smoke`."""


@pytest.mark.parametrize(
    "benchmark_",
    [
        pytest.param(each, id=each.names[0], marks=[] if each.names[0] in FAST else pytest.mark.slow)
        for each in runner.benchmarks()
    ],
)
@pytest.mark.filterwarnings("default")
def test_smoke(benchmark_):
    found = list(runner.run(benchmark_.names, "smoke"))
    assert {measure.name for measure in found} <= set(benchmark_.names)
    assert len({measure.name for measure in found}) == len(found)
    assert all(math.isfinite(measure.value) for measure in found)


def test_the_fast_ones_exist():
    assert {each.names[0] for each in runner.benchmarks()} >= FAST


def test_without_a_gpu_its_benchmarks_are_skipped(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert list(runner.run(["gpu.*"], "laptop")) == []
    said = capsys.readouterr().err
    for name in ("gpu.step_vs_torch", "gpu.rows_1m_128", "gpu.serve_requests"):
        assert f"{name} is skipped" in said
