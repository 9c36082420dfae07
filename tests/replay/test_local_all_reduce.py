"""Local all-reduce in virtual time: each NN worker's own network, averaged in random pairs."""

import functools

import numpy as np
import pytest
import torch

from persia import Trainer, data
from persia.errors import ConfigError, DataError
from persia.modes import Async, Bsp, Sync
from persia.nn.models import DeepFM
from persia.optim import SGD
from persia.replay import LocalAllReduce, ReplayDense, ScheduleEvent, Setting, Timeline, simulate, steady
from persia.replay.local_networks import LocalNetworks
from persia.replay.virtual import VirtualTraining

BATCH = 64


@pytest.fixture(scope="module")
def reader():
    return data.synthetic(2048, id_features=4, ids_per_feature=200, batch_size=BATCH, dim=4)


def training_of(reader, batches):
    torch.manual_seed(3)
    return VirtualTraining(
        DeepFM(reader.schema, hidden=(16,)),
        reader.schema,
        batches.__getitem__,
        lambda parameters: torch.optim.Adam(parameters, 1e-2),
        SGD(lr=0.05),
        seed=5,
    )


def trained(reader, mode, workers=4, factors=None, runs=1):
    batches = list(reader)
    training, count = training_of(reader, batches), len(batches) // runs
    setting = Setting(steady(factors or [1.0] * workers), local_batch=BATCH)
    step = 0
    for run in range(runs):
        timeline = simulate(mode, setting, range(run * count, (run + 1) * count), step=step)
        training.run(timeline)
        step = timeline.end_step
    return training, training.evaluate(batches)


@pytest.mark.parametrize(("batches", "same"), [(1, Async()), (3, Bsp(3))])
def test_timeline_is_that_of_the_same_rule_for_rows(batches, same):
    setting = Setting(steady([1.0, 1.0, 4.0]), local_batch=BATCH, lookup=0.25, push=0.25)
    assert simulate(LocalAllReduce(batches), setting, 50).events == simulate(same, setting, 50).events


def test_one_nn_worker_trains_as_async(reader):
    _, logits = trained(reader, LocalAllReduce(), workers=1, runs=2)
    _, asynchronous = trained(reader, Async(), workers=1, runs=2)
    np.testing.assert_array_equal(logits, asynchronous)


def timeline_of(mode, pushes, workers):
    """Returns a timeline in which NN workers read and push one after the other."""
    events = []
    for batch, worker in enumerate(pushes):
        for kind in ("pull", "push", "apply"):
            events.append(ScheduleEvent(float(batch), kind, "dense-0", worker, batch, batch, batch, BATCH))
    return Timeline(mode, workers, BATCH, 1, events)


@pytest.mark.parametrize("local_steps", [1, 2])
def test_pairs_are_averaged_after_local_steps(local_steps):
    workers, rate = 3, 0.5
    pushes = [0, 0, 1, 2, 1, 0, 2, 2]
    start = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    optimizers = functools.partial(torch.optim.SGD, lr=rate)
    timeline = timeline_of(LocalAllReduce(local_steps=local_steps, seed=7), pushes, workers)
    networks = LocalNetworks(timeline, [start], optimizers([start]), optimizers)
    ours = np.tile(start.detach().numpy(), (workers, 1)).astype(np.float64)
    steps, partners = [0] * workers, np.random.default_rng((7, 0))
    averaged = 0
    for batch, worker in enumerate(pushes):
        np.testing.assert_allclose(networks.read(batch), ours[worker], rtol=1e-6)
        gradient = np.array([batch + 1.0, 0.5 * worker], np.float32)
        networks.trained(timeline.events[3 * batch + 1], gradient)
        ours[worker] -= rate * gradient
        steps[worker] += 1
        if steps[worker] % local_steps == 0:
            partner = (worker + 1 + partners.integers(workers - 1)) % workers
            assert partner != worker
            ours[worker] = ours[partner] = (ours[worker] + ours[partner]) / 2
            averaged += 1
    assert averaged == {1: 8, 2: 3}[local_steps]
    networks.into([start], optimizers([start]))
    np.testing.assert_allclose(start.detach().numpy(), ours.mean(0), rtol=1e-6)


def test_networks_differ_and_end_at_their_mean(reader):
    training, logits = trained(reader, LocalAllReduce(4), factors=[1.0, 1.0, 1.0, 4.0])
    _, together = trained(reader, Bsp(4), factors=[1.0, 1.0, 1.0, 4.0])
    assert np.abs(logits - together).max() > 1e-3
    state = next(iter(training.state_dict()["optimizer"]["state"].values()))
    assert state["step"].item() == pytest.approx(2048 / BATCH / 4)  # The mean over NN workers.


def test_sync_continues_from_the_mean(reader):
    batches = list(reader)
    setting = Setting(steady([1.0] * 4), local_batch=BATCH)
    training = training_of(reader, batches)
    training.run(simulate(LocalAllReduce(4), setting, range(16)))
    again = training_of(reader, batches)
    again.load_state_dict(training.state_dict())
    for one in (training, again):
        one.run(simulate(Sync(), setting, range(16, 32), step=4))
    np.testing.assert_array_equal(training.evaluate(batches), again.evaluate(batches))


def test_a_dense_ps_reads_what_another_mode_has_trained():
    parameters = np.zeros(2)
    server = ReplayDense(parameters.copy, lambda gradient, step: None)
    assert server.read(0).tolist() == [0.0, 0.0]
    parameters += 1.0
    server.begin(Sync())
    assert server.read(1).tolist() == [1.0, 1.0]


def test_parts_of_networks_are_refused():
    timeline = timeline_of(LocalAllReduce(), [0], 1)
    part = [ScheduleEvent(0.0, "pull", "dense-1", 0, 0, 0, 0, BATCH)]
    with pytest.raises(DataError, match="whole networks"):
        LocalNetworks(Timeline(LocalAllReduce(), 1, BATCH, 1, timeline.events + part), [], None, None)


def test_a_trainer_refuses_it(reader):
    with pytest.raises(ConfigError, match="virtual time only"):
        Trainer(
            DeepFM(reader.schema),
            reader.schema,
            optimizer=lambda parameters: torch.optim.Adam(parameters, 1e-3),
            embedding_optimizer=SGD(lr=0.1),
            mode=LocalAllReduce(),
        ).fit(reader)


@pytest.mark.parametrize("field", ["batches", "local_steps"])
def test_numbers_are_checked(field):
    with pytest.raises(ConfigError, match=field):
        LocalAllReduce(**{field: 0})
