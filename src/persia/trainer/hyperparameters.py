"""Continues the dense optimizer of a checkpoint with the hyperparameters that a run declares now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from persia.checkpoint.compatibility import NEW_OPTIMIZER
from persia.errors import CheckpointError
from persia.nn.dense_step import DenseStep

__all__ = ["adopt_hyperparameters", "changes", "check_optimizer"]

STANDARD = ("lr", "betas", "eps", "momentum", "weight_decay")
"""Hyperparameters to compare with an older checkpoint, which has the values at its step only."""


def check_optimizer(optimizer: torch.optim.Optimizer, training: dict[str, Any], path: str, *, new: bool) -> str:
    """Checks that an optimizer can continue from the optimizer state of a checkpoint.

    Args:
        optimizer: the optimizer of this run.
        training: state `training` of the checkpoint.
        path: path of the checkpoint, for the error.
        new: whether the optimizer may be another one, without the state.

    Returns:
        Why it cannot continue from the state; empty if it can.

    Raises:
        CheckpointError: it cannot, and `new` is false.
    """
    own_kind = _kind(type(optimizer).__qualname__, optimizer.param_groups)
    recorded_kind = _kind(training["optimizer_class"], training["optimizer"]["param_groups"])
    if own_kind == recorded_kind:
        return ""
    difference = f"the optimizer is {recorded_kind} in the checkpoint and {own_kind} here"
    if not new:
        raise CheckpointError(f"{path}: {difference}. Make the optimizer as it was, or {NEW_OPTIMIZER}.", path=path)
    return difference


def adopt_hyperparameters(network: DenseStep, training: dict[str, Any]) -> list[str]:
    """Puts changed hyperparameters of this run into the state of a checkpoint, before that is loaded.

    Moments and step counts stay. So does a hyperparameter that is declared as before, whatever its value is now. The
    schedule keeps its position; one that the checkpoint lacks begins at the checkpoint's global step.

    Args:
        network: the network of this run, which is not changed.
        training: state `training` of the checkpoint, with an optimizer of the same kind.

    Returns:
        The changes, one text each.
    """
    scheduler, schedule = network.scheduler, training["scheduler"]
    groups = training["optimizer"]["param_groups"]
    recorded = training.get("hyperparameters") or [_standard(group) for group in groups]
    distinct: dict[str, None] = {}  # A set in order: groups often share a change.
    for group, before, now in zip(groups, recorded, network.hyperparameters, strict=False):
        for name, change in changes("optimizer", before, now).items():
            if name == "lr" and "initial_lr" in group and scheduler is None and schedule is None:
                change += f" (not applied: the program's scheduler has set {_plain(group['lr'])})"
            else:
                group[name] = now[name]
            distinct[change] = None
        if schedule is not None and scheduler is None:
            group["lr"] = group["initial_lr"] = now["lr"]
    if scheduler is not None:
        position = {"last_epoch": training["global_step"], "_step_count": training["global_step"] + 1}
        schedule = {**scheduler.state_dict(), **(schedule or position)}
        factors = [factor(schedule["last_epoch"]) for factor in scheduler.lr_lambdas]
        rates = [base * factor for base, factor in zip(scheduler.base_lrs, factors, strict=True)]
        for group, base, rate in zip(groups, scheduler.base_lrs, rates, strict=True):
            group["initial_lr"], group["lr"] = base, rate
        own = {"base_lrs": scheduler.base_lrs, "_last_lr": rates, "lr_lambdas": [None] * len(rates)}
        training["scheduler"] = schedule | own
    return list(distinct)


def changes(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Describes the fields of two records that differ, by name; fields that only one of them has do not count."""
    return {
        name: f"{prefix}.{name}: {_plain(before[name])} before, {_plain(value)} now"
        for name, value in now.items()
        if name in before and _plain(before[name]) != _plain(value)
    }


def _standard(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: group[name] for name in STANDARD if name in group}
    return values | {"lr": group["initial_lr"]} if "initial_lr" in group else values


def _plain(value: Any) -> Any:
    """Converts a tensor, an array or a sequence to a value that can be compared and printed."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def _kind(name: str, groups: list[dict[str, Any]]) -> str:
    """Names an optimizer, with the options and the groups that decide which state it keeps."""
    options = [option for option in ("amsgrad", "centered") if any(group.get(option) for group in groups)]
    if name == "RMSprop" and any(group.get("momentum") for group in groups):
        options.append("momentum")
    having = f" ({', '.join(options)})" if options else ""
    return f"{name}{having} with groups of {[len(group['params']) for group in groups]} tensors"
