"""Calls to several peers at the same time."""

import functools
import threading

import pytest

from persia.errors import StoreError
from persia.rpc.fan_out import call_all, try_all
from support.rpc_samples import DEADLINE
from support.waiting import wait_until


def fail(message):
    raise StoreError(message)


def test_calls_run_concurrently_and_raise_the_first_failure():
    barrier = threading.Barrier(3, timeout=DEADLINE)
    assert call_all([lambda n=n: (barrier.wait(), n)[1] for n in range(3)]) == [0, 1, 2]
    assert call_all([]) == []
    assert call_all([lambda: 1]) == [1]
    with pytest.raises(StoreError, match="second"):
        call_all([lambda: 1, lambda: fail("second"), lambda: fail("third")])


def test_calls_of_stubs_are_sent_before_any_wait_without_threads(stub, service):
    names = []

    def release():
        wait_until(lambda: service.waiting == 3, "three blocked calls")
        names.extend(thread.name for thread in threading.enumerate())
        service.gate.set()

    releasing = threading.Thread(target=release)
    releasing.start()
    assert sorted(call_all([stub.wait, functools.partial(stub.wait), stub.wait])) == [1, 2, 3]
    releasing.join()
    assert "persia-call" not in names


def test_arguments_by_name_are_sent(stub):
    assert call_all([functools.partial(stub.defaults, n, text="y") for n in (1, 2)]) == ["y", "yy"]


def test_stubs_and_objects_of_this_process_mix(stub, service):
    calls = [functools.partial(stub.defaults, 2), functools.partial(service.defaults, 3), lambda: "here"]
    assert call_all(calls) == ["xx", "xxx", "here"]


def test_expected_errors_take_the_places_of_results():
    kept = try_all([lambda: 1, lambda: fail("lost")], StoreError)
    assert kept[0] == 1
    assert isinstance(kept[1], StoreError)
    with pytest.raises(StoreError, match="lost"):
        try_all([lambda: 1, lambda: fail("lost")], KeyError)
