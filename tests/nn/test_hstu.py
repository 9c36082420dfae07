"""HSTU: values against NumPy loops over single events, times, ranking, first values, and bad arguments."""

import numpy as np
import pytest
import torch

from persia.errors import ConfigError
from persia.nn.models import HSTU, SASRec, hstu_encoder
from persia.nn.models.history import BatchNegatives
from persia.nn.models.hstu_encoder import AGE_BUCKETS
from persia.nn.pooling import SequenceEmbedding
from persia.nn.ranking import RankingModel
from persia.schema import DenseFeature, IdFeature, Label, Schema
from support.histories import (
    LENGTH,
    PAIRS,
    Numbers,
    events_of,
    history_schema,
    layer_norm,
    made_inputs,
    outcome,
    predicted,
    sigmoid,
)

AGES = slice(2, 2 + LENGTH)
WIDE = (IdFeature("wide", dim=7),)


def timed_schema(**rules):
    schema = history_schema(dense=0)
    dense = ["d0", "d1", DenseFeature("ages", **{"size": LENGTH} | rules), "d2"]
    return Schema(schema.id_features, dense_features=dense, labels=["click"])


def timed_inputs(schema, rows=7):
    """Ages from seconds to years, in no order; those of padding are as large."""
    dense, embeddings = made_inputs(schema, rows)
    dense[:, AGES] = torch.exp(10 * torch.rand(rows, LENGTH, generator=torch.Generator().manual_seed(1))) * 1.5
    return dense, embeddings


def moved(model):
    """The model with parameters that are far from their first values, none of which is 0."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def silu(x):
    return x * sigmoid(x)


def bucket(seconds):
    return 0 if seconds <= 1 else min(int(np.log(seconds) / 0.301), AGE_BUCKETS - 1)


def of_candidate(state, candidate, others):
    """Loss of predicting the candidate among the candidates and events of other samples."""
    scores = np.array([state @ item for item in (candidate, *others)])
    return np.log(np.exp(scores - scores.max()).sum()) + scores.max() - scores[0]


def layer_of(numbers, name, x, heads, ages):
    """One layer on a history and a candidate, `[events + 1, width]`; each attends by the time of the one after it."""
    projected = silu(numbers.linear(f"{name}.inputs", layer_norm(numbers, f"{name}.norm", x)))
    u, v, q, k = np.split(projected, 4, 1)
    attended = np.zeros_like(x)
    for i in range(len(x)):
        for j in range(i + 1):
            bias = numbers.of[f"{name}.bias"][i - j]
            if ages is not None:
                after = ages[i + 1] if i + 1 < len(ages) else 0.0
                bias = bias + numbers.of[f"{name}.times"][bucket(ages[j] - after)]
            for part in np.split(np.arange(x.shape[1]), heads):
                attended[i, part] += silu(q[i, part] @ k[j, part] + bias) * v[j, part] / (i + 1)
    return x + numbers.linear(f"{name}.output", layer_norm(numbers, f"{name}.attended", attended, 1e-6) * u)


@pytest.mark.parametrize("timed", [False, True])
@pytest.mark.parametrize(("heads", "block"), [(1, hstu_encoder.BLOCK), (1, 2), (3, hstu_encoder.BLOCK), (3, 2)])
@pytest.mark.parametrize("newest_first", [False, True])
def test_values_are_those_of_loops_over_events(timed, heads, block, newest_first, monkeypatch):
    monkeypatch.setattr(hstu_encoder, "BLOCK", block)  # Events that attend in one call.
    schema = timed_schema() if timed else history_schema()
    options = {"ages": "ages"} if timed else {}
    model = moved(HSTU(schema, newest_first=newest_first, heads=heads, hidden=(8,), next_item=0.5, **options))
    dense, embeddings = timed_inputs(schema) if timed else made_inputs(schema)
    numbers = Numbers(model, dense, embeddings)
    expected, extra = [], 0.0
    histories = [events_of(numbers, row, newest_first) for row in range(len(dense))]
    candidates = np.concatenate([numbers.pooled["item"], numbers.pooled["shop"]], 1)
    for row, (events, candidate) in enumerate(zip(histories, candidates, strict=True)):
        ages = None
        if timed:
            ages = numbers.dense[row, AGES][: len(events)]
            ages = np.append(ages[::-1] if newest_first else ages, 0.0)
        x = np.concatenate([events, [candidate]]) * np.sqrt(6) + numbers.of["encoder.positions"][: len(events) + 1]
        for layer in range(2):
            x = layer_of(numbers, f"encoder.layers.{layer}", x, heads, ages)
        states = layer_norm(numbers, "encoder.norm", x[:-1])
        others = numbers.dense[row][[0, 1, -1]] if timed else numbers.dense[row]
        pooled = [numbers.pooled[name][row] for name in ("user", "item", "shop")]
        logit = numbers.mlp("deep", np.concatenate([x[-1], *pooled, others]))
        if len(events):
            logit = logit + numbers.of["match"] * (states[-1] @ candidate)
            others = [item for other in (candidates, *histories) for item in other]
            own = [candidate.tolist(), *map(list, events)]
            others = [item for item in others if item.tolist() not in own]
            extra += 0.5 * of_candidate(states[-1], candidate, others) / len(dense)  # All labels are 1.
        expected.append(logit)
        negatives = histories[(row - len(dense) // 2) % len(dense)]
        extra += predicted(states, events, negatives) / len(dense)
    found, loss = outcome(model, dense, embeddings)
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-3, atol=1e-4)
    bce = np.mean(np.log1p(np.exp(-np.array(expected))))
    assert loss.item() == pytest.approx(bce + 0.5 * extra, rel=1e-4)
    assert isinstance(model.eval()(dense, embeddings), torch.Tensor)


def trained_output():
    """A network in training, what it returns for a batch, and the embeddings of this batch."""
    schema = history_schema()
    model = HSTU(schema, history=PAIRS[:1], hidden=())
    dense, embeddings = made_inputs(schema)
    return model, model(dense, embeddings), embeddings


def test_a_candidate_that_was_not_chosen_follows_nothing():
    model, output, _ = trained_output()
    labels = torch.zeros(len(output.logits), 1)
    without = output._replace(extra=output.extra._replace(of_candidate=None))
    assert model.loss(output.logits, labels, output.extra) == model.loss(output.logits, labels, without.extra)
    labels[2] = 1
    more = model.loss(output.logits, labels, output.extra) - model.loss(output.logits, labels, without.extra)
    assert more.item() == pytest.approx(0.5 * output.extra.of_candidate[2].item() / len(labels), rel=1e-4)


def test_a_candidate_without_a_history_follows_nothing():
    _, output, embeddings = trained_output()
    present = embeddings["items"].mask[:, 0]
    assert not present.all()
    assert (output.extra.of_candidate > 0).tolist() == present.tolist()


def test_predicting_the_candidate_moves_no_row_that_it_is_compared_with():
    _, output, embeddings = trained_output()
    output.extra.of_candidate.sum().backward()
    assert embeddings["item"].grad is None or not embeddings["item"].grad.any()
    assert embeddings["items"].values.grad.any()  # By the newest output.


def test_the_first_binary_label_says_whether_the_candidate_was_chosen():
    schema = history_schema()
    several = Schema(
        schema.id_features, dense_features=["d0"], labels=[Label("seconds", kind="regression"), "click", "buy"]
    )
    assert HSTU(several)._chosen == 1
    none = Schema(schema.id_features, dense_features=["d0"], labels=[Label("seconds", kind="regression")])
    model = HSTU(none)
    dense, embeddings = made_inputs(none)
    assert model(dense, embeddings).extra.of_candidate is None


def test_a_large_batch_has_a_limited_number_of_negatives():
    numbers = torch.arange(1_000)
    negatives = BatchNegatives(torch.randn(1_000, 2), None, numbers)
    assert negatives.thinned(128).samples.tolist() == list(range(0, 1_000, 8))
    assert negatives.thinned(2_000).samples.tolist() == numbers.tolist()
    more = BatchNegatives(torch.randn(3, 2), torch.tensor([True, False, True]), torch.tensor([0, 0, 1]))
    joined = negatives.joined(more)
    assert joined.present.tolist() == 1_000 * [True] + [True, False, True]
    assert joined.excluded(torch.ones(1, 2), torch.tensor([1])).nonzero()[:, 1].tolist() == [1, 1_001, 1_002]


def test_samples_are_grouped_on_a_cpu_as_they_are_padded_elsewhere():
    schema = timed_schema()
    model = moved(HSTU(schema, ages="ages"))
    dense, embeddings = timed_inputs(schema, rows=23)
    events = model.input.events(embeddings)
    state, newest, _ = model._outputs(events, model._times(dense, events.mask))
    padded = model._logits(state, newest, events.candidate, model.input.rest(embeddings), dense)
    torch.testing.assert_close(model.eval()(dense, embeddings), padded)


def test_one_user_is_ranked_as_rows_of_the_user_with_each_item():
    schema = timed_schema()
    model = moved(HSTU(schema, ages="ages", heads=2)).eval()
    dense, embeddings = timed_inputs(schema)
    for row, items in ((0, 3), (4, 7)):  # Without events, and with four.
        of_user = {
            name: SequenceEmbedding(e.values[row : row + 1], e.mask[row : row + 1])
            if isinstance(e, SequenceEmbedding)
            else e[row : row + 1]
            for name, e in embeddings.items()
            if name not in ("item", "shop")
        }
        of_items = {name: embeddings[name][:items] for name in ("item", "shop")}
        rows = dense[row].expand(items, -1)
        whole = of_items | {
            name: SequenceEmbedding(e.values.expand(items, -1, -1), e.mask.expand(items, -1))
            if isinstance(e, SequenceEmbedding)
            else e.expand(items, -1)
            for name, e in of_user.items()
        }
        found = model.score(model.user_part(dense[row : row + 1], of_user), rows, of_items)
        torch.testing.assert_close(found, model(rows, whole), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [SASRec, HSTU])
def test_predictors_can_rank_with_it(make):
    model = make(history_schema())
    assert isinstance(model, RankingModel)
    assert set(model.user_features) == {"items", "shops"}
    assert set(model.item_features) == {"item", "shop"}


def test_ages_are_of_the_user():
    assert set(HSTU(timed_schema(), ages="ages").user_features) == {"items", "shops", "ages"}


def test_attention_begins_by_recency_alone_whatever_the_length():
    """Of the sum of weights, each doubling of the distance has about the same part, and contents change little."""
    torch.manual_seed(0)
    features = [IdFeature("item", dim=16), IdFeature("history", table="item", pooling=None, max_length=500)]
    layer = HSTU(Schema(features), ages=None).encoder.layers[0]
    weights = torch.nn.functional.silu(layer.bias.detach())
    octaves = [weights[first : 2 * first].sum() for first in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    assert min(octaves) / max(octaves) > 0.8
    _, _, query, key = layer._projected(torch.randn(1, 500, 16))
    contents = torch.nn.functional.silu(query @ key.transpose(2, 3)).detach()
    assert contents.std() * 500**0.5 < weights[1]  # Of 500 events the noise is less than the newest one's weight.


@pytest.mark.parametrize("length", [1, 10, 100, 500])
def test_the_length_of_the_window_changes_nothing(length):
    """Five events have the same logits in a window of any length."""
    torch.manual_seed(0)
    short, long = (
        HSTU(Schema([IdFeature("item", dim=4), IdFeature("h", table="item", pooling=None, max_length=n)]), hidden=())
        for n in (5, 5 + length)
    )
    own = short.state_dict()
    for name, tensor in long.state_dict().items():
        tensor[tuple(slice(0, n) for n in own[name].shape)] = own[name]
    values, mask = torch.randn(3, 5, 4), torch.arange(5) < torch.tensor([[5], [3], [0]])
    values = values * mask.unsqueeze(2)
    padding = torch.nn.functional.pad
    item = torch.randn(3, 4)
    wide = SequenceEmbedding(padding(values, (0, 0, 0, length)), padding(mask, (0, length)))
    expected = short.eval()(torch.zeros(3, 0), {"item": item, "h": SequenceEmbedding(values, mask)})
    torch.testing.assert_close(long.eval()(torch.zeros(3, 0), {"item": item, "h": wide}), expected)


def test_a_negative_age_counts_as_none():
    schema = timed_schema()
    model = moved(HSTU(schema, ages="ages")).eval()
    dense, embeddings = timed_inputs(schema)
    dense[:, AGES] = -5.0
    found = model(dense, embeddings)
    dense[:, AGES] = 0.0
    torch.testing.assert_close(model(dense, embeddings), found)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: HSTU(history_schema(), heads=4), "heads = 4 does not divide"),
        (lambda: HSTU(history_schema(), layers=0), "layers"),
        (lambda: HSTU(history_schema(), hidden=(0,)), "width"),
        (lambda: HSTU(history_schema(), next_item=-1), "next_item"),
        (lambda: HSTU(history_schema(), history=[]), "needs a history"),
        (lambda: HSTU(history_schema(extra=WIDE), history=[("items", "wide")]), "event has dim 4"),
        (lambda: HSTU(history_schema(), history=PAIRS, negatives=["items"]), "negatives has 1 features"),
        (lambda: HSTU(history_schema(), ages="age"), "ages = 'age' is no dense feature"),
        (lambda: HSTU(history_schema(), ages="d0"), r"has 1 values, but .* max_length 5; .*\('d0', size=5\)"),
        (lambda: HSTU(timed_schema(log=True), ages="ages"), "has log or scale"),
        (lambda: HSTU(timed_schema(scale=(0, 2)), ages="ages"), "has log or scale"),
    ],
)
def test_bad_arguments_are_refused(build, match):
    with pytest.raises(ConfigError, match=match):
        build()
