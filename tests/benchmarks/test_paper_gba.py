"""The GBA paper as printed: which modes are switched, how staleness is counted, the hours of a day."""

import statistics

import pytest
from benchmarks.modes_runs import Rates
from benchmarks.paper_gba_runs import Continued, Strained, Way, continued, strained

from benchmarks import paper, paper_gba
from persia.modes import Async, Gba, Sync
from persia.replay import ScheduleEvent, Setting, Timeline, simulate, steady

RATES = Rates(3e-3, 0.1)


@pytest.fixture(autouse=True)
def _few_rows_for_the_rate(monkeypatch):
    monkeypatch.setattr("persia.data.generator.RATE_ROWS", 8_192)  # The rate of clicks does not matter here.


@pytest.mark.parametrize(("kind", "sync"), [("gba", Sync()), ("both", Sync("per_id"))])
def test_gba_divides_by_the_gradients_of_an_id(kind, sync, monkeypatch):
    asked = {}

    def switches(preset, throughout, switched, at_least):
        assert (preset, at_least) == ("laptop", -0.0005)
        asked["sync"] = throughout
        asked.update(switched)
        return iter(())

    monkeypatch.setattr(paper_gba, "switches", switches)
    for way in ("sync_to_gba", "gba_to_sync"):
        assert list(paper_gba.per_id("laptop", kind=kind, way=way)) == []
    gba = Gba(1_024, reduction="per_id")
    assert asked["sync"].modes == (sync,) * 16
    assert asked[f"paper.gba_per_id.{kind}.sync_to_gba"].modes == (sync,) * 8 + (gba,) * 8
    assert asked[f"paper.gba_per_id.{kind}.gba_to_sync"].modes == (gba,) * 8 + (sync,) * 8
    assert {plan.rates for plan in asked.values()} == {paper_gba.SWITCH_RATES}


def test_ages_are_counted_from_the_token():
    def push(version, token, server="dense-0"):
        return ScheduleEvent(0.0, "push", server, 0, 0, token, version, 1)

    mode = Gba(2, tolerance=3)
    events = [push(5, 5), push(5, 6), push(7, 4), push(9, 5), push(9, 1, "ps-0")]
    # The fourth is older than the tolerance; the last one is that of rows.
    timeline = Timeline(mode, 2, 1, 2, events)
    assert paper_gba.ages_by_token(timeline) == [0, -1, 3]
    assert paper_gba.ages_by_token(timeline, excluded=True) == [0, -1, 3, 4]


def test_a_token_is_ahead_of_the_step_at_which_its_batch_begins():
    """With N = M a batch is handed out while N others are under way, so its token is mostly the next step's."""
    timeline = simulate(Gba(8), Setting(paper.cluster(8, 0.2, 0.0, 100)), 800)
    by_token = statistics.fmean(paper_gba.ages_by_token(timeline))
    assert timeline.summary().staleness_mean - by_token == pytest.approx(0.9, abs=0.1)
    equal = simulate(Gba(8), Setting(steady([1.0] * 8)), 800)
    assert set(paper_gba.ages_by_token(equal)) == {0}


def test_a_line_of_staleness_for_each_count(monkeypatch):
    found = {m.name.rpartition(".")[2]: m for m in paper_gba.staleness("smoke", state="strained")}
    assert set(found) == set(paper_gba.STALENESS)
    assert found["gba_token_late"].value < found["gba_token_all"].value
    assert found["gba_token"].value < found["gba_token_late"].value < found["gba"].value < found["bsp"].value
    assert found["gba"].details["paper"] == (0.21, 11)
    assert 0 <= found["hop_bs"].value <= 3


def test_a_state_without_stragglers_is_as_sync():
    plan = Strained(500, RATES, 0, 6_400, 1, 2, {"calm": (0.0, 0.0), "strained": (0.3, 0.1)})
    days = strained(plan)
    assert {name: len(of) for name, of in days.items()} == {"calm": 2, "strained": 2, "sync": 2}
    aucs = {name: [day.auc for day in of] for name, of in days.items()}
    assert aucs["calm"] == pytest.approx(aucs["sync"], abs=1e-4)
    assert aucs["strained"] != pytest.approx(aucs["sync"], abs=1e-4)
    assert days["strained"][0].summary.staleness_mean > days["calm"][0].summary.staleness_mean == 0.0


def test_states_are_compared_with_sync_by_seed(monkeypatch):
    class Day:
        def __init__(self, auc):
            self.auc = auc
            self.summary = simulate(Gba(2), Setting(steady([1.0] * 2)), 4).summary()

    def everywhere(function, plans, result):
        assert function is strained
        assert {(p.ids, p.rates) for p in plans} == {(100_000, paper_gba.STRAINED_RATES[".sparse"])}
        loss = {"strained": 0.002, "busy": 0.0, "quiet": 0.0, "sync": 0.0}
        return [{name: [Day(0.7 + p.seed / 10 - lost)] for name, lost in loss.items()} for p in plans]

    monkeypatch.setattr(paper_gba, "everywhere", everywhere)
    found = {m.name: m for m in paper_gba.auc("laptop", suffix=".sparse")}
    assert found["paper.gba_auc.strained.sparse"].value == pytest.approx(-0.002)
    assert found["paper.gba_auc.strained.sparse"].holds is False
    assert found["paper.gba_auc.quiet.sparse"].details["per_seed"] == pytest.approx([0.0] * 5)


def test_the_load_of_a_day_slows_hosts_down():
    loads = [paper_gba.load(hour) for hour in range(24)]
    assert (min(loads), max(loads)) == pytest.approx((0.2, 0.9))
    assert (loads.index(min(loads)), loads.index(max(loads))) == (5, 17)

    def mean(hour):
        return statistics.fmean(s.factor for worker in paper_gba.hour_of(hour, 50, 400).workers for s in worker)

    assert mean(5) < mean(11) < mean(17)
    assert min(s.factor for worker in paper_gba.hour_of(5, 50, 400).workers for s in worker) == 1.0


def test_the_busiest_hour_is_worst_for_sync(monkeypatch):
    monkeypatch.setitem(paper_gba.SHARED_WORKERS, "smoke", 16)
    monkeypatch.setitem(paper_gba.SHARED_BATCHES, "smoke", 30)
    found = {m.name.rpartition(".")[2]: m for m in paper_gba.figure1("smoke")}
    assert found["sync"].value < found["async"].value <= 1.0
    assert found["gba"].value == pytest.approx(found["async"].value, abs=0.05)
    by_hour = found["async_over_sync"].details["by_hour"]
    assert found["async_over_sync"].value == max(by_hour)
    assert statistics.fmean(by_hour[14:21]) > statistics.fmean(by_hour[2:9])
    assert max(max(found[kind].details["by_hour"]) for kind in ("sync", "hybrid", "gba", "async")) == 1.0


def test_a_base_is_continued_with_the_rates_of_each_way():
    base = Way(Sync(), RATES)
    ways = {"stay": base, "frozen": Way(Sync(), Rates(1e-12, 1e-12)), "async": Way(Async(), RATES)}
    found = continued(Continued(500, 1.05, 0, 2_048, 4, base, ways))
    assert {name: len(areas) for name, areas in found.items()} == {"base": 2, "stay": 2, "frozen": 2, "async": 2}
    # Only ids that are met for the first time change anything: an evaluation sees zeros before.
    assert found["frozen"] == pytest.approx([found["base"][-1]] * 2, abs=2e-4)
    assert found["stay"] != pytest.approx(found["frozen"], abs=1e-3)
    assert found["async"] != pytest.approx(found["stay"], abs=1e-4)


def test_a_switch_is_compared_with_the_mode_that_stays(monkeypatch):
    asked = []

    def everywhere(function, plans, result):
        assert function is continued
        asked.extend(plans)
        lost = {"stay": [0.0, 0.0], "to_sync": [0.1, 0.02], "to_sync_tuned": [0.01, 0.0]}
        return [
            {"base": [0.5, 0.6], **{w: [0.7 + p.seed / 100 - gap for gap in lost[w]] for w in p.ways}} for p in plans
        ]

    monkeypatch.setattr(paper_gba, "everywhere", everywhere)
    found = {m.name.split("1.05.")[1]: m for m in paper_gba.figure2("laptop", data="500_1.05", direction="to_sync")}
    values = {name: measure.value for name, measure in found.items()}
    assert values == pytest.approx(
        {"to_sync.first": -0.1, "to_sync.last": -0.02, "to_sync_tuned.first": -0.01, "to_sync_tuned.last": 0.0}
    )
    sets = paper_gba.FOUND["500_1.05"]
    assert {p.base for p in asked} == {Way(Async(), sets.own)}
    assert asked[0].ways["to_sync"] == Way(Sync(), sets.own)
    assert asked[0].ways["to_sync_tuned"] == Way(Sync(), sets.sync)
    assert found["to_sync.first"].details["areas"]["base"] == [0.5, 0.6]
