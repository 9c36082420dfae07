"""The runs behind benchmarks/modes_figures.py."""

import pytest
from benchmarks.gba_runs import GlobalTags, Inherited, Stalled, best_rate, inherited, stalled, without_delay

from persia.modes import Gba
from persia.optim import Adagrad, Adam
from persia.replay import Setting, simulate, stalls


@pytest.mark.parametrize("best", [0.1, 0.8, 0.0125])
def test_the_search_for_a_rate_ends_with_both_neighbours_tried(best):
    tried = []

    def score(rates):
        tried.extend(rates)
        return [-abs(rate - best) for rate in rates]

    assert best_rate(score, 0.1) == best
    assert {best / 2, best, best * 2} <= set(tried)
    assert len(set(tried)) == len(tried)


def test_without_delay_the_same_batches_make_the_same_steps():
    setting = Setting(stalls(4, length=1.0, chance=0.1), local_batch=1)
    late = simulate(Gba(4, tolerance=100), setting, 200)
    fresh = without_delay(late, ["lookup", "pull"])
    assert late.summary().staleness_mean > 0.3
    assert (fresh.summary().staleness_max, fresh.summary().row_staleness_max) == (0, 0)
    steps = [
        [(e.kind, e.server, e.batch, e.version) for e in t.events if e.kind in ("push", "apply")] for t in (late, fresh)
    ]
    assert steps[0] == steps[1]
    only_rows = without_delay(late, ["lookup"]).summary()
    assert (only_rows.staleness_mean, only_rows.row_staleness_max) == (late.summary().staleness_mean, 0)


def test_rows_with_tags_of_their_own_refuse_less():
    runs = {
        mode: stalled(Stalled(mode(512, 0), Adagrad(lr=0.1), 0, 4_096, 1, 8, 64, 0.1))[0] for mode in (Gba, GlobalTags)
    }
    summary = runs[Gba].summary
    assert 0 < runs[Gba].refused < runs[GlobalTags].refused
    assert 0 < summary.decayed == runs[GlobalTags].summary.decayed


def test_all_numbers_of_nn_workers_inherit_one_base_and_rows():
    days = inherited(Inherited(Adam(lr=0.01), "global", 0, 6_400, 1, 1, (8, 20)))
    assert set(days) == {"base", "8", "20"}
    assert days["8"][0].summary.batches == 2 * 8
    assert days["20"][0].summary.batches == 2 * 20
    assert days["8"][0].auc == pytest.approx(days["20"][0].auc, abs=0.02)
