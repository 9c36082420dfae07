"""The mode Auto: a Trainer that watches its NN workers and switches."""

import logging
import time

import pytest

from persia.coordinator import TokenScheduler
from persia.errors import ConfigError
from persia.modes import Async, Auto, Gba, Sync, load_evidence, rehearse
from persia.nn.step_timings import StepTimings
from persia.replay import alternating
from persia.testing import emulation
from persia.types import StepTiming
from support.switching_samples import ROWS, batches, trainer

AUTO = Auto(Gba(4 * emulation.ROWS), windows=2, seconds=0.1)


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def watched(auto, factors, seconds, each=0.5):
    """Token lists that have been told the step times of NN workers: one second, times their factor."""
    clock = Clock()
    tokens = TokenScheduler(5.0, clock=clock)
    tokens.begin_auto(auto, len(factors), False)
    untold = {rank: [] for rank in range(len(factors))}
    ends = [0.0] * len(factors)
    while clock.now < seconds:
        clock.now += each
        for rank, factor in enumerate(factors):
            while ends[rank] + factor <= clock.now:
                untold[rank].append(StepTiming(clock.now - ends[rank], factor))
                ends[rank] += factor
            tokens.report_timings(rank, untold[rank])
            untold[rank] = []
        if tokens.requested():
            break
    return tokens, clock


def test_stragglers_make_it_ask_for_the_asynchronous_mode(caplog):
    auto = Auto(Gba(8 * ROWS), windows=2, seconds=10.0)
    with caplog.at_level(logging.INFO, "persia.modes"):
        tokens, clock = watched(auto, [1.0] * 6 + [4.0] * 2, 100.0)
    assert tokens.requested() == auto.asynchronous
    assert clock.now < 4 * auto.seconds
    assert "switch to asynchronous (asynchronous: predicted 3.25x" in caplog.text
    evidence = tokens.evidence()
    assert list(rehearse(auto, evidence.steps))[: len(evidence.choices)] == evidence.choices


def test_a_switch_that_a_death_has_undone_is_asked_for_again():
    """All restart in the mode of the recovery point, which may be that of before."""
    auto = Auto(Gba(8 * ROWS), windows=2, seconds=10.0)
    tokens, clock = watched(auto, [1.0] * 6 + [4.0] * 2, 100.0)
    tokens.resolve(auto.asynchronous)
    assert tokens.requested() is None
    tokens.begin_auto(auto, 8, False)
    again = clock.now + 100.0
    while not tokens.requested():
        assert clock.now < again
        clock.now += 4.0
        for rank in range(8):
            tokens.report_timings(rank, [StepTiming(1.0, 1.0)] if rank < 6 else [StepTiming(4.0, 4.0)])
    assert tokens.requested() == auto.asynchronous


def test_times_of_choices_count_from_the_start_of_the_run():
    clock = Clock()
    clock.now = 1e6
    tokens = TokenScheduler(5.0, clock=clock)
    tokens.begin_auto(Auto(Async(), seconds=2.0), 1, False)
    for _ in range(5):
        clock.now += 1.0
        tokens.report_timings(0, [StepTiming(1.0, 1.0)])
    tokens.begin_auto(Auto(Async(), seconds=2.0), 1, False)  # Another call of fit; the clock goes on.
    for _ in range(3):
        clock.now += 1.0
        tokens.report_timings(0, [StepTiming(1.0, 1.0)])
    evidence = tokens.evidence()
    assert [step.began for step in evidence.steps] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert [choice.time for choice in evidence.choices] == [2, 4, 7]


def test_a_switch_that_is_still_to_be_made_stays_decided():
    auto = Auto(Gba(8 * ROWS), windows=2, seconds=10.0)
    tokens, _ = watched(auto, [1.0] * 6 + [4.0] * 2, 100.0)
    tokens.begin_auto(auto, 8, False)
    assert tokens.requested() == auto.asynchronous
    assert tokens._policy.asynchronous


def test_quiet_asks_for_nothing():
    tokens, _ = watched(Auto(Async(), seconds=5.0), [1.0, 1.0, 1.0], 60.0)
    assert tokens.requested() is None
    choices = tokens.evidence().choices
    assert len(choices) >= 10
    assert not any(v.switch for v in choices)


def test_one_that_reports_nothing_is_waited_for_one_window():
    clock = Clock()
    tokens = TokenScheduler(5.0, clock=clock)
    tokens.begin_auto(Auto(Async(), seconds=10.0), 2, False)
    for second in range(1, 31):
        clock.now = float(second)
        tokens.report_timings(0, [StepTiming(1.0, 1.0)])
        found = len(tokens.evidence().choices)
        assert found == max(0, second // 10 - 1)


def test_a_restarted_coordinator_gets_the_rule_again():
    fresh = TokenScheduler(5.0)
    laps = StepTimings(fresh, 0, 0.0, lambda: fresh.begin_auto(Auto(Async()), 1, True))
    laps.add(time.monotonic())
    assert fresh.report_timings(0, [])
    laps.add(time.monotonic())
    assert len(fresh.evidence().steps) == 1


def test_by_hand_ends_it():
    tokens, clock = watched(Auto(Async(), windows=1, seconds=4.0), [1.0, 1.0], 10.0)
    tokens.request(Sync())
    tokens.resolve(Sync())
    for _ in range(40):
        clock.now += 1.0
        tokens.report_timings(0, [StepTiming(1.0, 0.1)])
        tokens.report_timings(1, [StepTiming(1.0, 9.0)])
    assert tokens.requested() is None


def test_a_mode_that_the_batches_do_not_fit_is_not_asked_for(caplog):
    clock = Clock()
    tokens = TokenScheduler(5.0, clock=clock)
    tokens.announce(2, ROWS)
    tokens.begin_auto(Auto(Gba(ROWS + 1), windows=1, seconds=4.0), 2, False)
    for _ in range(20):
        clock.now += 1.0
        tokens.report_timings(0, [StepTiming(1.0, 0.1)])
        tokens.report_timings(1, [StepTiming(1.0, 9.0)])
    assert tokens.requested() is None
    assert "no multiple" in caplog.text


def test_a_run_switches_and_its_decisions_can_be_repeated():
    trace = alternating([1.0, 1.0, 1.0, 6.0], quiet=0.4, strained=1.2)
    done = emulation.train(AUTO, emulation.Emulation(trace, 0.01), 350)
    choices = done.result.mode_choices
    assert done.result.rows == 350 * emulation.ROWS
    assert any(v.switch and v.asynchronous for v in choices)
    assert done.result.asynchronous.batches > 0


def test_evidence_is_written_beside_the_logs(tmp_path):
    pytest.importorskip("tensorboard")
    t = trainer(Auto(Gba(ROWS), seconds=0.01, windows=1), log_dir=str(tmp_path))
    result = t.fit(batches(80))
    evidence = load_evidence(tmp_path / "auto.json")
    assert evidence.choices == result.mode_choices != []
    assert not any(v.switch for v in result.mode_choices)  # One NN worker is as slow as itself.


def test_a_checkpoint_keeps_the_rule(tmp_path):
    auto = Auto(Gba(ROWS), seconds=0.05)
    t = trainer(auto)
    t.fit(batches(4))
    t.save(tmp_path)
    again = type(t).resume(str(tmp_path), t.model, optimizer=t.step.make_optimizer)
    assert (again.declared.mode, again.mode) == (auto, Sync())


def test_auto_needs_dense_pss_and_no_schedule():
    with pytest.raises(ConfigError, match="mode_schedule"):
        trainer(AUTO, mode_schedule=[(0, Sync())])
    with pytest.raises(ConfigError, match="accumulation_steps"):
        trainer(AUTO, accumulation_steps=2)
