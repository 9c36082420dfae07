"""Which rows a PS takes for changed since a moment."""

import threading
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persia.batching import ChangeFilter
from persia.ps import recent_changes
from persia.ps.recent_changes import RecentChanges
from persia.types import Moment, Packed

TABLES = [3, 8]


def packed(first, second=()):
    """Ids of the two tables."""
    return Packed.of({"a": np.array(first, np.uint64), "b": np.array(second, np.uint64)}, np.uint64)


def update(changes, first, second=()):
    with changes.updating(TABLES, packed(first, second)):
        pass


def changed(changes, seen, first, second=()):
    """The ids, of those given, that are taken for changed, by table."""
    ids = packed(first, second)
    places, found = changes.changed(TABLES, ids, seen)
    assert places.buffer.dtype == np.uint32
    assert list(places.names) == ["a", "b"]
    assert all((ids[name][places[name]] == found[name]).all() for name in ids)
    return [ids[name][places[name]].tolist() for name in ("a", "b")]


class Updating:
    """An update in another thread, which has begun when this is made, and ends with `end`."""

    def __init__(self, changes, ids):
        begun, self._may_end = threading.Event(), threading.Event()

        def run():
            with changes.updating(TABLES, packed(ids)):
                begun.set()
                assert self._may_end.wait(20)

        self._thread = threading.Thread(target=run)
        self._thread.start()
        assert begun.wait(20)

    def end(self):
        self._may_end.set()
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_updated_rows_have_changed():
    changes = RecentChanges()
    seen = changes.now()
    assert changed(changes, seen, [1, 2, 3], [1, 2]) == [[], []]
    update(changes, [3, 1], [2])
    assert changed(changes, seen, [1, 2, 3], [1, 2]) == [[1, 3], [2]]
    later = changes.now()
    assert later == Moment(seen.epoch, seen.version + 1)
    assert changed(changes, later, [1, 2, 3], [1, 2]) == [[], []]
    update(changes, [2])
    assert changed(changes, later, [1, 2, 3], [1, 2]) == [[2], []]
    assert changed(changes, seen, [1, 2, 3], [1, 2]) == [[1, 2, 3], [2]]
    assert changed(changes, seen, []) == [[], []]


def test_tables_have_their_own_ids():
    changes = RecentChanges()
    seen = changes.now()
    update(changes, range(100))
    assert changed(changes, seen, range(100), range(100)) == [list(range(100)), []]


def test_nothing_is_marked_before_rows_are_looked_up_ahead(monkeypatch):
    made = []

    class Counted(ChangeFilter):
        def __init__(self):
            super().__init__()
            made.append(self)
            self.marked = 0

        def mark(self, *arguments):
            self.marked += 1
            super().mark(*arguments)

    monkeypatch.setattr(recent_changes, "ChangeFilter", Counted)
    changes = RecentChanges()
    for _ in range(3):
        update(changes, [1])
    assert not made
    changes.now()
    update(changes, [1])
    assert changes.now().version == 4
    assert [marks.marked for marks in made] == [1]


@pytest.mark.parametrize("version", [0, 1, 2])
def test_moments_before_the_first_mark_know_no_changes(version):
    changes = RecentChanges()
    epoch = RecentChanges.now(changes).epoch
    changes = RecentChanges()
    for _ in range(3):
        update(changes, [1])
    first = changes.now()
    assert first.version == 3
    assert first.epoch != epoch
    assert changed(changes, Moment(first.epoch, version), [1, 7], [4]) == [[1, 7], [4]]
    assert changed(changes, first, [1, 7], [4]) == [[], []]


def test_before_any_lookup_ahead_everything_has_changed():
    """The moment is then of another PS, or of an earlier process."""
    changes = RecentChanges()
    assert changed(changes, Moment(changes._epoch, 0), [1, 7], [4]) == [[1, 7], [4]]
    assert changed(changes, Moment(1, 0), [], []) == [[], []]


def test_an_update_in_progress_at_the_first_lookup():
    """It is not marked, so a moment before its end knows nothing; rows that are read after it are known."""
    changes = RecentChanges()
    running = Updating(changes, [5])
    seen = changes.now()
    assert changed(changes, seen, [5, 6]) == [[5, 6], []]
    running.end()
    assert changed(changes, seen, [5, 6]) == [[5, 6], []]
    after = changes.now()
    assert changed(changes, after, [5, 6]) == [[], []]
    update(changes, [6])
    assert changed(changes, after, [5, 6]) == [[6], []]


def test_an_update_in_progress_during_a_lookup():
    """The rows may lack it, also where its ids are marked already."""
    changes = RecentChanges()
    before = changes.now()
    running = Updating(changes, [5])
    seen = changes.now()
    assert seen == before
    assert changed(changes, seen, [5, 6]) == [[5], []]  # Perhaps already.
    again = changes.now()
    running.end()
    assert changed(changes, again, [5, 6]) == [[5], []]  # And again: it was not done.
    assert changed(changes, changes.now(), [5, 6]) == [[], []]


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)])
def test_updates_that_overlap(order):
    """Moments lie before the oldest update in progress, and miss none of the later ones."""
    changes = RecentChanges()
    start = changes.now().version
    running = [Updating(changes, [number]) for number in range(3)]
    left = {0, 1, 2}
    for number in order:
        seen = changes.now()
        assert seen.version == start + min(left)
        found = set(changed(changes, seen, range(5))[0])
        assert left <= found <= {0, 1, 2}
        running[number].end()
        left.remove(number)
        assert number in changed(changes, seen, range(5))[0]
    assert changes.now().version == start + 3
    assert changed(changes, changes.now(), range(5)) == [[], []]


def test_an_update_that_fails_ends():
    changes = RecentChanges()
    seen = changes.now()
    with pytest.raises(KeyError), changes.updating(TABLES, packed([1])):
        raise KeyError
    assert changed(changes, seen, [1, 2]) == [[1], []]  # A part of it may have been applied.
    assert changes.now().version == seen.version + 1


def test_another_epoch_after_other_changes():
    changes = RecentChanges()
    seen = changes.now()
    changes.forget()
    assert changed(changes, seen, [1, 2], [3]) == [[1, 2], [3]]
    after = changes.now()
    assert after.epoch != seen.epoch
    assert changed(changes, after, [1, 2], [3]) == [[], []]
    update(changes, [2])
    assert changed(changes, after, [1, 2], [3]) == [[2], []]
    assert changed(changes, seen, [1, 2], [3]) == [[1, 2], [3]]


def test_epochs_fit_a_message_and_differ():
    epochs = [RecentChanges().now().epoch for _ in range(20)]
    assert len(set(epochs)) == 20
    assert min(epochs) >= 0
    assert max(epochs) < 2**63


def test_another_epoch_when_versions_run_out(monkeypatch):
    """Updates of the epoch before may be in progress: until they have ended, moments know nothing."""
    monkeypatch.setattr(recent_changes, "LAST_VERSION", 4)
    changes = RecentChanges()
    seen = changes.now()
    update(changes, [1])
    update(changes, [2])
    running = Updating(changes, [3])
    update(changes, [4])
    last = changes.now()
    assert last == Moment(seen.epoch, 2)
    assert changed(changes, last, range(6)) == [[3, 4], []]
    for _ in range(3):
        update(changes, [4])
    assert changed(changes, last, range(6)) == [list(range(6)), []]
    during = changes.now()
    assert during.epoch != seen.epoch
    assert changed(changes, during, range(6)) == [list(range(6)), []]
    running.end()
    assert changed(changes, during, range(6)) == [list(range(6)), []]  # The rows may lack it.
    now = changes.now()
    assert now == Moment(during.epoch, 3)
    assert changed(changes, now, range(6)) == [[], []]
    update(changes, [2])
    assert changed(changes, now, range(6)) == [[2], []]


ids = st.lists(st.integers(0, 5), max_size=4, unique=True)
actions = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), ids),
        st.tuples(st.just("apply"), st.integers(0, 9)),
        st.tuples(st.just("end"), st.integers(0, 9)),
        st.tuples(st.just("lookup"), ids),
        st.tuples(st.just("refresh"), st.integers(0, 9)),
        st.tuples(st.just("forget"), st.just(None)),
    ),
    max_size=40,
)


@given(actions, st.sampled_from([recent_changes.LAST_VERSION, 4]))
def test_every_changed_row_is_found(steps, last_version):
    """Against rows that count their updates: what is refreshed has all updates that have ended, whatever overlaps."""
    with mock.patch.object(recent_changes, "LAST_VERSION", last_version):
        check(steps)


def check(steps):
    changes, rows = RecentChanges(), dict.fromkeys(range(6), 0)
    running, copies, complete = [], [], dict.fromkeys(range(6), 0)
    for what, argument in steps:
        if what == "begin":  # Its ids are marked; none of its rows is written.
            update = changes.updating(TABLES, packed(argument))
            update.__enter__()
            running.append([update, list(argument), False])
        elif what == "apply" and running:
            one = running[argument % len(running)]
            if not one[2]:
                one[2] = True
                for id_ in one[1]:
                    rows[id_] += 1
        elif what == "end" and running:
            update, own, applied = running.pop(argument % len(running))
            for id_ in own:
                rows[id_] += not applied
                complete[id_] += 1
            update.__exit__(None, None, None)
        elif what == "lookup":
            seen = changes.now()
            copies.append([seen, {id_: rows[id_] for id_ in argument}])
        elif what == "refresh" and copies:
            copy = copies[argument % len(copies)]
            now = changes.now()
            for id_ in changed(changes, copy[0], list(copy[1]))[0]:
                copy[1][id_] = rows[id_]
            copy[0] = now
            assert all(value >= complete[id_] for id_, value in copy[1].items())
        elif what == "forget":
            for id_ in rows:  # Rows were set, to a value that no update has.
                rows[id_] += 1
                complete[id_] += 1
            changes.forget()
    for update, own, applied in running:
        for id_ in own:
            rows[id_] += not applied
        update.__exit__(None, None, None)
    for seen, copy in copies:
        for id_ in changed(changes, seen, list(copy))[0]:
            copy[id_] = rows[id_]
        assert copy == {id_: rows[id_] for id_ in copy}
