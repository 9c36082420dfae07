"""Histories of made-up users, and plain NumPy layers that share no code with the models."""

import numpy as np
import torch

from persia.nn.output import ModelOutput
from persia.nn.pooling import SequenceEmbedding
from persia.schema import IdFeature, Schema

LENGTH = 5
PAIRS = [("items", "item"), ("shops", "shop")]


def history_schema(pooling="sum", labels=("click",), dense=2, extra=()):
    return Schema(
        [
            IdFeature("user", dim=3),
            IdFeature("item", dim=4),
            IdFeature("shop", dim=2),
            IdFeature("items", table="item", pooling=None, max_length=LENGTH),
            IdFeature("shops", table="shop", pooling=None, max_length=LENGTH),
            *extra,
        ],
        dense_features=[f"d{i}" for i in range(dense)],
        labels=labels,
    )


def made_inputs(schema, rows=7, seed=0, lengths=None):
    """Dense features and embeddings that require gradients; row i has i % 6 events, where no lengths are given."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.arange(rows) % (LENGTH + 1) if lengths is None else torch.tensor(lengths)
    tables = schema.resolved_tables()
    embeddings = {}
    for feature in schema.id_features:
        dim = tables[feature.table_name].dim
        if feature.pooling is not None:
            embeddings[feature.name] = torch.randn(rows, dim, generator=generator).requires_grad_()
            continue
        mask = torch.arange(feature.max_length) < lengths.unsqueeze(1)
        values = torch.randn(rows, feature.max_length, dim, generator=generator) * mask.unsqueeze(2)
        embeddings[feature.name] = SequenceEmbedding(values.requires_grad_(), mask)
    return torch.randn(rows, schema.dense_width, generator=generator), embeddings


def leaves(embeddings):
    return [e.values if isinstance(e, SequenceEmbedding) else e for e in embeddings.values()]


def outcome(model, dense, embeddings, labels=None):
    """Logits and loss, as the Trainer computes them."""
    output = model(dense, embeddings)
    logits = output.logits if isinstance(output, ModelOutput) else output
    labels = torch.ones_like(logits) if labels is None else labels
    if isinstance(output, ModelOutput):
        return logits, model.loss(logits, labels, output.extra)
    loss = getattr(model, "loss", torch.nn.functional.binary_cross_entropy_with_logits)
    return logits, loss(logits, labels)


class Numbers:
    """Parameters and one sample's embeddings as float64 arrays."""

    def __init__(self, model, dense, embeddings):
        self.of = {name: tensor.detach().numpy().astype(np.float64) for name, tensor in model.state_dict().items()}
        self.dense = dense.numpy().astype(np.float64)
        self.pooled, self.events = {}, {}
        for name, e in embeddings.items():
            if isinstance(e, SequenceEmbedding):
                values = e.values.detach().numpy().astype(np.float64)
                self.events[name] = [v[m] for v, m in zip(values, e.mask.numpy(), strict=True)]
            else:
                self.pooled[name] = e.detach().numpy().astype(np.float64)

    def linear(self, name, x):
        y = x @ self.of[f"{name}.weight"].T
        return y + self.of[f"{name}.bias"] if f"{name}.bias" in self.of else y

    def mlp(self, name, x):
        """Linear layers with ReLU between them, and behind the last if there is no output layer."""
        numbers = sorted(int(key.split(".")[-2]) for key in self.of if key.startswith(f"{name}.") and "weight" in key)
        numbers = [n for n in numbers if f"{name}.{n}.weight" in self.of]
        for n in numbers:
            x = self.linear(f"{name}.{n}", x)
            if n != numbers[-1]:
                x = np.maximum(x, 0)
        return x


def events_of(numbers, row, reverse=False, names=("items", "shops")):
    """The events of a sample, `[length, dim]`."""
    events = np.concatenate([numbers.events[name][row] for name in names], 1)
    return events[::-1] if reverse else events


def side_by_side(numbers, row, first):
    """What the deep network reads."""
    return np.concatenate([first, *(numbers.pooled[n][row] for n in ("user", "item", "shop")), numbers.dense[row]])


def predicted(states, events, others):
    """Mean loss of a sample's predictions of its next events."""
    terms = [0.0]
    for t, (state, event) in enumerate(zip(states, events[1:], strict=False), start=1):
        terms.append(-np.log(sigmoid(state @ event)))
        if t < len(others):
            terms[-1] -= np.log(1 - sigmoid(state @ others[t]))
    return sum(terms) / max(1, len(terms) - 1)


def layer_norm(numbers, name, x, eps=1e-5):
    normal = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)
    return normal * numbers.of[f"{name}.weight"] + numbers.of[f"{name}.bias"]


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    x = np.exp(x - np.max(x))
    return x / x.sum()
