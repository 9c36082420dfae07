"""The networks of a prediction server: built once for an epoch, loaded for each version."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from persia.errors import CheckpointError, ConfigError, PublishError
from persia.nn.dense_step import autocast_for
from persia.nn.models.registry import MODELS, build
from persia.nn.output import logits_of
from persia.nn.pooling import Embeddings
from persia.publish import Description, NetworkUpdate
from persia.schema import Schema

__all__ = ["ModelSource", "Network", "NetworkBuilder"]

ModelSource: TypeAlias = torch.nn.Module | Callable[[Schema], torch.nn.Module] | None
"""A network, a function that makes one for a schema, or None for the description in the log."""


class Network:
    """One version of the network. Its parameters never change, so it is as thread-safe as its module.

    Args:
        module: the module, in evaluation mode.
        builder: builder of the module, which has its precision and input rules.
        update: the version.
    """

    def __init__(self, module: torch.nn.Module, builder: NetworkBuilder, update: NetworkUpdate) -> None:
        self.module = module
        self.compute: Callable[[torch.Tensor, Embeddings], object] = module
        """The module, or compiled code in its place."""
        self.step = update.step
        self.time = update.time
        self.input_rules = builder.input_rules
        """Rules of the training data's reader, for missing values and lists."""
        self._autocast = builder.autocast
        self._outputs = builder.outputs

    def logits(self, dense: torch.Tensor, embeddings: Embeddings, labels: torch.Tensor) -> torch.Tensor:
        """Returns logits float32 `[batch, labels]`, with the same operations as `Trainer.predict`."""
        return self.checked(lambda: self.compute(dense, embeddings), labels)

    def checked(self, compute: Callable[[], object], labels: torch.Tensor) -> torch.Tensor:
        """Returns the logits that `compute` returns, run in the precision of the network."""
        with torch.no_grad():
            with self._autocast():
                output = compute()
            return logits_of(output, labels, self._outputs)


class NetworkBuilder:
    """Builds the network of an epoch, and loads versions of it.

    Args:
        source: see `ModelSource`.
        description: description of the epoch.
        device: where the network runs.
        imports: see `ServeOptions.imports`.

    Raises:
        PublishError: the network cannot be built; the message says why.
    """

    def __init__(
        self, source: ModelSource, description: Description, device: torch.device, imports: Sequence[str]
    ) -> None:
        self._device = device
        self.autocast = autocast_for(description.precision, device)
        self.input_rules = description.input_rules
        self.outputs = description.schema.outputs
        try:
            network = _build_network(source, description, imports)
        except Exception as error:  # The code of a model may raise anything.
            raise PublishError(f"The network cannot be built: {_text(error)}") from error
        if not isinstance(network, torch.nn.Module):
            raise PublishError(
                f"The model is a {type(network).__name__}; give an nn.Module, or a function of the schema."
            )
        self._template = network

    def load(self, update: NetworkUpdate) -> Network:
        """Returns a version of the network.

        Raises:
            PublishError: its tensors do not fit the network, or are not finite.
        """
        try:
            module = copy.deepcopy(self._template)
            tensors = {name: tensor.torch() for name, tensor in update.tensors.items()}
            missing, unexpected = module.load_state_dict(tensors, strict=False)
            missing = [name for name in missing if not name.endswith("_extra_state")]  # Only tensors are published.
            if missing or unexpected:
                raise ConfigError(
                    f"it lacks {', '.join(missing[:4]) or 'nothing'}, and has {', '.join(unexpected[:4]) or 'nothing'} "
                    "that the model does not have; give the model that was trained"
                )
            broken = _not_finite(module)
            if broken is not None:
                raise PublishError(
                    f"The network of step {update.step} is not finite, in {broken!r}: training has diverged, or the "
                    "log is damaged. The previous version is served until a finite version is published.",
                    step=update.step,
                    tensor=broken,
                )
            return Network(module.to(self._device).eval().requires_grad_(False), self, update)
        except (CheckpointError, ConfigError, RuntimeError, ValueError, TypeError) as error:
            raise PublishError(
                f"The network of step {update.step} does not fit the model: {_text(error)}", step=update.step
            ) from error


def _not_finite(module: torch.nn.Module) -> str | None:
    """Returns the name of a parameter that is not finite, or of a buffer with a NaN; None if there is none.

    Buffers may have infinities, as masks of attention do.
    """
    for name, tensor in module.named_parameters():
        if not bool(torch.isfinite(tensor).all()):
            return name
    return next((name for name, tensor in module.named_buffers() if bool(torch.isnan(tensor).any())), None)


def _build_network(source: ModelSource, description: Description, imports: Sequence[str]) -> torch.nn.Module:
    if isinstance(source, torch.nn.Module):
        return source
    if source is not None:
        return source(description.schema)
    model = description.model
    if model is None:
        raise ConfigError(
            "the log does not describe it, as it was passed to the Trainer in Python; pass model = the module, or a "
            "function that builds it from the schema",
            field="model",
        )
    if model.kind not in MODELS:
        module = model.kind.partition(":")[0]
        if module not in imports:
            raise ConfigError(
                f"the log names the class {model.kind[:80]!r}; pass it as model, or allow its module with "
                f"ServeOptions(imports=({module[:80]!r},)), on the command line `--import {module[:80]}` in the folder "
                "of the module, if you trust those who can write the log",
                field="imports",
            )
        importlib.import_module(module)
    return build(model, description.schema)


def _text(error: Exception) -> str:
    text = " ".join(str(getattr(error, "message", error)).split())
    return text if isinstance(error, ConfigError) else f"{type(error).__name__}: {text}"
