"""Batches with fewer rows than a local batch: at the end of a pass, at a resume, or as all that there is."""

import numpy as np
import pytest
import torch

import persia
from persia import Batch, IdColumn
from persia.errors import ConfigError
from persia.modes import Bsp, Gba, Sync
from persia.nn.models import FFNN
from persia.optim import Adagrad
from persia.testing import Threads
from support.listed import Listed
from support.switching_samples import DEADLINE, ROWS, Net, assert_same, batches, trainer


def sgd(params):
    return torch.optim.SGD(params, 0.1)


def adam(params):
    return torch.optim.Adam(params, 1e-2)


def joined(part):
    return Batch(
        {name: IdColumn(np.concatenate([b.id_features[name].values for b in part])) for name in ("user", "item")},
        np.concatenate([b.dense for b in part]),
        np.concatenate([b.labels for b in part]),
    )


def with_rest(count, rest):
    """So many whole batches, and one of `rest` rows."""
    return Listed([*batches(count), *batches(1, rows=rest, seed=9)])


def reader(rows):
    return persia.data.synthetic(rows, id_features=3, ids_per_feature=40, dense_features=1, batch_size=ROWS)


def small_trainer(mode, cluster=None, **options):
    schema = reader(1).schema
    return persia.Trainer(
        FFNN(schema, hidden=(4,), dropout=0.0),
        schema,
        optimizer=adam,
        embedding_optimizer=Adagrad(lr=0.05),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(progress=False, timeout=DEADLINE, **options),
    )


@pytest.mark.parametrize(("mode", "rest"), [(Gba(2 * ROWS, reduction="global"), 5), (Bsp(2), 1)], ids=str)
def test_a_partial_batch_takes_a_slot_and_weighs_by_its_rows(mode, rest):
    """A step of a whole batch and a partial one is one of both together."""
    data = with_rest(3, rest)
    mine, large = trainer(mode, optimizer=sgd, dtype=torch.float64), trainer(Sync(), optimizer=sgd, dtype=torch.float64)
    result = mine.fit(data)
    large.fit([joined(data[:2]), joined(data[2:])])
    assert (result.steps, result.asynchronous.batches, result.rows) == (2, 4, 3 * ROWS + rest)
    if isinstance(mode, Gba):  # Bsp divides by the gradients that have an id.
        assert_same(mine, large, 1e-6)


def test_a_bsp_step_with_a_partial_batch_is_the_mean_over_rows():
    data = with_rest(1, 3)
    mine, large = (trainer(mode, optimizer=sgd, dtype=torch.float64) for mode in (Bsp(2), Sync()))
    mine.fit(data)
    large.fit([joined(data)])
    for p, q in zip(mine.model.parameters(), large.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-9)


@pytest.mark.parametrize("declared", [True, False])
def test_a_run_goes_on_with_the_last_partial_batch_of_a_pass(declared, tmp_path):
    """The checkpoint knows the local batch, and so does a reader."""
    rows = 6 * ROWS + 5
    data = reader(rows) if declared else Listed(reader(rows))
    first = small_trainer(Gba(2 * ROWS))
    first.fit(data, max_steps=3)
    assert first.position == 6
    first.save(tmp_path)
    state = first.state.state_dict()
    assert state["local_batch"] == ROWS
    second = persia.Trainer.resume(str(tmp_path), FFNN(first.schema, hidden=(4,), dropout=0.0), optimizer=adam)
    result = second.fit(data)
    assert (result.rows, result.steps, result.global_step) == (5, 1, 4)
    second.fit(data, again=True)
    assert second.global_step == 8


def test_a_run_continues_with_a_partial_batch_within_a_list(tmp_path):
    """Only the checkpoint tells the local batch here."""
    data = Listed([*with_rest(2, 5), *batches(3, seed=2)])
    first = trainer(Gba(2 * ROWS))
    first.fit(data, max_steps=1)
    first.save(tmp_path)
    second = persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=adam)
    result = second.fit(data)
    assert (result.rows, result.steps) == (3 * ROWS + 5, 2)


@pytest.mark.parametrize("declared", [True, False])
def test_a_source_smaller_than_a_local_batch_trains(declared):
    data = reader(5) if declared else list(reader(5))
    t = small_trainer(Gba(2 * ROWS))
    result = t.fit(data, epochs=3)
    assert (result.rows, result.steps) == (15, 3)


def test_the_batches_of_another_source_may_be_of_another_size():
    """M follows the batches: twice as many of half the size make a step."""
    t = trainer(Gba(2 * ROWS))
    assert t.fit(batches(4)).steps == 2
    assert t.fit(batches(4, rows=ROWS // 2)).steps == 1
    assert t.fit(batches(1, rows=5)).steps == 1  # Fewer rows than any batch: a step by itself.
    assert t.fit(batches(4), again=True).steps == 2


def test_a_local_batch_that_does_not_fit_is_refused_still():
    for data in (reader(3 * ROWS), reader(5), batches(3), batches(1, rows=2 * ROWS)):
        t = small_trainer(Gba(ROWS + 1)) if not isinstance(data, list) else trainer(Gba(ROWS + 1))
        with pytest.raises(ConfigError, match="no multiple"):
            t.fit(data)


@pytest.mark.parametrize("make", [lambda rows: reader(rows), lambda rows: list(reader(rows))], ids=["reader", "list"])
def test_whoever_draws_the_partial_batch_first_m_is_the_same(make, tmp_path):
    """Several NN workers: the second one has the partial batch, which may be drawn before any whole one."""
    data = make(ROWS + 5)

    def work(member):
        t = small_trainer(Gba(2 * ROWS), member)
        return t.fit(data, epochs=4), t.state.local_batch

    results = Threads(nn_workers=2, timeout=DEADLINE).run(work)
    assert [local_batch for _, local_batch in results] == [ROWS, ROWS]
    assert {(result.steps, result.rows, result.asynchronous.batches) for result, _ in results} == {
        (4, 4 * (ROWS + 5), 8)
    }


def test_nn_workers_that_are_threads_resume_at_a_partial_batch(tmp_path):
    data = with_rest(6, 5)

    def first(member):
        t = trainer(Gba(2 * ROWS), member)
        t.fit(data, max_steps=3)
        t.save(str(tmp_path))

    def second(member):
        t = persia.Trainer.resume(str(tmp_path), Net(torch.float32), optimizer=adam, cluster=member)
        return t.fit(data)

    Threads(nn_workers=2, timeout=DEADLINE).run(first)
    results = Threads(nn_workers=2, timeout=DEADLINE).run(second)
    assert {(result.rows, result.steps, result.global_step) for result in results} == {(5, 1, 4)}
