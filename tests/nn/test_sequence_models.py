"""Networks on histories: values against NumPy loops over single events, gradients, and bad schemas."""

import numpy as np
import pytest
import torch

from persia.errors import ConfigError
from persia.nn.models import DIEN, DIN, YouTubeDNN
from persia.nn.pooling import SequenceEmbedding
from persia.schema import IdFeature, Schema
from support.histories import (
    LENGTH,
    Numbers,
    history_schema,
    leaves,
    made_inputs,
    outcome,
    sigmoid,
    softmax,
)

MODELS = [DIN, DIEN, YouTubeDNN]
PAIRS = [("items", "item"), ("shops", "shop")]


def events_of(numbers, row, reverse=False, names=("items", "shops")):
    events = np.concatenate([numbers.events[name][row] for name in names], 1)
    return events[::-1] if reverse else events


def side_by_side(numbers, row, first):
    return np.concatenate([first, *(numbers.pooled[n][row] for n in ("user", "item", "shop")), numbers.dense[row]])


def test_din_weighs_each_event_by_the_candidate():
    schema = history_schema()
    model = DIN(schema, attention=(6, 5), hidden=(8,))
    dense, embeddings = made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    expected = []
    for row in range(len(dense)):
        candidate = np.concatenate([numbers.pooled["item"][row], numbers.pooled["shop"][row]])
        interest = np.zeros(6)
        for event in events_of(numbers, row):
            weight = numbers.mlp("attention", np.concatenate([event, candidate, event - candidate, event * candidate]))
            interest += weight[0] * event
        expected.append(numbers.mlp("deep", side_by_side(numbers, row, interest)))
    np.testing.assert_allclose(model(dense, embeddings).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def gru(numbers, events):
    """States of the extractor: gates are reset, update, new, as in torch.nn.GRU."""
    state, states = np.zeros(6), []
    for event in events:
        a = numbers.of["extractor.weight_ih_l0"] @ event + numbers.of["extractor.bias_ih_l0"]
        b = numbers.of["extractor.weight_hh_l0"] @ state + numbers.of["extractor.bias_hh_l0"]
        reset, update = sigmoid(a[:6] + b[:6]), sigmoid(a[6:12] + b[6:12])
        state = (1 - update) * np.tanh(a[12:] + reset * b[12:]) + update * state
        states.append(state)
    return states


@pytest.mark.parametrize("newest_first", [False, True])
def test_dien_follows_interests_and_predicts_the_next_event(newest_first):
    schema = history_schema()
    model = DIEN(schema, newest_first=newest_first, hidden=(8,), auxiliary=0.3)
    dense, embeddings = made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    expected, terms, predictions = [], 0.0, 0
    for row in range(len(dense)):
        events = events_of(numbers, row, newest_first)
        states = gru(numbers, events)
        candidate = np.concatenate([numbers.pooled["item"][row], numbers.pooled["shop"][row]])
        interest = np.zeros(6)
        if len(events):
            attention = softmax(np.array([state @ numbers.of["attention.weight"] @ candidate for state in states]))
            for weight, state in zip(attention, states, strict=True):
                a, b = numbers.linear("evolution.inputs", state), numbers.linear("evolution.states", interest)
                update, reset = sigmoid(a[:6] + b[:6]), sigmoid(a[6:12] + b[6:12])
                new = np.tanh(a[12:] + reset * b[12:])
                interest = (1 - weight * update) * interest + weight * update * new
        expected.append(numbers.mlp("deep", side_by_side(numbers, row, interest)))
        # Negatives: the events of the sample half a batch before, where both have one.
        others = events_of(numbers, (row - len(dense) // 2) % len(dense), newest_first)
        for t in range(len(events) - 1):
            terms -= np.log(sigmoid(states[t] @ events[t + 1]))
            predictions += 1
            if t + 1 < len(others):
                terms -= np.log(1 - sigmoid(states[t] @ others[t + 1]))
    labels = torch.tensor([[1.0], [0.0]]).repeat(4, 1)[: len(dense)]
    logits, loss = outcome(model, dense, embeddings, labels)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    p = sigmoid(np.array(expected))
    y = labels.numpy()
    bce = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert loss.item() == pytest.approx(bce + 0.3 * terms / predictions, rel=1e-4)
    model.eval()
    assert isinstance(model(dense, embeddings), torch.Tensor)  # No auxiliary loss outside of training.
    assert model.loss(logits, labels).item() == pytest.approx(bce, rel=1e-4)


def test_dien_takes_negatives_of_the_reader():
    extra = (
        IdFeature("not_items", table="item", pooling=None, max_length=LENGTH),
        IdFeature("not_shops", table="shop", pooling=None, max_length=LENGTH),
    )
    schema = history_schema(extra=extra)
    model = DIEN(schema, history=PAIRS, negatives=("not_items", "not_shops"), hidden=())
    dense, embeddings = made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    terms, predictions = 0.0, 0
    for row in range(len(dense)):
        events = events_of(numbers, row)
        others = events_of(numbers, row, names=("not_items", "not_shops"))
        for state, event, other in zip(gru(numbers, events), events[1:], others[1:], strict=False):
            terms -= np.log(sigmoid(state @ event)) + np.log(1 - sigmoid(state @ other))
            predictions += 1
    output = model(dense, embeddings)
    assert output.extra.item() == pytest.approx(terms / predictions, rel=1e-4)
    # They are no input of the network itself.
    assert model.deep[0].in_features == 6 + 3 + 4 + 2 + 2


def test_youtube_dnn_has_powers_of_dense_features_and_means_of_sequences():
    schema = history_schema()
    model = YouTubeDNN(schema, hidden=(8, 6))
    dense, embeddings = made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    expected = []
    for row in range(len(dense)):
        x = numbers.dense[row]
        events = [numbers.events[n][row] for n in ("items", "shops")]
        means = [e.mean(0) if len(e) else np.zeros(e.shape[1]) for e in events]
        pooled = [numbers.pooled[n][row] for n in ("user", "item", "shop")]
        root = np.where(x < 0, -np.sqrt(np.abs(x)), np.sqrt(np.abs(x)))
        expected.append(numbers.mlp("mlp", np.concatenate([*pooled, *means, x, x**2, root])))
    np.testing.assert_allclose(model(dense, embeddings).detach().numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", MODELS)
def test_gradients_reach_all_parameters_and_events_but_no_padding(make):
    torch.manual_seed(0)
    schema = history_schema()
    model = make(schema)
    dense, embeddings = made_inputs(schema, rows=16)
    _, loss = outcome(model, dense, embeddings)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(leaf.grad.abs().sum() > 0 for leaf in leaves(embeddings))
    for e in embeddings.values():
        if isinstance(e, SequenceEmbedding):
            assert not e.values.grad[~e.mask].any()
            assert e.values.grad[e.mask].abs().sum(1).gt(0).all()


@pytest.mark.parametrize("make", [DIN, DIEN])
def test_padding_of_a_single_sequence_has_no_gradient(make):
    schema = history_schema()
    model = make(schema, history=PAIRS[:1])
    dense, embeddings = made_inputs(schema)
    outcome(model, dense, embeddings)[1].backward()
    items = embeddings["items"]
    assert not items.values.grad[~items.mask].any()
    assert items.values.grad[items.mask].abs().sum(1).gt(0).all()


def shortened(sequence, length):
    mask = sequence.mask & (torch.arange(LENGTH) < length)
    return SequenceEmbedding((sequence.values * mask.unsqueeze(2)).detach(), mask)


@pytest.mark.parametrize("short", ["items", "shops"])
def test_an_event_that_one_sequence_lacks_does_not_count(short):
    schema = history_schema()
    model = DIEN(schema)
    _, embeddings = made_inputs(schema)
    both = embeddings | {name: shortened(embeddings[name], 2) for name in ("items", "shops")}
    one = embeddings | {short: both[short]}
    events, expected = model.input.events(one), model.input.events(both)
    assert torch.equal(events.mask, expected.mask)
    assert torch.equal(events.values, expected.values)
    assert events.lengths.tolist() == [0, 1, 2, 2, 2, 2, 0]


def test_negatives_beyond_the_history_do_not_count():
    extra = (IdFeature("nots", table="item", pooling=None, max_length=LENGTH),)
    schema = history_schema(extra=extra)
    model = DIEN(schema, history=PAIRS[:1], negatives=["nots"])
    dense, embeddings = made_inputs(schema)
    embeddings["items"] = shortened(embeddings["items"], 3)
    longer = model(dense, embeddings).extra
    embeddings["nots"] = shortened(embeddings["nots"], 3)
    assert torch.equal(model(dense, embeddings).extra, longer)


@pytest.mark.parametrize("make", MODELS)
def test_padding_and_the_rest_of_the_batch_change_no_logit(make):
    schema = history_schema()
    model = make(schema).eval()
    dense, embeddings = made_inputs(schema)
    whole = model(dense, embeddings)
    for row in range(len(dense)):
        alone = {
            name: SequenceEmbedding(e.values[row : row + 1], e.mask[row : row + 1])
            if isinstance(e, SequenceEmbedding)
            else e[row : row + 1]
            for name, e in embeddings.items()
        }
        torch.testing.assert_close(model(dense[row : row + 1], alone), whole[row : row + 1])


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_batches_without_any_event_have_finite_results(make, rows):
    schema = history_schema()
    model = make(schema)
    dense, embeddings = made_inputs(schema, rows, lengths=[0] * rows)
    logits, loss = outcome(model, dense, embeddings)
    assert len(logits) == rows
    if rows:
        loss.backward()
        assert loss.isfinite()
        assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves(embeddings))


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(make, dtype):
    schema = history_schema()
    model = make(schema)
    dense, embeddings = made_inputs(schema)
    exact, _ = outcome(model, dense, embeddings)
    with torch.autocast("cpu", dtype):
        logits, loss = outcome(model, dense, embeddings)
    loss.float().backward()
    torch.testing.assert_close(logits.float(), exact, rtol=0.1, atol=0.1)
    assert all(leaf.grad.isfinite().all() for leaf in leaves(embeddings))


def test_pairs_are_those_of_one_table():
    assert DIN(history_schema()).input.pairs == tuple(PAIRS)
    assert DIN(history_schema(), history=PAIRS[:1]).input.pairs == tuple(PAIRS[:1])


WIDE = (IdFeature("wide", dim=7), IdFeature("long", table="item", pooling=None, max_length=LENGTH + 1))


@pytest.mark.parametrize("make", [DIN, DIEN])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"history": [("items", "nope")]}, "no ID-type feature 'nope'"),
        ({"history": [("user", "item")]}, r"'user' has pooling='sum'; declare it with pooling=None"),
        ({"history": [("items", "shops")]}, "candidate's feature 'shops' is not pooled"),
        ({"history": [*PAIRS, PAIRS[0]]}, "'items' twice"),
        ({"history": [*PAIRS, ("long", "item")]}, r"'long' has max_length 6, but 'items' 5"),
        ({"history": []}, "needs a history"),
        ({"hidden": (0,)}, "width"),
        ({"outputs": 0}, "outputs"),
        ({"dropout": 1.0}, "dropout"),
    ],
)
def test_what_does_not_fit_is_refused(make, options, match):
    with pytest.raises(ConfigError, match=match):
        make(history_schema(extra=WIDE), **{"history": PAIRS} | options)


@pytest.mark.parametrize("make", [DIN, DIEN])
def test_a_schema_without_a_history_is_refused(make):
    with pytest.raises(ConfigError, match="needs a history"):
        make(Schema([IdFeature("item", dim=4), IdFeature("old", dim=4, pooling=None, max_length=3)]))
    with pytest.raises(ConfigError, match="no ID-type feature"):
        make(Schema([], dense_features=["x"]))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda s: DIN(s, history=[("items", "wide")]), "event has dim 4, but the candidate 7"),
        (lambda s: DIN(s, history=PAIRS[:1], attention=(-1,)), "width"),
        (lambda s: DIEN(s, history=PAIRS, negatives=["items"]), "negatives has 1 features, but the history 2"),
        (lambda s: DIEN(s, history=PAIRS[:1], negatives=["item"]), "negatives: feature 'item' has pooling='sum'"),
        (lambda s: DIEN(s, history=PAIRS[:1], negatives=["long"]), "'long' has max_length 6"),
        (lambda s: DIEN(s, history=PAIRS[:1], negatives=["shops"]), "'shops' has dim 2, but 'items' 4"),
        (lambda s: DIEN(s, history=PAIRS[:1], auxiliary=-1.0), "auxiliary"),
        (lambda s: DIEN(s, history=PAIRS[:1], newest_first="no"), "newest_first"),
    ],
)
def test_bad_arguments_are_refused(build, match):
    with pytest.raises(ConfigError, match=match):
        build(history_schema(extra=WIDE))
