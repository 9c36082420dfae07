"""A pass of evaluation that reads rows for hardly any id of a feature warns."""

import logging

import numpy as np
import pytest
import torch

import persia
from persia import Batch, IdColumn, IdFeature, Schema
from persia.modes import Sync
from persia.nn.coverage import FEWEST_IDS, IDS_PER_BATCH, MOST_BATCHES, IdSample
from persia.optim import Adagrad
from persia.testing.threads import Threads
from support.several_ps import Several

SCHEMA = Schema(
    [IdFeature("user", dim=4), IdFeature("item", dim=4), IdFeature("seen", dim=4, table="item", pooling="mean")]
)
ROWS = 64


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(12, 1)

    def forward(self, dense, embeddings):
        return self.last(torch.cat(list(embeddings.values()), 1))


def batches(count, seed=0, **first):
    """Ids from 200 consecutive numbers by feature, from `first` on."""
    random = np.random.default_rng(seed)
    ends = np.arange(ROWS + 1, dtype=np.int64) * 3
    found = []
    for _ in range(count):
        columns = {
            name: IdColumn(random.integers(0, 200, ROWS * (3 if offsets is not None else 1)).astype(np.uint64), offsets)
            for name, offsets in (("user", None), ("item", None), ("seen", ends))
        }
        for name, start in first.items():
            columns[name] = IdColumn(columns[name].values + np.uint64(start), columns[name].offsets)
        labels = random.integers(0, 2, (ROWS, 1)).astype(np.float32)
        found.append(Batch(columns, np.zeros((ROWS, 0), np.float32), labels))
    return found


def make(cluster=None):
    return persia.Trainer(
        Net(),
        SCHEMA,
        optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-2),
        embedding_optimizer=Adagrad(0.1),
        mode=Sync(),
        cluster=cluster or Several(2),
        options=persia.TrainerOptions(progress=False, timeout=30.0),
    )


@pytest.fixture
def warnings(caplog):
    def said():
        return [r.getMessage() for r in caplog.records if r.name == "persia.nn" and r.levelno == logging.WARNING]

    return said


def predict(trainer, data):
    return list(trainer.predict(data))


@pytest.mark.parametrize("score", [persia.Trainer.evaluate, predict], ids=["evaluate", "predict"])
def test_other_ids_are_told_by_feature(score, warnings):
    trainer = make()
    trainer.fit(batches(10))
    score(trainer, batches(5, 1))
    assert warnings() == []
    score(trainer, batches(5, 2, user=10**9, seen=10**9))
    (told,) = warnings()
    rows = trainer.embeddings.statistics()["user"]["rows"]
    assert f": 'user' (0.0 % of 320 sampled ids; table 'user' has {rows} rows), 'seen' (0.0 % of 480" in told
    assert "'item' (" not in told  # It shares the table of `seen`.
    assert "IdFeature.kind" in told


def test_texts_in_place_of_numbers(warnings):
    """The case it is for: the same values, read as another kind of column."""
    trainer = make()
    numbers = batches(10)
    trainer.fit(numbers)
    as_texts = [
        Batch.from_columns(
            SCHEMA,
            {
                "user": [f"u{v}" for v in batch.id_features["user"].values],
                **{name: batch.id_features[name] for name in ("item", "seen")},
                "label": batch.labels[:, 0],
            },
        )
        for batch in numbers
    ]
    trainer.evaluate(as_texts)
    (told,) = warnings()
    assert "'user' (0.0 %" in told
    assert "'item' (" not in told


def test_new_ids_are_no_fault_unless_all_are(warnings):
    trainer = make()
    trainer.fit(batches(10))
    trainer.evaluate(batches(10, 1, user=180))  # A tenth of the users is known.
    assert warnings() == []


def test_small_samples_and_empty_tables_are_not_judged(warnings):
    trainer = make()
    trainer.evaluate(batches(5))  # Untrained: there is no row to find.
    trainer.fit(batches(10))
    trainer.evaluate(batches(1, user=10**9, item=10**9))  # 64 ids each.
    assert FEWEST_IDS > ROWS
    assert warnings() == []


def test_a_model_whose_rows_are_zeros_is_not_blamed(warnings):
    """Found is what the store has, not what is not zero."""
    trainer = make()
    trainer.fit(batches(10))
    for table in ("user", "item"):
        trainer.embeddings.set_rows(table, np.arange(200), np.zeros((200, 4)))
    trainer.evaluate(batches(5, 1))
    assert warnings() == []


def test_training_asks_nothing(monkeypatch):
    trainer = make()

    def fail(*_):
        raise AssertionError("asked")

    monkeypatch.setattr("persia.nn.evaluation_pass.warn_of_unknown_ids", fail)
    monkeypatch.setattr(IdSample, "add", fail)
    trainer.fit(batches(5))
    with pytest.raises(AssertionError):
        trainer.evaluate(batches(1))


def test_one_of_several_nn_workers_tells(warnings):
    cluster = Threads(nn_workers=2, timeout=30.0)

    def work(member):
        trainer = make(member)
        trainer.fit(batches(10))
        trainer.evaluate(batches(10, 2, user=10**9))

    cluster.run(work)
    assert len(warnings()) == 1


def test_the_sample_is_bounded_and_spread_over_the_pass():
    sample = IdSample()
    for number in range(1000):
        ids = np.arange(5000, dtype=np.uint64) + np.uint64(10_000 * number)
        sample.add({"user": IdColumn(ids), "few": IdColumn(ids[: number % 2])})
    found = sample.ids()
    assert list(found) == ["user"]
    assert IDS_PER_BATCH * MOST_BATCHES // 4 < len(found["user"]) <= IDS_PER_BATCH * MOST_BATCHES
    of_batch, places = np.divmod(found["user"], np.uint64(10_000))
    assert of_batch.max() > 700
    assert np.diff(np.unique(of_batch)).max() < 300
    assert places.max() > 4900
    assert IdSample().ids() == {}
