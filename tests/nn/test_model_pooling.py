"""The native pooling and the torch twin that runs on a GPU give the same values and gradients."""

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import persia
from persia.errors import PersiaError
from persia.nn.pooling import Expander, expand_with_torch
from support.examples import examples


@st.composite
def cases(draw):
    batch = draw(st.integers(1, 6))
    dim = draw(st.integers(1, 5))
    unique = draw(st.integers(1, 7))
    features, inverse, offsets, weights = [], {}, {}, {}
    for i in range(draw(st.integers(1, 4))):
        name = f"f{i}"
        pooling = draw(st.sampled_from(["sum", "mean", "sqrtn", None]))
        features.append(persia.IdFeature(name, dim=dim, table="t", pooling=pooling, max_length=3))
        lengths = draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
        single = draw(st.booleans())
        count = batch if single else sum(lengths)
        inverse[name] = np.array(
            draw(st.lists(st.integers(0, unique - 1), min_size=count, max_size=count)), dtype=np.uint16
        )
        offsets[name] = None if single else np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
        if pooling is not None and draw(st.booleans()):
            quarters = st.integers(-8 if pooling == "sum" else 0, 8)
            drawn = draw(st.lists(quarters, min_size=count, max_size=count))
            weights[name] = np.array(drawn, np.float32) / 4
    return features, unique, dim, inverse, offsets, weights


@settings(max_examples=examples(60), deadline=None)
@given(cases())
def test_native_equals_torch(case):
    features, unique, dim, inverse, offsets, weights = case
    schema = persia.Schema(features)
    values = torch.randn(unique, dim)
    results = []
    for native in (True, False):
        leaf = values.clone().requires_grad_()
        if native:
            found = Expander(schema, torch.device("cpu"), 2)({"t": leaf}, inverse, offsets, weights)
        else:
            found = expand_with_torch(
                {f.name: ("t", f.pooling, f.max_length) for f in features},
                {"t": leaf},
                {n: torch.from_numpy(a.astype(np.int64)) for n, a in inverse.items()},
                {n: None if o is None else torch.from_numpy(o) for n, o in offsets.items()},
                {n: torch.from_numpy(w) for n, w in weights.items()},
            )
        tensors = [f.values if isinstance(f, persia.nn.SequenceEmbedding) else f for f in found.values()]
        (0 * leaf.sum() + sum((t * (i + 1)).square().sum() for i, t in enumerate(tensors))).backward()
        masks = [f.mask for f in found.values() if isinstance(f, persia.nn.SequenceEmbedding)]
        results.append((tensors, masks, leaf.grad))
    (ours, our_masks, our_grad), (theirs, their_masks, their_grad) = results
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(our_masks, their_masks, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-4, atol=1e-5)


@st.composite
def single_ids(draw):
    """Features whose samples have one id each, in tables of two widths; and features that the loss leaves out."""
    batch = draw(st.integers(1, 5))
    dims = draw(st.lists(st.sampled_from([2, 3]), min_size=1, max_size=4))
    counts = [draw(st.integers(1, 6)) for _ in dims]
    of_features = draw(st.lists(st.integers(0, len(dims) - 1), min_size=1, max_size=6))
    inverse = [
        np.array(
            draw(st.lists(st.integers(0, counts[table] - 1), min_size=batch, max_size=batch)),
            draw(st.sampled_from([np.uint16, np.uint32])),
        )
        for table in of_features
    ]
    return dims, counts, of_features, inverse, draw(st.sets(st.integers(0, len(of_features) - 1)))


@settings(max_examples=examples(100), deadline=None)
@given(single_ids())
def test_single_ids_one_by_one_equal_those_of_the_native_path(case):
    """Values, gradients, and which tables get none."""
    dims, counts, of_features, inverse, left_out = case
    names = [f"f{number}" for number in range(len(of_features))]
    schema = persia.Schema(
        [persia.IdFeature(name, dim=dims[t], table=f"t{t}") for name, t in zip(names, of_features, strict=True)]
    )
    values = {f"t{t}": torch.randn(counts[t], dims[t]) for t in sorted(set(of_features))}
    results = []
    for on_host in (True, False):
        expander = Expander(schema, torch.device("cpu"), 1)
        expander.on_host = on_host
        leaves = {name: rows.clone().requires_grad_() for name, rows in values.items()}
        arrays = [one if on_host else torch.from_numpy(one) for one in inverse]
        found = expander(leaves, dict(zip(names, arrays, strict=True)), dict.fromkeys(names))
        assert list(found) == names
        for embeddings in found.values():
            embeddings.mul_(1.0)  # A model may.
        terms = [(i + 1) * found[name].square().sum() for i, name in enumerate(names)]
        sum(NoGradient.apply(term) if i in left_out else term for i, term in enumerate(terms)).backward()
        results.append(([found[name].detach() for name in names], {n: leaf.grad for n, leaf in leaves.items()}))
    (ours, our_gradients), (theirs, their_gradients) = results
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
    for name, mine in our_gradients.items():
        assert (mine is None) == (their_gradients[name] is None)
        if mine is not None:
            torch.testing.assert_close(mine, their_gradients[name])


@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("on_host", [True, False])
def test_weights_are_those_of_embedding_bag(pooling, on_host):
    """Values and gradients of float64 bags: `per_sample_weights` of torch, divided as TensorFlow does."""
    torch.manual_seed(0)
    expander = Expander(persia.Schema([persia.IdFeature("f", dim=8, table="t", pooling=pooling)]), torch.device("cpu"))
    expander.on_host = on_host
    offsets = torch.tensor([0, 3, 3, 4, 9])
    inverse, weights = torch.tensor([2, 0, 2, 1, 3, 3, 0, 1, 2]), torch.rand(9)
    weights[3] = 0  # A sample whose weights add up to 0.
    rows, target = torch.randn(4, 8), torch.randn(4, 8)
    ours = rows.clone().requires_grad_()
    arrays = [inverse.short().numpy().view(np.uint16), offsets.numpy(), weights.numpy()]
    given = [{"f": one} for one in (arrays if on_host else [inverse, offsets, weights])]
    found = expander({"t": ours}, *given)["f"]
    (found * target).sum().backward()
    exact = rows.double().requires_grad_()
    bags = torch.nn.functional.embedding_bag(
        inverse, exact, offsets, mode="sum", per_sample_weights=weights.double(), include_last_offset=True
    )
    parts = [part.double() for part in weights.tensor_split(offsets[1:-1])]
    sums = {"sum": [1.0] * 4, "mean": [p.sum() for p in parts], "sqrtn": [p.square().sum().sqrt() for p in parts]}
    divided = torch.stack([bag / by if by else 0 * bag for bag, by in zip(bags, sums[pooling], strict=True)])
    (divided * target).sum().backward()
    torch.testing.assert_close(found, divided.float(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.grad, exact.grad.float(), rtol=1e-6, atol=1e-6)
    assert not found[1].any()
    assert not found[2].any()


def values_of(found):
    return [f.values if isinstance(f, persia.nn.SequenceEmbedding) else f for f in found.values()]


def weighted(found, leave_out):
    """A loss of all features but some, with an autograd function that returns no gradient for these."""
    terms = ((t * (i + 1)).square().sum() for i, t in enumerate(values_of(found)))
    return sum(NoGradient.apply(term) if i in leave_out else term for i, term in enumerate(terms))


class NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


@settings(max_examples=examples(60), deadline=None)
@given(cases(), st.sampled_from([1.0, 0.3]), st.integers(1, 3), st.sets(st.integers(0, 3)), st.booleans())
def test_pooled_ahead_is_pooled_in_place_bit_for_bit(case, factor, calls, leave_out, in_time):
    features, unique, dim, inverse, offsets, weights = case
    expander = Expander(persia.Schema(features), torch.device("cpu"), 2)
    leaf = torch.randn(unique, dim).requires_grad_()
    ahead = expander.ahead({"t": leaf.detach().numpy()}, inverse, offsets, weights)
    if in_time:
        ahead.pool()
    found = [expander({"t": leaf}, inverse, offsets, weights) for _ in range(calls)]
    taken = [ahead.embeddings() for _ in range(calls)]
    for ours, theirs in zip(taken, found, strict=True):
        for name, mine in ours.items():
            if isinstance(mine, persia.nn.SequenceEmbedding):
                assert torch.equal(mine.values, theirs[name].values)
                assert torch.equal(mine.mask, theirs[name].mask)
            else:
                assert torch.equal(mine, theirs[name])
    for made in (found, taken):
        sum(weighted(one, leave_out) for one in made).backward()
    assert ahead.leaf.grad is not None
    assert ahead.nbytes == sum(4 * values.numel() for values in values_of(taken[0]))
    expected = {} if leaf.grad is None else {"t": leaf.grad if factor == 1.0 else leaf.grad.mul_(factor)}
    gradients = ahead.gradients({}, factor)()
    assert list(gradients) == list(expected)
    for name, gradient in gradients.items():
        np.testing.assert_array_equal(gradient, expected[name].numpy())


def ahead_of(dims):
    """Tables of 4 rows, and the features of a batch of 3 samples, one for each table."""
    schema = persia.Schema([persia.IdFeature(name, dim=dim) for name, dim in dims.items()])
    rows = {table.name: torch.rand(4, table.dim) for table in schema.resolved_tables().values()}
    inverse = dict.fromkeys(dims, np.array([0, 3, 3], np.uint16))
    arrays = {name: part.numpy() for name, part in rows.items()}
    return rows, Expander(schema, torch.device("cpu")).ahead(arrays, inverse, dict.fromkeys(dims))


def test_embeddings_changed_in_place_are_pooled_again():
    rows, ahead = ahead_of({"a": 2})
    ahead.embeddings()["a"].relu_().mul_(5)
    assert torch.equal(ahead.embeddings()["a"], rows["a"][[0, 3, 3]])


def test_only_tables_of_the_loss_get_gradients_which_add_up():
    _, ahead = ahead_of({"a": 2, "b": 3, "c": 2})
    first, second = ahead.embeddings(), ahead.embeddings()
    (first["a"].sum() + 2 * second["a"].sum() + second["c"].sum()).backward()
    packed = ahead.gradients({}, 1.0)()
    assert set(packed) == {"a", "c"}
    np.testing.assert_array_equal(packed["a"], np.array([[3, 3], [0, 0], [0, 0], [6, 6]], np.float32))
    np.testing.assert_array_equal(packed["c"], np.array([[1, 1], [0, 0], [0, 0], [2, 2]], np.float32))
    ahead.embeddings()["b"].sum().backward()
    assert list(ahead.gradients({}, 1.0)()) == ["b"]


def test_gradients_of_rows_are_added():
    _, ahead = ahead_of({"a": 2, "b": 1})
    ahead.embeddings()["a"].sum().backward()
    packed = ahead.gradients({name: np.full((4, dim), 5, np.float32) for name, dim in (("a", 2), ("b", 1))}, 2.0)()
    np.testing.assert_array_equal(packed["a"], np.array([[12, 12], [10, 10], [10, 10], [14, 14]], np.float32))
    np.testing.assert_array_equal(packed["b"], np.full((4, 1), 10, np.float32))


def test_a_second_backward_pass_changes_nothing_that_was_taken():
    _, ahead = ahead_of({"a": 2})
    loss = ahead.embeddings()["a"].sum()
    loss.backward(retain_graph=True)
    summed = ahead.gradients({}, 1.0)
    loss.backward()
    np.testing.assert_array_equal(summed()["a"], np.array([[1, 1], [0, 0], [0, 0], [2, 2]], np.float32))


def test_gradients_are_freed_once_they_are_summed():
    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.sum()

        @staticmethod
        def backward(ctx, gradient):
            array = np.ones((3, 2), np.float32)
            made.append(weakref.ref(array))
            return torch.from_numpy(array)

    made = []
    _, ahead = ahead_of({"a": 2})
    loss = Sum.apply(ahead.embeddings()["a"])
    loss.backward()
    summed = ahead.gradients({}, 1.0)
    assert made[0]() is not None
    summed()
    gc.collect()
    assert made[0]() is None


def test_a_gradient_that_is_changed_before_its_sum_is_an_error():
    class Reusing(torch.autograd.Function):
        workspace = torch.ones(3, 2)

        @staticmethod
        def forward(ctx, values):
            return values.sum()

        @staticmethod
        def backward(ctx, gradient):
            return Reusing.workspace

    _, ahead = ahead_of({"a": 2})
    Reusing.apply(ahead.embeddings()["a"]).backward()
    summed = ahead.gradients({}, 1.0)
    Reusing.workspace.zero_()
    with pytest.raises(PersiaError, match="changed in place after its backward pass"):
        summed()
