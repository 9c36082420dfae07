"""A mode of a user's module in the processes of a cluster, which find its class by the driver's path."""

import pytest

import persia
from persia.modes import Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import BATCH, make_trainer, options, reader
from support.toy_mode import EveryOther

pytestmark = pytest.mark.usefixtures("ray_here")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [EveryOther(), Sync()], ids=["from the start", "switched to"])
def test_a_mode_of_a_users_module_trains(mode):
    data = reader(24)
    with persia.cluster.Ray(2, 1, 1, 2, options()) as cluster:
        schedule = [] if isinstance(mode, EveryOther) else [(4, EveryOther())]
        trainer = make_trainer(cluster, mode, mode_schedule=schedule)
        result = trainer.fit(data)
        assert result.rows == 24 * BATCH
        assert trainer.mode == EveryOther()
        assert result.asynchronous is not None
