"""A run that is saved and resumed goes on as if nothing had happened."""

import numpy as np
import pytest
import torch

import persia
from persia.errors import CheckpointError, PersiaError
from persia.modes import Hybrid, Sync
from persia.optim import SGD, Adagrad, Adam


def reader(rows=4_000):
    return persia.data.synthetic(rows, id_features=3, ids_per_feature=400, dense_features=1, batch_size=200)


def schema_of(optimizer=None, capacity=300):
    base = reader().schema
    tables = [persia.Table("id_0", 16, optimizer=optimizer, capacity=capacity, admission=persia.AdmitProbability(0.5))]
    return persia.Schema(base.id_features, base.dense_features, base.labels, tables)


def model(schema, dropout=0.3):
    torch.manual_seed(0)
    return persia.nn.models.FFNN(schema, hidden=(16,), dropout=dropout)


def adam(parameters):
    return torch.optim.Adam(parameters, 1e-2)


def trainer(schema, mode=None, **options):
    return persia.Trainer(
        model(schema),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode or Sync(),
        options=persia.TrainerOptions(**{"progress": False} | options),
    )


def stored(t):
    result = {}
    for server in t.embeddings.connection.servers:
        for chunk in server.export_rows():
            result.setdefault(chunk.table, {}).setdefault(chunk.shard, []).append(chunk.arrays)
    return result


def assert_same_rows(one, two):
    one, two = stored(one), stored(two)
    assert one.keys() == two.keys()
    for table in one:
        for shard in one[table]:
            for a, b in zip(one[table][shard], two[table][shard], strict=True):
                for name in a:
                    np.testing.assert_array_equal(a[name], b[name], err_msg=f"{table} {name}")


@pytest.mark.parametrize("optimizer", [None, Adam(lr=0.01), SGD(lr=0.1, momentum=0.9)])
def test_resuming_in_sync_mode_is_bit_identical(tmp_path, optimizer):
    schema = schema_of(optimizer)
    whole = trainer(schema)
    torch.manual_seed(1)
    expected = whole.fit(reader(), epochs=2)

    first = trainer(schema)
    torch.manual_seed(1)
    first.fit(reader(), epochs=2, max_steps=27)
    first.save(str(tmp_path))
    torch.manual_seed(99)
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    result = second.fit(reader(), epochs=2)

    assert result.global_step == expected.global_step == 40
    assert result.progressive == expected.progressive
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_same_rows(whole, second)


def test_periodic_checkpoints_do_not_disturb_sync(tmp_path):
    schema = schema_of()
    plain, saving = (
        trainer(schema),
        trainer(schema, checkpoint_dir=str(tmp_path), checkpoint_every_steps=6, keep_last=2),
    )
    results = []
    for t in (plain, saving):
        torch.manual_seed(1)
        results.append(t.fit(reader()).progressive)
    assert results[0] == results[1]
    assert_same_rows(plain, saving)
    assert len(list(tmp_path.glob("step-*"))) == 2


@pytest.mark.parametrize("mode", [Hybrid(4), Hybrid("auto")])
def test_resuming_in_hybrid_mode_goes_on(tmp_path, mode):
    schema = schema_of()
    first = trainer(schema, mode)
    first.fit(reader(), max_steps=9)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert second.mode == mode
    assert second.fit(reader()).global_step == 20


def test_schedules_scaler_and_options_are_restored(tmp_path):
    schema = schema_of()
    options = {"precision": "fp16", "schedule": persia.Schedule(warmup_steps=100), "seed": 5}
    first = trainer(schema, **options)
    first.fit(reader(), max_steps=10)
    first.save(str(tmp_path))
    second = persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam)
    assert second.options == first.options
    assert second.step.optimizer.param_groups[0]["lr"] == first.step.optimizer.param_groups[0]["lr"]
    assert second.step.scaler.state_dict() == first.step.scaler.state_dict()


def test_what_does_not_fit_is_refused_and_changes_nothing(tmp_path):
    schema = schema_of()
    first = trainer(schema)
    first.fit(reader(), max_steps=3)
    path = first.save(str(tmp_path))

    other = persia.Schema([persia.IdFeature("id_0", dim=8), *reader().schema.id_features[1:]], ["dense_0"], ["click"])
    fresh = trainer(other)
    with pytest.raises(CheckpointError, match="dim"):
        fresh.load(str(tmp_path))

    torch.manual_seed(0)
    with pytest.raises(CheckpointError, match="tensor"):
        persia.Trainer.resume(str(tmp_path), persia.nn.models.FFNN(schema, hidden=(17,)), optimizer=adam)
    with pytest.raises(CheckpointError, match="SGD"):
        persia.Trainer.resume(str(tmp_path), model(schema), optimizer=lambda p: torch.optim.SGD(p, 0.1))
    with pytest.raises(CheckpointError, match="seed"):
        persia.Trainer.resume(str(tmp_path), model(schema), optimizer=adam, options=persia.TrainerOptions(seed=7))
    with pytest.raises(PersiaError, match="fresh"):
        first.load(str(tmp_path))

    part = sorted((tmp_path / path.rsplit("/", 1)[1]).rglob("*.safetensors"))[0]
    part.write_bytes(part.read_bytes()[:-5])
    fresh = trainer(schema)
    before = [p.clone() for p in fresh.model.parameters()]
    with pytest.raises(CheckpointError):
        fresh.load(str(tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(before, fresh.model.parameters(), strict=True))
    assert not any(t["rows"] for t in fresh.embeddings.statistics().values())
    with pytest.raises(CheckpointError):
        persia.Trainer.resume(str(tmp_path / "nothing"), model(schema), optimizer=adam)
