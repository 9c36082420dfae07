"""What the program on the first host prints becomes the measures of training over hosts."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from benchmarks import hosts


@pytest.fixture
def printed(monkeypatch):
    """Seconds of each kind; hosts are always permitted."""
    seconds = {
        "sync-1": [4.0, 4.4, 4.0, 4.0, 4.0],
        "hybrid-1": [2.0, 2.0, 2.0, 2.0, 2.0],
        "hybrid-2": [2.5] * 5,
        "hybrid-4": [4.0] * 5,
    }

    def run(number, *arguments, seconds_of=seconds, **_):
        assert (number, arguments[:4]) == (0, ("-m", "benchmarks.hosts", "5", "40"))
        found = {kind: {"seconds": seconds_of[kind], "cpu": {"nn_worker": 0.01}, "hosts": {}} for kind in arguments[4:]}
        return SimpleNamespace(returncode=0, stdout=f"a line of Ray\n{json.dumps(found)}\n", stderr="")

    @contextlib.contextmanager
    def ray_hosts(_):
        yield SimpleNamespace(run=run)

    monkeypatch.setattr(hosts, "ray_hosts", ray_hosts)
    return seconds


def test_hybrid_is_compared_with_sync_round_by_round(printed):
    measure = hosts.hybrid_vs_sync("laptop")
    assert (measure.value, measure.holds) == (2.0, True)
    assert measure.details["sync-1"]["s/step"] == 0.1


def test_several_nn_workers_are_compared_with_one(printed):
    measure = hosts.scaling("laptop")
    assert (measure.value, measure.details["by_number"]) == (2.0, {"1": 1.0, "2": 1.6, "4": 2.0})


def test_a_training_that_fails_is_told(printed, monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="no space")
    with pytest.raises(RuntimeError, match="no space"):
        hosts.trained(SimpleNamespace(run=lambda *_, **__: failed), 1, 1, "sync-1")


def test_it_is_skipped_in_a_smoke_run(capsys):
    assert hosts.hybrid_vs_sync("smoke") is hosts.scaling("smoke") is None
    assert capsys.readouterr().err.count("is skipped") == 2
