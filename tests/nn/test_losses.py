"""Losses of labels against PyTorch and the formulas of the papers, with masks, weights and groups."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.twins import losses as twins

from persia import IdFeature, Label, Schema
from persia.errors import ConfigError, DataError
from persia.nn import Targets, losses
from persia.nn.prepared import dummy_batch
from persia.nn.targets import may_be_missing
from persia.nn.targets import targets_of as made
from persia.schema import (
    BPR,
    JRC,
    BinaryCrossEntropy,
    EntireSpace,
    Focal,
    Hinge,
    Huber,
    ListwiseSoftmax,
    Squared,
    Tweedie,
)
from support.examples import examples

KINDS = {
    "bce": Label("y", loss=BinaryCrossEntropy(positive_weight=3.0)),
    "focal": Label("y", loss=Focal(gamma=0.5, alpha=0.25)),
    "brier": Label("y", loss=Squared()),
    "squared": Label("y", "regression"),
    "huber": Label("y", "regression", loss=Huber(delta=0.5)),
    "poisson": Label("y", "count"),
    "tweedie": Label("y", "regression", loss=Tweedie(power=1.3)),
    "softmax": Label("y", "multiclass", classes=4),
    "ordinal": Label("y", "ordinal", classes=4),
    "bpr": Label("y", loss=BPR()),
    "hinge": Label("y", loss=Hinge(margin=0.7)),
    "listwise": Label("y", loss=ListwiseSoftmax()),
    "graded": Label("y", "regression", loss=ListwiseSoftmax()),
    "jrc": Label("y", loss=JRC(alpha=0.3)),
}


def schema_of(*labels, **fields):
    return Schema([IdFeature("user", 4)], labels=labels, group="g", **fields)


def targets_of(schema, labels, weights=None, groups=None):
    return made(labels, weights, groups, masked=may_be_missing(schema))


def masked(label):
    fields = {name: getattr(label, name) for name in ("kind", "classes", "loss", "weight")}
    return Label(label.name, missing="mask", **fields)


def labels_of(label, rng, rows):
    match label.kind:
        case "binary":
            return rng.integers(0, 2, rows).astype(float)
        case "regression":
            return rng.normal(size=rows).round(1) if not isinstance(label.loss, Tweedie) else rng.gamma(1.0, size=rows)
        case "count":
            return rng.poisson(1.0, rows).astype(float)
    return rng.integers(0, 4, rows).astype(float)


def expected(name, label, logits, labels, groups, weights, known):
    """The loss of a label by the formula of its paper."""
    if name in ("bpr", "hinge"):
        cost = (lambda d: math.log1p(math.exp(-d))) if name == "bpr" else (lambda d: max(0.0, 0.7 - d))
        rows = np.flatnonzero(known)
        return twins.pairwise(cost, logits[rows, 0], labels[rows], groups[rows], weights[rows])
    if name in ("listwise", "graded"):
        return twins.listwise_softmax(logits[:, 0], labels, groups, weights, known, name == "graded")
    if name == "jrc":
        return twins.jrc(logits, labels, groups, weights, known, 0.3)
    by_row = {
        "bce": lambda x, y: twins.binary_cross_entropy(x[0], y, 3.0),
        "focal": lambda x, y: twins.focal(x[0], y, 0.5, 0.25),
        "brier": lambda x, y: (twins.sigmoid(x[0]) - y) ** 2,
        "squared": lambda x, y: (x[0] - y) ** 2,
        "huber": lambda x, y: (x[0] - y) ** 2 / 2 if abs(x[0] - y) < 0.5 else 0.5 * (abs(x[0] - y) - 0.25),
        "poisson": lambda x, y: math.exp(x[0]) - y * x[0],
        "tweedie": lambda x, y: math.exp(0.7 * x[0]) / 0.7 + y * math.exp(-0.3 * x[0]) / 0.3,
        "softmax": lambda x, y: math.log(sum(map(math.exp, x))) - x[int(y)],
        "ordinal": lambda x, y: twins.ordinal(x, y),
    }[name]
    return twins.mean([by_row(x, y) for x, y in zip(logits, labels, strict=True)], weights * known)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=examples(40), deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 12),
    groups=st.integers(1, 6),
    zeros=st.sampled_from([0.0, 0.3, 1.0]),
    missing=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_each_loss_is_the_formula_of_its_paper(name, seed, rows, groups, zeros, missing):
    rng = np.random.default_rng(seed)
    label = masked(KINDS[name])
    logits, labels = rng.normal(size=(rows, label.outputs)), labels_of(label, rng, rows)
    weights = np.where(rng.random(rows) < zeros, 0, rng.gamma(1.0, size=rows))
    known, ids = rng.random(rows) >= missing, rng.integers(-groups, groups, rows)
    given_labels = torch.tensor(np.where(known, labels, np.nan))[:, None]
    schema = schema_of(label)
    targets = targets_of(schema, given_labels, torch.tensor(weights), torch.tensor(ids))
    x = torch.tensor(logits, requires_grad=True)
    loss = losses.schema_loss(schema, x, targets)
    assert loss.item() == pytest.approx(expected(name, label, logits, labels, ids, weights, known), rel=1e-9, abs=1e-12)
    loss.backward()
    assert x.grad is not None
    assert not x.grad[~known].any()
    if not (weights * known).any():
        assert loss.item() == 0
        assert not x.grad.any()
    assert torch.autograd.gradcheck(lambda x: losses.schema_loss(schema, x, targets), (x,), atol=1e-6)


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=examples(25), deadline=None)
@given(seed=st.integers(0, 2**32 - 1), size=st.sampled_from([1e2, 1e4, 1e30]))
def test_huge_logits_give_no_nan(name, seed, size):
    rng = np.random.default_rng(seed)
    label = masked(KINDS[name])
    schema = schema_of(label)
    labels = torch.tensor(labels_of(label, rng, 8), dtype=torch.float32)[:, None]
    known = torch.tensor(rng.random(8) < 0.5)
    x = torch.tensor(rng.normal(size=(8, label.outputs)) * size, dtype=torch.float32).requires_grad_()
    groups = torch.tensor(rng.integers(0, 3, 8))
    loss = losses.schema_loss(schema, x, Targets(labels, known[:, None], None, groups))
    loss.backward()
    bounded = name not in ("poisson", "tweedie", "squared")  # Their values grow beyond float32.
    assert not x.grad[~known].any()
    if bounded:
        assert loss.isfinite()
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_a_mask_hides_whatever_logits_are_there(name):
    label = masked(KINDS[name])
    x = torch.full((4, label.outputs), 1e30, requires_grad=True)
    targets = Targets(torch.zeros(4, 1), torch.zeros(4, 1, dtype=torch.bool), None, torch.zeros(4, dtype=torch.int64))
    loss = losses.schema_loss(schema_of(label), x, targets)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(x.grad, torch.zeros_like(x))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("name", KINDS)
def test_a_dummy_batch_has_a_loss_and_gradients(name, rows):
    schema = schema_of(KINDS[name])
    batch = dummy_batch(schema, rows, torch.device("cpu"))
    x = torch.randn(rows, schema.outputs, requires_grad=True)
    loss = losses.schema_loss(schema, x, targets_of(schema, batch.labels, batch.weights, batch.groups))
    loss.backward()  # It stands in for data in collectives, so that each parameter needs a gradient.
    assert loss.isfinite()
    assert x.grad.shape == x.shape


def test_torch_has_the_same_losses():
    torch.manual_seed(0)
    x, y = torch.randn(32), torch.rand(32)
    nn = torch.nn
    assert torch.equal(
        losses.binary_cross_entropy(x, y, 2.0).mean(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(2.0))(x, y)
    )
    assert torch.equal(losses.squared(x, y).mean(), nn.MSELoss()(x, y))
    assert torch.equal(losses.huber(x, y, 0.3).mean(), nn.HuberLoss(delta=0.3)(x, y))
    assert torch.equal(losses.poisson(x, y).mean(), nn.PoissonNLLLoss()(x, y))
    classes = torch.randint(0, 5, (32,))
    wide = torch.randn(32, 5)
    assert torch.equal(losses.softmax(wide, classes.float()).mean(), nn.CrossEntropyLoss()(wide, classes))
    torch.testing.assert_close(losses.focal(x, y, gamma=0), losses.binary_cross_entropy(x, y))


def test_plain_labels_have_the_bits_of_torch():
    torch.manual_seed(0)
    logits, labels = torch.randn(64, 3, requires_grad=True), torch.rand(64, 3)
    schema = Schema([IdFeature("user", 4)], labels=["a", "b", Label("c")])
    loss = losses.schema_loss(schema, logits, targets_of(schema, labels))
    plain = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
    assert torch.equal(loss, plain)
    assert loss.grad_fn.name() == plain.grad_fn.name() == "BinaryCrossEntropyWithLogitsBackward0"
    weighted = losses.schema_loss(schema, logits, Targets(labels, None, torch.ones(64)))
    torch.testing.assert_close(weighted, plain)  # Declaring weights does not change the size of a loss.


def test_the_loss_is_the_mean_over_labels_by_their_weights():
    torch.manual_seed(0)
    logits, labels = torch.randn(16, 4), torch.rand(16, 2).round()
    schema = Schema([IdFeature("user", 4)], labels=["a", Label("b", "multiclass", classes=3, weight=0.5)])
    a = torch.nn.functional.binary_cross_entropy_with_logits(logits[:, 0], labels[:, 0])
    b = torch.nn.functional.cross_entropy(logits[:, 1:], labels[:, 1].long())
    torch.testing.assert_close(losses.schema_loss(schema, logits, labels), (a + 0.5 * b) / 2)


def entire_space_schema(missing="error"):
    return Schema([IdFeature("user", 4)], labels=["click", Label("buy", loss=EntireSpace("click"), missing=missing)])


@settings(max_examples=examples(40), deadline=None)
@given(a=st.floats(-15, 15), b=st.floats(-15, 15), label=st.sampled_from([0.0, 1.0]))
def test_entire_space_is_the_formula_of_its_paper(a, b, label):
    x = torch.tensor([b, a], dtype=torch.float64)
    found = losses.entire_space(x[:1], x[1:], torch.tensor([label], dtype=torch.float64))
    assert found.item() == pytest.approx(twins.entire_space(b, a, label), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("a", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("b", [-1e4, 0.0, 1e4])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_entire_space_stays_finite(a, b, label):
    x = torch.tensor([b, a], requires_grad=True)
    loss = losses.entire_space(x[:1], x[1:], torch.tensor([label])).sum()
    loss.backward()
    assert loss.isfinite()
    assert x.grad.isfinite().all()


def test_a_conversion_without_a_click_is_known_to_be_none():
    nan = math.nan
    labels = torch.tensor([[0.0, nan], [1.0, 1.0], [1.0, 0.0], [1.0, nan]], dtype=torch.float64)
    logits = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    schema = entire_space_schema("mask")
    loss = losses.schema_loss(schema, logits, targets_of(schema, labels))
    buys = [twins.entire_space(b, a, y) for (a, b), y in zip(logits.tolist()[:3], [0, 1, 0], strict=True)]
    clicks = [twins.binary_cross_entropy(a, y) for (a, _), y in zip(logits.tolist(), [0, 1, 1, 1], strict=True)]
    assert loss.item() == pytest.approx((sum(buys) / 3 + sum(clicks) / 4) / 2)
    assert torch.autograd.gradcheck(lambda x: losses.schema_loss(schema, x, targets_of(schema, labels)), (logits,))


def test_conversions_may_go_through_conversions():
    nan = math.nan
    labels = [
        Label("click", loss=JRC()),
        Label("cart", loss=EntireSpace("click"), missing="mask"),
        Label("buy", loss=EntireSpace("cart"), missing="mask"),
    ]
    rows = torch.tensor([[0.0, nan, nan], [1.0, 0.0, nan], [1.0, 1.0, 1.0], [1.0, nan, nan]], dtype=torch.float64)
    schema = schema_of(*labels)
    logits = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    targets = targets_of(schema, rows, None, torch.zeros(4, dtype=torch.int64))
    _, cart, buy = losses.SchemaLoss(schema).by_label(logits, targets)
    x = logits.detach().numpy()
    click = [twins.sigmoid(row[1] - row[0]) for row in x]
    carts = [p * twins.sigmoid(row[2]) for p, row in zip(click, x, strict=True)]
    buys = [p * twins.sigmoid(row[3]) for p, row in zip(carts, x, strict=True)]
    assert cart.item() == pytest.approx(-(sum(math.log(1 - p) for p in carts[:2]) + math.log(carts[2])) / 3)
    assert buy.item() == pytest.approx(-(sum(math.log(1 - p) for p in buys[:2]) + math.log(buys[2])) / 3)
    assert torch.autograd.gradcheck(lambda x: losses.schema_loss(schema, x, targets), (logits,))


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([Label("a", loss=EntireSpace("b")), Label("b", loss=EntireSpace("a"))], "through 'b' back to 'a'; let one"),
        ([Label("a", loss=EntireSpace("b")), Label("b", loss=BPR())], "through 'b', whose loss only ranks"),
    ],
)
def test_a_conversion_goes_through_a_probability(labels, message):
    with pytest.raises(ConfigError, match=message):
        schema_of(*labels)


def test_a_group_loss_without_groups_says_so():
    with pytest.raises(DataError, match=r"loss of label 'y' compares samples of a group.*Schema\.group"):
        losses.schema_loss(schema_of(KINDS["bpr"]), torch.zeros(4, 1), torch.zeros(4, 1))


def test_uncertainty_weights_are_those_of_the_paper():
    schema = Schema([IdFeature("user", 4)], labels=["a", Label("b", "regression")])
    weights = losses.UncertaintyWeights(schema)
    assert [name for name, _ in weights.named_parameters()] == ["log_variance"]
    weights.log_variance.data = torch.tensor([0.5, -1.0])
    a, b = torch.tensor(2.0), torch.tensor(3.0)
    sigma = [math.exp(0.25), math.exp(-0.5)]
    expected = 2 / sigma[0] ** 2 + math.log(sigma[0]) + 3 / (2 * sigma[1] ** 2) + math.log(sigma[1])
    assert weights([a, b]).item() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ConfigError, match=r"two or more labels; the schema has 'label' \(weight 1\)"):
        losses.UncertaintyWeights(Schema([IdFeature("user", 4)]))
