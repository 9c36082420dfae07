"""The driver of `fit` replaces embedding PSs that have died for good, and loads the rows that they had."""

from types import SimpleNamespace

import pytest

import persia
from persia.errors import RoleDiedError
from persia.trainer import loading
from persia.trainer.driver import Driver


class Cluster:
    """Two PSs own rows; others leave."""

    def __init__(self):
        self.restarted = []

    def owning_servers(self, ranks):
        return [rank for rank in ranks if rank < 2]

    def restart_servers(self, ranks):
        self.restarted.append(ranks)


def death(rank, *later, **fields):
    others = [{"role": "embedding_ps", "rank": other} for other in later]
    return RoleDiedError(f"embedding PS {rank} has died.", role="embedding_ps", rank=rank, later=others, **fields)


@pytest.fixture
def reload(monkeypatch, tmp_path):
    """Replaces PSs after deaths; returns the ranks that were replaced, and those into which rows were loaded."""

    def call(*deaths, checkpoint=True):
        cluster, loaded = Cluster(), []
        monkeypatch.setattr("persia.trainer.driver.list_checkpoints", lambda _: [1] if checkpoint else [])
        monkeypatch.setattr(loading, "load_partitions", lambda *arguments: loaded.append(arguments[-1]) or "path")
        options = persia.TrainerOptions(checkpoint_dir=str(tmp_path))
        declared = SimpleNamespace(options=options, schema=None)
        Driver(cluster, None, None, None, [], declared)._reload_servers(list(deaths))
        return cluster.restarted, loaded

    return call


def test_lost_pss_get_the_rows_of_the_last_checkpoint(reload):
    assert reload(death(0, 1)) == ([[0, 1]], [[0, 1]])
    with pytest.raises(RoleDiedError, match="embedding PS 0 has died"):
        reload(death(0), checkpoint=False)
    assert reload(death(0, returns=True)) == ([], [])


def test_no_rows_are_loaded_into_pss_that_leave(reload):
    assert reload(death(2), checkpoint=False) == ([[2]], [])
    assert reload(death(1, 3)) == ([[1, 3]], [[1]])
    with pytest.raises(RoleDiedError):
        reload(death(2, 0), checkpoint=False)
