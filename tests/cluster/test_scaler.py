"""The rules of a `Scaler`: what measurements call for, without processes."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.cluster import RayOptions, Scaler
from persia.cluster.scaler import DECREASE_WINDOWS, SCALED, MeasuredLoad, ScalingDecision, ScalingRules
from persia.errors import ConfigError

BOUNDS = {"ps": (1, 8), "embedding_workers": (1, 8), "data_loaders": (1, 8)}
SCALER = Scaler(**BOUNDS, cool_down_seconds=100.0)
IDLE = MeasuredLoad(1, 1, 1)

shares = st.floats(0, 1.2)
loads = st.builds(
    MeasuredLoad,
    *(st.integers(1, 12) for _ in SCALED),
    lookups=shares,
    loading=shares,
    ps_memory=shares,
    ps_processors=shares,
    worker_processors=shares,
    loaders_busy=shares,
    source_idle=st.booleans(),
    rows_stay=st.booleans(),
)


def change(decision: ScalingDecision | None) -> tuple[str, int, int, str] | None:
    """A decision that is not blocked."""
    assert decision is None or not decision.blocked
    return decision[:4] if decision is not None else None


def lasting(rules: ScalingRules, load: MeasuredLoad, start: float = 0.0) -> ScalingDecision | None:
    """The first decision if a load lasts: at the end of a cool-down that its first window may begin."""
    return next(iter([rules.decide(load, start + 20.0 * window) for window in range(6)][-1]), None)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (IDLE, None),
        # Memory and processors of PSs, down to three quarters of the limit.
        (IDLE._replace(ps=2, ps_memory=0.81), ("ps", 2, 3, "memory")),
        (IDLE._replace(ps=4, ps_memory=0.95), ("ps", 4, 7, "memory")),
        (IDLE._replace(ps=2, ps_processors=0.9), ("ps", 2, 3, "processors")),
        (IDLE._replace(ps=2, ps_processors=3.0), ("ps", 2, 4, "processors")),
        (IDLE._replace(ps_memory=0.8, ps_processors=0.8), None),
        # Lookups: the busier of both roles, a quarter more of it.
        (IDLE._replace(lookups=0.3, ps_processors=0.7, worker_processors=0.5), ("ps", 1, 2, "lookups")),
        (IDLE._replace(lookups=0.3, ps_processors=0.5, worker_processors=0.7), ("embedding_workers", 1, 2, "lookups")),
        (
            IDLE._replace(embedding_workers=5, lookups=0.3, worker_processors=0.7),
            ("embedding_workers", 5, 7, "lookups"),
        ),
        # Neither is busy: the network, or other NN workers.
        (IDLE._replace(lookups=0.3, ps_processors=0.3, worker_processors=0.3), None),
        # Data: from loaders, unless these wait for embedding workers, or the source has no more.
        (IDLE._replace(loading=0.3, loaders_busy=0.9), ("data_loaders", 1, 2, "loading")),
        (IDLE._replace(loading=0.3, loaders_busy=0.2), None),
        (IDLE._replace(loading=0.3, worker_processors=0.9), ("embedding_workers", 1, 2, "loading")),
        (IDLE._replace(loading=0.3, loaders_busy=0.9, source_idle=True), None),
        # Fewer, if those that stay have little to do.
        (IDLE._replace(ps=4, ps_memory=0.4, ps_processors=0.2), ("ps", 4, 3, "idle")),
        (IDLE._replace(ps=4, ps_memory=0.5, ps_processors=0.2), None),
        (IDLE._replace(ps=4, ps_memory=0.4, ps_processors=0.3), None),
        (IDLE._replace(ps=4, ps_memory=0.4, rows_stay=True), None),
        (IDLE._replace(ps=4, ps_memory=0.4, lookups=0.06), None),
        (IDLE._replace(embedding_workers=2, worker_processors=0.1), ("embedding_workers", 2, 1, "idle")),
        (IDLE._replace(embedding_workers=2, worker_processors=0.2), None),
        (IDLE._replace(data_loaders=3, loaders_busy=0.2), ("data_loaders", 3, 2, "idle")),
        (IDLE._replace(data_loaders=3, loaders_busy=0.3), None),
        # The most urgent one first.
        (IDLE._replace(ps_memory=0.9, lookups=0.3, worker_processors=0.9), ("ps", 1, 2, "memory")),
    ],
)
def test_what_measurements_call_for(load, expected):
    assert change(lasting(ScalingRules(SCALER), load)) == expected


def test_the_evidence_has_the_measurements():
    load = IDLE._replace(ps=2, lookups=0.31, ps_processors=0.45, worker_processors=0.92)
    decision = lasting(ScalingRules(SCALER), load)
    assert str(decision) == (
        "embedding_workers 1 -> 2: NN workers wait for lookups for 31% of their time, above 10%; an embedding PS uses "
        "45% of its processors, embedding workers 92% of theirs"
    )


def test_increases_need_two_windows_and_decreases_five():
    idle, full = IDLE._replace(data_loaders=3), IDLE._replace(data_loaders=3, ps_memory=0.9)
    rules = ScalingRules(SCALER)
    assert lasting(rules, idle._replace(loading=0.07)) is None  # Neither more nor less.
    assert rules.decide(full, 200.0) == []
    assert change(rules.decide(full, 300.0)[0]) == ("ps", 1, 2, "memory")
    assert rules.decide(idle._replace(loading=0.07), 400.0) == []
    assert rules.decide(full, 500.0) == []
    rules.decide(idle._replace(loading=0.07), 600.0)
    assert [len(rules.decide(idle, 700.0 + window)) for window in range(6)] == [0, 0, 0, 0, 1, 1]
    # What was measured before a change does not count.
    rules.interrupt(800.0)
    assert [len(rules.decide(idle, 900.0 + window)) for window in range(5)] == [0, 0, 0, 0, 1]


def test_training_begins_with_a_cool_down():
    rules, full = ScalingRules(SCALER), IDLE._replace(ps_memory=0.9)
    assert [len(rules.decide(full, now)) for now in (1000.0, 1099.0, 1100.0)] == [0, 0, 1]


def test_what_stands_in_the_way():
    full = IDLE._replace(ps=4, ps_memory=0.9)
    assert lasting(ScalingRules(Scaler(ps=(1, 4), cool_down_seconds=100.0)), full).blocked == "4 is the maximum"
    assert lasting(ScalingRules(Scaler(cool_down_seconds=100.0)), full).blocked == "Scaler.ps has no bounds"
    for bounds, count in (((1, 3), 3), ((5, 8), 5)):
        blocked = lasting(ScalingRules(Scaler(ps=bounds, cool_down_seconds=100.0)), full).blocked
        assert blocked == f"4 is outside Scaler.ps = {bounds}; call scale(ps={count})"
    # Nobody needs to know that a number cannot be lower.
    idle = full._replace(ps_memory=0.1)
    assert lasting(ScalingRules(Scaler(ps=(4, 8), cool_down_seconds=100.0)), idle) is None


def test_something_else_is_done_if_a_decision_is_blocked():
    busy = IDLE._replace(ps=4, ps_memory=0.9, loading=0.5, loaders_busy=1.0)
    rules = ScalingRules(Scaler(ps=(1, 4), data_loaders=(1, 2), cool_down_seconds=100.0))
    lasting(rules, busy)
    assert [(d.role, d.blocked) for d in rules.decide(busy, 200.0)] == [
        ("ps", "4 is the maximum"),
        ("data_loaders", ""),
    ]


def test_numbers_that_cannot_be_are_blocked():
    asked = []

    def problem(counts):
        asked.append(counts)
        return "too many batches"

    rules = ScalingRules(SCALER, problem)
    assert lasting(rules, IDLE._replace(loading=0.5, loaders_busy=1.0)).blocked == "too many batches"
    assert asked[-1] == {"ps": 1, "embedding_workers": 1, "data_loaders": 2}


def test_tables_that_bound_the_memory_call_for_no_ps():
    assert lasting(ScalingRules(SCALER), IDLE._replace(ps_memory=0.95, memory_bounded=True)) is None


def test_what_fails_does_not_hinder_others_and_is_tried_again_later_and_later():
    rules = ScalingRules(SCALER)
    slow = IDLE._replace(ps_memory=0.9, loading=0.5, loaders_busy=1.0)
    decision = lasting(rules, slow)
    assert decision.role == "ps"
    rules.failed(decision, "no host", 100.0)
    assert lasting(rules, slow, 50.0) is None  # Processes were started and ended, so this is a cool-down, too.
    rules.decide(slow, 200.0)
    first, second = rules.decide(slow, 201.0)
    assert first.blocked == "it has failed, and is tried again after 200 s: no host"
    assert change(second) == ("data_loaders", 1, 2, "loading")
    assert rules.decide(slow, 299.0)[0].blocked
    decision = rules.decide(slow, 300.0)[0]
    assert change(decision) == ("ps", 1, 2, "memory")
    rules.failed(decision, "no host", 300.0)
    assert lasting(rules, slow, 599.0).blocked.startswith("it has failed, and is tried again after 400 s")
    decision = lasting(rules, slow, 700.0)
    rules.changed(decision, 800.0)  # That it has failed before is over.
    rules.failed(decision, "no host", 900.0)
    assert lasting(rules, slow._replace(ps_memory=0.85), 999.0).blocked.startswith(
        "it has failed, and is tried again after 200"
    )


def test_an_increase_that_has_not_helped_is_not_repeated():
    """As for PSs that share the memory of one host."""
    rules = ScalingRules(SCALER)
    full = IDLE._replace(ps_memory=0.9)
    rules.changed(lasting(rules, full), 110.0)
    full, quiet = full._replace(ps=2, ps_memory=0.88), IDLE._replace(ps=2, ps_memory=0.7)
    assert rules.decide(full, 209.0) == []  # The cool-down.
    assert rules.decide(full, 210.0)[0].blocked == "1 -> 2 did not help: 90% before, 88% after"
    assert [d.role for d in rules.decide(full._replace(ps_processors=0.9), 220.0)] == ["ps", "ps"]
    # Around the limit it is noise.
    for now in range(230, 290, 10):
        assert rules.decide(quiet if now % 30 else full, now) == []
    rules.decide(full, 290.0)
    assert rules.decide(full, 300.0)[0].blocked
    # It has helped once its reason has ended: then there is more to do than before.
    for now in range(310, 360, 10):
        assert rules.decide(quiet, now) == []
    rules.decide(full, 360.0)
    assert change(rules.decide(full, 370.0)[0]) == ("ps", 2, 3, "memory")


def test_quiet_windows_in_a_cool_down_do_not_show_that_an_increase_has_helped():
    rules = ScalingRules(SCALER)
    full = IDLE._replace(ps_memory=0.9)
    rules.changed(lasting(rules, full), 110.0)
    for now in range(120, 210, 10):
        rules.decide(IDLE._replace(ps=2), now)
    rules.decide(full._replace(ps=2), 210.0)
    assert rules.decide(full._replace(ps=2), 220.0)[0].blocked == "1 -> 2 did not help: 90% before, 90% after"


def test_an_increase_for_another_reason_does_not_hide_that_one_has_not_helped():
    rules = ScalingRules(SCALER)
    full = IDLE._replace(ps_memory=0.9)
    rules.changed(lasting(rules, full), 100.0)
    both = full._replace(ps=2, ps_processors=0.9)
    lasting(rules, both, 100.0)
    rules.changed(rules.decide(both, 200.0)[1], 200.0)
    assert lasting(rules, full._replace(ps=3), 200.0).blocked == "1 -> 2 did not help: 90% before, 90% after"


def test_an_increase_that_has_helped_is_followed_by_another_one():
    rules = ScalingRules(SCALER)
    slow = IDLE._replace(loading=0.8, loaders_busy=1.0)
    rules.changed(lasting(rules, slow), 100.0)
    slow = slow._replace(data_loaders=2, loading=0.7)
    assert change(lasting(rules, slow, 100.0)) == ("data_loaders", 2, 3, "loading")


def test_a_decrease_that_was_a_mistake_is_not_repeated_for_long():
    rules = ScalingRules(SCALER)
    idle = IDLE._replace(data_loaders=3)
    rules.changed(lasting(rules, idle), 100.0)
    slow = idle._replace(data_loaders=2, loading=0.5, loaders_busy=0.6)
    rules.changed(lasting(rules, slow, 100.0), 200.0)
    assert lasting(rules, idle, 300.0) is None
    assert change(lasting(rules, idle._replace(data_loaders=4), 400.0)) == ("data_loaders", 4, 3, "idle")  # By hand.
    assert lasting(rules, idle, 2499.0) is None
    assert change(lasting(rules, idle, 2600.0)) == ("data_loaders", 3, 2, "idle")


def test_after_a_change_by_anybody_nothing_is_changed_for_a_while():
    rules = ScalingRules(SCALER)
    assert lasting(rules, IDLE) is None
    full = IDLE._replace(ps=2, ps_memory=0.9)
    assert rules.decide(full, 110.0) == []  # `persia control scale` has added a PS.
    assert rules.decide(full, 209.0) == []
    (decision,) = rules.decide(full, 210.0)
    assert change(decision) == ("ps", 2, 3, "memory")
    rules.interrupt(300.0)  # Rows have moved.
    assert rules.decide(full, 398.0) == []
    assert rules.decide(full, 399.0) == []
    assert rules.decide(full, 400.0) == [decision]


@given(loads, st.integers(1, 8), st.integers(0, 8))
def test_no_decision_leaves_the_bounds(load, low, more):
    bounds = (low, low + more)
    scaler = Scaler(ps=bounds, embedding_workers=bounds, data_loaders=bounds, cool_down_seconds=100.0)
    decision = lasting(ScalingRules(scaler), load, 0.0)
    if decision is not None and not decision.blocked:
        assert low <= decision.after <= low + more
        assert decision.after != decision.before == load.count(decision.role)


def spread(load: MeasuredLoad, decision: ScalingDecision) -> MeasuredLoad:
    """The measurements if the same work is divided among the processes that there are now, and waits are as before."""
    ratio = decision.before / decision.after
    fields = {
        "ps": ("ps_memory", "ps_processors"),
        "embedding_workers": ("worker_processors",),
        "data_loaders": ("loaders_busy",),
    }[decision.role]
    return load._replace(**{decision.role: decision.after}, **{field: getattr(load, field) * ratio for field in fields})


@given(loads, st.booleans())
def test_a_change_does_not_call_for_its_opposite(load, helps):
    """Neither if the same is measured, nor if the same work is divided."""
    rules = ScalingRules(SCALER)
    decision = lasting(rules, load)
    if decision is None or decision.blocked:
        return
    rules.changed(decision, 100.0)
    after = spread(load, decision) if helps else load._replace(**{decision.role: decision.after})
    if decision.after > decision.before and helps and decision.reason in ("lookups", "loading"):
        after = after._replace(lookups=0.0, loading=0.0)  # It has ended the waits.
    again = lasting(rules, after, 100.0)
    if again is not None and again.role == decision.role and not again.blocked:
        assert (again.after > again.before) == (decision.after > decision.before)


@given(
    st.tuples(*(st.integers(1, 8) for _ in SCALED)),
    st.tuples(*(st.floats(0.05, 5.0) for _ in range(4))),
    st.floats(20.0, 400.0),
)
def test_changes_by_constant_work_end_and_keep_to_the_cool_downs(counts, work, window):
    """Work in processes: of memory and processors of PSs, of embedding workers, of data loaders. Waits when too few."""
    memory, servers, workers, loaders = work
    scaler = Scaler(**BOUNDS, window_seconds=window, cool_down_seconds=100.0)
    rules, now, changed = ScalingRules(scaler), 0.0, -math.inf
    directions: dict[str, list[int]] = {role: [] for role in SCALED}
    numbers = dict(zip(SCALED, counts, strict=True))
    for _ in range(40 * (math.ceil(100.0 / window) + DECREASE_WINDOWS)):
        now += window
        ps, of_workers, of_loaders = numbers.values()
        late = [servers / ps, workers / of_workers, loaders / of_loaders]
        load = MeasuredLoad(
            **numbers,
            lookups=max(0.0, 1 - 1 / max(late[0], late[1], 1.0)),
            loading=max(0.0, 1 - 1 / max(late[2], 1.0)),
            ps_memory=memory / ps,
            ps_processors=min(1.0, late[0]),
            worker_processors=min(1.0, late[1]),
            loaders_busy=min(1.0, late[2]),
        )
        decision = next((decision for decision in rules.decide(load, now) if not decision.blocked), None)
        if decision is None:
            continue
        assert now >= changed + scaler.cool_down_seconds
        changed = now
        numbers[decision.role] = decision.after
        directions[decision.role].append(decision.after - decision.before)
        rules.changed(decision, now)
    assert changed < now - 2 * (DECREASE_WINDOWS * window + scaler.cool_down_seconds)
    for steps in directions.values():
        assert not any(a * b < 0 for a, b in itertools.pairwise(steps))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ps": 3}, r"Invalid ps = 3; expected a minimum and a maximum number of processes, such as \(2, 8\)"),
        ({"ps": (0, 3)}, "Invalid minimum of ps = 0"),
        ({"data_loaders": (3, 2)}, "Invalid maximum of data_loaders = 2; expected a whole number from 3 to 256"),
        ({"embedding_workers": (1, 257)}, "Invalid maximum of embedding_workers = 257"),
        ({"waiting": 0.0}, "Invalid waiting"),
        ({"memory": 1.5}, "Invalid memory"),
        ({"window_seconds": 0.0}, "Invalid window_seconds"),
        ({"dry_run": "no"}, "Invalid dry_run"),
    ],
)
def test_arguments_that_are_not_valid(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Scaler(**arguments)
    with pytest.raises(ConfigError, match="Invalid scaler"):
        RayOptions(scaler=arguments)


def test_the_first_number_is_within_the_bounds():
    Scaler(ps=(2, 4)).check_count("ps", 2)
    Scaler().check_count("ps", 1)
    with pytest.raises(ConfigError, match=r"Invalid Ray.ps = 1: the scaler keeps it from 2 to 4. Start with a number"):
        Scaler(ps=(2, 4)).check_count("ps", 1)
