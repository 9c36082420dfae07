"""Modes are pure functions: no threads here."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.errors import ConfigError, PersiaError
from persia.modes import Aggregation, Dense, Hybrid, Observation, Sync


@given(st.integers(0, 100))
def test_sync_opens_only_when_all_is_applied(in_flight):
    assert Sync().gate(in_flight, Sync().initial_depth()) == (in_flight == 0)


@given(st.integers(1, 50), st.integers(0, 100))
def test_hybrid_bounds_the_steps_that_a_lookup_may_miss(staleness, in_flight):
    mode = Hybrid(staleness)
    assert mode.gate(in_flight, mode.initial_depth()) == (in_flight <= staleness)
    assert mode.next_depth(mode.initial_depth(), Observation(1.0, 1.0, 32)) == staleness


@given(st.integers(0, 10_000))
def test_hybrid_none_has_no_bound(in_flight):
    assert Hybrid(None).gate(in_flight, Hybrid(None).initial_depth())


def test_aggregation():
    assert Sync().aggregate(1, 2) is Aggregation.HOLD
    assert Sync().aggregate(2, 2) is Aggregation.APPLY
    assert Hybrid(1).aggregate(1, 2) is Aggregation.APPLY
    assert Sync().dense() is Hybrid(1).dense() is Dense.ALL_REDUCE


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "many"])
def test_bad_staleness_names_the_field(bad):
    with pytest.raises(ConfigError, match="staleness"):
        Hybrid(bad)


def test_modes_round_trip_as_configuration():
    for mode in (Sync(), Hybrid(3), Hybrid("auto"), Hybrid(None)):
        assert msgspec.convert(msgspec.to_builtins(mode), Sync | Hybrid) == mode
    assert issubclass(ConfigError, PersiaError)
