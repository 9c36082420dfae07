"""Runs of a Trainer whose device owns rows are, bit for bit, runs without: checkpoints, resumes and kills included."""

import msgspec
import numpy as np
import pytest
import torch
from test_resume import adam, model, reader, trainer

import persia
from persia.checkpoint import CheckpointReader, list_checkpoints
from persia.errors import ConfigError
from persia.modes import Auto, Gba, Hybrid, Sync
from persia.nn.owned_rows import Unwritten
from persia.optim import Adam
from persia.publish import PublishOptions
from support.waiting import wait_until

OWNED = {"id_0": 100_000, "id_1": 40, "id_2": 0}
"""All rows of the first table, few of the second."""

IDS = np.arange(400, dtype=np.uint64)


def declared(*, owns):
    base = reader().schema
    tables = [persia.Table(name, 16, owned_rows=count * owns) for name, count in OWNED.items()]
    tables[0] = msgspec.structs.replace(tables[0], optimizer=Adam(0.01), value_bound=0.5)
    return persia.Schema(base.id_features, base.dense_features, base.labels, tables)


def run(tmp_path, *, owns, data=None, **options):
    """Trains with incremental checkpoints and evaluations. Returns the trainer, its result, and what was read."""
    t = persia.Trainer(
        model(declared(owns=owns)),
        declared(owns=owns),
        optimizer=adam,
        embedding_optimizer=persia.optim.Adagrad(0.1),
        mode=Sync(),
        options=persia.TrainerOptions(
            progress=False,
            checkpoint_dir=str(tmp_path / f"owns-{owns}"),
            checkpoint_every_steps=6,
            checkpoint_increments=2,
            checkpoint_share=1.0,
            keep_last=9,
            eval_every_steps=4,
            **options,
        ),
    )
    read = []

    def look(network, _):
        if t.global_step % 6 == 5:  # The next checkpoint would be skipped.
            wait_until(lambda: not t.checkpointing.busy)
        if network.training and t.global_step % 3 == 1:
            found = t.embeddings.rows("id_0", IDS, state=True)
            read.append((found.values, found.state.values, found.state.update_count))

    t.model.register_forward_pre_hook(look)
    torch.manual_seed(1)
    return t, t.fit(data or reader(), reader(600)), read


def rows_of(path, step):
    """All rows of a checkpoint, without their recency, by table."""
    found = {}
    for table in OWNED:
        parts = [arrays for _, arrays in CheckpointReader(path, step).rows(table)]
        columns = {name: np.concatenate([arrays[name] for arrays in parts]) for name in parts[0]}
        order = np.argsort(columns["ids"])
        found[table] = [columns[name][order] for name in sorted(columns) if name != "stamp"]
    return found


def assert_same(mine, theirs):
    assert mine.keys() == theirs.keys()
    for table, columns in mine.items():
        for a, b in zip(columns, theirs[table], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_run_is_the_same_to_the_last_bit(tmp_path):
    """Its network, metrics, what is read within passes, and each of its checkpoints, of which most are incremental."""
    (one, result, read), (two, other, read_too) = (run(tmp_path, owns=owns) for owns in (False, True))
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert result.progressive == other.progressive
    assert result.evaluation == other.evaluation
    assert len(read) > 3
    for mine, theirs in zip(read, read_too, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(mine, theirs, strict=True))
    paths = [tmp_path / f"owns-{owns}" for owns in (False, True)]
    steps = [[entry.step for entry in list_checkpoints(path)] for path in paths]
    assert steps[0] == steps[1]
    assert any(CheckpointReader(paths[1], step).manifest.base is not None for step in steps[1])
    for step in steps[0]:
        assert_same(rows_of(paths[0], step), rows_of(paths[1], step))
    assert two.embeddings.owned.hits > 1000
    assert two.embeddings.owned.unwritten == Unwritten()
    assert one.embeddings.pushed == two.embeddings.pushed


class Dying:
    """The batches of a reader, until one at which the process dies."""

    def __init__(self, number):
        self.number = number

    def batches(self, epoch=0, start=0):
        for i, batch in enumerate(reader().batches(epoch, start), start):
            if i == self.number:
                raise MemoryError
            yield batch

    def fingerprint(self):
        return reader().fingerprint()


def test_after_a_death_training_continues_from_the_checkpoint(tmp_path):
    """What came after it is lost, on the device and at the parameter servers alike."""
    path = tmp_path / "owns-True"
    with pytest.raises(MemoryError):
        run(tmp_path, owns=True, data=Dying(15))
    assert [entry.step for entry in list_checkpoints(path)] == [6, 12]
    resumed = persia.Trainer.resume(str(path), model(declared(owns=True)), optimizer=adam)
    assert resumed.global_step == 12
    resumed.fit(reader(), reader(600))
    assert resumed.embeddings.owned.hits > 0
    whole, _, _ = run(tmp_path, owns=False)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert_same(rows_of(path, 20), rows_of(tmp_path / "owns-False", 20))


def test_rows_that_were_updated_before_an_error_are_written_back():
    """As without owned rows, the parameter servers have the gradients of all steps before it."""
    found = []
    for owns in (False, True):
        t = trainer(declared(owns=owns))
        torch.manual_seed(1)
        with pytest.raises(MemoryError):
            t.fit(Dying(5))
        assert t.embeddings.owned.unwritten == Unwritten()
        found.append(t.embeddings.rows("id_0", IDS, state=True))
    np.testing.assert_array_equal(found[0].values, found[1].values)
    np.testing.assert_array_equal(found[0].state.update_count, found[1].state.update_count)
    t.fit(reader())
    assert t.global_step == 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": Hybrid()}, "the mode Sync, not Hybrid"),
        ({"mode": Auto(asynchronous=Gba(400))}, "the mode Sync, not Gba"),
        ({"mode": Sync(), "mode_schedule": [(9, Hybrid(2))]}, "the mode Sync, not Hybrid"),
        ({"mode": Sync(), "publish": PublishOptions("published")}, "no TrainerOptions.publish"),
        ({"mode": Sync(), "record_dir": "recorded"}, "no record_dir"),
        ({"mode": Sync(), "accumulation_steps": 2}, "accumulation_steps = 1"),
    ],
)
def test_runs_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=rf"Table\('id_0'\).owned_rows = 100000 needs {message}"):
        trainer(declared(owns=True), **arguments)


def test_a_switch_of_modes_is_refused():
    t = trainer(declared(owns=True))
    with pytest.raises(ConfigError, match="the mode Sync, not Hybrid"):
        t.switch(Hybrid(2))
    t.fit(reader(), max_steps=2)
    assert t.mode == Sync()
