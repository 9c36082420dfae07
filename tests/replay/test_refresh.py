"""Rows that are looked up ahead and stay fresh: which updates a batch misses, and that Sync keeps its bits."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError
from persia.modes import Async, Bsp, Gba, HopBs, HopBw, Hybrid, Sync
from persia.replay import Setting, Slowdown, Trace, simulate, steady
from persia.testing.logistic import LOCAL, Problem, delayed_sync

WORKERS = 4
STEPS = 10


def late(latency, factors=(1.0,) * WORKERS):
    """Lookups and pushes take so many compute times of a batch each."""
    return Setting(steady(factors), local_batch=LOCAL, lookup=latency, push=latency)


def versions(timeline):
    """Version of the rows that each batch reads, by the number of the batch."""
    read = {e.batch: e.version for e in timeline.events if e.kind == "lookup"}
    return [read[batch] for batch in sorted(read)]


def missed(mode, setting, refresh):
    """Steps that the rows of NN worker 0 lack, by step."""
    reads = versions(simulate(mode, setting, WORKERS * STEPS, refresh=refresh))
    return [step - version for step, version in enumerate(reads[::WORKERS])]


def hybrid(depth):
    return Hybrid(depth, warmup=0)


def test_a_batch_misses_only_the_step_whose_push_is_in_flight():
    """A step starts when the one before has finished: that push is not at the PS yet, and all earlier ones are."""
    quarter = late(0.25)
    assert missed(hybrid(4), quarter, refresh=False) == [0, 1, 2, 3, 4, 4, 4, 4, 4, 4]
    assert missed(hybrid(4), quarter, refresh=True) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert missed(hybrid(1), quarter, refresh=False) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    assert missed(Sync(), quarter, refresh=True) == [0] * STEPS


def test_a_batch_misses_two_steps_when_push_and_transfer_take_longer_than_one():
    """A gradient is applied 0.75 after its step, and the update is at the NN workers 0.5 later: 1.25 steps."""
    setting = Setting(steady([1.0] * WORKERS), lookup=0.5, push=1.5)
    assert missed(hybrid(4), setting, refresh=True) == [0, 1, 2, 2, 2, 2, 2, 2, 2, 2]
    assert missed(hybrid(1), setting, refresh=True) == [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]  # Its bound is kept: it waits.


def test_without_latency_nothing_is_missed():
    assert missed(hybrid(4), late(0.0), refresh=True) == [0] * STEPS


def test_rows_are_never_older_than_their_lookup():
    """A lookup as long as a step never runs ahead: it reads half a step before the use, and a transfer takes one."""
    assert missed(hybrid(4), late(1.0), refresh=False) == missed(hybrid(4), late(1.0), refresh=True) == [0] + [1] * 9


@pytest.mark.parametrize("depth", [4, 16, None])
@pytest.mark.parametrize("latency", [0.25, 1.0])
def test_any_depth_misses_what_a_depth_of_one_does(depth, latency):
    setting = late(latency, (1.0, 1.0, 1.0, 4.0))
    batches = WORKERS * 100
    one = simulate(hybrid(1), setting, batches)
    deep = simulate(Hybrid(depth, warmup=0), setting, batches, refresh=True)
    assert versions(deep) == versions(one)
    assert versions(simulate(Hybrid(depth, warmup=0), setting, batches)) != versions(one)
    assert deep.summary().rate == pytest.approx(one.summary().rate, rel=1e-3)


@pytest.mark.parametrize("factors", [(1.0,) * WORKERS, (1.0, 2.0, 1.0, 4.0)])
def test_sync_keeps_its_bits_and_does_not_wait_for_lookups(factors):
    setting, batches = late(0.25, factors), WORKERS * 40
    plain, ahead = (simulate(Sync(), setting, batches, refresh=refresh) for refresh in (False, True))
    trained, same = Problem(np.float32).run(plain), Problem(np.float32).run(ahead)
    assert trained.apart(Problem(np.float32)) > 0.01
    assert same.apart(trained) == 0.0
    step = max(factors)
    assert plain.summary().rate == pytest.approx(WORKERS * LOCAL / (step + 0.25 + 0.25), rel=0.01)
    assert ahead.summary().rate == pytest.approx(WORKERS * LOCAL / (step + 0.125 + 0.25), rel=0.01)


def test_hybrid_is_sync_with_the_rows_that_its_timeline_says():
    """By the rule of delayed Sync, in float64; one slow NN worker and a warm-up."""
    mode = Hybrid(3, warmup=12)
    setting = Setting(steady([1.0, 1.0, 1.0, 1.5]), lookup=0.5, push=3.0)
    timeline = simulate(mode, setting, WORKERS * 30, refresh=True)
    reads = versions(timeline)
    missing = [batch // WORKERS - version for batch, version in enumerate(reads)]
    assert missing[: 4 * WORKERS] == [0] * 4 * WORKERS  # The bound of the warm-up.
    assert set(missing[12 * WORKERS :]) == {2}
    assert Problem().run(timeline).apart(delayed_sync(Problem(), reads, WORKERS)) <= 1e-9


# Sums of these are exact, so that times can be compared.
factors = st.sampled_from([1.0, 1.5, 4.0])
latencies = st.sampled_from([0.0, 0.25, 1.0, 2.5])


@settings(deadline=None)
@given(
    st.data(),
    st.integers(2, 4),
    st.sampled_from(
        [Sync(), hybrid(1), hybrid(3), Hybrid(2, warmup=9), Hybrid(None), Hybrid(2, combine=False, warmup=0)]
    ),
    st.integers(1, 60),
    st.integers(0, 3),
)
def test_a_batch_sees_what_is_applied_one_lookup_before_its_use(data, workers, mode, batches, first):
    trace = Trace([[Slowdown(0.0, data.draw(factors)), Slowdown(3.0, data.draw(factors))] for _ in range(workers)], 8.0)
    setting = Setting(trace, lookup=data.draw(latencies), push=data.draw(latencies))
    timeline = simulate(mode, setting, batches, step=first, start=5.0, refresh=True)
    updates = [e for e in timeline.events if e.kind == "apply" and e.server == "ps-0"]
    used = {e.batch: e.time for e in timeline.events if e.kind == "pull"}
    least = updates[0].version
    lookups = [e for e in timeline.events if e.kind == "lookup"]
    assert sorted(e.batch for e in lookups) == sorted(used) == list(range(batches))
    for lookup in lookups:
        arrived = sum(e.time <= used[lookup.batch] - setting.lookup for e in updates)
        newest = sum(e.time <= used[lookup.batch] - setting.lookup / 2 for e in updates)
        assert least + arrived <= lookup.version <= least + newest
    if mode.combine if isinstance(mode, Hybrid) else True:
        for lookup in lookups:
            depth = mode.depth_at(mode.initial_depth(), lookup.token)
            assert depth is None or lookup.token - lookup.version <= depth
    times = [e.time for e in timeline.events]
    assert times == sorted(times)
    assert times[0] == 5.0


@pytest.mark.parametrize("mode", [Async(), Gba(WORKERS * LOCAL), Bsp(WORKERS), HopBs(2)], ids=str)
def test_asynchronous_modes_hide_what_hybrid_hides(mode):
    """The token is drawn before the computation ends, so that nothing waits; the own gradient is not applied then."""
    setting, batches = late(0.25), WORKERS * 100
    waiting, ahead = (simulate(mode, setting, batches, refresh=refresh) for refresh in (False, True))
    assert waiting.summary().rate == pytest.approx(WORKERS * LOCAL / 1.5, rel=0.01)
    assert ahead.summary().rate == pytest.approx(WORKERS * LOCAL, rel=0.01)
    hybrid_rate = simulate(hybrid(4), setting, batches, refresh=True).summary().rate
    assert ahead.summary().rate >= hybrid_rate * (1 - 1e-9)
    ends = {e.batch: e.time + 1.0 for e in ahead.events if e.kind == "lookup"}  # As all take a second.
    own = [[e for e in ahead.events if e.kind == "lookup" and e.worker == rank] for rank in range(WORKERS)]
    for lookups in own:
        for before, read in pairwise(lookups):
            assert read.time == ends[before.batch]  # Read half a lookup before the computation ends.


@pytest.mark.parametrize("mode", [HopBs(1), HopBw(1)], ids=str)
def test_where_a_second_batch_may_not_pass_nothing_is_drawn_ahead(mode):
    setting, batches = late(0.25), WORKERS * 20
    plain, ahead = (simulate(mode, setting, batches, refresh=refresh) for refresh in (False, True))
    assert plain.events == ahead.events


@pytest.mark.parametrize("mode", [Async(), Gba(WORKERS * LOCAL), HopBs(2), HopBw(1)], ids=str)
def test_without_latency_nothing_is_drawn_ahead(mode):
    setting, batches = late(0.0, (1.0, 2.0, 1.0, 4.0)), WORKERS * 40
    plain, ahead = (simulate(mode, setting, batches, refresh=refresh) for refresh in (False, True))
    assert plain.events == ahead.events


@settings(deadline=None)
@given(st.data(), st.sampled_from([Async(), Gba(4), Bsp(3), HopBs(2)]), st.integers(1, 60))
def test_an_nn_worker_has_two_open_tokens_at_most(data, mode, batches):
    workers = data.draw(st.integers(2, 4))
    trace = Trace([[Slowdown(0.0, data.draw(factors)), Slowdown(3.0, data.draw(factors))] for _ in range(workers)], 8.0)
    setting = Setting(trace, lookup=data.draw(latencies), push=data.draw(latencies))
    timeline = simulate(mode, setting, batches, refresh=True)
    opened = [0] * workers
    seen = set()
    for event in timeline.events:
        if event.server != "dense-0":
            continue
        if event.kind == "pull":
            opened[event.worker] += 1
            assert opened[event.worker] <= 2
            assert event.batch not in seen
            seen.add(event.batch)
        elif event.kind in ("push", "drop"):
            opened[event.worker] -= 1
    assert seen == set(range(batches))
    assert opened == [0] * workers


@pytest.mark.parametrize("at", [1.5, 2.05, 2.2])
def test_a_crash_loses_the_token_that_was_drawn_ahead(at):
    """Before the draw that begins at 2 and reads at 2.125; while it has read nothing; and after it has read."""
    setting = Setting(steady([1.0, 1.0]), crashes=[(at, 0)], lookup=0.25, push=0.25)
    timeline = simulate(Gba(2), setting, 12, refresh=True)
    lost = [e.batch for e in timeline.events if e.kind == "lost" and e.server == "dense-0"]
    assert len(lost) == (1 if at == 1.5 else 2)
    pushed = [e.batch for e in timeline.events if e.kind == "push" and e.server == "dense-0"]
    assert sorted([*lost, *pushed]) == list(range(12))
    assert Problem().run(timeline).apart(Problem()) > 0.01


def test_auto_has_no_rows_to_refresh():
    with pytest.raises(ConfigError, match="Invalid refresh = True") as error:
        simulate(Hybrid("auto"), Setting(steady([1, 1])), 8, refresh=True)
    assert error.value.fields["field"] == "refresh"
