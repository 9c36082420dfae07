"""`ModelOutput`: what a model returns whose loss needs more than its logits."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from persia.errors import ConfigError
from persia.metrics.answers import probabilities_of

__all__ = ["ModelOutput", "are_log_odds", "logits_of", "predictions_of", "probabilities_of"]


class ModelOutput(NamedTuple):
    """Logits, and what else the loss needs.

    A model returns it in place of logits for an auxiliary loss, or for its own loss, such as a sampled softmax.
    Its method `loss(logits, labels, extra)`, or `loss(logits, targets, extra)`, gets `extra` back. Metrics and
    predictions use the logits only.

    Attributes:
        logits: `[batch, Schema.outputs]`.
        extra: anything made of tensors. Collectives of several NN workers average gradients only, by their rows: terms
            of it are of this NN worker's local batch, and a loss that is a mean over rows is the mean over all rows.
    """

    logits: torch.Tensor
    extra: Any


def logits_of(output: object, labels: torch.Tensor, outputs: int | None = None) -> torch.Tensor:
    """Returns logits float32 `[batch, outputs]` of what a model returned.

    Args:
        output: the logits, or a `ModelOutput`.
        labels: `[batch, labels]`. If they have no columns, as data to predict may, the model may return any number of
            logits.
        outputs: `Schema.outputs`; by default one for each label.

    Raises:
        ConfigError: it has another shape.
    """
    logits = output.logits if isinstance(output, ModelOutput) else output
    rows, count = labels.shape
    _check_logits(logits, rows, 0 if not count else count if outputs is None else outputs)
    assert isinstance(logits, torch.Tensor)
    return logits.float()


def are_log_odds(model: torch.nn.Module) -> bool:
    """Returns whether the sigmoid of a model's logits is a probability.

    It is not if the model has an attribute `are_log_odds` that is False, as `TwoTower` has: its logits only rank.
    """
    return bool(getattr(model, "are_log_odds", True))


def predictions_of(model: torch.nn.Module, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns probabilities float32 `[batch, labels]`, or the logits themselves if they are no log-odds."""
    return probabilities_of(logits) if are_log_odds(model) else logits


def _check_logits(logits: object, rows: int, outputs: int) -> None:
    """Raises ConfigError unless the model returned logits `[batch, outputs]`; any number of them if `outputs` is 0."""
    shape = getattr(logits, "shape", None)
    if shape is not None and len(shape) == 2 and shape[0] == rows and outputs in (0, shape[1]):
        return
    what = f"a {type(logits).__name__}" if shape is None else f"logits of shape {list(shape)}"
    hint = f" Return one column per label, here {outputs}, of which labels with classes have several."
    raise ConfigError(
        f"The model returned {what}; expected [batch, outputs] = [{rows}, {outputs or 'outputs'}]."
        + (hint if outputs else ""),
        field="model",
    )
