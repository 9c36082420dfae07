"""`ModelOutput`: what a model returns whose loss needs more than its logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from persia.errors import ConfigError

__all__ = ["ModelOutput", "are_log_odds", "logits_of", "loss_of", "predictions_of", "probabilities_of"]


class ModelOutput(NamedTuple):
    """Logits, and what else the loss needs.

    A model returns it in place of logits for an auxiliary loss, or for a loss of its own, such as a sampled softmax.
    Its method `loss(logits, labels, extra)` gets `extra` back. Metrics and predictions use the logits only.

    Attributes:
        logits: `[batch, labels]`.
        extra: anything made of tensors. Collectives of several NN workers average gradients only, by their rows: terms
            of it are of this NN worker's local batch, and a loss that is a mean over rows is the mean over all rows.
    """

    logits: torch.Tensor
    extra: Any


def logits_of(output: object, labels: torch.Tensor) -> torch.Tensor:
    """Returns logits float32 `[batch, labels]` of what a model returned.

    Raises:
        ConfigError: it has another shape.
    """
    logits = output.logits if isinstance(output, ModelOutput) else output
    _check_logits(logits, labels)
    assert isinstance(logits, torch.Tensor)
    return logits.float()


def probabilities_of(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns probabilities float32 `[batch, labels]` from log-odds float32 `[batch, labels]`.

    They do not keep the order: all log-odds above 17 give 1.
    """
    with np.errstate(over="ignore"):  # exp(-logit) of a large negative logit: the probability is 0.
        return (1.0 / (1.0 + np.exp(-logits))).astype(np.float32)


def are_log_odds(model: torch.nn.Module) -> bool:
    """Returns whether the sigmoid of a model's logits is a probability.

    It is not if the model has an attribute `are_log_odds` that is False, as `TwoTower` has: its logits only rank.
    """
    return bool(getattr(model, "are_log_odds", True))


def predictions_of(model: torch.nn.Module, logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Returns probabilities float32 `[batch, labels]`, or the logits themselves if they are no log-odds."""
    return probabilities_of(logits) if are_log_odds(model) else logits


def loss_of(model: torch.nn.Module, output: object, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns logits as `logits_of` does, and the loss: the model's own, else the mean binary cross-entropy.

    Args:
        model: whose method `loss(logits, labels)`, or `loss(logits, labels, extra)` for a `ModelOutput`, is used.
        output: what it returned.
        labels: float32 `[batch, labels]`.

    Raises:
        ConfigError: the logits have another shape, or the model has no loss for its `extra`.
    """
    logits = logits_of(output, labels)
    loss: Callable[..., torch.Tensor] | None = getattr(model, "loss", None)
    if not isinstance(output, ModelOutput):
        return logits, (loss or torch.nn.functional.binary_cross_entropy_with_logits)(logits, labels)
    if loss is None:
        raise ConfigError(
            f"{type(model).__name__} returned a ModelOutput, but has no loss that uses its `extra`; give the model a "
            "method `loss(logits, labels, extra)`, or return the logits alone.",
            field="model",
        )
    return logits, loss(logits, labels, output.extra)


def _check_logits(logits: object, labels: torch.Tensor) -> None:
    """Raises ConfigError unless the model returned logits `[batch, labels]`. Data to predict may have no labels."""
    shape = getattr(logits, "shape", None)
    if shape == labels.shape:
        return
    rows, count = labels.shape
    if not count and shape is not None and len(shape) == 2 and shape[0] == rows:
        return
    what = f"a {type(logits).__name__}" if shape is None else f"logits of shape {list(shape)}"
    hint = f" Return one column per label, here {count}." if count else ""
    raise ConfigError(
        f"The model returned {what}; expected [batch, labels] = [{rows}, {count or 'labels'}].{hint}", field="model"
    )
