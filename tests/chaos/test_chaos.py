"""A short run through faults of many kinds; `make chaos` runs longer ones."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

import numpy as np
from chaos_invariants import Rows, counts, stale, sums, values
from chaos_records import Recorded, collect
from chaos_run import Plan, run
from chaos_schedule import KINDS, draw

from persia.errors import StalePushError

LEARNING_RATE = 0.5


def test_a_schedule_is_drawn_from_its_seed():
    faults = draw(1, 1800.0, 60)
    assert faults == draw(1, 1800.0, 60) != draw(2, 1800.0, 60)
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)
    assert {fault.kind for fault in faults} == set(KINDS)
    assert sum((fault.kind, fault.role) == ("kill", "nn_worker") for fault in draw(1, 1.0, 600)) == 15


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


@pytest.mark.processes
@pytest.mark.usefixtures("ray_here")
def test_training_goes_on_through_faults(tmp_path):
    found = run(Plan(seed=1, seconds=14.0, faults=12, steps=600), tmp_path, print)
    assert found.wrong == []
    assert sum(found.made.values()) == 12
