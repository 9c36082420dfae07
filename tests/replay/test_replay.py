"""Real gradients along schedules: Gba against Sync, switching, and the paper's Algorithm 2 written out."""

from collections import defaultdict
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import DataError
from persia.modes import Async, Bsp, Gba, HopBw, Hybrid, Sync
from persia.replay import (
    PlainRows,
    PlainTable,
    ReplayDense,
    ReplayRows,
    Setting,
    Slowdown,
    TakenGradient,
    Trace,
    replay,
    simulate,
    steady,
)
from persia.replay.plain import PlainOptimizer
from persia.store.table_config import TableConfig
from persia.testing.logistic import IDS, LOCAL, Problem, lock_step
from support.examples import examples
from support.twins import optimizers as reference_optim


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("reduction", ["per_id", "global"])
@pytest.mark.parametrize(("dtype", "steps", "bound"), [(np.float64, 50, 1e-9), (np.float32, 10, 1e-5)])
def test_gba_in_lock_step_is_sync(workers, reduction, dtype, steps, bound):
    sync = Problem(dtype).run(lock_step(Sync(reduction), workers, steps * workers))
    gba = Problem(dtype).run(lock_step(Gba(LOCAL * workers, reduction=reduction), workers, steps * workers))
    assert sync.updates == gba.updates == steps
    assert sync.apart(gba) <= bound
    assert sync.apart(Problem(dtype)) > 0.1


def test_switching_in_lock_step_changes_nothing():
    """Adam's state goes along, and tokens continue from k."""
    throughout = Problem().run(lock_step(Sync(), 4, 240))
    switched, step = Problem(), 0
    for number, mode in enumerate((Sync(), Gba(4 * LOCAL, tolerance=0), Sync())):
        schedule = lock_step(mode, 4, 80, step=step, start=80 * number)
        switched.run(schedule)
        step = schedule.end_step
    assert step == 60
    assert throughout.apart(switched) <= 1e-9


def test_bsp_and_hop_bw_without_backup_are_sync_in_lock_step():
    sync = Problem().run(lock_step(Sync(), 4, 80))
    for mode in (Bsp(4), HopBw(0)):
        assert sync.apart(Problem().run(lock_step(mode, 4, 80))) <= 1e-9


def test_a_delay_changes_what_is_learned():
    sync = Problem(optimizer="sgd").run(lock_step(Sync(), 1, 60))
    for mode in (Hybrid(2, warmup=0), Async()):
        late = Problem(optimizer="sgd").run(lock_step(mode, 4, 60))
        assert sync.apart(late) > 1e-3


@st.composite
def settings_of_all_kinds(draw):
    workers = draw(st.integers(1, 5))
    parts = [
        [Slowdown(0.0, draw(st.floats(0.5, 9.0))), Slowdown(2.0, draw(st.floats(0.5, 9.0)))] for _ in range(workers)
    ]
    crashes = draw(st.lists(st.tuples(st.floats(0, 20), st.integers(0, workers - 1)), max_size=3))
    return Setting(Trace(parts, 5.0), local_batch=LOCAL, crashes=crashes)


class AlgorithmTwo:
    """GBA's appendix B, Algorithm 2, literally but for the order of its lines 19 and 21: buffers, not sums."""

    def __init__(self, problem, group, tolerance):
        self.problem, self.group, self.tolerance = problem, group, tolerance
        self.rows, self.weights = problem.table, problem
        self.buffer = []
        self.tags = defaultdict(int)
        self.k = 0

    def push(self, token, gradient):
        self.buffer.append((token, gradient))
        if len(self.buffer) == self.group:
            self.flush()

    def flush(self):
        dense = [(0 if self.k - token > self.tolerance else 1, g["dense-0"]) for token, g in self.buffer]
        if any(weight for weight, _ in dense):
            self.problem.update(sum(weight * g for weight, g in dense) / len(dense), self.k)
        by_id = defaultdict(list)
        for token, g in self.buffer:
            for id_, row in zip(*g["ps-0"]["item"], strict=True):
                tag = self.tags[int(id_)]
                version = tag + 1 if tag else 0  # A tag of 0 is "never" as well as "in step 0".
                by_id[int(id_)].append((0 if version - token > self.tolerance else 1, row))
        for id_, parts in by_id.items():
            if any(weight for weight, _ in parts):
                mean = sum(weight * row for weight, row in parts) / len(parts)
                self.rows.update(np.array([id_], np.uint64), mean[None])
                self.tags[id_] = self.k
        self.buffer.clear()
        self.k += 1


@settings(deadline=None, max_examples=examples(60))
@given(settings_of_all_kinds(), st.integers(1, 6), st.integers(0, 2), st.integers(1, 60))
def test_running_sums_do_what_algorithm_two_does_with_buffers(setting, group, tolerance, batches):
    schedule = simulate(Gba(group * LOCAL, tolerance, "per_id"), setting, batches)  # The divisor of its line 23.
    problem, written_out = Problem(), Problem()
    reference = AlgorithmTwo(written_out, group, tolerance)
    reads = {}
    problem.run(schedule)
    for event in schedule.events:
        at = reads.setdefault(event.batch, {})
        if event.kind == "lookup":
            ids = np.unique(written_out.data(event.batch)[0])
            at["ps-0"] = {"item": (ids, written_out.table.rows[ids.astype(int)])}
        elif event.kind == "pull":
            at["dense-0"] = written_out.weights.copy()
        elif event.kind == "push" and event.server == "ps-0":
            reference.push(event.token, written_out.compute(event.batch, at))
    if reference.buffer:
        reference.flush()
    assert problem.apart(written_out) <= 1e-9
    assert problem.updates == written_out.updates
    for id_ in range(IDS):
        assert problem.servers["ps-0"].last_step("item", id_) == reference.tags[id_]


def test_a_row_that_nobody_touched_takes_an_old_gradient():
    """Dense weights decay by k, rows by their own last change."""
    table = PlainTable(np.zeros((4, 1)), "sgd", 1.0)
    server = ReplayRows(PlainRows({"item": table}), lambda batch: {})
    server.begin(Gba(1, tolerance=1))
    one = np.ones((1, 1))
    ids = {i: np.array([i], np.uint64) for i in range(4)}
    for step in range(5):
        server.add({"item": (ids[0], one)}, TakenGradient(step, step, 1.0, 1.0))
        server.apply(step)
    old = TakenGradient(step=5, token=2, decay=0.0, share=1.0)
    server.add({"item": (ids[1], one)}, old)
    server.add({"item": (ids[0], one)}, old)
    server.apply(5)
    assert table.rows[:, 0].tolist() == [-5.0, -0.5, 0.0, 0.0]  # Divided by both gradients of step 5.
    assert [server.last_step("item", i) for i in range(3)] == [4, 5, 0]


@pytest.mark.parametrize(("token", "applied"), [(4, 1), (3, 1), (2, 0)])
def test_a_row_of_every_step_is_as_old_as_dense_parameters(token, applied):
    table = PlainTable(np.zeros((1, 1)), "sgd", 1.0)
    server = ReplayRows(PlainRows({"item": table}), lambda batch: {})
    server.begin(Gba(1, tolerance=1))
    id_ = np.array([0], np.uint64)
    for step, age in ((0, 0), (1, 0), (2, 0), (3, 0), (4, 4 - token)):
        server.add({"item": (id_, np.ones((1, 1)))}, TakenGradient(step, step - age, 1.0, 1.0))
        server.apply(step)
    assert table.rows[0, 0] == -4.0 - applied


def test_a_row_from_after_a_rollback_counts_as_never_touched():
    table = PlainTable(np.zeros((1, 1)), "sgd", 1.0)
    server = ReplayRows(PlainRows({"item": table}), lambda batch: {})
    server.begin(Gba(1, tolerance=1))
    id_ = np.array([0], np.uint64)
    for step in (*range(20), *range(5, 15)):
        server.add({"item": (id_, np.ones((1, 1)))}, TakenGradient(step, step, 1.0, 1.0))
        server.apply(step)
    assert table.rows[0, 0] == -30.0
    server.add({"item": (id_, np.ones((1, 1)))}, TakenGradient(15, 12, 1.0, 1.0))  # Changed in step 14 since.
    server.apply(15)
    assert table.rows[0, 0] == -30.0


def test_a_stale_gradient_counts_in_the_divisor():
    table = PlainTable(np.zeros((2, 1)), "sgd", 1.0)
    server = ReplayRows(PlainRows({"item": table}), lambda batch: {})
    server.begin(Gba(2, tolerance=0))
    id_ = np.array([1], np.uint64)
    for step, tokens in ((3, (3, 3)), (4, (1, 4))):
        for token in tokens:
            server.add({"item": (id_, np.ones((1, 1)))}, TakenGradient(step, token, 1.0, 1.0))
        server.apply(step)
    assert table.rows[1, 0] == -1.5


@pytest.mark.parametrize("optimizer", get_args(PlainOptimizer))
def test_a_plain_table_has_the_rules_of_the_store(optimizer):
    rng = np.random.default_rng(5)
    table = PlainTable(rng.normal(size=(2, 3)), optimizer, 0.1)
    config = TableConfig("t", 3, optimizer=optimizer)
    row, state = table.rows[1].astype(np.float32), np.zeros(config.state_width, np.float32)
    for count in range(1, 6):
        gradient = rng.normal(size=3)
        table.update(np.array([1], np.uint64), gradient[None])
        reference_optim.apply(config, row, state, gradient.astype(np.float32), 0.1, count)
    np.testing.assert_allclose(table.rows[1], row, rtol=1e-5)


def test_a_push_without_data_counts():
    changes = []
    server = ReplayDense(lambda: np.zeros(1), lambda gradient, step: changes.append((step, gradient.tolist())))
    server.add(np.ones(1), TakenGradient(0, 0, 1.0, 1.0))
    server.add(None, TakenGradient(0, 0, 1.0, 1.0))
    server.apply(0)
    server.add(np.ones(1), TakenGradient(0, 0, 0.0, 1.0))
    server.apply(1)
    assert changes == [(0, [0.5])]


class Forgetful(Problem):
    """The gradients of some batches are zeros."""

    def compute(self, batch, found):
        given = super().compute(batch, found)
        if batch % 5 != 3:
            return given
        ids, values = given["ps-0"]["item"]
        return {"ps-0": {"item": (ids, 0 * values)}, "dense-0": 0 * given["dense-0"]}


def test_an_empty_push_counts_like_a_gradient_of_zeros():
    schedule = lock_step(Bsp(4), 4, 16)
    replace = msgspec.structs.replace
    events = [replace(e, empty=e.kind == "push" and e.batch % 5 == 3) for e in schedule.events]
    marked = replace(schedule, events=events)
    zeros = Forgetful(optimizer="sgd").run(schedule)
    assert Problem(optimizer="sgd").run(marked).apart(zeros) == 0.0
    assert zeros.apart(Problem(optimizer="sgd").run(schedule)) > 1e-3
    assert marked.summary().applied_rows == schedule.summary().applied_rows - 3 * LOCAL


def test_a_push_without_a_gradient_has_no_staleness():
    schedule = simulate(Gba(4 * LOCAL), Setting(steady([1.0, 1.0, 1.0, 4.0]), local_batch=LOCAL), 32)
    replace = msgspec.structs.replace
    marked = replace(schedule, events=[replace(e, empty=e.kind == "push" and e.worker == 3) for e in schedule.events])
    whole, without = schedule.summary(), marked.summary()
    assert whole.staleness_max > without.staleness_max
    assert whole.row_staleness_max > without.row_staleness_max


def test_a_schedule_that_contradicts_itself_is_refused():
    schedule = lock_step(Gba(4 * LOCAL), 4, 16)
    events = schedule.events
    first = next(i for i, e in enumerate(events) if e.kind == "apply")
    replace = msgspec.structs.replace
    for broken, message in (
        (events[:first] + events[first + 1 :], "k is 0 here"),
        ([replace(e, version=e.version + (i > 40)) for i, e in enumerate(events)], "k is"),
        ([replace(e, version=0, rows=0) for e in events if e.kind == "push"], "must be applied"),
        ([e for e in events if e.kind != "pull"], "not read"),
    ):
        with pytest.raises(DataError, match=message):
            Problem().run(replace(schedule, events=broken))
    with pytest.raises(DataError, match="dense-0"):
        replay(schedule, {"ps-0": Problem().servers["ps-0"]}, Problem().compute)
    other = replace(schedule, mode=HopBw(0), events=[replace(e, token=e.token - 1) for e in events])
    with pytest.raises(DataError, match="'drop'"):
        Problem().run(other)
