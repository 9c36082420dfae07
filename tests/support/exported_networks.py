"""Networks for tests of exporters."""

from torch import nn

from persia.nn import models
from persia.nn.output import ModelOutput
from persia.schema import IdFeature, Schema

__all__ = ["HISTORY", "Branching", "make"]

HISTORY = Schema(
    [
        IdFeature("user", dim=8),
        IdFeature("item", dim=8),
        IdFeature("history", dim=8, table="item", pooling=None, max_length=6),
    ],
    dense_features=["a", "b"],
    labels=["click"],
)
"""What every model of persia accepts."""


def make(name):
    """Returns a model of `persia.nn.models`, in evaluation mode."""
    options = {"item": ["item"]} if name == "TwoTower" else {}
    return getattr(models, name)(HISTORY, **options).eval()


class Branching(nn.Module):
    """Branches on a value, so it cannot be exported."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, dense, embeddings):
        logits = self.linear(dense)
        if dense.sum() > 0:
            logits = logits + 1
        return ModelOutput(logits, None)
