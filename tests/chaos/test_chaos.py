"""A short run through faults of many kinds; `make chaos` runs longer ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import numpy as np
from chaos_checks import Course, check_rows
from chaos_invariants import Rows, counts, once, stale, sums, values
from chaos_records import Recorded, collect
from chaos_run import Dropped, Plan, run
from chaos_schedule import KINDS, MOVES, ROLES, draw

from persia.errors import ClosedError, StalePushError
from persia.modes import Gba

LEARNING_RATE = 0.5
LEARNING_RATE_OF_RUNS = 10.0


def test_a_schedule_is_drawn_from_its_seed():
    faults = draw(1, 1800.0, 60)
    assert faults == draw(1, 1800.0, 60) != draw(2, 1800.0, 60)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert sum((fault.kind, fault.role) == ("kill", "nn_worker") for fault in draw(1, 1.0, 600)) == 15


def test_only_some_kinds_are_drawn():
    faults = draw(1, 100.0, 22, ("kill", *MOVES))
    assert [fault.kind for fault in faults].count("move") == 12
    assert {fault.role for fault in faults if fault.kind == "kill"} == set(ROLES)
    assert {fault.kind for fault in draw(1, 100.0, 10, ("stop", "full_disk"))} == {"stop", "full_disk"}


class Role:
    """Takes every push, but those of the step 9."""

    def push(self, header, gradients, map_version=0):
        if header[3] == 9:
            raise StalePushError("too old")
        return {}


@pytest.fixture
def pushes(tmp_path):
    """Table `many`, all ids, and `id_0`, even ids only: of steps 1 and 2 two ranks, a repeated and a refused push."""
    role = Recorded(Role(), str(tmp_path), 2, 0)
    gradients = {name: (np.arange(4, dtype=np.uint64), np.ones((4, 2), np.float32)) for name in ("many", "id_0")}
    for header in ((0, 0, 1, 1, 3), (0, 1, 1, 1, 1), (0, 0, 2, 2, 4), (0, 0, 2, 2, 4)):
        role.push(header, gradients)
    with pytest.raises(StalePushError):
        role.push((0, 0, 9, 9, 4), gradients)
    return tmp_path


def test_pushes_are_counted_once_by_row(pushes):
    found = collect(pushes, by_step=False)
    assert found["many"].ids.tolist() == [0, 1, 2, 3]
    assert found["id_0"].ids.tolist() == [0, 2]
    assert (found["many"].begun[0], found["many"].done[0], found["many"].known[0]) == (4, 3, True)
    assert found["many"].sums.tolist() == [[3.0, 3.0]] * 4
    steps = collect(pushes, by_step=True)["many"]
    assert (steps.begun[0], steps.done[0], steps.sums[0].tolist()) == (3, 2, [2.0, 2.0])


def test_a_step_is_divided_by_the_rows_of_all_ranks_at_its_ps(tmp_path):
    """Also by those without the row; at another PS a repeated push may have come without data."""
    one, two = (np.array([id_], np.uint64) for id_ in (1, 2))
    gradient = np.ones((1, 2), np.float32)
    first, second = (Recorded(Role(), str(tmp_path), 1, rank) for rank in range(2))
    first.push((0, 0, 1, 1, 3), {"many": (one, gradient)})
    first.push((0, 1, 1, 1, 1), {})
    second.push((0, 0, 1, 1, 0), {})
    second.push((0, 1, 1, 1, 1), {"many": (two, gradient)})
    assert collect(tmp_path, by_step=True)["many"].sums.tolist() == [[0.75, 0.75], [1.0, 1.0]]


def test_a_row_that_is_wrong_is_found(pushes, monkeypatch):
    monkeypatch.setattr("chaos_invariants.LEAST_COMPARED", 4)
    monkeypatch.setattr("chaos_invariants._initial_values", lambda table, ids, dim, seed: np.full((len(ids), dim), 7.0))
    found = {"many": collect(pushes, by_step=False)["many"]}
    ids, embeddings = np.arange(4, dtype=np.uint64), np.full((4, 2), 7.0 - 3 * LEARNING_RATE)
    rows = {"many": Rows(ids, np.full(4, 3), embeddings)}
    assert counts(rows, found) == []
    assert values(rows, found, LEARNING_RATE, 0) == ([], {"many": 4})
    off = embeddings.copy()
    off[2, 1] += 0.01
    wrong, _ = values({"many": Rows(ids, np.full(4, 3), off)}, found, LEARNING_RATE, 0)
    assert len(wrong) == 1
    assert "('many', 2) is" in wrong[0]
    for updates in (2, 5):
        assert len(counts({"many": Rows(ids, np.array([3, updates, 3, 3]), embeddings)}, found)) == 1
    missing = {"many": Rows(ids[:3], np.full(3, 3), embeddings[:3])}
    assert len(counts(missing, found)) == len(values(missing, found, LEARNING_RATE, 0)[0]) == 1


def test_too_few_compared_rows_are_a_failure(pushes, monkeypatch):
    monkeypatch.setattr("chaos_invariants._initial_values", lambda table, ids, dim, seed: np.full((len(ids), dim), 7.0))
    found = {"many": collect(pushes, by_step=False)["many"]}
    rows = {"many": Rows(np.arange(4, dtype=np.uint64), np.full(4, 3), np.full((4, 2), 5.5))}
    assert values(rows, found, LEARNING_RATE, 0)[0] == ["rows: only 4 of many could be compared, not 40000"]


def test_a_row_that_is_no_sum_of_its_gradients_is_found(tmp_path, monkeypatch):
    """Four pushes to 40 rows: the third is missing from all, the second from some, and the fourth was a short step."""
    monkeypatch.setattr("chaos_invariants._initial_values", lambda table, ids, dim, seed: np.full((len(ids), dim), 7.0))
    role, rng = Recorded(Role(), str(tmp_path), 1, 0), np.random.default_rng(0)
    ids = np.arange(40, dtype=np.uint64)
    gradients = rng.normal(size=(4, 40, 4)).astype(np.float32)
    for number, values_ in enumerate(gradients, 1):
        role.push((0, 0, number, number, 4), {"many": (ids, values_)})
    pushes = collect(tmp_path, by_step=False)
    times = np.ones((4, 40))
    times[2] = 0  # In three rows each of them is the only one, so that it is known.
    times[1, :5] = 0
    times[3] = 3 / 2
    times[:, 5:8] = [[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 3 / 2]]

    def checked(times, off=0.0, most=200, least=40):
        embeddings = 7.0 - LEARNING_RATE / 3 * np.einsum("ni,nid->id", times, gradients)
        embeddings[8] += off
        rows = {"many": Rows(ids, np.full(40, 3), embeddings)}
        return sums(rows, pushes, LEARNING_RATE, 3, 0, most, least)

    found = int((times != 1).sum())
    assert checked(times, most=found) == ([], {"many": 40}, found)
    (wrong,) = checked(times, most=found - 1)[0]
    assert f"{found} gradients of rows are missing" in wrong
    assert checked(times, most=found, least=41)[0] == ["rows: only 40 of many could be compared, not 41"]
    (wrong,) = checked(times, 0.01)[0]
    assert "('many', 8) is no sum" in wrong
    times[0, 8] = 2
    (wrong,) = checked(times)[0]
    assert "('many', 8) is no sum" in wrong


def test_more_stale_gradients_than_restarts_explain_are_a_failure():
    assert stale(10_000, 1, 3, 2, 1000) == []
    assert len(stale(10_001, 1, 3, 2, 1000)) == len(stale(1, 0, 3, 2, 1000)) == 1


@pytest.fixture
def gba_pushes(tmp_path):
    """Twelve rows of `many`, each with a push of its own."""
    role = Recorded(Role(), str(tmp_path), 1, 0)
    for number in range(1, 13):
        if number != 9:
            gradient = np.full((1, 8), float(number), np.float32)
            role.push((0, 0, number, number, 256), {"many": (np.array([number], np.uint64), gradient)})
    return tmp_path


def test_a_change_of_numbers_explains_steps_of_gba_that_were_cut_short(gba_pushes, monkeypatch):
    """A push of a step of one counts three times as much as one of three."""
    monkeypatch.setattr("chaos_invariants._initial_values", lambda table, ids, dim, seed: np.full((len(ids), dim), 7.0))
    monkeypatch.setattr("chaos_checks.make_schema", lambda: SimpleNamespace(id_features=[0]))
    monkeypatch.setattr("chaos_checks.BATCH", 1)
    monkeypatch.setattr("chaos_checks.MODES", {"gba": Gba(3)})
    ids = np.array([number for number in range(1, 13) if number != 9], np.uint64)
    embeddings = np.repeat(7.0 - LEARNING_RATE_OF_RUNS * ids[:, None].astype(np.float64), 8, axis=1)
    rows = {"many": Rows(ids, np.ones(len(ids)), embeddings)}
    course = Course("gba", 2, restarts=0, changes=1, dropped=0, least=11)
    checked = check_rows(rows, gba_pushes, course)
    assert (checked.wrong, checked.compared, checked.counted, checked.differ) == ([], {"many": 11}, 11, 11)
    (wrong,) = check_rows(rows, gba_pushes, course._replace(changes=0)).wrong
    assert "11 gradients of rows are missing, or of short steps, at most 3 expected" in wrong
    (wrong,) = check_rows(rows, gba_pushes, course._replace(dropped=1)).wrong
    assert "stale gradients: 1 rows dropped, at most 0 expected" in wrong


def test_other_modes_are_checked_by_the_sum_of_their_steps(gba_pushes, monkeypatch):
    monkeypatch.setattr("chaos_invariants._initial_values", lambda table, ids, dim, seed: np.full((len(ids), dim), 7.0))
    ids = np.array([number for number in range(1, 13) if number != 9], np.uint64)
    embeddings = np.repeat(7.0 - LEARNING_RATE_OF_RUNS * ids[:, None].astype(np.float64), 8, axis=1)
    rows = {"many": Rows(ids, np.ones(len(ids)), embeddings)}
    course = Course("sync", 2, restarts=0, changes=0, dropped=0, least=11)
    assert check_rows(rows, gba_pushes, course) == ([], {"many": 11}, 11, 0)
    embeddings[3] += 1
    (wrong,) = check_rows(rows, gba_pushes, course).wrong
    assert "('many', 4) is" in wrong


def test_a_row_on_two_pss_is_found():
    rows = {"many": Rows(np.array([1, 4, 4, 5], np.uint64), np.ones(4), np.zeros((4, 2)))}
    assert once(rows) == ["rows: ('many', 4) is on two PSs"]


def test_stale_rows_of_a_ps_that_leaves_meanwhile_are_left_out():
    def left():
        raise ClosedError("it has left")

    dropped = Dropped()
    dropped.add([SimpleNamespace(row_staleness=lambda: SimpleNamespace(stale=3)), SimpleNamespace(row_staleness=left)])
    assert dropped.rows == 3
    dropped.add([SimpleNamespace(row_staleness=lambda: SimpleNamespace(stale=2))])  # Of a process that has restarted.
    assert dropped.rows == 5


@pytest.mark.processes
@pytest.mark.usefixtures("ray_here")
def test_training_goes_on_through_faults(tmp_path):
    found = run(Plan(seed=1, seconds=14.0, faults=12, steps=600), tmp_path, print)
    assert found.wrong == []
    assert sum(found.made.values()) == 12
