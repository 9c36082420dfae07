import pytest

from persia import rpc
from support.rpc_samples import DEADLINE, Sample, Service


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
