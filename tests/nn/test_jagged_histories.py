"""Histories without padding: the same numbers and gradients as with padding to `max_length`, for any lengths."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from persia.nn.models import HSTU, NextItem, SASRec, event_layout
from persia.nn.models.event_layout import EventLayout
from persia.nn.pooling import SequenceEmbedding
from persia.schema import DenseFeature, IdFeature, Schema
from support.examples import examples
from support.histories import LENGTH, PAIRS, history_schema, leaves, made_inputs, outcome

LONG = 90
LENGTHS = st.lists(st.sampled_from([0, 1, 2, 7, 8, 9, 10, 40, 80, LONG - 1, LONG]), min_size=1, max_size=9) | st.lists(
    st.just(LONG), min_size=1, max_size=4
)


def mask_of(lengths, longest=LONG):
    return torch.arange(longest) < torch.tensor(lengths, dtype=torch.int64).unsqueeze(1)


@settings(deadline=None, max_examples=examples(100))
@given(lengths=LENGTHS, one_group=st.booleans())
def test_places_are_those_of_the_events(lengths, one_group):
    mask = mask_of(lengths)
    numbers = torch.arange(1.0, mask.numel() + 1).view(mask.shape)
    layout = EventLayout.jagged(mask, one_group=one_group)
    flat = layout.flat(numbers)
    left = layout.left
    assert flat[left > 0].sort().values.equal(numbers[mask])
    assert len(flat) == sum(group.samples * group.length for group in layout.groups)
    assert (layout.unflat(flat) * mask).equal(numbers * mask)
    assert layout.joined(layout.grouped(flat)).equal(flat)
    assert layout.per_sample([g.amin(1) for g in layout.grouped(flat)]).equal(numbers[:, 0])
    assert layout.of_samples(torch.arange(len(lengths)))[left > 0].equal((flat[left > 0].long() - 1) // LONG)
    ends = [row * LONG + length if length else 0 for row, length in enumerate(lengths)]
    assert layout.last(flat).tolist() == ends
    after = -torch.arange(1.0, len(lengths) + 1)
    expected = torch.where(
        mask_of(lengths).sum(1, keepdim=True) == torch.arange(1, LONG + 1), after[:, None], numbers + 1
    )
    assert (layout.unflat(layout.following(flat, after)) * mask).equal(expected * mask)
    if one_group:
        assert layout.groups == [(len(lengths), max(1, *lengths, 0))]
    else:
        for group, own in zip(layout.groups, layout.grouped(left), strict=True):
            assert own[:, 0].min() >= group.length - max(event_layout.SLACK_EVENTS, 0.1 * group.length)


def long_schema(timed):
    features = [IdFeature("item", dim=8), IdFeature("history", table="item", pooling=None, max_length=LONG)]
    features.append(IdFeature("drawn", table="item", pooling=None, max_length=3))
    dense = ["new", "log_q", DenseFeature("history_log_q", size=LONG), DenseFeature("drawn_log_q", size=3)]
    return Schema(features, dense_features=[*dense, DenseFeature("ages", size=LONG)], labels=["label"])


CORRECTED = {
    "negatives": ["drawn"],
    "log_q": "log_q",
    "history_log_q": "history_log_q",
    "negatives_log_q": "drawn_log_q",
}


def both(model, dense, embeddings, monkeypatch):
    """Losses, logits and all gradients, without padding and with it."""
    found = []
    for jagged in (True, False):
        with monkeypatch.context() as patch:
            if not jagged:
                patch.setattr(event_layout, "can_be_jagged", lambda mask: False)
            tensors = [*model.parameters(), *leaves(embeddings)]
            logits, loss = outcome(model, dense, embeddings)
            gradients = torch.autograd.grad(loss + logits.square().sum(), tensors, allow_unused=True)
        found.append([logits, loss, *(torch.zeros(()) if g is None else g for g in gradients)])
    return found


@pytest.mark.parametrize(
    "options", [{}, CORRECTED | {"new_events": "new"}, {"targets": "newest", "newest_first": True}]
)
@pytest.mark.parametrize("backbone", ["sasrec", "hstu", "gru"])
@settings(deadline=None, max_examples=examples(6))
@given(lengths=LENGTHS, seed=st.integers(0, 99))
def test_next_item_has_the_numbers_of_padded_histories(backbone, options, lengths, seed):
    torch.manual_seed(seed)
    schema = long_schema(backbone == "hstu")
    more = {"ages": "ages", "heads": 2} if backbone == "hstu" else {}
    model = NextItem(schema, backbone=backbone, history=[("history", "item")], **options, **more)
    dense, embeddings = made_inputs(schema, len(lengths), seed, lengths)
    dense[:, -LONG:] = torch.exp(3 * dense[:, -LONG:])
    embeddings["drawn"] = SequenceEmbedding(
        embeddings["drawn"].values.detach().requires_grad_(), torch.rand(len(lengths), 3) < 0.5
    )
    jagged, padded = both(model, dense, embeddings, pytest.MonkeyPatch())
    for mine, reference in zip(jagged, padded, strict=True):
        torch.testing.assert_close(mine, reference, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("make", [lambda schema: SASRec(schema, heads=3), HSTU])
def test_ranking_has_the_numbers_of_padded_histories(make, monkeypatch):
    torch.manual_seed(0)
    schema = history_schema()
    dense, embeddings = made_inputs(schema, 13)
    for mine, reference in zip(*both(make(schema), dense, embeddings, monkeypatch), strict=True):
        torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-5)


def test_most_padding_is_not_computed():
    """Lengths up to 1,000 with a mean of 250: few groups, whose attention is little more than that of the events."""
    lengths = np.random.default_rng(0).exponential(250, 64).clip(1, 1_000).astype(int)
    layout = EventLayout.jagged(mask_of(lengths.tolist(), 1_000))
    assert len(layout.groups) < 25
    places = sum(group.samples * group.length for group in layout.groups)
    assert places < 1.06 * lengths.sum()
    assert sum(group.samples * group.length**2 for group in layout.groups) < 1.1 * (lengths**2).sum()


def test_a_compiled_network_has_fixed_shapes(monkeypatch):
    """Code that is compiled for one batch fits batches of other lengths."""
    schema = history_schema()
    model = NextItem(schema, history=PAIRS).eval()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for lengths in ([0, 1, 5], [5, 5, 2]):
        dense, embeddings = made_inputs(schema, 3, lengths=lengths)
        torch.testing.assert_close(compiled(dense, embeddings), model(dense, embeddings))
    assert len(graphs) == 1


def test_a_batch_without_samples_or_events_has_no_numbers():
    for lengths in ([], [0], [0, 0, 0]):
        layout = EventLayout.jagged(mask_of(lengths, LENGTH))
        flat = layout.flat(torch.zeros(len(lengths), LENGTH, 2))
        assert layout.last(flat).shape == (len(lengths), 2)
        assert layout.last(flat).abs().sum() == 0
