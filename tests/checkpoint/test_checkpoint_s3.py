"""Checkpoints on a real S3 server on loopback: moto's."""

from __future__ import annotations

from uuid import uuid4

import numpy as np
import pytest

import persia
from persia.checkpoint import CheckpointReader, CheckpointWriter, ReshardOptions, compact, list_checkpoints, reshard
from persia.checkpoint.storage import Storage
from persia.errors import CheckpointError
from support import s3
from support.checkpoint_samples import OPTIMIZER, SCHEMA, make_rows, write

bucket, endpoint = s3.bucket, s3.endpoint  # fixtures
pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning"),
]


def test_round_trip_and_retention(bucket: str) -> None:
    for step in (1, 2, 3):
        write(bucket, step, keep_last=2)
    assert [(entry.step, entry.latest) for entry in list_checkpoints(bucket)] == [(2, False), (3, True)]
    reader = CheckpointReader(bucket)
    reader.verify()
    assert reader.state("trainer") == {"step": 3, 1: (None, [1.5])}
    assert sum(len(arrays["ids"]) for _, arrays in reader.rows("item")) == 10


def test_large_parts_are_uploaded_in_pieces(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs.core

    pieces: list[str] = []
    call = s3fs.core.S3File._call_s3

    def noted(self, method, *arguments, **options):
        pieces.append(method)
        return call(self, method, *arguments, **options)

    monkeypatch.setattr(s3fs.core.S3File, "_call_s3", noted)
    rows = make_rows(1_500_000, 4, 4)  # 78 MB; s3fs sends 50 MiB at a time.
    with CheckpointWriter(bucket, 1) as writer:
        writer.add_rows("item", 0, rows)
        writer.commit(schema=SCHEMA, optimizer=OPTIMIZER)
    assert pieces.count("upload_part") >= 2
    assert "complete_multipart_upload" in pieces
    ((_, arrays),) = CheckpointReader(bucket).rows("item")
    for name, column in rows.items():
        np.testing.assert_array_equal(arrays[name], column)


def test_what_is_cut_off_is_never_latest(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(bucket, 1)
    put = Storage.put

    def lost(storage: Storage, path: str, data: bytes) -> None:
        if path == "LATEST":
            raise CheckpointError("connection lost")
        put(storage, path, data)

    with monkeypatch.context() as patch:
        patch.setattr(Storage, "put", lost)
        with pytest.raises(CheckpointError, match="connection lost"):
            write(bucket, 2)
    assert CheckpointReader(bucket).manifest.global_step == 1
    CheckpointReader(bucket, 2).verify()  # It is whole, and may be named.


def test_a_bucket_that_is_missing_is_an_error_and_not_made(bucket: str) -> None:
    import s3fs

    misspelt = f"s3://{uuid4().hex[:12]}/run"
    with pytest.raises(CheckpointError, match=r"Cannot write .* does not exist"):
        write(misspelt, 1)
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        CheckpointReader(misspelt)
    assert bucket.split("/")[2] in s3fs.S3FileSystem().ls("")
    assert misspelt.split("/")[2] not in s3fs.S3FileSystem().ls("")


def test_increments_and_resharding(bucket: str) -> None:
    write(bucket, 1)
    base = CheckpointReader(bucket).base
    with CheckpointWriter(bucket, 2) as writer:
        changed = make_rows(2, seed=5)
        writer.add_rows("item", 0, changed)
        writer.add_removed("item", 0, make_rows(7, seed=1)["ids"][:3])
        writer.commit(schema=SCHEMA, optimizer=OPTIMIZER, base=base)
    assert len(persia.checkpoint.open(bucket)["item"]) == 10 - 3 + 2
    target = bucket + "-resharded"
    reshard(bucket, target, ReshardOptions(2))
    compact(bucket)
    for url in (bucket, target):
        table = persia.checkpoint.open(url)["item"]
        assert len(table) == 9
        assert table.find(changed["ids"])[0].all()


def test_training_saves_and_resumes_there(bucket: str) -> None:
    import torch

    data = persia.data.synthetic(2000, id_features=2, ids_per_feature=50, dense_features=1, batch_size=200)

    def model():
        torch.manual_seed(0)
        return persia.nn.models.FFNN(data.schema, hidden=(8,))

    def adam(parameters):
        return torch.optim.Adam(parameters, 1e-2)

    trainer = persia.Trainer(
        model(),
        data.schema,
        optimizer=adam,
        embedding_optimizer=persia.optim.Adagrad(lr=0.1),
        options=persia.TrainerOptions(checkpoint_dir=bucket, checkpoint_every_steps=3, progress=False),
    )
    trainer.fit(data)
    again = persia.Trainer.resume(bucket, model(), optimizer=adam)
    assert again.global_step == 10
