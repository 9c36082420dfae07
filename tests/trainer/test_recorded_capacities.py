"""Capacities in checkpoints: of the whole cluster, or of each PS in those of version 0.1."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

import persia
from persia.checkpoint import CheckpointReader, ReshardOptions, reshard
from persia.checkpoint.format import MANIFEST, encode_manifest
from persia.modes import Sync
from persia.optim import Adagrad
from support.several_ps import Several

ROWS = 7_000


def schema_of(capacity):
    return persia.Schema(
        [persia.IdFeature("item", dim=2), persia.IdFeature("user", dim=2)],
        tables=[persia.Table("item", 2, capacity=capacity), persia.Table("user", 2)],
    )


def model(schema):
    torch.manual_seed(0)
    return persia.nn.models.FFNN(schema, hidden=(4,))


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def trainer(servers, capacity):
    schema = schema_of(capacity)
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=Sync(),
        cluster=Several(servers),
        options=persia.TrainerOptions(progress=False),
    )


def rows(t):
    return t.embeddings.statistics()["item"]["rows"]


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of two PSs with 7,000 rows and a capacity of 8,000."""
    t = trainer(2, 8_000)
    t.embeddings.set_rows("item", np.arange(ROWS, dtype=np.uint64), np.ones((ROWS, 2), np.float32))
    t.save(str(tmp_path))
    return tmp_path


def as_of_version_0_1(directory: Path) -> None:
    """Makes the capacity one of each PS, and that of the other table the default of then."""
    reader = CheckpointReader(directory)
    config = dict(reader.manifest.config)
    del config["capacity_scope"]
    config["schema"]["tables"][0]["capacity"] = 4_000
    config["schema"]["tables"][1]["capacity"] = 1 << 30
    manifest = msgspec.structs.replace(reader.manifest, config=config)
    Path(reader.path, MANIFEST).write_bytes(encode_manifest(manifest))


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_a_resumed_run_has_the_capacity_of_the_checkpoint_in_all_ps_together(saved, servers):
    t = persia.Trainer.resume(str(saved), model(schema_of(None)), optimizer=adam, cluster=Several(servers))
    assert t.schema.resolved_tables()["item"].capacity == 8_000
    assert rows(t) == ROWS
    more = np.arange(20_000, dtype=np.uint64)
    t.embeddings.set_rows("item", more, np.zeros((len(more), 2), np.float32))
    assert rows(t) == 8_000


@pytest.mark.parametrize("offline", [False, True])
@pytest.mark.parametrize("servers", [1, 2, 3])
def test_capacities_of_each_ps_are_added_up_when_an_old_run_is_resumed(saved, tmp_path, servers, offline):
    as_of_version_0_1(saved)
    directory = saved
    if offline:
        directory = tmp_path / "other"
        reshard(saved, directory, ReshardOptions(2))
    t = persia.Trainer.resume(str(directory), model(schema_of(None)), optimizer=adam, cluster=Several(servers))
    tables = t.schema.resolved_tables()
    assert (tables["item"].capacity, tables["user"].capacity) == (8_000, None)
    assert rows(t) == ROWS
    t.save(str(tmp_path / "again"))
    again = persia.Trainer.resume(str(tmp_path / "again"), model(t.schema), optimizer=adam, cluster=Several(2))
    assert again.schema == t.schema


def test_rows_that_a_smaller_capacity_evicts_are_warned_of(saved, caplog):
    t = trainer(2, 4_000)
    t.load(str(saved))
    assert rows(t) == 4_000
    assert "Table 'item': 3000 of 7000 rows do not fit its capacity, 4000 in 2 PSs" in caplog.text
    assert "of each PS" not in caplog.text
    caplog.clear()
    as_of_version_0_1(saved)
    t = trainer(2, 4_000)
    t.load(str(saved))
    assert "capacity was of each PS; now it is of all PSs together" in caplog.text
    caplog.clear()
    trainer(2, 8_000).load(str(saved))
    assert "do not fit" not in caplog.text
