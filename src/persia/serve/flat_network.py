"""The dense network as a function of tensors only, for exporters, which do not support features and sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from persia.nn.output import ModelOutput
from persia.nn.pooling import Embeddings, SequenceEmbedding
from persia.schema import Schema

__all__ = ["FlatNetwork", "InputLayout", "example_input", "export_error", "sample_inputs", "weights_of"]

EXAMPLE_ROWS = 7
"""Rows of the traced batch: not 0 or 1, which exporters treat as constants, and not a usual width of a layer."""


class InputLayout:
    """The order of the tensors that are the inputs of a network.

    `dense` comes first, then the features in order: a pooled feature as its values, a sequence as values and mask.

    Args:
        embeddings: embeddings with the features and kinds of all later calls.

    Attributes:
        names: names of the tensors: "dense", the name of a feature, or "<name>.mask".
    """

    def __init__(self, embeddings: Embeddings) -> None:
        self._features = [(name, isinstance(value, SequenceEmbedding)) for name, value in embeddings.items()]
        self.names = ["dense"]
        for name, sequence in self._features:
            self.names += [name, f"{name}.mask"] if sequence else [name]

    def flat(self, dense: Tensor, embeddings: Embeddings) -> list[Tensor]:
        """Returns the tensors of an input in order."""
        tensors = [dense]
        for name, _ in self._features:
            value = embeddings[name]
            tensors += [value] if isinstance(value, Tensor) else value
        return tensors

    def nested(self, tensors: Sequence[Tensor]) -> tuple[Tensor, dict[str, Tensor | SequenceEmbedding]]:
        """Returns `dense` and the embeddings from the tensors in order."""
        remaining = iter(tensors)
        dense = next(remaining)
        embeddings: dict[str, Tensor | SequenceEmbedding] = {}
        for name, sequence in self._features:
            values = next(remaining)
            embeddings[name] = SequenceEmbedding(values, next(remaining)) if sequence else values
        return dense, embeddings


class FlatNetwork(nn.Module):
    """A network as a function of tensors, for `torch.export`.

    Args:
        model: the network. Its mode is not changed; put it into evaluation mode.
        layout: layout of its inputs.
        weights: names of the parameters and buffers that are inputs, before all others. The rest are constants.
    """

    def __init__(self, model: nn.Module, layout: InputLayout, weights: Sequence[str] = ()) -> None:
        super().__init__()
        self._layout = layout
        self._weights = tuple(weights)
        if self._weights:
            self._model = [model]  # In a list it is not a sub-module, so its weights do not become constants.
        else:
            self.model = model

    def forward(self, *tensors: Tensor) -> Tensor:
        """Returns logits `[batch, outputs]`."""
        count = len(self._weights)
        inputs = self._layout.nested(tensors[count:])
        output: Any
        if count:
            named = dict(zip(self._weights, tensors[:count], strict=True))
            output = torch.func.functional_call(self._model[0], named, inputs)
        else:
            output = self.model(*inputs)
        logits: Tensor = output.logits if isinstance(output, ModelOutput) else output
        return logits


def example_input(schema: Schema) -> tuple[Tensor, dict[str, Tensor | SequenceEmbedding]]:
    """Returns dense features and embeddings of samples without ids, on the CPU."""
    tables = schema.resolved_tables()
    embeddings: dict[str, Tensor | SequenceEmbedding] = {}
    for feature in schema.id_features:
        dim = tables[feature.table_name].dim
        if feature.pooling is not None:
            embeddings[feature.name] = torch.zeros(EXAMPLE_ROWS, dim)
            continue
        length = feature.max_length or 0
        mask = torch.zeros(EXAMPLE_ROWS, length, dtype=torch.bool)
        embeddings[feature.name] = SequenceEmbedding(torch.zeros(EXAMPLE_ROWS, length, dim), mask)
    return torch.zeros(EXAMPLE_ROWS, schema.dense_width), embeddings


def sample_inputs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Returns the tensors of a batch that can be traced: rows of the input, repeated, or zeros if it has none.

    Args:
        tensors: `[batch, ...]` each.
    """
    rows = tensors[0].shape[0]
    if not rows:
        return [tensor.new_zeros(EXAMPLE_ROWS, *tensor.shape[1:]) for tensor in tensors]
    index = torch.arange(EXAMPLE_ROWS, device=tensors[0].device) % rows
    return [tensor.detach().index_select(0, index) for tensor in tensors]


def export_error(error: Exception) -> str:
    """Returns why an export has failed, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def weights_of(model: nn.Module) -> Mapping[str, Tensor]:
    """Returns the parameters and buffers of a network by name, each once, detached."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}
