"""Modes are pure functions: no threads here."""

import functools

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.config import convert
from persia.errors import ConfigError, PersiaError
from persia.modes import (
    Action,
    Arrival,
    Async,
    Bsp,
    Decision,
    Dense,
    Gba,
    HopBs,
    HopBw,
    Hybrid,
    Mode,
    ModeSetting,
    Observation,
    Sync,
    decode,
    encode,
)


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


MODES: list[Mode] = [
    *(Sync(), Sync("per_id"), Hybrid(3), Hybrid("auto"), Hybrid(None), Hybrid(3, combine=False)),
    *(Async(), Bsp(4), HopBs(2)),
    *(HopBw(1), Gba(64), Gba(64, tolerance=0, reduction="per_id")),
]


def actions(mode, tokens, nn_workers=4, local_batch=16):
    """Decisions on gradients that arrive one after another, and the step that they leave."""
    step = held = 0
    group = mode.group(nn_workers, local_batch)
    decisions = []
    for token in tokens:
        decision = mode.arrive(Arrival(step, held, token, group))
        decisions.append(decision)
        if decision.action is Action.APPLY:
            step, held = step + 1, 0
        elif decision.action is Action.HOLD:
            held += 1
    return decisions, step


@given(st.integers(1, 64), st.integers(1, 1000), st.integers(0, 2000))
def test_a_warm_up_raises_the_bound_from_0(depth, warmup, step):
    mode = Hybrid(depth, warmup=warmup)
    assert mode.depth_at(depth, 0) == 0
    bound = mode.depth_at(depth, step)
    assert bound == depth if step >= warmup else bound * warmup <= depth * step < (bound + 1) * warmup
    assert Hybrid(depth, warmup=0).depth_at(depth, step) == Sync().depth_at(depth, step) == depth
    assert Hybrid(None).depth_at(None, step) is None


def test_a_warm_up_is_the_default_where_there_is_a_limit_to_rise_to():
    assert (Hybrid().warmup, Hybrid(4).warmup, Hybrid(None).warmup) == (500, 500, 0)
    assert [Hybrid(4).depth_at(4, step) for step in (0, 124, 125, 499, 500)] == [0, 0, 1, 3, 4]
    assert [Hybrid("auto").depth_at(1, step) for step in (0, 499, 500)] == [0, 0, 1]


def test_a_warm_up_needs_a_bound():
    with pytest.raises(ConfigError, match="warmup = 5; expected 0, as staleness = None has no limit") as caught:
        Hybrid(None, warmup=5)
    assert caught.value.fields["field"] == "mode.warmup"
    with pytest.raises(ConfigError, match="warmup = -1"):
        Hybrid(2, warmup=-1)


def test_dense():
    for mode in MODES:
        expected = Dense.ALL_REDUCE if isinstance(mode, Sync | Hybrid) else Dense.SERVER
        assert mode.dense() is expected


def test_how_many_gradients_make_a_step():
    expected = [4, 4, 4, 4, 4, 1, 1, 4, 1, 3, 4, 4]
    assert [mode.group(nn_workers=4, local_batch=16) for mode in MODES] == expected


@given(st.lists(st.integers(0, 3), max_size=30))
def test_only_gba_decays_and_only_hop_bw_drops(ages):
    for mode in MODES:
        step = held = 0
        group = mode.group(4, 16)
        for age in ages:
            token = max(0, step - age)
            decision = mode.arrive(Arrival(step, held, token, group))
            late = isinstance(mode, HopBw) and token < step
            assert (decision.action is Action.DROP) == late
            if late:
                continue
            assert (decision.action is Action.APPLY) == (held + 1 == group)
            stale = isinstance(mode, Gba) and step - token > mode.tolerance
            assert decision.decay == mode.decay(step, token) == (0.0 if stale else 1.0)
            step, held = (step + 1, 0) if decision.action is Action.APPLY else (step, held + 1)


@given(st.integers(0, 40), st.integers(0, 40), st.lists(st.integers(0, 60), min_size=1, max_size=8))
def test_only_gba_limits_rows_and_rows_from_the_future_count_as_never_touched(step, age, last_steps):
    token = max(0, step - age)
    for mode in MODES:
        limit = mode.row_limit(step, token)
        for last, admitted in zip(last_steps, limit.admits(np.array(last_steps)), strict=True):
            known = last if last < step else -1
            version = known + 1 if known > 0 else 0  # Of the row. 0 is "never" as well as "in step 0".
            assert admitted == (not isinstance(mode, Gba) or version - token <= mode.tolerance)


@pytest.mark.parametrize("tolerance", [0, 1, 3])
def test_a_row_of_every_step_decays_as_dense_parameters_do(tolerance):
    mode = Gba(64, tolerance)
    for step in range(2, 9):
        for token in range(step + 1):
            assert mode.row_limit(step, token).admits(np.array([step - 1])) == mode.decay(step, token)


def test_hop_bw_drops_what_comes_after_its_step():
    decisions, step = actions(HopBw(1), [0, 0, 0, 0, 1, 1, 1])
    assert [d.action.value for d in decisions] == ["hold", "hold", "apply", "drop", "hold", "hold", "apply"]
    assert step == 2


def test_gba_counts_a_stale_gradient_with_weight_0():
    decisions, step = actions(Gba(32, tolerance=1), [0, 0, 1, 1, 0, 2])
    assert decisions == [
        *(Decision(Action.HOLD), Decision(Action.APPLY)) * 2,
        *(Decision(Action.HOLD, 0.0), Decision(Action.APPLY)),
    ]
    assert step == 3


@given(st.integers(1, 20), st.integers(0, 400))
def test_a_token_value_repeats_m_times(group, number):
    mode = Gba(group * 8)
    value = mode.token(number, version=7, group=mode.group(3, 8))
    assert value * group <= number < (value + 1) * group


def test_other_tokens_are_the_version():
    assert {mode.token(100, 7, 4) for mode in MODES if not isinstance(mode, Gba)} == {7}


@given(st.integers(1, 5), st.integers(0, 10))
def test_hop_bs_holds_back_the_fastest(bound, ahead):
    assert HopBs(bound).gate(0, None, ahead) == (ahead < bound)


def test_gates_of_asynchronous_modes():
    assert all(mode.gate(100, mode.initial_depth(), 100) for mode in (Async(), Bsp(4), Gba(64)))
    assert [HopBw(1).gate(n, HopBw(1).initial_depth()) for n in range(3)] == [True, False, False]


def test_what_waits_for_the_newest_step():
    assert [mode for mode in MODES if mode.waits_for_step] == [Sync(), Sync("per_id"), HopBw(1)]


def test_m_must_be_whole():
    with pytest.raises(
        ConfigError, match=r"Set it to 96 or 144, or use local batches of 20 or 25 or 50 rows"
    ) as caught:
        Gba(100).group(4, 48)
    assert caught.value.fields["field"] == "mode.global_batch_size"
    with pytest.raises(ConfigError, match=r"Set it to 48, or use local batches of"):
        Gba(10).group(4, 48)


def test_gba_advises_about_as_many_nn_workers_as_gradients():
    assert all(Gba(800).advice(n, 100) is None for n in (4, 8, 16))
    assert "local batches of about 400 rows, or 8 NN workers" in (Gba(800).advice(2, 100) or "")
    assert Gba(800).advice(17, 100) is not None


def test_hop_bw_needs_someone_to_wait_for():
    assert HopBw(3).group(4, 1) == 1
    with pytest.raises(ConfigError, match="at most 3") as caught:
        HopBw(4).group(4, 1)
    assert caught.value.fields["field"] == "mode.backup"


@pytest.mark.parametrize(
    ("kind", "field", "bad"),
    [
        *((Bsp, "batches", bad) for bad in (0, -3, 2.0)),
        *((HopBs, "bound", bad) for bad in (0, -1, True)),
        *((HopBw, "backup", bad) for bad in (-1, None)),
        *((Gba, "global_batch_size", bad) for bad in (0, 1.5, None)),
    ],
)
def test_bad_arguments_name_the_field(kind, field, bad):
    with pytest.raises(ConfigError, match=rf"{kind.__name__}.{field}") as caught:
        kind(bad)
    assert caught.value.fields["field"] == f"mode.{field}"


def test_a_bad_tolerance_names_the_field():
    with pytest.raises(ConfigError, match="tolerance"):
        Gba(64, tolerance=-1)


@pytest.mark.parametrize(
    "make", [Sync, functools.partial(Hybrid, 2, True), *(functools.partial(m, 1) for m in (Bsp, HopBw))], ids=str
)
def test_every_mode_that_combines_has_a_reduction(make):
    assert make().reduction == "global"
    assert make("per_id").reduction == "per_id"
    with pytest.raises(ConfigError, match=r"reduction = 'mean'.*'global' or 'per_id'"):
        make("mean")
    assert Gba(64, reduction="per_id").reduction == "per_id"
    with pytest.raises(ConfigError, match="reduction"):
        Gba(64, reduction="mean")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "many"])
def test_bad_staleness_names_the_field(bad):
    with pytest.raises(ConfigError, match="staleness"):
        Hybrid(bad)


def test_modes_round_trip_as_configuration():
    for mode in MODES:
        assert convert(msgspec.to_builtins(mode), ModeSetting, "here") == mode
        assert convert(msgspec.to_builtins(mode), Mode, "here") == decode(encode(mode)) == mode
    assert issubclass(ConfigError, PersiaError)
