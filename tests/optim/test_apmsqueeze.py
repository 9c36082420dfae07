"""APMSqueeze held against its reference and against Adam, with threads as workers."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from persia.errors import CheckpointError, ConfigError, PersiaError
from persia.optim import APMSqueeze, APMSqueezeOptions, OneBit, Uncompressed
from persia.optim.buckets import Flat, ranges
from support import apms_case
from support.apms_case import COMPRESSORS, SHAPES, arrays, equal_the_reference, gradients, joined, make, step, train
from support.apms_threads import together
from support.examples import examples
from support.twins.apmsqueeze import ReferenceAPMSqueeze


def trained(rank, exchange, steps, options, shapes=SHAPES, native=True, arguments=None):
    parameters, optimizer = joined(exchange, {"debug": True} | options, shapes, native, **(arguments or {}))
    return train(parameters, optimizer, rank, steps, shapes)


def equals_the_reference(workers, options, shapes=SHAPES, steps=7, native=True, **arguments):
    options = {"warmup": 3, "bucket_bytes": 4 * 2000} | options
    results = together(workers, trained, steps, options, shapes, native, arguments)
    equal_the_reference(results, options, steps, shapes, 2e-6, **arguments)


@pytest.mark.parametrize("workers", range(1, 9))
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@given(size=st.integers(1, 3000), bucket=st.integers(300, 4000), seed=st.integers(0, 3))
@settings(max_examples=examples(1), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_any_number_of_workers_and_any_sizes(compressor, workers, size, bucket, seed):
    native, communicate = workers % 2 == 0, ("momentum", "gradient")[workers // 2 % 2]  # All four, even and odd.
    shapes = [(size,), (7, 3), (1100 + seed,), (), (0,)]
    # The last of two compressed steps has the errors of the first.
    options = {"compressor": compressor, "communicate": communicate, "bucket_bytes": 4 * bucket, "warmup": 2}
    equals_the_reference(workers, options, shapes, steps=4, native=native)


@pytest.mark.parametrize(
    ("shape", "buckets"),
    [((255, 1000), 1), ((525, 1000), 2), ((3000, 1000), 6), ((100, 1 << 20), 16)],  # Of 1 MB, 1 MB, 2 MB, 25 MB.
)
def test_the_number_of_buckets(shape, buckets):
    parameter = torch.nn.Parameter(torch.empty(shape, device="meta"))
    found = [(begin, end) for begin, end, _ in ranges(Flat([parameter]), 25 << 20, OneBit())]
    assert len(found) == buckets
    assert [begin for begin, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == parameter.numel()


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_clipping_decay_and_betas_are_those_of_the_reference(native):
    options = {"compressor": OneBit(block=64), "clip_norm": 30.0}
    equals_the_reference(3, options, native=native, weight_decay=0.1, betas=(0.8, 0.99), lr=3e-3, eps=1e-6)


class FrozenAdam(torch.optim.Adam):
    """Adam whose v stays as it is after `warmup` steps."""

    def __init__(self, params, warmup, **arguments):
        super().__init__(params, foreach=False, **arguments)
        self.warmup, self.kept = warmup, []

    def step(self):
        first = self.param_groups[0]["params"][0]
        steps = int(self.state[first]["step"]) if self.state else 0
        if steps < self.warmup:
            return super().step()
        beta1, beta2 = self.param_groups[0]["betas"]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if steps == self.warmup:
                self.kept.append(state["exp_avg_sq"] / (1 - beta2**self.warmup))
            state["step"] += 1
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
        for p, v in zip(self.param_groups[0]["params"], self.kept, strict=True):
            state = self.state[p]
            p.data -= self.param_groups[0]["lr"] * state["exp_avg"] / (1 - beta1 ** state["step"]) / (v.sqrt() + 1e-8)
        return None


def test_alone_and_uncompressed_it_is_adam_whose_v_is_frozen():
    parameters, optimizer = make({"warmup": 5, "compressor": Uncompressed(), "variance_floor": 1e-12}, lr=0.01)
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    adam = FrozenAdam(others, 5, lr=0.01)
    for number in range(15):
        step(parameters, optimizer, number, 0)
        for other, parameter in zip(others, parameters, strict=True):
            other.grad = parameter.grad.clone()
        adam.step()
        for other, parameter in zip(others, parameters, strict=True):
            torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)
    assert optimizer.phase == "compressed"


def test_warm_up_is_adamw():
    parameters, optimizer = make({"warmup": 100}, weight_decay=0.1, lr=0.01, betas=(0.8, 0.9))
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    adam = torch.optim.AdamW(others, lr=0.01, betas=(0.8, 0.9), weight_decay=0.1)
    for number in range(20):
        step(parameters, optimizer, number, 0)
        for other, parameter in zip(others, parameters, strict=True):
            other.grad = parameter.grad.clone()
        adam.step()
    for other, parameter in zip(others, parameters, strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@pytest.mark.parametrize("workers", range(1, 9))
@given(seed=st.integers(0, 100))
@settings(max_examples=examples(1), deadline=None, phases=[Phase.explicit, Phase.generate])
def test_gradients_equal_what_was_sent_plus_the_last_errors(compressor, workers, seed):
    """Telescoping, of the reference: sum over steps of what a worker sent = sum of its momenta - its final error."""
    options = APMSqueezeOptions(warmup=1, compressor=compressor, bucket_bytes=4 * 500)
    reference = ReferenceAPMSqueeze(apms_case.tensors(seed, [(130,), (5,), (1030,)]), workers, options)
    sent = [np.zeros(1165) for _ in range(workers)]
    wanted = [np.zeros(1165) for _ in range(workers)]
    agreed = np.zeros(1165)
    for number in range(5):
        g = [gradients(number + seed, rank, [(130,), (5,), (1030,)]) for rank in range(workers)]
        before = np.concatenate(reference.momentum)
        reference.step(g)
        if number == 0:
            continue
        for rank in range(workers):
            wanted[rank] += 0.9 * before + (1 - 0.9) * np.concatenate([np.ravel(x) for x in g[rank]]).astype(float)
            sent[rank] += np.concatenate(reference.sent[rank])
        agreed += np.concatenate(reference.momentum)
    for rank in range(workers):
        np.testing.assert_allclose(sent[rank], wanted[rank] - np.concatenate(reference.worker_errors[rank]), atol=1e-9)
    mean = np.mean(sent, axis=0) - np.concatenate(reference.server_error)
    np.testing.assert_allclose(agreed, mean, atol=1e-9)


# --- robustness -------------------------------------------------------------------------------------------------


def skip(rank, exchange, bad_step, bad_rank):
    parameters, optimizer = joined(exchange, {"warmup": 3, "debug": True})
    for number in range(8):
        before = optimizer.state_dict(), arrays(parameters)
        for parameter, g in zip(parameters, gradients(number, rank), strict=True):
            parameter.grad = torch.from_numpy(np.array(g))
        if number == bad_step and rank == bad_rank:
            parameters[0].grad[3, 4] = float("nan")
        optimizer.step()
        after = optimizer.state_dict(), arrays(parameters)
        if number == bad_step:
            for i, values in before[0]["state"].items():
                for name, value in values.items():
                    assert torch.equal(value, after[0]["state"][i][name])
            for old, new in zip(before[1], after[1], strict=True):
                np.testing.assert_array_equal(old, new)
    assert optimizer.statistics()["skipped_steps"] == 1
    assert optimizer.statistics()["steps"] == 7
    return arrays(parameters)


@pytest.mark.parametrize("bad_step", [1, 6], ids=["warmup", "compressed"])
def test_a_non_finite_gradient_skips_the_step_on_all_workers(bad_step):
    results = together(3, skip, bad_step, 1)
    for result in results:
        for value, first in zip(result, results[0], strict=True):
            np.testing.assert_array_equal(value, first)
            assert np.isfinite(value).all()


def test_elements_that_never_had_a_gradient_do_not_blow_up():
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.zeros(4096))
    optimizer = APMSqueeze([parameter], 1e-3, options=APMSqueezeOptions(warmup=20))
    for _ in range(60):
        parameter.grad = torch.randn(4096)
        parameter.grad[1000:3000] = 0.0
        optimizer.step()
    assert parameter[1000:3000].abs().max() < 0.1  # Noise over eps would be thousands.


@pytest.mark.parametrize("warmup", [19, 20])
def test_a_short_warm_up_is_warned_of(warmup, caplog):
    parameters, optimizer = make({"warmup": warmup}, [(1500,)])
    for number in range(warmup + 2):
        step(parameters, optimizer, number, 0, [(1500,)])
    assert ("frozen after only 19 steps" in caplog.text) == (warmup == 19)


@pytest.mark.parametrize("warmup", [30, 1])
def test_a_network_that_has_diverged_is_told_once(warmup, caplog):
    parameters, optimizer = make({"warmup": warmup}, [(1500,)])
    for number in range(2):
        step(parameters, optimizer, number, 0, [(1500,)])
    for _ in range(50):
        parameters[0].grad.fill_(float("nan"))
        optimizer.step()
    told = [record.getMessage() for record in caplog.records if "in a row" in record.message]
    assert len(told) == 1
    assert ("longer warm-up" in told[0]) == (warmup == 1)
    assert optimizer.statistics()["skipped_steps"] == 50


def grouped(rank, exchange):
    parameters, optimizer = joined(exchange, {"warmup": 3, "debug": True, "compressor": Uncompressed()})
    half = len(parameters) // 2
    optimizer.param_groups[0]["params"] = parameters[:half]
    optimizer.add_param_group({"params": parameters[half:], "lr": 0.0, "betas": (0.5, 0.9)})
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    start = arrays(parameters)
    moved = []
    for number in range(8):
        before = arrays(parameters)
        step(parameters, optimizer, number, rank)
        schedule.step()
        moved.append(np.median(np.abs(arrays(parameters)[0] - before[0])))
    for t in range(half, len(parameters)):
        np.testing.assert_array_equal(arrays(parameters)[t], start[t])
    return moved


def test_parameter_groups_and_schedules():
    moved, _ = together(2, grouped)
    assert moved[0] > 1e-4
    assert moved[-1] < moved[0] / 30


def unfrozen(rank, exchange):
    parameters, optimizer = joined(exchange, {"warmup": 3, "debug": True})
    for number in range(14):
        for t, (parameter, g) in enumerate(zip(parameters, gradients(number, rank), strict=True)):
            late, seldom = t == 2 and number < 6, t == 5 and number in (4, 5)
            elsewhere = t == 0 and rank == 1 and number % 2  # No gradient here, but there.
            parameter.grad = None if late or seldom or elsewhere else torch.from_numpy(np.array(g))
        before = arrays(parameters)
        optimizer.step()
        after = arrays(parameters)
        assert (before[2] == after[2]).all() == (number < 6)
        assert (before[5] == after[5]).all() == (number in (4, 5))
        assert not (before[0] == after[0]).any()
        optimizer.zero_grad(set_to_none=True)
    state = optimizer.consolidate()
    assert [c["phase"] for c in state["apmsqueeze"]["cohorts"]] == ["compressed", "compressed"]
    assert [c["steps"] for c in state["apmsqueeze"]["cohorts"]] == [14, 8]
    assert state["state"][5]["step"] == 12
    return arrays(parameters)


def test_frozen_and_late_parameters():
    for mine, theirs in zip(*together(2, unfrozen), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_closure_and_strides_and_dtypes():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 40, 3), torch.nn.Flatten(), torch.nn.Linear(40 * 36, 4))
    model[0].to(memory_format=torch.channels_last)
    model[2].bfloat16()
    optimizer = APMSqueeze(model.parameters(), 1e-3, options=APMSqueezeOptions(warmup=20, bucket_bytes=4000))
    x = torch.randn(16, 3, 8, 8)

    def closure():
        optimizer.zero_grad()
        loss = model[2](model[1](model[0](x)).bfloat16()).float().square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure).detach()) for _ in range(60)]
    assert losses[-1] < 0.2 * losses[0]
    assert optimizer.phase == "compressed"


def scaled(rank, exchange, unscale):
    parameters, optimizer = joined(exchange, {"warmup": 3, "debug": True}, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=4)
    optimizer.attach_scaler(scaler)
    scales = []
    for number in range(9):
        for t, (parameter, g) in enumerate(zip(parameters, gradients(number, rank), strict=True)):
            parameter.grad = torch.from_numpy(np.array(g)) * scaler.get_scale()
            if number == 5 and rank == 1 and t == 0:
                parameter.grad[0, 0] = float("inf")
        scaler.scale(torch.ones(()))  # Makes the scale.
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return arrays(parameters), scales, optimizer.statistics()["skipped_steps"]


@pytest.mark.parametrize("unscale", [False, True])
def test_an_overflow_elsewhere_lowers_every_scale(unscale):
    (mine, scales, skipped), (theirs, others, also) = together(2, scaled, unscale)
    assert scales == others
    assert scales[5] < scales[4]
    assert skipped == also == 1
    for value, other in zip(mine, theirs, strict=True):
        np.testing.assert_array_equal(value, other)


def unattached(rank, exchange):
    parameters, optimizer = joined(exchange, {"warmup": 3})
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(ConfigError, match="attach_scaler"):
        scaler.step(optimizer)


def test_a_scaler_that_is_not_attached_is_refused():
    together(2, unattached)


def automatic(rank, exchange):
    parameters, optimizer = joined(exchange, {"warmup": "auto", "debug": True}, betas=(0.9, 0.9))
    phases = []
    for number in range(60):
        step(parameters, optimizer, 0 if number > 15 else number % 7, rank)
        phases.append(optimizer.phase)
    return phases


def test_automatic_warm_up_ends_when_v_has_stabilised():
    mine, theirs = together(2, automatic)
    assert mine == theirs
    assert mine[19] == "warmup"
    assert mine[-1] == "compressed"


def test_no_compressor_is_the_uncompressed_one():
    one, other = (together(2, trained, 6, {"warmup": 3, "compressor": c}) for c in (None, Uncompressed()))
    for mine, theirs in zip(one[0][0], other[0][0], strict=True):
        np.testing.assert_array_equal(mine, theirs)


def differing(rank, exchange):
    parameters, optimizer = joined(exchange, {"warmup": 3, "debug": True})
    with pytest.raises(PersiaError, match="parameter 2 differs between rank 0 and rank 1"):
        for number in range(6):
            if rank == 1 and number == 4:
                with torch.no_grad():
                    parameters[2][0] += 1e-3
            step(parameters, optimizer, number, rank)


def test_debug_finds_what_differs():
    together(2, differing)


# --- state ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("consolidate", [True, False], ids=["consolidated", "own"])
@pytest.mark.parametrize(("at", "place"), [(0, 0), (1, 1), (3, 0), (4, 1), (7, 0)])
def test_a_resumed_run_is_the_same_to_the_bit(at, place, consolidate):
    compressor = COMPRESSORS[::3][(place + consolidate) % 2]  # Both at each place.
    options = {"warmup": 3, "compressor": compressor, "bucket_bytes": 4 * 2000}
    together(3, apms_case.resumed, options, at, consolidate, 8)


def save(rank, exchange):
    parameters, optimizer = joined(exchange, {"warmup": 3, "compressor": OneBit(block=64)})
    for number in range(7):
        step(parameters, optimizer, number, rank)
    if rank == 0:  # By itself: it never communicates.
        optimizer.state_dict()
        optimizer.statistics()
    return optimizer.consolidate(), optimizer.state_dict()


def load(rank, exchange, state):
    parameters, optimizer = joined(exchange, {"warmup": 3, "compressor": OneBit(block=64), "debug": True})
    optimizer.load_state_dict(state)
    kept = optimizer.state_dict()
    optimizer._connected()
    taken = optimizer.consolidate()
    step(parameters, optimizer, 7, rank)
    return kept, taken


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_another_number_of_workers_takes_the_mean_of_the_errors(workers):
    state, _ = together(4, save)[0]
    for kept, taken in together(workers, load, state):
        for i, values in state["state"].items():
            assert torch.equal(kept["state"][i]["worker_error"], values["worker_error"])  # Until the first step.
            for mine in taken["state"][i]["worker_error"]:
                torch.testing.assert_close(mine, values["worker_error"].mean(0))
            assert torch.equal(taken["state"][i]["server_error"], values["server_error"])
            assert torch.equal(taken["state"][i]["exp_avg"], values["exp_avg"])


def test_the_state_of_one_worker_is_no_state_for_others():
    state = together(2, save)[1][1]
    with pytest.raises(CheckpointError, match="rank 1 of 2"):
        together(3, load, state)


def test_states_of_others_are_refused():
    parameters, optimizer = make({"warmup": 3})
    with pytest.raises(CheckpointError, match="not a state of this version"):
        optimizer.load_state_dict(torch.optim.Adam(parameters).state_dict())
    other = together(1, save)[0][0]
    _, smaller = make({"warmup": 3}, [(70, 33), (5,)])
    with pytest.raises(CheckpointError, match="parameter"):
        smaller.load_state_dict(other)


# --- dense PSs --------------------------------------------------------------------------------------------------


def there_and_back(rank, exchange, communicate, averaged_steps):
    """Some compressed steps, some on averages, as on a dense PS; beside it one that loses nothing from there on."""
    options = {"warmup": 3, "communicate": communicate, "bucket_bytes": 4 * 2000}
    parameters, optimizer = joined(exchange, {"debug": True} | options)
    for number in range(6):
        step(parameters, optimizer, number, rank)
    others, lossless = joined(exchange, {"compressor": Uncompressed()} | options)
    lossless.load_state_dict(optimizer.consolidate())
    with torch.no_grad():
        for other, parameter in zip(others, parameters, strict=True):
            other.copy_(parameter)
    averaged = optimizer.hand_over()
    for number in range(6, 6 + averaged_steps):
        for t, parameter in enumerate(parameters):
            every = [torch.from_numpy(np.array(gradients(number, other)[t])) for other in range(exchange.size)]
            parameter.grad = torch.stack(every).mean(0)
        averaged.step()
        step(others, lossless, number, rank)
    optimizer.take_back()
    for mine, theirs in zip(arrays(parameters), arrays(others), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)
    mine, theirs = optimizer.consolidate(), lossless.consolidate()
    for i, values in theirs["state"].items() if averaged_steps else ():  # Without, the momentum has the errors already.
        for name in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(mine["state"][i][name], values[name], rtol=1e-5, atol=2e-6)
    assert optimizer.phase == "compressed"
    step(parameters, optimizer, 6 + averaged_steps, rank)
    assert optimizer.statistics()["steps"] == 7 + averaged_steps
    assert optimizer.statistics()["worker_error_norm"] > 0
    return arrays(parameters)


@pytest.mark.parametrize("averaged_steps", [0, 1, 4])
@pytest.mark.parametrize("communicate", ["momentum", "gradient"])
def test_what_was_not_sent_goes_to_a_dense_ps(communicate, averaged_steps):
    results = together(3, there_and_back, communicate, averaged_steps)
    for found in results:
        for mine, first in zip(found, results[0], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_a_warm_up_on_a_dense_ps_goes_on():
    """And ends when there is something to send again; a parameter that begins there has a warm-up of its own."""
    parameters, optimizer = make({"warmup": 4, "compressor": Uncompressed()}, weight_decay=0.1, lr=0.01)
    others = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    adam = torch.optim.AdamW(others, lr=0.01, weight_decay=0.1)
    current = optimizer
    for number in range(6):
        if number == 1:
            current = optimizer.hand_over()
        for t, (parameter, other, g) in enumerate(zip(parameters, others, gradients(number, 0), strict=True)):
            late = t == 5 and number < 3
            parameter.grad, other.grad = (None if late else torch.from_numpy(np.array(g)) for _ in range(2))
        current.step()
        adam.step()
    for mine, theirs in zip(parameters, others, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
    optimizer.take_back()
    assert optimizer.phase == "warmup"
    step(parameters, optimizer, 6, 0)
    cohorts = optimizer.state_dict()["apmsqueeze"]["cohorts"]
    assert [(c["phase"], c["steps"]) for c in cohorts] == [("compressed", 7), ("warmup", 4)]
    assert cohorts[1]["parameters"] == [5]


# --- arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"warmup": 0}, "warmup"),
        ({"warmup": "soon"}, "warmup"),
        ({"compressor": "one_bit"}, "compressor"),
        ({"communicate": "love"}, "communicate"),
        ({"clip_norm": 0.0}, "clip_norm"),
        ({"bucket_bytes": 0}, "bucket_bytes"),
        ({"timeout": -1.0}, "timeout"),
        ({"variance_floor": 2.0}, "variance_floor"),
        ({"track_scale": "yes"}, "track_scale"),
        ({"refresh_variance": 0}, "refresh_variance"),
        ({"refresh_variance": True}, "refresh_variance"),
    ],
)
def test_wrong_options(options, field):
    with pytest.raises(ConfigError) as caught:
        APMSqueezeOptions(**options)
    assert caught.value.fields["field"] == field


@pytest.mark.parametrize(
    "arguments",
    [
        *({"lr": lr} for lr in (-1.0, "x", float("nan"))),
        *({"betas": betas} for betas in ((1.0, 0.9), 0.9, (0.9, None))),
        {"eps": -1.0},
        {"weight_decay": -1.0},
    ],
)
def test_wrong_arguments(arguments):
    with pytest.raises(ConfigError) as caught:
        APMSqueeze([torch.nn.Parameter(torch.zeros(3))], **arguments)
    assert caught.value.fields["field"] in arguments


def test_sparse_gradients_are_refused():
    table = torch.nn.Embedding(5, 2, sparse=True)
    optimizer = APMSqueeze(table.parameters())
    table(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ConfigError, match="sparse"):
        optimizer.step()


@pytest.mark.processes
def test_importing_the_declarations_imports_no_torch():
    code = "import sys, persia.optim; assert 'torch' not in sys.modules; persia.optim.APMSqueeze"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_statistics():
    _, _, alone = together(1, trained, 5, {"warmup": 3})[0]
    assert alone["bytes_sent"] == alone["bytes_last_step"] == 0
    _, _, several = together(4, trained, 5, {"warmup": 3}, [(100_000,)])[0]
    assert several["phase"] == "compressed"
    assert several["compression_ratio"] > 25
    assert several["worker_error_norm"] > 0
    assert several["server_error_norm"] > 0
