"""What benchmarks/paper_figures.py computes from curves, and the network that it makes."""

import subprocess

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from benchmarks.compressed.network import ShapedNetwork
from benchmarks.paper_figures import mean_curve, shaped_loopback
from benchmarks.paper_figures_runs import Curve

from benchmarks import paper_figures

CURVE = Curve([10.0, 20.0, 30.0], [0.6, 0.7, 0.65], 1.5)


def test_a_mean_of_curves():
    other = Curve([12.0, 22.0, 32.0], [0.62, 0.7, 0.67], 0.5)
    expected = {"seconds": [11.0, 21.0, 31.0], "auc": [0.61, 0.7, 0.66], "staleness": [1.5, 0.5]}
    assert mean_curve([CURVE, other]) == expected


def test_figure_6_asks_its_interval(monkeypatch):
    def everywhere(function, plans, result, processes):
        # Sync reaches its goal after 9 s, Async never, Hybrid after 6 s, or after 10 s with one seed.
        late = {"sync": 1.0, "async": 1.0, "hybrid": 2 / 3}
        times = {plan: late[plan.kind] for plan in plans} | {p: 10 / 9 for p in plans if (p.kind, p.seed) == slow}
        areas = {"sync": [0.6 + n / 100 for n in range(12)], "async": [0.5] * 12}
        areas["hybrid"] = areas["sync"]
        return [Curve([times[p] * n for n in range(1, 13)], areas[p.kind], 0.0) for p in plans]

    monkeypatch.setattr(paper_figures, "everywhere", everywhere)
    slow = None
    even = paper_figures.figure6("laptop")
    assert (even.value, even.holds, even.details["pairs"]) == (pytest.approx(1.5), True, 5)
    assert even.interval == pytest.approx((1.5, 1.5))
    slow = ("hybrid", 3)
    found = paper_figures.figure6("laptop")
    assert found.value == pytest.approx((1.5**4 * 0.9) ** 0.2)
    assert found.interval[0] < found.value
    assert found.details["per_seed"][3] == pytest.approx(0.9)


@pytest.mark.processes
@pytest.mark.skipif(not ShapedNetwork.allowed(), reason="no rights for network namespaces")
def test_a_shaped_loopback_is_limited_and_goes_away():
    with shaped_loopback(0.2) as name:
        found = subprocess.run(
            ["tc", "-n", name, "qdisc", "show", "dev", "lo"], capture_output=True, text=True, check=True
        )
        assert "tbf" in found.stdout
        assert "200Mbit" in found.stdout
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert name not in listed
