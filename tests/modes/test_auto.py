"""When Auto switches: decisions follow from recorded step times alone."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.config import convert
from persia.errors import ConfigError
from persia.modes import Async, Auto, AutoState, Gba, Hybrid, ModeSetting, StepTime, Sync, decide, rehearse
from persia.replay import Setting, alternating, phases, simulate, steady

AUTO = Auto(Gba(8), seconds=10.0)


def choices(auto, mode, trace, batches=1000):
    return list(rehearse(auto, simulate(mode, Setting(trace), batches).step_times()))


@pytest.mark.parametrize("mode", [Sync(), Gba(8)])
def test_predictions_are_the_rates_whichever_mode_was_watched(mode):
    for choice in choices(AUTO, mode, steady([1] * 6 + [4] * 2))[2:]:
        assert choice.sync_rate == pytest.approx(2.0)
        assert choice.asynchronous_rate == pytest.approx(6.5)
        assert choice.slowest == 6
        assert choice.asynchronous


def test_quiet_stays():
    assert not any(v.asynchronous or v.switch for v in choices(AUTO, Sync(), steady([1] * 8)))


def test_moving_stragglers_are_seen():
    last = choices(AUTO, Sync(), phases(8, length=10.0), 2000)[-1]
    assert last.asynchronous


@pytest.mark.parametrize("mode", [Sync(), Gba(8)])
def test_it_follows_phases_within_its_windows(mode):
    quiet, strained = 200.0, 100.0
    trace = alternating([1] * 6 + [4] * 2, quiet=quiet, strained=strained)
    found = choices(AUTO, mode, trace, 8000)
    for choice in found:
        since = (choice.time % (quiet + strained)) - quiet
        late = (AUTO.windows + 2) * AUTO.seconds
        if since >= late:
            assert choice.asynchronous, str(choice)
        if late <= since + quiet < quiet:
            assert not choice.asynchronous, str(choice)
    switches = [v for v in found if v.switch]
    assert len(switches) == pytest.approx(2 * found[-1].time / (quiet + strained), abs=2)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 30.0)), min_size=1, max_size=40), st.integers(1, 4))
def test_no_switch_without_windows_in_a_row(raw, windows):
    auto = Auto(Async(), windows=windows, seconds=5.0)
    clock = dict.fromkeys(range(4), 0.0)
    steps = []
    for worker, seconds in raw:
        steps.append(StepTime(worker, clock[worker], seconds))
        clock[worker] += seconds
    against = 0
    strained = False
    for choice in rehearse(auto, steps):
        speaks = choice.ratio < auto.back * (1 - 1e-12) if strained else choice.ratio >= auto.gain
        against = against + 1 if speaks else 0
        assert choice.switch == (against >= windows)
        if choice.switch:
            strained, against = not strained, 0
        assert choice.asynchronous == strained


def test_nothing_is_decided_without_evidence():
    state = AutoState(True, 1)
    assert decide(AUTO, state, [], 10.0) == (state, None)
    assert list(rehearse(AUTO, [])) == []


def test_the_log_line_has_the_evidence():
    choice = choices(AUTO, Sync(), steady([1] * 6 + [4] * 2))[1]
    assert choice.switch
    line = "switch to asynchronous (asynchronous: predicted 3.25x of 2.0 batches/s; slowest NN worker: 6;"
    assert line in str(choice)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("sync", {"sync": Gba(8)}),
        ("asynchronous", {"asynchronous": Hybrid(1)}),
        ("gain", {"gain": 1.0}),
        ("back", {"back": 0.9}),
        ("windows", {"windows": 0}),
        ("seconds", {"seconds": 0.0}),
    ],
)
def test_bad_arguments_name_the_field(field, arguments):
    with pytest.raises(ConfigError, match=f"Auto.{field}"):
        Auto(**{"asynchronous": Gba(8), **arguments})


def test_it_round_trips_as_configuration():
    auto = Auto(Gba(64), Hybrid(2), gain=2.0)
    assert convert(msgspec.to_builtins(auto), ModeSetting, "here") == auto
