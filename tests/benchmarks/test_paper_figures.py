"""What benchmarks/paper_figures.py computes from curves, and the network that it makes."""

import subprocess

import pytest
from benchmarks.compressed.network import ShapedNetwork
from benchmarks.paper_figures import mean_curve, seconds_to, shaped_loopback
from benchmarks.paper_figures_runs import Curve

CURVE = Curve([10.0, 20.0, 30.0], [0.6, 0.7, 0.65], 1.5)


def test_seconds_to_an_auc_lie_between_the_points_of_a_curve():
    assert seconds_to(CURVE, 0.55) == pytest.approx(5.0)
    assert seconds_to(CURVE, 0.6) == pytest.approx(10.0)
    assert seconds_to(CURVE, 0.675) == pytest.approx(17.5)
    assert seconds_to(CURVE, 0.71) is None


def test_a_mean_of_curves():
    other = Curve([12.0, 22.0, 32.0], [0.62, 0.7, 0.67], 0.5)
    expected = {"seconds": [11.0, 21.0, 31.0], "auc": [0.61, 0.7, 0.66], "staleness": [1.5, 0.5]}
    assert mean_curve([CURVE, other]) == expected


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
