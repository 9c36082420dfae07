"""Hyperparameters of the optimizers that are changed between a checkpoint and the run that resumes it."""

import functools
import logging

import numpy as np
import pytest
import torch

import persia
from persia.checkpoint import CheckpointReader
from persia.errors import CheckpointError
from persia.modes import Sync
from persia.optim import SGD, Adagrad, APMSqueeze

SCHEDULE = persia.Schedule(warmup_steps=4, decay="linear", total_steps=14)


def reader():
    return persia.data.synthetic(2_000, id_features=2, ids_per_feature=50, dense_features=1, batch_size=200)


def adam(parameters, lr=1e-2, **arguments):
    return torch.optim.Adam(parameters, lr, **arguments)


def trainer(optimizer=adam, embedding_optimizer=None, schedule=None):
    torch.manual_seed(0)
    schema = reader().schema
    return persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=(8,)),
        schema,
        optimizer=optimizer,
        embedding_optimizer=embedding_optimizer or Adagrad(lr=0.1),
        mode=Sync(),
        options=persia.TrainerOptions(progress=False, schedule=schedule),
    )


def groups(t):
    return t.step.optimizer.param_groups


def rate(t):
    (group,) = groups(t)
    return group["lr"]


@pytest.fixture
def resumed(tmp_path, caplog):
    """Loads the checkpoint of a trainer into another one; returns what was logged."""

    def run(first, second, **options):
        first.save(tmp_path)
        with caplog.at_level(logging.WARNING, "persia.checkpoint"):
            second.load(str(tmp_path), **options)
        return caplog.text

    return run


@pytest.mark.parametrize(
    ("optimizer", "before", "now"),
    [
        (
            torch.optim.AdamW,
            {"lr": 0.001, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0},
            {"lr": 0.0005, "betas": (0.8, 0.999), "eps": 1e-6, "weight_decay": 0.01},
        ),
        (torch.optim.SGD, {"lr": 0.001, "momentum": 0.9}, {"lr": 0.0005, "momentum": 0.5}),
        (APMSqueeze, {"lr": 0.001, "weight_decay": 0.0}, {"lr": 0.0005, "weight_decay": 0.01}),
    ],
)
def test_changed_hyperparameters_take_effect(resumed, optimizer, before, now):
    first, second = (trainer(functools.partial(optimizer, **arguments)) for arguments in (before, now))
    first.fit(reader(), max_steps=5)
    log = resumed(first, second)
    state = second.step.optimizer.state_dict()
    assert {name: state["param_groups"][0][name] for name in now} == now
    kept = first.step.optimizer.state_dict()["state"]
    assert state["state"].keys() == kept.keys() != set()
    for number, values in kept.items():
        for name, value in values.items():
            assert torch.equal(state["state"][number][name], value)
    assert len(log.splitlines()) == 1
    for name in now:
        assert f"optimizer.{name}: {before[name]} before, {now[name]} now" in log
    second.fit(reader())
    assert second.global_step == 10


def test_a_changed_rate_trains_as_one_that_is_set_by_hand(resumed):
    """Also in the first step after the resume."""
    first = trainer()
    first.fit(reader(), max_steps=5)
    second = trainer(functools.partial(adam, lr=0.003))
    resumed(first, second)
    groups(first)[0]["lr"] = 0.003
    for t in (first, second):
        t.fit(reader(), max_steps=2)
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_parameter_groups_have_rates_of_their_own(resumed):
    def make(parameters, rates):
        parameters = list(parameters)
        return torch.optim.Adam(
            [{"params": parameters[:1], "lr": rates[0]}, {"params": parameters[1:], "lr": rates[1]}]
        )

    first = trainer(functools.partial(make, rates=(0.1, 0.2)))
    first.fit(reader(), max_steps=2)
    second = trainer(functools.partial(make, rates=(0.1, 0.3)))
    log = resumed(first, second)
    assert [group["lr"] for group in groups(second)] == [0.1, 0.3]
    assert "optimizer.lr: 0.2 before, 0.3 now" in log


@pytest.mark.parametrize("lr", [1e-2, 3e-3])
def test_a_schedule_keeps_its_position(resumed, lr):
    first = trainer(schedule=SCHEDULE)
    first.fit(reader(), max_steps=6)
    second = trainer(functools.partial(adam, lr=lr), schedule=SCHEDULE)
    log = resumed(first, second)
    assert rate(second) == lr * SCHEDULE.factor(6)
    second.fit(reader(), max_steps=1)
    assert rate(second) == lr * SCHEDULE.factor(7)
    assert bool(log) == (lr != 1e-2)


def test_another_schedule_applies_from_its_step_on(resumed):
    first = trainer(schedule=SCHEDULE)
    first.fit(reader(), max_steps=6)
    other = persia.Schedule(decay="cosine", total_steps=20)
    second = trainer(schedule=other)
    assert "trainer.schedule: " in resumed(first, second)
    assert rate(second) == 1e-2 * other.factor(6)


def test_without_its_schedule_a_run_has_the_configured_rate(resumed):
    first = trainer(schedule=SCHEDULE)
    first.fit(reader(), max_steps=6)
    second = trainer()
    resumed(first, second)
    assert rate(second) == 1e-2


def test_a_new_schedule_begins_at_the_step_of_the_run(resumed):
    first = trainer()
    first.fit(reader(), max_steps=6)
    second = trainer(schedule=SCHEDULE)
    resumed(first, second)
    assert rate(second) == 1e-2 * SCHEDULE.factor(6)
    second.fit(reader(), max_steps=1)
    assert rate(second) == 1e-2 * SCHEDULE.factor(7)


def test_a_rate_that_was_set_by_hand_stays_if_the_declared_one_does(resumed):
    first = trainer()
    first.fit(reader(), max_steps=2)
    groups(first)[0]["lr"] = 0.004
    second = trainer()
    assert resumed(first, second) == ""
    assert rate(second) == 0.004
    third = trainer(functools.partial(adam, lr=0.003))
    assert "optimizer.lr: 0.01 before, 0.003 now" in resumed(second, third)
    assert rate(third) == 0.003


@pytest.mark.parametrize("lr", [1e-2, 3e-3])
def test_a_scheduler_of_the_program_keeps_its_rate(resumed, lr):
    first = trainer()
    halving = torch.optim.lr_scheduler.StepLR(first.step.optimizer, 1, gamma=0.5)
    first.fit(reader(), max_steps=2)
    halving.step()
    second = trainer(functools.partial(adam, lr=lr))
    again = torch.optim.lr_scheduler.StepLR(second.step.optimizer, 1, gamma=0.5)
    log = resumed(first, second)
    again.load_state_dict(halving.state_dict())
    assert rate(second) == 0.005
    again.step()
    assert rate(second) == 0.0025
    assert ("0.01 before, 0.003 now (not applied: the program's scheduler has set 0.005)" in log) == (lr != 1e-2)


def test_another_optimizer_has_its_own_rate_at_the_position_of_the_schedule(resumed):
    first = trainer(schedule=SCHEDULE)
    first.fit(reader(), max_steps=6)
    second = trainer(functools.partial(torch.optim.SGD, lr=0.5), schedule=SCHEDULE)
    log = resumed(first, second, new_optimizer=True)
    assert "The optimizer's state is reset" in log
    assert "optimizer.lr" not in log.replace("embedding_optimizer.lr", "")
    assert rate(second) == 0.5 * SCHEDULE.factor(6)
    second.fit(reader(), max_steps=1)
    assert rate(second) == 0.5 * SCHEDULE.factor(7)


@pytest.mark.parametrize(
    ("optimizer", "argument", "value"),
    [(adam, "amsgrad", True), (torch.optim.RMSprop, "centered", True), (torch.optim.RMSprop, "momentum", 0.9)],
)
def test_an_option_that_needs_other_state_makes_another_optimizer(resumed, optimizer, argument, value):
    first = trainer(functools.partial(optimizer, lr=1e-2))
    first.fit(reader(), max_steps=2)
    make = functools.partial(optimizer, lr=1e-2, **{argument: value})
    with pytest.raises(CheckpointError, match=f"{argument}.*new_optimizer=True .`--new-optimizer` of persia train"):
        resumed(first, trainer(make))
    second = trainer(make)
    resumed(first, second, new_optimizer=True)
    second.fit(reader(), max_steps=1)


@pytest.mark.parametrize("schedule", [None, SCHEDULE])
def test_a_checkpoint_of_an_earlier_version_has_current_values_only(resumed, monkeypatch, schedule):
    first = trainer(schedule=schedule)
    first.fit(reader(), max_steps=6)
    state = CheckpointReader.state

    def earlier(self, name):
        found = state(self, name)
        return {**found, "hyperparameters": None} if name == "training" else found

    monkeypatch.setattr(CheckpointReader, "state", earlier)
    factor = schedule.factor(6) if schedule else 1.0
    same = trainer(schedule=schedule)
    assert resumed(first, same) == ""
    assert rate(same) == 1e-2 * factor
    second = trainer(functools.partial(adam, lr=3e-3, weight_decay=0.1), schedule=schedule)
    log = resumed(first, second)
    assert "optimizer.lr: 0.01 before, 0.003 now; optimizer.weight_decay: 0 before, 0.1 now" in log
    assert rate(second) == 3e-3 * factor


def test_a_rate_that_is_a_tensor_is_compared_by_value(resumed):
    first = trainer(functools.partial(adam, lr=torch.tensor(0.5)))
    first.fit(reader(), max_steps=2)
    assert resumed(first, trainer(functools.partial(adam, lr=torch.tensor(0.5)))) == ""
    second = trainer(functools.partial(adam, lr=torch.tensor(0.25)))
    assert "optimizer.lr: 0.5 before, 0.25 now" in resumed(first, second)
    assert float(rate(second)) == 0.25


def test_a_change_of_the_embedding_optimizer_is_logged(resumed):
    first = trainer()
    first.fit(reader(), max_steps=2)
    second = trainer(embedding_optimizer=Adagrad(lr=0.02))
    assert "embedding_optimizer.lr: 0.1 before, 0.02 now" in resumed(first, second)
    rows = [t.embeddings.connection.servers[0] for t in (first, second)]
    ids = np.arange(50, dtype=np.uint64)
    for name in ("id_0", "id_1"):
        a, b = (server.lookup({name: ids}, False)[name] for server in rows)
        np.testing.assert_array_equal(a, b)
    third = trainer(embedding_optimizer=SGD(lr=0.02))
    assert "embedding_optimizer.kind: adagrad before, sgd now\n" in resumed(first, third, new_optimizer=True)
