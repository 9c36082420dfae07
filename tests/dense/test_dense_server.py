"""The dense PS: in this process and over rpc, with one and several; the user's optimizer to the bit."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
import torch

import persia
from persia import rpc
from persia.dense import DenseServer, SharedNetwork
from persia.dense.server import partition
from persia.errors import ClosedError, ConfigError, DeadlineError, PersiaError, StalePushError, StoreError
from persia.modes import Async, Gba
from persia.services import DenseMaker, DensePS
from persia.types import PushedDense, PushHeader, PushId, TensorSpec

DEADLINE = 20.0

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "groups": lambda p: _groups(list(p)),
}


def _groups(parameters):
    weights = [p for p in parameters if p.ndim > 1]
    rest = [p for p in parameters if p.ndim <= 1]
    return torch.optim.Adam([{"params": weights, "weight_decay": 0.1, "lr": 0.02}, {"params": rest, "lr": 0.005}])


def network(norm=False, dtype=torch.float32):
    torch.manual_seed(3)
    layers = [torch.nn.Linear(4, 6), *([torch.nn.BatchNorm1d(6)] if norm else []), torch.nn.Linear(6, 1)]
    return torch.nn.Sequential(*layers).to(dtype)


@pytest.fixture(params=[("here", 1), ("here", 3), ("rpc", 2)], ids=lambda p: f"{p[0]}-{p[1]}")
def servers(request):
    """Makes dense PSs of a maker."""
    how, count = request.param
    with ExitStack() as stack:

        def make(maker):
            made = [DenseServer(maker, rank, count, DEADLINE) for rank in range(count)]
            if how == "here":
                return made
            stubs = []
            for server in made:
                listening = stack.enter_context(rpc.serve(server, protocol=DensePS))
                stubs.append(rpc.connect(listening.address, DensePS, peer="dense PS", timeout=DEADLINE))
                stack.callback(rpc.close, stubs[-1])
            return stubs

        yield make


def shared(model, factory, servers, schedule=None):
    optimizer = factory([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor) if schedule else None
    return (
        SharedNetwork(model, optimizer, scheduler, servers(DenseMaker(factory, schedule)), DEADLINE),
        optimizer,
        scheduler,
    )


def header(step, slot=0, group=1, rows=8, generation=1):
    return PushHeader(generation, 0, step * group + slot + 1, step, rows, slot=slot, group=group)


def data(seed, rows=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(rows, 4, generator=generator).to(dtype),
        torch.randint(0, 2, (rows, 1), generator=generator).to(dtype),
    )


def backward(model, seed):
    x, y = data(seed, dtype=next(model.parameters()).dtype)
    torch.nn.functional.binary_cross_entropy_with_logits(model(x), y).backward()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_one_gradient_a_step_is_the_optimizer_itself(name, servers):
    schedule = persia.Schedule(warmup_steps=3, decay="linear", total_steps=10)
    alone = network()
    optimizer = OPTIMIZERS[name](list(alone.parameters()))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor)

    def train_alone(seed):
        backward(alone, seed)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    model = network()
    here, mine, my_scheduler = shared(model, OPTIMIZERS[name], servers, schedule)

    def train_replica(seed):
        backward(model, seed)
        mine.step()
        mine.zero_grad()
        my_scheduler.step()

    for seed in range(2):
        train_alone(seed)
        train_replica(seed)
    here.load(1, 5, Async())
    for seed in range(2, 7):
        here.pull(3 + seed, lambda: True)()
        backward(model, seed)
        here.gradients()(header(3 + seed), 1.0)
        train_alone(seed)
    here.take_over()
    for seed in range(7, 9):
        train_alone(seed)
        train_replica(seed)
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert mine.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert my_scheduler.last_epoch == scheduler.last_epoch


def test_a_step_is_the_mean_by_rows_without_stale_gradients(servers):
    factory = lambda p: torch.optim.SGD(p, 1.0)  # noqa: E731
    model = network(dtype=torch.float64)
    before = [p.detach().clone() for p in model.parameters()]
    here, _, _ = shared(model, factory, servers)
    here.load(1, 0, Async())
    expected = [torch.zeros_like(p) for p in model.parameters()]
    for slot, (rows, weight) in enumerate([(8, 1.0), (4, 1.0), (8, 0.0), (0, 1.0)]):
        here.pull(0, lambda: True)()
        backward(model, slot)
        if rows * weight:
            for total, p in zip(expected, model.parameters(), strict=True):
                total += rows / 20 * p.grad
        here.gradients()(header(0, slot, 4, rows), weight)
    here.pull(1, lambda: True)()
    for p, old, gradient in zip(model.parameters(), before, expected, strict=True):
        torch.testing.assert_close(p, old - gradient, rtol=0, atol=1e-14)
    assert here.version == 1


def test_a_step_of_only_stale_gradients_skips_the_optimizer(servers):
    model = network()
    here, _, _ = shared(model, OPTIMIZERS["adam"], servers)
    backward(model, 0)
    here.load(1, 0, Async())
    here.gradients()(header(0, 0, 2), 0.0)
    here.push_empty(header(0, 1, 2, rows=0))
    before = [p.detach().clone() for p in model.parameters()]
    here.pull(1, lambda: True)()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    here.take_over()


def test_gradients_are_summed_as_they_come_each_once(servers):
    """The order within a step does not matter; each step is one of the optimizer, with the pushes that came for it."""
    results = []
    for order in ([0, 1, 2, 3, 4, 5], [2, 0, 1, 5, 4, 3]):
        model = network(dtype=torch.float64)
        here, _, _ = shared(model, OPTIMIZERS["adam"], servers)
        here.load(1, 0, Async())
        pushes = {}
        for place in range(6):
            backward(model, place)
            pushes[place] = here.gradients()
        for place in order:
            head = header(0, 0, 3)._replace(rank=place)
            pushes[place](head, 1.0)
            pushes[place](head, 1.0)  # A repetition.
        here.take_over()
        results.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_a_gradient_that_comes_too_late_weighs_nothing(servers):
    """It was placed in step 0, when it was fresh; it comes in step 2, beyond the tolerance."""
    model = network()
    here, _, _ = shared(model, lambda p: torch.optim.SGD(p, 1.0), servers)
    here.load(1, 0, Gba(8, tolerance=1))
    for rank in range(2):
        here.push_empty(header(0, rows=0)._replace(rank=rank))
    before = [p.detach().clone() for p in model.parameters()]
    backward(model, 0)
    here.gradients()(header(0)._replace(rank=2, token=0), 1.0)
    here.pull(3, lambda: True)()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert [server.statistics()["stale"] for server in here.servers] == [1] * len(here.servers)
    backward(model, 0)
    here.gradients()(header(0)._replace(rank=3, token=2), 1.0)
    here.pull(4, lambda: True)()
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_remainder_is_drained_and_phases_are_checked(servers):
    model = network()
    here, _, _ = shared(model, lambda p: torch.optim.SGD(p, 1.0), servers)
    here.load(1, 0, Async())
    alone = network()
    for slot in range(2):
        backward(model, slot)
        here.gradients()(header(0, slot, 4), 1.0)
        backward(alone, slot)
    with pytest.raises(PersiaError, match="Out of phase"):
        here.drain(1, 0, 3)
    here.drain(1, 0, 2)
    here.drain(1, 0, 2)  # A repetition.
    here.take_over()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q - q.grad / 2, rtol=0, atol=1e-7)
    assert here.pull(1, lambda: True) is not None


def test_statistics_of_batch_norm_are_averaged(servers):
    model = network(norm=True)
    here, _, _ = shared(model, lambda p: torch.optim.SGD(p, 0.1), servers)
    here.load(1, 0, Async())
    means = []
    for slot in range(2):
        here.pull(0, lambda: True)()
        backward(model, slot)
        means.append(model[1].running_mean.clone())
        here.gradients()(header(0, slot, 2), 1.0)
    here.pull(1, lambda: True)()
    torch.testing.assert_close(model[1].running_mean, (means[0] + means[1]) / 2)
    assert model[1].num_batches_tracked == 1
    here.take_over()
    torch.testing.assert_close(model[1].running_mean, (means[0] + means[1]) / 2)


def test_parameters_without_a_gradient_are_left_alone(servers):
    model = network()
    here, _, _ = shared(model, OPTIMIZERS["adam"], servers)
    here.load(1, 0, Async())
    before = model[0].weight.detach().clone()
    model[1](torch.randn(3, 6)).sum().backward()
    here.gradients()(header(0), 1.0)
    here.take_over()
    assert torch.equal(model[0].weight, before)


def test_a_pull_waits_for_its_version_while_it_is_needed(servers, monkeypatch):
    monkeypatch.setattr("persia.dense.network.SLICE_SECONDS", 0.02)
    model = network()
    here, _, _ = shared(model, OPTIMIZERS["sgd"], servers)
    here.load(1, 0, Async())
    with pytest.raises(ClosedError, match="no longer needed"):
        here.pull(1, lambda: False)
    backward(model, 0)
    push = here.gradients()
    thread = threading.Thread(target=lambda: push(header(0), 1.0))
    thread.start()
    here.pull(1, lambda: True)()
    thread.join(DEADLINE)
    assert here.version == 1


def test_a_pull_waits_for_a_push_of_its_own(servers, monkeypatch):
    monkeypatch.setattr("persia.dense.network.SLICE_SECONDS", 0.02)
    here, _, _ = shared(network(), OPTIMIZERS["sgd"], servers)
    here.load(1, 0, Async())
    here.push_empty(header(0, group=4, rows=0)._replace(rank=1))
    with pytest.raises(ClosedError, match="no longer needed"):
        here.pull(0, lambda: False, PushId(0, 1))
    here.push_empty(header(0, group=4, rows=0))
    here.pull(0, lambda: False, PushId(0, 1))()
    assert here.version == 0


def test_generations(servers):
    model = network()
    here, _, _ = shared(model, OPTIMIZERS["sgd"], servers)
    here.load(2, 0, Async())
    backward(model, 0)
    push = here.gradients()
    with pytest.raises(StalePushError, match="generation 1"):
        push(header(0, generation=1), 1.0)
    with pytest.raises(StalePushError, match="generation 1"):
        here.load(1, 0, Async())
    push(header(0, 0, 2, generation=2), 1.0)
    with pytest.raises(PersiaError, match="drain"):
        here.load(2, 0, Async())
    here.load(3, 0, Async())


def test_what_fits_no_dense_ps_is_refused():
    model = network()
    with pytest.raises(ConfigError, match="LBFGS"):
        SharedNetwork(model, torch.optim.LBFGS(model.parameters()), None, [], DEADLINE)
    with pytest.raises(ConfigError, match="clip_norm"):
        DenseServer(DenseMaker(OPTIMIZERS["sgd"], clip_norm=1.0), 0, 2)
    server = DenseServer(DenseMaker(lambda p: torch.optim.SGD(model.parameters(), 0.1)))
    here = SharedNetwork(model, OPTIMIZERS["sgd"](list(model.parameters())), None, [server], DEADLINE)
    with pytest.raises(ConfigError, match="other than `params`"):
        here.load(1, 0, Async())
    with pytest.raises(StoreError, match="no network"):
        server.export()


def test_gradients_are_clipped_by_their_norm_in_a_step():
    model, alone = network(), network()
    server = DenseServer(DenseMaker(lambda p: torch.optim.SGD(p, 1.0), clip_norm=0.01))
    here = SharedNetwork(model, torch.optim.SGD(model.parameters(), 1.0), None, [server], DEADLINE)
    here.load(1, 0, Async())
    backward(model, 0)
    backward(alone, 0)
    here.gradients()(header(0), 1.0)
    here.take_over()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p, q - q.grad)


def test_what_does_not_fit_changes_nothing():
    model = network()
    server = DenseServer(DenseMaker(OPTIMIZERS["sgd"]))
    here = SharedNetwork(model, OPTIMIZERS["sgd"](list(model.parameters())), None, [server], DEADLINE)
    here.load(1, 0, Async())
    with pytest.raises(StoreError, match="tensors have 176 bytes"):
        server.push(header(0), PushedDense(1.0, np.zeros(3, np.uint8), np.ones(4, np.bool_), None))
    with pytest.raises(StoreError, match="Invalid slot"):
        server.push(header(0)._replace(slot=1), PushedDense(0.0, None, None, None))
    with pytest.raises(DeadlineError, match="version 1 of the parameters has not arrived"):
        server.pull(-1, 1, None, 0.01)
    with pytest.raises(DeadlineError, match=r"push 7 of NN worker 3 has not arrived .* 0 gradients since step 0"):
        server.pull(-1, 0, PushId(3, 7), 0.01)
    assert server.statistics()["version"] == 0


def test_tensors_are_spread_by_size():
    specs = [TensorSpec(str(n), "float32", [size]) for n, size in enumerate([10, 1000, 400, 300, 20, 290])]
    assert partition(specs, 2) == [[0, 1], [2, 3, 4, 5]]
    assert sorted(n for part in partition(specs, 4) for n in part) == list(range(6))
