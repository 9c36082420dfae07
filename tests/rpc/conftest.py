import contextlib

import pytest

from persia import rpc
from support.rpc_samples import DEADLINE, Sample, Service


@pytest.fixture
def quick_ticks(monkeypatch):
    """A server looks soon at what has expired. For tests that wait for a tick."""
    monkeypatch.setattr("persia.rpc.server.TICK_SECONDS", 0.02)


@pytest.fixture
def serve():
    """Starts servers with the limits that a test chooses. Returns each with a stub that is connected."""
    with contextlib.ExitStack() as stack:

        def start(**limits):
            server = stack.enter_context(rpc.serve(Service(), protocol=Sample, limits=rpc.Limits(**limits)))
            stub = rpc.connect(server.address, Sample, timeout=DEADLINE)
            stack.callback(rpc.close, stub)
            assert stub.defaults(1) == "x"
            return server, stub

        yield start


@pytest.fixture
def service():
    found = Service()
    yield found
    found.gate.set()


@pytest.fixture
def server(service):
    with rpc.serve(service, protocol=Sample) as found:
        yield found
        service.gate.set()


@pytest.fixture
def stub(server):
    found = rpc.connect(server.address, Sample, peer="sample 0", timeout=DEADLINE)
    yield found
    rpc.close(found)
