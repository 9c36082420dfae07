"""The device in checkpoints: version 0.1 recorded its default, the CPU."""

from pathlib import Path

import msgspec
import pytest
import torch

import persia
from persia.checkpoint import CheckpointReader
from persia.checkpoint.format import MANIFEST, encode_manifest
from persia.optim import SGD
from persia.trainer.loading import recorded


@pytest.mark.parametrize(
    ("scope", "renamed", "expected"),
    [
        (False, False, "auto"),
        (False, True, "auto"),
        (True, False, "auto"),  # As `reshard` writes it now.
        (True, True, "cpu"),
    ],
)
def test_the_default_device_of_an_old_run_is_the_present_default(tmp_path, scope, renamed, expected):
    schema = persia.Schema([persia.IdFeature("item", dim=2)], labels=["click"])
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(4,)),
        schema,
        optimizer=lambda parameters: torch.optim.SGD(parameters, 0.1),
        embedding_optimizer=SGD(lr=0.1),
        options=persia.TrainerOptions(device="cpu", progress=False),
    )
    trainer.save(str(tmp_path))
    reader = CheckpointReader(tmp_path)
    config = dict(reader.config)
    if not renamed:
        config["options"]["snapshot_every_seconds"] = config["options"].pop("recovery_point_every_seconds")
    if not scope:
        del config["capacity_scope"]
    manifest = msgspec.structs.replace(reader.manifest, config=config)
    Path(reader.path, MANIFEST).write_bytes(encode_manifest(manifest))
    assert recorded(str(tmp_path)).options.device == expected
