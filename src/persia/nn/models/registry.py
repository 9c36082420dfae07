"""The models by the names that configurations and the log of changes have for them."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from persia.checks import check_choice
from persia.config import call
from persia.errors import ConfigError
from persia.nn import models
from persia.nn.losses import UncertaintyWeights
from persia.schema import Schema
from persia.types import ModelDescription

__all__ = ["MODELS", "build", "description_of"]

MODELS: dict[str, Callable[..., torch.nn.Module]] = {
    "ffnn": models.FFNN,
    "ffnn_paper": models.FFNN.paper,
    "deepfm": models.DeepFM,
    "dlrm": models.DLRM,
    "dcn_v2": models.DCNv2,
    "din": models.DIN,
    "dien": models.DIEN,
    "youtube_dnn": models.YouTubeDNN,
    "final_mlp": models.FinalMLP,
    "mask_net": models.MaskNet,
    "mmoe": models.MMoE,
    "ple": models.PLE,
    "sasrec": models.SASRec,
    "hstu": models.HSTU,
    "two_tower": models.TwoTower,
    "next_item": models.NextItem,
}

_ATTRIBUTE = "_persia_description"
"""Attribute of a network with its description; it is pickled with the network, so NN workers have it, too."""


def build(description: ModelDescription, schema: Schema) -> torch.nn.Module:
    """Builds the network that a description names, with random parameters. `description_of` returns its description.

    Args:
        description: a model of `persia.nn.models`; or "module:Class" of a module that is imported, and that the caller
            trusts. The class takes the schema, then the options. The option `task_weights = "uncertainty"` of any kind
            makes `UncertaintyWeights`.
        schema: the input of the network.

    Raises:
        ConfigError: the kind or its class is unknown, the class is no network, or an option is unknown or invalid.
    """
    options = {name: tuple(v) if isinstance(v, list) else v for name, v in description.options.items()}
    task_weights = options.pop("task_weights", None)
    if task_weights is not None:
        check_choice("model.options.task_weights", task_weights, ("uncertainty",))
    network = call(_maker(description.kind), options, "model.options", schema)
    if not isinstance(network, torch.nn.Module):
        raise ConfigError(
            f"Invalid model.kind = {description.kind!r}: it makes a {type(network).__name__}; name a subclass of "
            "torch.nn.Module.",
            field="model.kind",
        )
    if task_weights is not None:
        network.task_weights = UncertaintyWeights(schema)
    setattr(network, _ATTRIBUTE, description)
    return network


def description_of(network: torch.nn.Module) -> ModelDescription | None:
    """Returns the description from which `build` has built a network; None if it was made in another way."""
    description = getattr(network, _ATTRIBUTE, None)
    return description if isinstance(description, ModelDescription) else None


def _maker(kind: str) -> Callable[..., torch.nn.Module]:
    if kind in MODELS:
        return MODELS[kind]
    module, _, name = kind.partition(":")
    made: Callable[..., torch.nn.Module] | None = getattr(sys.modules.get(module), name, None) if name else None
    if made is None:
        raise ConfigError(
            f"Invalid model.kind = {kind!r}: "
            + (f"{module} has no {name!r}" if module in sys.modules else "it is none of the models of persia.nn.models")
            + "; name a class of the module.",
            field="model.kind",
        )
    return made
