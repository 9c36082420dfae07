"""The tracked scale of v, held against the reference and against its formula."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.optim import APMSqueezeOptions
from support.apms_case import COMPRESSORS, arrays, changing, feed, gradients, joined, make, resumed, tensors
from support.apms_threads import together
from support.examples import examples
from support.twins.apmsqueeze import ReferenceAPMSqueeze

BETAS = (0.9, 0.8)
OPTIONS = {"warmup": 4, "bucket_bytes": 4 * 2000, "track_scale": True}


def trained(rank, exchange, steps, options, native, rates, rewarm):
    parameters, optimizer = joined(exchange, OPTIONS | {"debug": True} | options, native=native, betas=BETAS)
    for number in range(steps):
        if number == rewarm:
            optimizer.rewarm(2)
        feed(parameters, optimizer, changing(number, rank, rates))
    return arrays(parameters)


@pytest.mark.parametrize("communicate", ["momentum", "gradient"])
@pytest.mark.parametrize("compressor", COMPRESSORS[::2], ids=str)
@given(
    workers=st.integers(1, 3),
    rates=st.lists(st.sampled_from([0.3, 0.7, 0.9, 1.1, 1.5]), min_size=1, max_size=4),
    rewarm=st.sampled_from([None, 6]),
    native=st.booleans(),
    clip=st.sampled_from([None, 20.0]),
)
@settings(max_examples=examples(4), deadline=None, derandomize=True)
def test_it_equals_the_reference(compressor, communicate, workers, rates, rewarm, native, clip):
    options = {"compressor": compressor, "communicate": communicate, "clip_norm": clip}
    reference = ReferenceAPMSqueeze(tensors(0), workers, APMSqueezeOptions(**OPTIONS | options), betas=BETAS)
    for number in range(11):
        if number == rewarm:
            reference.rewarm(2)
        reference.step([changing(number, rank, rates) for rank in range(workers)])
    for found in together(workers, trained, 11, options, native, rates, rewarm):
        for value, wanted in zip(found, reference.x, strict=True):
            np.testing.assert_allclose(value.ravel(), wanted, rtol=2e-5, atol=4e-6)


def test_the_scale_is_the_root_of_the_ratio_of_square_norms():
    def check(rank, exchange):
        parameters, optimizer = joined(exchange, OPTIONS | {"variance_floor": 1e-3}, betas=BETAS)
        squares = []
        for number in range(9):
            grads = changing(number, rank, [1.2, 0.5, 1.0])
            feed(parameters, optimizer, grads)
            squares.append([float(np.sum(g.astype(np.float64) ** 2)) for g in grads])
        cohort = optimizer._cohorts[0]
        for p, factor in zip(cohort.flat.parameters, cohort.scale.factors(), strict=True):
            t = next(i for i, one in enumerate(parameters) if one is p)
            mine = [s[t] for s in squares]
            late, early = (np.average(mine[:n], weights=0.8 ** np.arange(n)[::-1]) for n in (9, 4))
            wanted = max(late / early, 1e-3) ** 0.5 if early else 1.0
            assert factor == pytest.approx(wanted, rel=1e-6)
        assert max(cohort.scale.factors()) > 1.5  # Some grow,
        assert min(cohort.scale.factors()) < 0.5  # and some shrink.

    together(1, check)


def test_the_scale_has_a_floor_and_zeros_are_no_division_by_zero():
    for floor, scale in ((0.01, 0.1), (0.0, 1.0)):
        parameters, optimizer = make(OPTIONS | {"variance_floor": floor}, betas=(0.9, 0.0))
        for number in range(8):
            feed(parameters, optimizer, [g * (number < 5) for g in gradients(number, 0)])
        cohort = optimizer._cohorts[0]
        for p, factor in zip(cohort.flat.parameters, cohort.scale.factors(), strict=True):
            assert factor == pytest.approx(scale if p.numel() else 1.0)
        assert all(np.isfinite(value).all() for value in arrays(parameters))


def test_a_tensor_without_gradients_keeps_its_scale():
    parameters, optimizer = make(OPTIONS, betas=BETAS)
    for number in range(7):
        feed(parameters, optimizer, changing(number, 0, [1.3]))
    before = optimizer._cohorts[0].scale.factors()
    for parameter, g in zip(parameters[1:], changing(7, 0, [1.3])[1:], strict=True):
        parameter.grad = torch.from_numpy(np.array(g))
    parameters[0].grad = None
    optimizer.step()
    after = optimizer._cohorts[0].scale.factors()
    number = next(i for i, p in enumerate(optimizer._cohorts[0].flat.parameters) if p is parameters[0])
    assert [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a == b and a != 1.0] == [number]


def test_it_is_off_by_default():
    parameters, optimizer = make({"warmup": 4})
    for number in range(6):
        feed(parameters, optimizer, gradients(number, 0))
    assert optimizer._cohorts[0].scale is None
    assert "scale" not in optimizer.state_dict()["apmsqueeze"]["cohorts"][0]


@pytest.mark.parametrize("consolidate", [True, False], ids=["consolidated", "own"])
@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_resumed_run_is_the_same_to_the_bit(at, consolidate):
    of = partial(changing, rates=[0.8, 1.2])
    together(2, partial(resumed, of=of, betas=BETAS), OPTIONS, at, consolidate, 10)


def test_a_v_frozen_untracked_keeps_its_scale_until_refrozen():
    _, old = states = make({"warmup": 4}, betas=BETAS)
    for number in range(6):
        feed(states[0], old, gradients(number, 0))
    parameters, optimizer = make(OPTIONS, betas=BETAS)
    optimizer.load_state_dict(old.state_dict())
    for number in range(6, 16):
        if number == 10:
            optimizer.rewarm(2)
        feed(parameters, optimizer, changing(number, 0, [1.3]))
        if number < 12:
            assert set(optimizer._cohorts[0].scale.factors()) == {1.0}
    assert min(f for f, p in zip(optimizer._cohorts[0].scale.factors(), parameters, strict=True)) >= 1.0
    assert max(optimizer._cohorts[0].scale.factors()) > 1.1


def test_on_dense_pss_v_has_the_scale():
    def check(rank, exchange):
        parameters, optimizer = joined(exchange, OPTIONS | {"compressor": None}, betas=BETAS)
        for number in range(7):
            feed(parameters, optimizer, changing(number, rank, [0.7, 1.2]))
        cohort = optimizer._cohorts[0]
        factors = dict(zip(map(id, cohort.flat.parameters), cohort.scale.factors(), strict=True))
        frozen = [values["exp_avg_sq"] for _, values in sorted(optimizer.state_dict()["state"].items())]
        averaged = optimizer.hand_over()
        optimizer.hand_over()  # Once more changes nothing.
        for parameter, v in zip(parameters, frozen, strict=True):
            torch.testing.assert_close(averaged.state[parameter]["exp_avg_sq"], v * factors[id(parameter)] ** 2)
        for parameter, g in zip(parameters, changing(7, rank, [0.7, 1.2]), strict=True):
            parameter.grad = torch.from_numpy(np.array(g))
        averaged.step()
        optimizer.take_back()
        optimizer._connected()
        assert set(optimizer._cohorts[0].scale.factors()) == {1.0}
        feed(parameters, optimizer, changing(8, rank, [0.7, 1.2]))
        assert len(set(optimizer._cohorts[0].scale.factors())) > 1

    together(1, check)


def test_a_run_that_tracks_no_longer_keeps_the_scale_it_had():
    parameters, optimizer = make(OPTIONS, betas=BETAS)
    for number in range(8):
        feed(parameters, optimizer, changing(number, 0, [0.7]))
    cohort = optimizer._cohorts[0]
    factors = cohort.scale.factors()
    assert min(factors) < 0.9
    values, other = make(OPTIONS | {"track_scale": False}, betas=BETAS)
    other.load_state_dict(optimizer.state_dict())
    feed(values, other, changing(8, 0, [0.7]))  # v is frozen.
    before, after = (c.flat.views(c.flat.variance) for c in (cohort, other._cohorts[0]))
    for v, scaled, factor in zip(before, after, factors, strict=True):
        torch.testing.assert_close(scaled, v * factor**2)
