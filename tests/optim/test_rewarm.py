"""APMSqueeze.rewarm, held against its reference and against Adam's formulas."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.errors import ConfigError
from persia.optim import APMSqueeze, APMSqueezeOptions, Uncompressed
from support.apms_case import COMPRESSORS, arrays, equal_the_reference, gradients, joined, make, resumed, step, train
from support.apms_threads import together
from support.examples import examples

SMALL_BUCKETS = {"warmup": 3, "bucket_bytes": 4 * 2000}


def trained(rank, exchange, steps, options, native, rewarm):
    parameters, optimizer = joined(exchange, SMALL_BUCKETS | {"debug": True} | options, native=native)
    return train(parameters, optimizer, rank, steps, rewarm=rewarm)


@pytest.mark.parametrize("communicate", ["momentum", "gradient"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=str)
@given(
    workers=st.integers(1, 4),
    at=st.integers(0, 6),
    steps=st.integers(1, 4),
    again=st.integers(1, 5),
    rest=st.integers(1, 3),
    native=st.booleans(),
    clip=st.sampled_from([None, 30.0]),
)
@settings(max_examples=examples(4), deadline=None, derandomize=True)
def test_it_equals_the_reference(compressor, communicate, workers, at, steps, again, rest, native, clip):
    """Called in the warm-up, at its end and later; and once more, perhaps before the first one is over."""
    rewarm = {at: steps, at + again: 2}
    options = {"compressor": compressor, "communicate": communicate, "clip_norm": clip}
    total = at + again + rest
    results = together(workers, trained, total, options, native, rewarm)
    equal_the_reference(results, SMALL_BUCKETS | options, total, tolerance=2e-6, rewarm=rewarm)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
def test_rewarm_is_adam_from_frozen_v_and_momentum_with_errors(native):
    lr, (beta1, beta2), eps = 1e-3, (0.9, 0.999), 1e-8

    def check(rank, exchange):
        parameters, optimizer = joined(exchange, SMALL_BUCKETS, native=native)
        train(parameters, optimizer, 0, 6)
        before = optimizer.state_dict()["state"]
        assert optimizer.statistics()["worker_error_norm"] > 0
        optimizer.rewarm(4)
        assert optimizer.statistics()["worker_error_norm"] == optimizer.statistics()["server_error_norm"] == 0
        expected = [p.detach().clone() for p in parameters]
        values = [before[t] for t in range(len(parameters))]
        m = [v["exp_avg"].add(v["worker_error"].add(v["server_error"]), alpha=1.0 / beta1) for v in values]
        v = [one["exp_avg_sq"].clone() for one in values]
        for number in range(6, 10):
            step(parameters, optimizer, number, 0)
            assert optimizer.phase == "warmup"
            for t, array in enumerate(gradients(number, 0)):
                g = torch.from_numpy(np.array(array))
                m[t].mul_(beta1).add_(g, alpha=1.0 - beta1)
                v[t].mul_(beta2).addcmul_(g, g, value=1.0 - beta2)  # Its bias is corrected already.
                expected[t] -= torch.div(m[t], v[t].sqrt().add_(eps)).mul_(lr / (1.0 - beta1 ** (number + 1)))
        for found, wanted in zip(arrays(parameters), expected, strict=True):
            if native:
                np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6)
            else:
                np.testing.assert_array_equal(found, wanted)
        step(parameters, optimizer, 10, 0)
        assert optimizer.phase == "compressed"
        for t, one in optimizer.state_dict()["state"].items():  # Frozen as it was: not corrected once more.
            floor = 1e-3 * v[t].mean() if v[t].numel() else 0.0
            torch.testing.assert_close(one["exp_avg_sq"], v[t].clamp(min=floor), rtol=1e-5, atol=1e-6)

    together(1, check)


@pytest.mark.parametrize("consolidate", [True, False], ids=["consolidated", "own"])
@pytest.mark.parametrize(("at", "place"), [(5, 0), (7, 1), (9, 0), (12, 1)])
def test_a_resumed_run_is_the_same_to_the_bit(at, place, consolidate):
    options = SMALL_BUCKETS | {"compressor": COMPRESSORS[::3][(place + consolidate) % 2]}  # Both at each place.
    together(2, partial(resumed, rewarm={5: 4}), options, at, consolidate, 14)


def on_dense_ps(rank, exchange, steps):
    """Some steps of the second warm-up on averages, as on a dense PS, beside one that stays."""
    parameters, optimizer = joined(exchange, SMALL_BUCKETS | {"debug": True})
    others, other = joined(exchange, SMALL_BUCKETS)
    for number in range(14):
        for optimizer_ in (optimizer, other) if number == 5 else ():
            optimizer_.rewarm(5)
        if number == 7:
            averaged = optimizer.hand_over()
        if 7 <= number < 7 + steps:
            for t, parameter in enumerate(parameters):
                every = [torch.from_numpy(np.array(gradients(number, one)[t])) for one in range(exchange.size)]
                parameter.grad = torch.stack(every).mean(0)
            averaged.step()
        else:
            if number == 7 + steps:
                optimizer.take_back()
            step(parameters, optimizer, number, rank)
        step(others, other, number, rank)
        if number < 10:
            for mine, theirs in zip(arrays(parameters), arrays(others), strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=2e-6)
    assert optimizer.phase == "compressed"
    for i, values in other.consolidate()["state"].items():
        torch.testing.assert_close(optimizer.state_dict()["state"][i]["exp_avg_sq"], values["exp_avg_sq"])


@pytest.mark.parametrize("steps", [1, 3])
def test_it_goes_on_where_the_network_is_on_dense_pss(steps):
    together(2, on_dense_ps, steps)


def test_elements_without_v_move_again():
    parameter = torch.nn.Parameter(torch.zeros(4096))
    options = APMSqueezeOptions(warmup=20, compressor=Uncompressed(), variance_floor=0.0)
    optimizer = APMSqueeze([parameter], 1e-3, options=options)
    for number in range(40):
        parameter.grad = torch.ones(4096)
        if number < 30:
            parameter.grad[7] = 0.0
        if number == 30:
            assert parameter[7] == 0.0
            optimizer.rewarm(5)
        optimizer.step()
    assert parameter[7].isfinite()
    assert parameter[7] < 0.0


def test_before_the_first_step_nothing_changes():
    parameters, optimizer = make({"warmup": 3})
    optimizer.rewarm(10)
    for number in range(4):
        step(parameters, optimizer, number, 0)
    assert optimizer.phase == "compressed"


@pytest.mark.parametrize("steps", [0, -1, True, 1.5, "auto"])
def test_wrong_steps_are_refused(steps):
    _, optimizer = make({"warmup": 3})
    with pytest.raises(ConfigError, match="expected a whole number") as caught:
        optimizer.rewarm(steps)
    assert caught.value.fields["field"] == "steps"


def differently(rank, exchange):
    parameters, optimizer = joined(exchange, SMALL_BUCKETS)
    train(parameters, optimizer, rank, 5)
    with pytest.raises(ConfigError, match=r"differs between workers: \[3, 4\]"):
        optimizer.rewarm(3 + rank)
    assert optimizer.phase == "compressed"


def test_different_steps_are_refused():
    together(2, differently)


def test_on_dense_pss_it_is_refused():
    parameters, optimizer = make({"warmup": 3})
    train(parameters, optimizer, 0, 5)
    optimizer.hand_over()
    with pytest.raises(ConfigError, match="on dense PSs"):
        optimizer.rewarm(3)
    optimizer.take_back()
    optimizer.rewarm(3)
    step(parameters, optimizer, 5, 0)
    assert optimizer.phase == "warmup"
