"""Networks on histories: values against NumPy loops over single events, gradients, and bad schemas."""

import contextlib

import numpy as np
import pytest
import torch

from persia.errors import ConfigError
from persia.nn.models import DIEN, DIN, HSTU, SASRec, TwoTower, YouTubeDNN
from persia.nn.models.dien import AttentionGRU
from persia.nn.pooling import SequenceEmbedding
from persia.schema import IdFeature, Schema
from support.histories import (
    LENGTH,
    PAIRS,
    Numbers,
    events_of,
    history_schema,
    layer_norm,
    leaves,
    made_inputs,
    outcome,
    predicted,
    side_by_side,
    sigmoid,
    softmax,
)


def two_tower(schema):
    return TwoTower(schema, item=["item", "shop"])


MODELS = [DIN, DIEN, YouTubeDNN, SASRec, HSTU, two_tower]


def read(make, embeddings):
    """Embeddings that the model reads."""
    return {name: e for name, e in embeddings.items() if make is not SASRec or name != "user"}


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
    expected, auxiliary = [], 0.0
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
        auxiliary += predicted(states, events, others) / len(dense)
    labels = torch.tensor([[1.0], [0.0]]).repeat(4, 1)[: len(dense)]
    logits, loss = outcome(model, dense, embeddings, labels)
    np.testing.assert_allclose(logits.detach().numpy(), expected, rtol=1e-4, atol=1e-5)
    p = sigmoid(np.array(expected))
    y = labels.numpy()
    bce = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
    assert loss.item() == pytest.approx(bce + 0.3 * auxiliary, rel=1e-4)
    model.eval()
    assert isinstance(model(dense, embeddings), torch.Tensor)  # No auxiliary loss outside of training.
    assert model.loss(logits, labels).item() == pytest.approx(bce, rel=1e-4)


def test_dien_adds_up_a_long_history_in_float32_under_autocast():
    torch.manual_seed(0)
    layer = AttentionGRU(4)
    values, attention = torch.randn(3, 1, 4).expand(3, 400, 4), torch.full((3, 400), 1 / 400)
    exact = layer(values, attention)
    with torch.autocast("cpu", torch.bfloat16):
        state = layer(values, attention)
    assert state.dtype == torch.float32
    torch.testing.assert_close(state, exact, rtol=0.02, atol=0.002)


def test_dien_takes_negatives_of_the_reader():
    extra = (
        IdFeature("not_items", table="item", pooling=None, max_length=LENGTH),
        IdFeature("not_shops", table="shop", pooling=None, max_length=LENGTH),
    )
    schema = history_schema(extra=extra)
    model = DIEN(schema, history=PAIRS, negatives=("not_items", "not_shops"), hidden=())
    dense, embeddings = made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    auxiliary = 0.0
    for row in range(len(dense)):
        events = events_of(numbers, row)
        others = events_of(numbers, row, names=("not_items", "not_shops"))
        auxiliary += predicted(gru(numbers, events), events, others) / len(dense)
    output = model(dense, embeddings)
    assert output.extra.item() == pytest.approx(auxiliary, rel=1e-4)
    # They are no input of the network itself.
    assert model.deep[0].in_features == 6 + 3 + 4 + 2 + 2


def test_youtube_dnn_has_dense_powers_and_means_of_sequences():
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


def test_youtube_dnn_takes_dense_squares_beyond_float16():
    schema = history_schema()
    model = YouTubeDNN(schema)
    dense, embeddings = made_inputs(schema)
    with torch.autocast("cpu", torch.float16):
        _, loss = outcome(model, dense * 10_000, embeddings)
    loss.float().backward()
    assert loss.isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", MODELS)
def test_gradients_reach_parameters_and_events_but_no_padding(make):
    torch.manual_seed(0)
    schema = history_schema()
    model = make(schema)
    dense, embeddings = made_inputs(schema, rows=16)
    _, loss = outcome(model, dense, embeddings)
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(leaf.grad.abs().sum() > 0 for leaf in leaves(read(make, embeddings)))
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


@pytest.mark.parametrize("make", [DIEN, SASRec, HSTU])
def test_an_event_that_did_follow_is_no_negative(make):
    schema = history_schema()
    model = make(schema, history=PAIRS[:1])
    _, embeddings = made_inputs(schema, rows=2, lengths=[4, 4])
    items = embeddings["items"]
    with torch.no_grad():
        items.values[1, 2] = items.values[0, 2]  # The same third event; the other sample is the other one.
    events = model.input.events(embeddings)
    sample = (model.next_item if make is DIEN else model.negatives).sample
    assert sample(embeddings, events)[1].tolist() == 2 * [[True, True, False, True, False]]
    alone = {"item": embeddings["item"][:1], "items": SequenceEmbedding(items.values[:1], items.mask[:1])}
    assert not sample(alone, model.input.events(alone))[1].any()


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
def test_no_model_waits_for_the_device(make, monkeypatch):
    """A tensor on the meta device has no values to read."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())  # It does not know that device.

    def leaf(tensor):
        return tensor.detach().to("meta").requires_grad_()

    schema = history_schema()
    model = make(schema).to("meta")
    dense, embeddings = made_inputs(schema)
    embeddings = {
        name: SequenceEmbedding(leaf(e.values), e.mask.to("meta")) if isinstance(e, SequenceEmbedding) else leaf(e)
        for name, e in embeddings.items()
    }
    logits, loss = outcome(model, dense.to("meta"), embeddings)
    assert logits.shape == (len(dense), 1)
    loss.backward()


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
    assert all(leaf.grad.isfinite().all() for leaf in leaves(read(make, embeddings)))


def test_pairs_are_those_of_one_table():
    assert DIN(history_schema()).input.pairs == tuple(PAIRS)
    assert DIN(history_schema(), history=PAIRS[:1]).input.pairs == tuple(PAIRS[:1])


def test_two_sequences_of_one_table_are_not_paired_by_guess():
    extra = [IdFeature(f"{kind}_seen", table=kind, pooling=None, max_length=LENGTH) for kind in ("item", "shop")]
    schema = history_schema(extra=extra)
    with pytest.raises(
        ConfigError, match=r"'items' and 'item_seen' .* table 'item'; .* history=\[\('items', 'item'\)\]"
    ):
        DIN(schema)
    assert DIN(schema, history=PAIRS[:1]).input.pairs == tuple(PAIRS[:1])
    assert DIEN(schema, negatives=["item_seen", "shop_seen"]).input.pairs == tuple(PAIRS)


WIDE = (
    IdFeature("wide", dim=7),
    IdFeature("long", table="item", pooling=None, max_length=LENGTH + 1),
    IdFeature("newest", table="item", pooling=None, max_length=LENGTH, keep="last"),
)


@pytest.mark.parametrize("make", [DIN, DIEN])
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"history": [("items", "nope")]}, "no ID-type feature 'nope'"),
        ({"history": [("user", "item")]}, r"'user' has pooling='sum'; declare it with pooling=None"),
        ({"history": [("items", "shops")]}, "candidate's feature 'shops' is not pooled"),
        ({"history": [*PAIRS, PAIRS[0]]}, "'items' twice"),
        ({"history": [*PAIRS, ("long", "item")]}, r"'long' has max_length 6, but 'items' 5"),
        ({"history": [*PAIRS, ("newest", "item")]}, r"'newest' keeps the last ids .* but 'items' the first"),
        ({"history": []}, "needs a history"),
        ({"history": "items"}, "Invalid history = 'items'; expected a list of pairs"),
        ({"history": [("items",)]}, "Invalid history"),
        ({"history": [("items", 3)]}, "Invalid history"),
        ({"history": 3}, "Invalid history = 3"),
        ({"hidden": (0,)}, "width"),
        ({"hidden": 8}, "hidden = 8"),
        ({"outputs": 0}, "outputs"),
        ({"outputs": 1.5}, "outputs = 1.5"),
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
        (lambda s: DIN(s, history=PAIRS[:1], attention=(-1,)), "width in attention = -1"),
        (lambda s: DIN(s, history=PAIRS[:1], attention=4), "Invalid attention = 4"),
        (lambda s: DIEN(s, history=PAIRS[:1], negatives="long"), "Invalid negatives = 'long'"),
        (lambda s: SASRec(s, history=PAIRS[:1], negatives=3), "Invalid negatives = 3"),
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


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("newest_first", [False, True])
def test_sasrec_attends_to_earlier_events(heads, newest_first):
    schema = history_schema()
    model = SASRec(schema, newest_first=newest_first, heads=heads, next_item=0.5)
    dense, embeddings = made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    logits, auxiliary = [], 0.0
    for row in range(len(dense)):
        events = events_of(numbers, row, newest_first)
        x = events * np.sqrt(6) + numbers.of["encoder.positions"][LENGTH - len(events) :]
        for block in ("encoder.blocks.0", "encoder.blocks.1"):
            q, k, v = np.split(numbers.linear(f"{block}.projection", layer_norm(numbers, f"{block}.norms.0", x)), 3, 1)
            attended = np.zeros_like(x)
            size = 6 // heads
            for t in range(len(events)):
                for low in range(0, 6, size):
                    part = slice(low, low + size)
                    weights = softmax(k[: t + 1, part] @ q[t, part] / np.sqrt(size))
                    attended[t, part] = weights @ v[: t + 1, part]
            x = x + attended
            hidden = np.maximum(numbers.linear(f"{block}.first", layer_norm(numbers, f"{block}.norms.1", x)), 0)
            x = x + numbers.linear(f"{block}.second", hidden)
        states = layer_norm(numbers, "encoder.norm", x)
        candidate = np.concatenate([numbers.pooled["item"][row], numbers.pooled["shop"][row]])
        logits.append([states[-1] @ candidate if len(events) else 0.0])
        others = events_of(numbers, (row - len(dense) // 2) % len(dense), newest_first)
        auxiliary += predicted(states, events, others) / len(dense)
    found, loss = outcome(model, dense, embeddings)
    np.testing.assert_allclose(found.detach().numpy(), logits, rtol=1e-3, atol=1e-4)
    bce = np.mean(-np.log(sigmoid(np.array(logits))))
    assert loss.item() == pytest.approx(bce + 0.5 * auxiliary, rel=1e-4)
    assert isinstance(model.eval()(dense, embeddings), torch.Tensor)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: SASRec(history_schema(labels=("a", "b"))), "one logit, but the schema has 2 labels"),
        (lambda: SASRec(history_schema(), heads=4), "heads = 4 does not divide the width of an event, 6"),
        (lambda: SASRec(history_schema(), blocks=0), "blocks"),
        (lambda: SASRec(history_schema(), next_item=-1), "next_item"),
        (lambda: SASRec(history_schema(), dropout=1.0), "dropout"),
        (lambda: SASRec(history_schema(extra=WIDE), history=[("items", "wide")]), "event has dim 4"),
        (lambda: SASRec(history_schema(), history=PAIRS, negatives=["items"]), "negatives has 1 features"),
    ],
)
def test_bad_arguments_of_attention_are_refused(build, match):
    with pytest.raises(ConfigError, match=match):
        build()
