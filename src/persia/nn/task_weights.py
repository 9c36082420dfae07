"""`UncertaintyWeights`: weights of the losses of labels that are learned with the model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from persia.checks import check_kind
from persia.errors import ConfigError
from persia.schema import Huber, Schema, Squared

__all__ = ["UncertaintyWeights"]


class UncertaintyWeights(nn.Module):
    """Weights of labels that are learned (Kendall, Gal and Cipolla, CVPR 2018, arXiv 1705.07115, section 3.2).

    Each label has a parameter s = log sigma^2, at first 0. Its loss L enters as exp(-s) L + s / 2, or, with a squared
    or Huber loss, as exp(-s) L / 2 + s / 2; the loss is the sum over labels. Assign it to the attribute `task_weights`
    of a model, whose parameters and checkpoints then have it:

        model.task_weights = persia.nn.losses.UncertaintyWeights(schema)

    Args:
        schema: declares the labels, two or more, each with a `weight` of 1.

    Raises:
        ConfigError: there is one label, or one has another weight.
    """

    def __init__(self, schema: Schema) -> None:
        super().__init__()
        check_kind("schema", schema, Schema, "a persia.Schema")
        labels = schema.targets
        if len(labels) < 2 or any(label.weight != 1 for label in labels):
            raise ConfigError(
                "UncertaintyWeights learns the weights of two or more labels; the schema has "
                + ", ".join(f"{label.name!r} (weight {label.weight:g})" for label in labels)
                + ". Leave the weights of labels at 1, or leave UncertaintyWeights out.",
                field="task_weights",
            )
        self.log_variance = nn.Parameter(torch.zeros(len(labels)))
        self._squared = [isinstance(label.effective_loss, (Squared, Huber)) for label in labels]

    def forward(self, losses: list[Tensor]) -> Tensor:
        """Returns the sum of weighted losses, `[]`, from the losses of the labels, `[]` each."""
        terms = [
            torch.exp(-s) * (loss / 2 if half else loss) + s / 2
            for s, loss, half in zip(self.log_variance.unbind(), losses, self._squared, strict=True)
        ]
        return torch.stack(terms).sum()
