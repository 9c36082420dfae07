"""More data and other data on a cluster, whose data loaders read passes of which each may read other files."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import persia
from persia.errors import ConfigError
from persia.modes import Gba, Sync

pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')

from support.cluster_samples import options

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("ray_here")]

SCHEMA = persia.Schema([persia.IdFeature("row", 4, kind="number")], labels=["click"])
ROWS = 80


def write(folder, number):
    ids = np.arange(number * ROWS, (number + 1) * ROWS)
    pq.write_table(pa.table({"row": ids, "click": ids % 2}), f"{folder}/{number}.parquet")
    return f"{folder}/{number}.parquet"


def reader(paths, batch_size=4):
    return persia.data.parquet(paths, SCHEMA, batch_size, shuffle_rows=32)


@pytest.mark.parametrize("mode", [Sync(), Gba(8)], ids=["sync", "gba"])
def test_new_files_are_trained_once(mode, tmp_path):
    days = [write(tmp_path, number) for number in range(3)]

    def make(cluster):
        torch.manual_seed(0)
        return persia.Trainer(
            persia.nn.models.FFNN(SCHEMA, hidden=(4,)),
            SCHEMA,
            optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
            embedding_optimizer=persia.optim.Adagrad(lr=0.1),
            mode=mode,
            cluster=cluster,
            options=persia.TrainerOptions(progress=False, device="cpu"),
        )

    def updates(trainer):
        found = trainer.embeddings.rows("row", np.arange(3 * ROWS), state=True)
        return np.where(found.found, found.state.update_count, 0).reshape(3, ROWS)

    with persia.cluster.Ray(1, 1, 2, 2, options()) as cluster:
        trainer = make(cluster)
        trainer.fit(reader(days[1]), max_steps=5)
        with pytest.raises(ConfigError, match="batch_size changed in the middle of a pass"):
            trainer.fit(reader(days[1], 8))
        trainer.fit(reader(days[:2]))
        assert [set(of_file.tolist()) for of_file in updates(trainer)] == [{1}, {1}, {0}]
        assert trainer.fit(reader(days[:2])).nothing_left
        trainer.save(str(tmp_path / "checkpoint"))
    with persia.cluster.Ray(1, 1, 1, 1, options()) as cluster:
        trainer = make(cluster)
        trainer.load(str(tmp_path / "checkpoint"))
        assert trainer.fit(reader(days), epochs=2).rows == 4 * ROWS
        assert [set(of_file.tolist()) for of_file in updates(trainer)] == [{2}, {2}, {2}]
        assert trainer.fit(reader(days[2]), again=True).rows == ROWS
