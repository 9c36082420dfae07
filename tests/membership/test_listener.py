"""Following the membership at the coordinator, and waiting for members to join."""

import threading

import pytest

from persia.coordinator import CoordinatorServer
from persia.errors import ClosedError, DeadlineError, PersiaError
from persia.membership import Listener, await_members, listener

TIMEOUT = 20.0


class Failing:
    """A coordinator that fails once, like one that is being restarted."""

    def __init__(self, coordinator, error):
        self.coordinator, self.error = coordinator, error
        self.calls = 0

    def membership(self, newer_than=0, timeout=0.0):
        self.calls += 1
        if self.calls == 2:
            raise self.error
        return self.coordinator.membership(newer_than, timeout)


def test_every_change_is_passed_on_the_first_by_the_constructor():
    coordinator = CoordinatorServer()
    coordinator.join("embedding_worker", 0, "here")
    seen, callers, came = [], [], threading.Condition()

    def changed(membership):
        with came:
            callers.append(threading.current_thread())
            seen.append(len(membership.members))
            came.notify_all()

    following = Listener(coordinator, changed)
    assert seen == [1]
    coordinator.join("embedding_worker", 1, "there")
    with came:
        assert came.wait_for(lambda: seen == [1, 2], TIMEOUT)
    assert [caller is threading.current_thread() for caller in callers] == [True, False]
    following.close()


def test_a_call_that_fails_is_repeated_after_a_pause(monkeypatch):
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.01)
    coordinator, changed = CoordinatorServer(), threading.Event()
    failing = Failing(coordinator, PersiaError("It is being restarted."))
    following = Listener(failing, lambda membership: changed.set() if membership.members else None)
    coordinator.join("data_loader", 0, "here")
    assert changed.wait(TIMEOUT)
    assert failing.calls > 2
    following.close()


def test_it_ends_with_its_connection():
    before = set(threading.enumerate())
    Listener(Failing(CoordinatorServer(), ClosedError("It is closed.")), lambda _: None)
    for thread in set(threading.enumerate()) - before:
        thread.join(TIMEOUT)
        assert not thread.is_alive()


def test_members_are_awaited_by_role_and_late_ones_counted():
    coordinator = CoordinatorServer()
    for rank in (2, 0, 1):
        coordinator.join("embedding_ps", rank, f"address {rank}")
    coordinator.join("data_loader", 0, "")
    coordinator.depart("embedding_ps", 1, 1, "it died")
    assert [m.rank for m in await_members(coordinator, "embedding_ps", 2, TIMEOUT)] == [0, 2]
    with pytest.raises(DeadlineError, match="Only 2 of 3 processes of the role embedding PS joined") as caught:
        await_members(coordinator, "embedding_ps", 3, 0.05)
    assert caught.value.fields["joined"] == [0, 2]


def test_a_change_that_could_not_be_followed_is_tried_again(monkeypatch, caplog):
    monkeypatch.setattr(listener, "PAUSE_SECONDS", 0.01)
    coordinator, followed = CoordinatorServer(), threading.Event()
    tries = []

    def changed(membership):
        if membership.members:
            tries.append(membership.version)
            if len(tries) == 1:
                raise OSError("Too many open files")
            followed.set()

    following = Listener(coordinator, changed)
    coordinator.join("data_loader", 0, "here")
    assert followed.wait(TIMEOUT)
    assert tries[0] == tries[1]
    assert "is retried" in caplog.text
    following.close()
