"""What the chaos runs over hosts print becomes one measure of all of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from benchmarks import chaos


@pytest.fixture
def lines(monkeypatch):
    """What each mode prints; hosts are always permitted."""
    found = {
        mode: [{"mode": mode, "seed": 1, "value": 0.9, "seconds": 100.0, "wrong": [], "made": {"kill": 2}}]
        for mode in chaos.MODES
    }
    support = SimpleNamespace(Hosts=lambda _: SimpleNamespace(close=lambda: None), UnavailableError=OSError)
    monkeypatch.setattr(chaos, "tests_support", lambda _: support)

    def lines_of(program, *arguments):
        assert program == "chaos_network.py"
        return iter(found[arguments[arguments.index("--mode") + 1]])

    monkeypatch.setattr(chaos, "lines_of", lines_of)
    return found


def test_shares_are_weighed_by_the_time(lines):
    lines["gba"] = [{**lines["gba"][0], "value": 0.6, "seconds": 200.0, "made": {"loss": 3, "kill": 1}}]
    share, violations, faults = chaos.hosts("laptop")
    assert (share.value, share.holds) == (pytest.approx(0.75), False)
    assert (violations.value, violations.holds) == (0.0, True)
    assert (faults.value, faults.holds, faults.details["kinds"]) == (8.0, None, {"kill": 5, "loss": 3})


def test_a_run_that_failed_is_a_violation(lines):
    lines["sync"] = [{"mode": "sync", "seed": 1, "value": 0.0, "wrong": ["it has ended"], "made": {"kill": 1}}]
    share, violations, _ = chaos.hosts("laptop")
    assert share.value == pytest.approx(0.9)
    assert (violations.value, violations.details["wrong"]) == (1.0, {"sync 1": ["it has ended"]})


def test_a_run_that_prints_nothing_is_no_success(lines):
    lines["sync"] = []
    with pytest.raises(RuntimeError, match="only 2 runs"):
        chaos.hosts("laptop")


def test_it_is_skipped_in_a_smoke_run(lines, capsys):
    assert chaos.hosts("smoke") is chaos.lost("smoke") is None
    assert capsys.readouterr().err.count("is skipped") == 2


def test_what_does_not_hold_after_moves_is_counted(monkeypatch):
    line = {"made": {"move": 50, "kill": 41}, "compared": {"many": 50_000}, "counted": 9, "wrong": ["a", "b"]}
    monkeypatch.setattr(chaos, "lines_of", lambda program, *arguments: iter([line]))
    measure = chaos.lost("laptop")
    assert (measure.value, measure.holds, measure.details["made"]) == (2.0, False, {"move": 50, "kill": 41})
