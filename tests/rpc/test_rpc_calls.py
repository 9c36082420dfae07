"""Many calls at a time, deadlines, errors, iterators, back-pressure, the end of either side."""

import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest

from persia import rpc
from persia.errors import ClosedError, ConfigError, DeadlineError, PersiaError, RemoteError, StoreError, WireError
from persia.rpc import port
from persia.rpc.server import DELIVERY_SECONDS
from support.rpc_samples import DEADLINE, OddError, Sample, Service, expire, expire_iterators
from support.waiting import wait_until


def test_many_calls_from_many_threads(stub):
    def work(seed):
        rng = np.random.default_rng(seed)
        for _ in range(30):
            array = rng.random(int(rng.integers(0, 40_000)), np.float32)
            method = stub.floats if rng.random() < 0.5 else stub.floats_inline
            assert np.array_equal(method(array), array)
        return True

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(work, range(16)))
    assert rpc.statistics(stub)["in_flight"] == 0


def test_started_calls_run_at_the_same_time(stub, service):
    futures = [rpc.start(stub.wait) for _ in range(200)]
    wait_until(lambda: service.waiting == 200, "200 blocked calls")
    assert stub.defaults(2) == "xx"  # Others are served meanwhile.
    service.gate.set()
    assert sorted(future.result() for future in futures) == list(range(1, 201))
    assert futures[0].result() == futures[0].result()


def test_start_calls_objects_of_this_process_as_well(service):
    assert rpc.start(service.defaults, 2, text="y").result() == "yy"
    failed = rpc.start(service.fail, "persia")
    for _ in range(2):
        with pytest.raises(StoreError):
            failed.result()
    assert rpc.within(service, 1.0) is service
    assert rpc.statistics(service) == {}
    rpc.close(service)


def test_replies_are_taken_even_if_nobody_waits(stub, service, server):
    for _ in range(300):
        rpc.start(stub.floats, np.zeros(1 << 16, np.float32))
    wait_until(lambda: rpc.statistics(stub)["in_flight"] == 0, "all replies")
    assert server.statistics()["replies_dropped"] == 0


def test_a_late_reply_names_peer_address_operation(stub, service, server):
    late = rpc.start(stub.wait)
    wait_until(lambda: service.waiting == 1)
    expire(stub)
    with pytest.raises(DeadlineError, match=r"sample 0 at tcp://127.0.0.1:\d+ is late: wait ") as caught:
        late.result()
    assert caught.value.fields == {
        "peer": "sample 0", "address": server.address, "operation": "wait", "seconds": DEADLINE,
    }  # fmt: skip
    service.gate.set()
    wait_until(lambda: service.ran == 1)
    # Whoever receives next meets the late reply, too.
    wait_until(lambda: stub.defaults(1) == "x" and rpc.statistics(stub)["late_replies"] == 1)
    assert stub.wait() == 2


def test_nobody_there():
    stub = rpc.connect("tcp://127.0.0.1:1", Sample, peer="sample 7", timeout=0.05)
    with pytest.raises(DeadlineError, match="nothing answers there"):
        stub.wait()
    future = rpc.start(stub.wait)
    wait_until(lambda: rpc.statistics(stub)["in_flight"] == 0, "a started call expires by itself")
    with pytest.raises(DeadlineError):
        future.result()
    rpc.close(stub)


def test_expired_calls_are_not_run(service):
    limits = rpc.Limits(threads=1)
    with rpc.serve(service, protocol=Sample, limits=limits) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        first = rpc.start(stub.wait)
        wait_until(lambda: service.waiting == 1)
        patience = 0.3
        late = rpc.start(rpc.within(stub, patience).nothing, 8)
        counts = server.statistics
        wait_until(lambda: counts()["requests_held"] + counts()["expired"] == 2, "the arrival of both requests")
        time.sleep(patience)  # A server counts from the arrival, which is later than the client's start.
        service.gate.set()
        with pytest.raises(DeadlineError):
            late.result()
        assert first.result() == 1
        assert stub.defaults(1) == "x"
        assert service.seen is None
        assert server.statistics()["expired"] == 1
        rpc.close(stub)


def test_errors_of_persia_come_back_as_they_were(stub, server):
    with pytest.raises(StoreError, match="The store is full; delete rows") as caught:
        stub.fail("persia")
    assert caught.value.fields == {"table": "item", "rows": 7, "path": repr(OddError)}
    (note,) = caught.value.__notes__
    assert "in fail" in note
    assert "sample 0" in note
    assert server.address in note
    assert "rpc_samples.py" in note
    assert server.statistics()["errors"] == 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is StoreError
    assert again.fields == caught.value.fields


@pytest.mark.parametrize(("kind", "name"), [("other", "ValueError"), ("exit", "SystemExit"), ("odd", "OddError")])
def test_other_errors_come_back_as_remote_errors(stub, kind, name):
    with pytest.raises(RemoteError, match=rf"sample 0 .* failed in fail: .*{name}") as caught:
        stub.fail(kind)
    assert caught.value.fields["kind"].endswith(name)
    assert caught.value.fields["operation"] == "fail"
    assert stub.defaults(1) == "x"


def test_unknown_methods_are_refused(server):
    class Other:
        def missing(self, a: int) -> int:
            return a

        def defaults(self) -> str:
            return ""

    stub = rpc.connect(server.address, Other)
    with pytest.raises(WireError, match="no method 'missing'"):
        stub.missing(1)
    with pytest.raises(WireError):
        stub.defaults()
    rpc.close(stub)


# --- iterators ----------------------------------------------------------------------------------------------------


def test_iterators(stub, service, server):
    items = list(stub.chunks(5, 10))
    assert [item.number for item in items] == list(range(5))
    assert all(np.array_equal(item.array, np.full(10, item.number)) for item in items)
    assert list(stub.chunks(0, 1)) == []
    wait_until(lambda: server.statistics()["streams"] == 0)


def test_an_iterator_is_at_most_two_items_ahead(stub, service):
    """One is kept to be sent again, one is under way."""
    found = stub.chunks(100, 1 << 18)
    for number in range(10):
        assert next(found).number == number
        assert service.made <= number + 2
    found.close()
    wait_until(lambda: service.finished == 1, "the generator is closed")
    with pytest.raises(StopIteration):
        next(found)


def test_an_error_ends_an_iterator(stub, service):
    found = stub.chunks(3, 1)
    assert [next(found).number for _ in range(3)] == [0, 1, 2]
    with pytest.raises(StoreError, match="three is too many"):
        next(found)
    with pytest.raises(StopIteration):
        next(found)


@pytest.mark.usefixtures("quick_ticks")
def test_abandoned_iterators_expire(service):
    limits = rpc.Limits(streams=2)
    with rpc.serve(service, protocol=Sample, limits=limits) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        kept = [stub.chunks(10, 1) for _ in range(2)]
        with pytest.raises(WireError, match=r"Limits.streams"):
            stub.chunks(10, 1)
        for found in kept:
            next(found)
        expire_iterators(server)
        wait_until(lambda: server.statistics()["streams_expired"] == 2)
        wait_until(lambda: service.finished == 2, "the generators are closed")
        with pytest.raises(WireError, match="call the method again"):
            list(kept[0])
        del kept
        rpc.close(stub)


def test_a_dropped_iterator_is_closed(stub, service, server):
    found = stub.chunks(10, 1)
    next(found)
    del found
    wait_until(lambda: server.statistics()["streams"] == 0)
    assert server.statistics()["streams_expired"] == 0


# --- back-pressure ------------------------------------------------------------------------------------------------


def test_a_busy_server_stops_reading_and_loses_nothing(service):
    limits = rpc.Limits(threads=2, requests=8, request_bytes=6 << 20, peer_share=1)
    array = np.zeros(1 << 18, np.float32)  # 1 MiB
    with rpc.serve(service, protocol=Sample, limits=limits) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        futures = [rpc.start(stub.wait_with, array) for _ in range(100)]
        wait_until(lambda: server.statistics()["bytes_held"] >= limits.request_bytes, "the limit is reached")
        held = server.statistics()
        assert held["requests_held"] <= 8
        assert held["bytes_held"] <= limits.request_bytes + (1 << 20) + 4096
        wait_until(lambda: service.waiting == 2)
        service.gate.set()
        assert sorted(future.result() for future in futures) == list(range(1, 101))
        # The account is settled after the reply has left.
        wait_until(lambda: server.statistics()["requests_held"] == server.statistics()["bytes_held"] == 0)
        rpc.close(stub)


def test_a_client_that_does_not_read_holds_only_itself_up(server, stub, service):
    """Its replies wait for it, in bounded number; those of others go out."""
    lazy = rpc.connect(server.address, Sample, timeout=DEADLINE)
    lazy.defaults(1)
    connection = lazy._connection
    big = np.zeros(1 << 18, np.float32)
    with connection._port.lock:  # Nobody fetches its replies.
        connection._keeper = threading.current_thread()
    futures = [rpc.start(lazy.floats, big) for _ in range(150)]
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert stub.defaults(2) == "xx"
    for future in futures:
        assert len(future.result()) == 1 << 18
    assert server.statistics()["replies_dropped"] == 0
    rpc.close(lazy)


def test_a_reply_to_a_client_that_is_gone_harms_nothing(server, stub, service):
    gone = rpc.connect(server.address, Sample, timeout=DEADLINE)
    futures = [rpc.start(gone.wait) for _ in range(5)]
    wait_until(lambda: service.waiting == 5)
    rpc.close(gone)
    for future in futures:
        with pytest.raises(ClosedError):
            future.result()
    wait_until(lambda: server.statistics()["disconnections"] == 1)
    for _ in range(3):  # ZeroMQ's threads come to what follows the end of a connection before they pass these on.
        assert stub.defaults(1) == "x"
    service.gate.set()
    wait_until(lambda: server.statistics()["replies_dropped"] == 5)
    assert stub.defaults(1) == "x"


# --- the end ------------------------------------------------------------------------------------------------------


def test_closing_a_stub_ends_calls_in_work(stub, service):
    failures = []

    def work():
        try:
            stub.wait()
        except PersiaError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    wait_until(lambda: service.waiting == 4)
    rpc.close(stub)
    rpc.close(stub)
    for thread in threads:
        thread.join(DEADLINE)
    assert [type(f) for f in failures] == [ClosedError] * 4
    with pytest.raises(ClosedError, match="connect again"):
        stub.wait()


def test_closing_a_server_lets_running_calls_finish(service, monkeypatch):
    kept, fetched = [], threading.Event()

    def deliver(seconds):
        """Instead of `DELIVERY_SECONDS`, which are few for a client that has to wait for a processor."""
        kept.append((service.ran, seconds))
        fetched.wait(DEADLINE)

    server = rpc.serve(service, protocol=Sample)
    stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
    future = rpc.start(stub.wait)
    wait_until(lambda: service.waiting == 1)
    monkeypatch.setattr("persia.rpc.server.time", SimpleNamespace(monotonic=time.monotonic, sleep=deliver))
    closing = threading.Thread(target=server.close)
    closing.start()
    wait_until(lambda: server._closing)
    time.sleep(0.05)  # So that it would go on if it did not wait for the call.
    service.gate.set()
    assert future.result() == 1
    fetched.set()
    closing.join(DEADLINE)
    assert not closing.is_alive()
    assert kept == [(1, DELIVERY_SECONDS)]  # After the call.
    server.close()
    rpc.close(stub)


def test_closing_a_server_does_not_wait_for_ever(service):
    server = rpc.serve(service, protocol=Sample)
    stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
    future = rpc.start(stub.wait)
    wait_until(lambda: service.waiting == 1)
    server.close(seconds=0.1)
    second = Service()
    with rpc.serve(second, server.address, protocol=Sample):  # The address is free.
        service.gate.set()
        wait_until(lambda: second.waiting == 1, "the call comes again")
        expire(stub)
        with pytest.raises(DeadlineError):
            future.result()
        second.gate.set()
    rpc.close(stub)


def _use_in_child(stub, pipe):
    try:
        stub.defaults(1)
    except ClosedError as error:
        pipe.send(str(error))
    os._exit(0)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_stub_in_a_forked_child_is_a_clear_error(stub):
    assert stub.defaults(1) == "x"
    methods = multiprocessing.get_context("fork")
    here, there = methods.Pipe()
    child = methods.Process(target=_use_in_child, args=(stub, there))
    child.start()
    assert here.poll(DEADLINE)
    assert "fork" in here.recv()
    child.join(DEADLINE)
    assert stub.defaults(2) == "xx"


def test_idle_threads_end(service, monkeypatch):
    monkeypatch.setattr("persia.rpc.server.IDLE_SECONDS", 0.05)
    with rpc.serve(service, protocol=Sample) as server:
        stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
        futures = [rpc.start(stub.wait) for _ in range(20)]
        wait_until(lambda: service.waiting == 20)
        assert server.statistics()["threads"] == 21
        service.gate.set()
        for future in futures:
            future.result()
        wait_until(lambda: server.statistics()["threads"] == 2)
        rpc.close(stub)


def test_bad_addresses(server):
    for bad in ("nowhere", "tcp://127.0.0.1", "tcp://127.0.0.1:x"):
        with pytest.raises(ConfigError):
            rpc.connect(bad, Sample)
        with pytest.raises(ConfigError):
            rpc.serve(Service(), bad, protocol=Sample)
    with pytest.raises(ConfigError, match=r"in use"):
        rpc.serve(Service(), server.address, protocol=Sample)
    with pytest.raises(ConfigError, match="threads"):
        rpc.Limits(threads=0)


def test_several_in_one_process_do_not_meet():
    """No state is shared between servers."""
    services = [Service() for _ in range(3)]
    servers = [rpc.serve(s, protocol=Sample) for s in services]
    stubs = [rpc.connect(s.address, Sample) for s in servers]
    for number, stub in enumerate(stubs):
        stub.nothing(number)
    assert [s.seen for s in services] == [(n, "x") for n in range(3)]
    assert port.HEARTBEAT_SECONDS < port.DEAD_SECONDS
    for stub, server in zip(stubs, servers, strict=True):
        rpc.close(stub)
        server.close()


def test_a_call_that_cannot_be_sent_fails_alone(stub):
    for _ in range(2):
        with pytest.raises(WireError, match="without its arrays"):
            stub.defaults(1, "x" * (1 << 20))
        assert stub.defaults(2, "y") == stub.defaults(2, "y")


def test_an_error_whose_text_is_no_utf8_crosses_too(stub):
    with pytest.raises(RemoteError, match=r"cannot read bad\\udcff"):
        stub.fail("file")
    assert stub.defaults(2, "y")
