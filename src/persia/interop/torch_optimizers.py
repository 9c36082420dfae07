"""Converts PyTorch optimizers to embedding optimizers, and their state to state of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from persia.errors import ConfigError
from persia.schema import SGD, Adagrad, Adam, EmbeddingOptimizer, Ftrl, RowwiseAdagrad

__all__ = ["TorchState", "embedding_optimizer", "read_state", "state_to_write"]

KEYS: dict[type[EmbeddingOptimizer], tuple[str, ...]] = {
    SGD: ("momentum_buffer",),
    Adagrad: ("sum",),
    Adam: ("exp_avg", "exp_avg_sq"),
}
"""Entries of a torch optimizer's state, which the state of a row concatenates."""


class TorchState(NamedTuple):
    """The state of a torch optimizer for a weight.

    Attributes:
        columns: state tensors, float `[rows, dim]`, in the order of `persia.nn.RowState.values`.
        step: number of updates; 0 if the optimizer does not count them.
    """

    columns: Sequence[Tensor]
    step: int


def embedding_optimizer(optimizer: torch.optim.Optimizer, weight: Tensor) -> EmbeddingOptimizer:
    """Returns the embedding optimizer that updates a row as a torch optimizer does.

    `SGD`, `Adagrad`, `Adam`, `AdamW` and `SparseAdam` have one. A row is updated if a batch has
    it, as with the weight of a sparse module. Momentum, Adam's moments and weight decay also change the weight of a
    dense module in steps without a gradient. Adam's bias correction counts updates of the row; torch's counts updates
    of the weight.

    Args:
        optimizer: optimizer from `torch.optim`, with its current learning rate.
        weight: a parameter of the optimizer.

    Raises:
        ConfigError: the optimizer does not have the weight, or has an option that no embedding optimizer has.
    """
    group = _group(optimizer, weight)
    kind = type(optimizer).__name__
    refused = {"maximize": False, "amsgrad": False, "nesterov": False, "dampening": 0, "lr_decay": 0}
    for name, value in refused.items():
        if group.get(name, value) != value:
            raise ConfigError(
                f"torch.optim.{kind} has {name} = {group[name]!r}, which no embedding optimizer of persia has; set it "
                f"to {value!r}, or choose one of persia.optim.",
                field=name,
            )
    lr = float(group["lr"])
    match optimizer:
        case torch.optim.SGD():
            return SGD(lr, float(group["momentum"]), float(group["weight_decay"]))
        case torch.optim.Adagrad():
            first = float(group["initial_accumulator_value"])
            return Adagrad(lr, first, float(group["eps"]), float(group["weight_decay"]))
        case (
            torch.optim.Adam() | torch.optim.AdamW() | torch.optim.SparseAdam()
        ):  # In older versions, AdamW is not a subclass of Adam.
            beta1, beta2 = map(float, group["betas"])
            eps, decay = float(group["eps"]), float(group.get("weight_decay", 0.0))
            if isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay"):
                return Adam(lr, beta1, beta2, eps, decoupled_weight_decay=decay)
            return Adam(lr, beta1, beta2, eps, decay)
    raise ConfigError(
        f"No embedding optimizer of persia updates rows as {kind} does; pass SGD, Adagrad, Adam, AdamW or SparseAdam "
        "of torch.optim, or leave the optimizer out to move only the weights.",
        field="optimizer",
    )


def read_state(
    optimizer: torch.optim.Optimizer, weight: Tensor, declared: EmbeddingOptimizer | None
) -> TorchState | None:
    """Returns the state of a weight, for rows that `declared` updates, if any; None if there is no state (yet).

    Raises:
        ConfigError: the state does not match `declared`.
    """
    keys = _keys(optimizer, weight, declared)
    state = optimizer.state.get(weight, {})
    if not keys or any(state.get(key) is None for key in keys):
        return None
    return TorchState([state[key] for key in keys], int(state.get("step", 0)))


def state_to_write(
    optimizer: torch.optim.Optimizer, weight: Tensor, declared: EmbeddingOptimizer | None
) -> tuple[dict[str, Any], Sequence[Tensor]]:
    """Returns the state of a weight, and the tensors in it that hold the state of rows; zeros if there was none.

    Raises:
        ConfigError: the state does not match `declared`.
    """
    keys = _keys(optimizer, weight, declared)
    state: dict[str, Any] = optimizer.state[weight]
    for key in keys:
        if state.get(key) is None:
            state[key] = torch.zeros_like(weight, memory_format=torch.preserve_format)
        elif state[key].is_sparse:
            state[key] = state[key].to_dense()
    if keys and not isinstance(optimizer, torch.optim.SGD) and "step" not in state:
        group = _group(optimizer, weight)
        on_device = bool(group.get("fused") or group.get("capturable"))
        state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device if on_device else "cpu")
        if isinstance(optimizer, torch.optim.SparseAdam):  # Counts with a plain integer.
            state["step"] = 0
    return state, [state[key] for key in keys]


def _keys(optimizer: torch.optim.Optimizer, weight: Tensor, declared: EmbeddingOptimizer | None) -> tuple[str, ...]:
    if declared is None:  # The rows of the table are not trained.
        return ()
    equivalent = embedding_optimizer(optimizer, weight)
    momentum = [isinstance(each, SGD) and bool(each.momentum) for each in (equivalent, declared)]
    if (
        type(equivalent) is not type(declared)
        or momentum[0] != momentum[1]
        or isinstance(declared, Ftrl | RowwiseAdagrad)
    ):
        raise ConfigError(
            f"The optimizer of the table is {declared!r}, whose state differs from torch.optim."
            f"{type(optimizer).__name__}; declare the table with optimizer = {equivalent!r}, or leave the optimizer "
            "out to move only the weights.",
            field="optimizer",
        )
    return () if isinstance(declared, SGD) and not declared.momentum else KEYS[type(declared)]


def _group(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Any]:
    for group in optimizer.param_groups:
        if any(parameter is weight for parameter in group["params"]):
            return group
    raise ConfigError(
        f"The {type(optimizer).__name__} does not have the weight of this module; pass the optimizer that trains it.",
        field="optimizer",
    )
