"""`Objective`: the loss that trains a model, its own or that of the schema's labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any

import torch

from persia.errors import ConfigError
from persia.nn.losses import SchemaLoss, UncertaintyWeights
from persia.nn.output import ModelOutput, logits_of
from persia.nn.targets import may_be_missing, targets_of
from persia.schema import Schema

__all__ = ["Objective"]


class Objective:
    """The loss that trains a model.

    A model's own method `loss` is used if it has one, else the loss of the schema's labels, with the learned weights
    of an attribute `task_weights` if the model has one. The method gets logits float32 `[batch, Schema.outputs]`, then
    `Targets` if it has a parameter named `targets`, else labels float32 `[batch, labels]`, and then the `extra` of a
    `ModelOutput`.

    Args:
        model: the network.
        schema: its labels.

    Raises:
        ConfigError: the model's loss takes labels, which say nothing of the weights or missing labels of the schema.
    """

    def __init__(self, model: torch.nn.Module, schema: Schema) -> None:
        self._name = type(model).__name__
        self._outputs = schema.outputs
        self._masked = may_be_missing(schema)
        self._loss = SchemaLoss(schema)
        self._own: Callable[..., torch.Tensor] | None = getattr(model, "loss", None)
        self._takes_targets = self._own is not None and "targets" in _parameters(self._own)
        weights = getattr(model, "task_weights", None)
        self._task_weights = weights if isinstance(weights, UncertaintyWeights) else None
        unseen = [f"missing values of {label.name!r}" for label in schema.targets if label.missing == "mask"]
        if schema.sample_weight is not None:
            unseen.append(f"sample_weight = {schema.sample_weight!r}")
        if self._own is not None and not self._takes_targets and unseen:
            raise ConfigError(
                f"{self._name}.loss takes labels, and would not see what the schema has: {', '.join(unseen)}; name its "
                "second parameter `targets`, which gets labels, mask, weights and groups.",
                field="model",
            )

    def logits(self, output: object, labels: torch.Tensor) -> torch.Tensor:
        """Returns logits float32 `[batch, Schema.outputs]` of what the model returned; see `logits_of`."""
        return logits_of(output, labels, self._outputs)

    def __call__(
        self,
        output: object,
        labels: torch.Tensor,
        weights: torch.Tensor | None = None,
        groups: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits as `logits` does, and the loss, `[]`.

        Args:
            output: what the model returned.
            labels: float32 `[batch, labels]`; NaN where one is missing.
            weights: float32 `[batch]`, or None.
            groups: int64 `[batch]`, or None.

        Raises:
            ConfigError: the logits have another shape, or the model has no loss for its `extra`.
            DataError: a loss compares rows of a group, and there are no groups.
        """
        logits = self.logits(output, labels)
        extra: tuple[Any, ...] = ()
        if isinstance(output, ModelOutput):
            if self._own is None:
                raise ConfigError(
                    f"{self._name} returned a ModelOutput, but has no loss that uses its `extra`; give the model a "
                    "method `loss(logits, targets, extra)` or `loss(logits, labels, extra)`, or return logits alone.",
                    field="model",
                )
            extra = (output.extra,)
        if self._own is not None and not self._takes_targets:
            return logits, self._own(logits, labels, *extra)
        targets = targets_of(labels, weights, groups, masked=self._masked)
        if self._own is not None:
            return logits, self._own(logits, targets, *extra)
        return logits, self._loss(logits, targets, self._task_weights)


def _parameters(function: Callable[..., object]) -> Collection[str]:
    """Returns the names of a function's parameters; none of a function in C."""
    try:
        return inspect.signature(function).parameters
    except ValueError:
        return ()
