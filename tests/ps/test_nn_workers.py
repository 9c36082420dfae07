"""A PS serves another number of NN workers, from a switch on, and after its restart."""

import threading

import numpy as np
import pytest

from persia.errors import StoreError
from persia.modes import Hybrid, Sync
from persia.optim import SGD
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Table
from persia.services import Round
from persia.types import BucketMap, Gradients, PackedGradients, PushHeader

TABLES = {"item": Table("item", 4)}
IDS = np.array([7], np.uint64)


def server(regions=None):
    return EmbeddingServer(
        TABLES, SGD(lr=1.0), Sync(), 1, 1, ServerOptions(1, 30.0, regions=regions, buckets=BucketMap.even(1), rank=0)
    )


def push(ps, generation, nn_workers, step):
    """All NN workers push a gradient of 1 for one row; returns the value of the row before and after."""
    before = ps.lookup({"item": IDS}, True).buffer.copy()
    gradients = PackedGradients.of({"item": Gradients(IDS, np.ones((1, 4), np.float32))})
    failures = []

    def work(rank):
        try:
            ps.push(PushHeader(generation, rank, 1, step, 8), gradients)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(nn_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    if failures:
        raise failures[0]
    return before - ps.lookup({"item": IDS}, False).buffer


@pytest.mark.parametrize("mode", [Sync(), Hybrid(2, combine=False)], ids=str)
def test_from_a_switch_on_and_after_a_restart(tmp_path, mode):
    ps = server(str(tmp_path / "regions"))
    for generation, nn_workers in enumerate((1, 3, 2), 1):
        ps.switch(mode, generation, 5, nn_workers)
        moved = push(ps, generation, nn_workers, 5)
        assert moved == pytest.approx(1.0 if isinstance(mode, Sync) else nn_workers)
        with pytest.raises(StoreError, match=f"Invalid .*{nn_workers}"):
            ps.push(PushHeader(generation, nn_workers, 1, 6, 8, 0, 2), {})
    ps.switch(mode, 4, 9)  # As many as before.
    del ps
    again = server(str(tmp_path / "regions"))
    assert push(again, 4, 2, 9) == pytest.approx(1.0 if isinstance(mode, Sync) else 2.0)


def test_between_two_runs():
    """Without a mode; the first push of the next generation says at which step it begins."""
    ps = server()
    ps.switch(Sync(), 1, 0, 2)
    push(ps, 1, 2, 0)
    ps.adopt(Round(2, 1), BucketMap.even(1), None, 0, 3)
    assert push(ps, 3, 3, 1) == pytest.approx(1.0)
