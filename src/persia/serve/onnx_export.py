"""Exports the dense network as an ONNX file, for runtimes without torch."""

from __future__ import annotations

import copy
import os
import warnings
from pathlib import Path

import torch
from torch import nn

from persia.errors import ConfigError, MissingExtraError
from persia.schema import Schema
from persia.serve.flat_network import FlatNetwork, InputLayout, example_input, export_error

__all__ = ["export_onnx"]

MAX_ROWS = 1 << 24
"""Largest batch that the exported network supports."""


def export_onnx(model: nn.Module, schema: Schema, path: str | os.PathLike[str]) -> Path:
    """Writes the dense network as an ONNX file, with its current weights, for batches of any size. Takes seconds.

    The file does not contain rows: the caller looks them up and pools them. Inputs:

    - `dense`: float32 `[batch, dense features]`;
    - for each pooled feature, its name: float32 `[batch, dim]`;
    - for each un-pooled feature, its name: float32 `[batch, max_length, dim]`, zero where there is no id; and
      `<name>.mask`: bool `[batch, max_length]`, True where there is an id.

    The output `logits` is float32 `[batch, Schema.outputs]`. Predictions of binary labels are their sigmoid; of other
    labels `persia.metrics.answers_of(schema).answers(logits)`, which needs NumPy alone. Inputs that the network does
    not read are included.

    Args:
        model: the network. It is not modified; a copy in evaluation mode is exported.
        schema: its input.
        path: the file to write. Its directory must exist. Above 2 GB, weights are in a second file, `<path>.data`.

    Returns:
        The path.

    Raises:
        MissingExtraError: onnx or onnxscript is not installed.
        ConfigError: ONNX cannot express the network.
        OSError: the file cannot be written.
    """
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            'export_onnx needs onnx and onnxscript: pip install "persia-recsys[onnx]".', extra="onnx"
        ) from error
    model = copy.deepcopy(model).cpu().eval().requires_grad_(False)
    example = example_input(schema)
    layout = InputLayout(example[1])
    inputs = layout.flat(*example)
    batch = torch.export.Dim("batch", max=MAX_ROWS)
    shapes = (tuple({0: batch} for _ in inputs),)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Of torch about itself.
            exported = torch.export.export(FlatNetwork(model, layout), tuple(inputs), dynamic_shapes=shapes)
            program = torch.onnx.export(
                exported, (), input_names=layout.names, output_names=["logits"], dynamo=True, verbose=False
            )
    except Exception as error:  # Tracer and converter may raise anything.
        raise ConfigError(
            f"{type(model).__name__} cannot be exported as ONNX; check what in its `forward` depends on values. "
            f"{export_error(error)}",
            field="model",
        ) from error
    assert program is not None
    path = Path(path)
    program.save(path)
    return path
