"""Converts a torch optimizer and its tensors to a record that can be sent, and back, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from persia.dense.tensor_layout import Layout, spec_of
from persia.errors import ConfigError, StoreError
from persia.types import DenseState, TensorSpec

__all__ = ["capture", "joined", "restore"]

SCHEDULED = "last_epoch"


def capture(
    parameters: Sequence[TensorSpec],
    owned: Mapping[int, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> DenseState:
    """Captures the state needed to continue elsewhere. Call it while nothing trains.

    Args:
        parameters: specs of all parameters of the network.
        owned: the parameters to capture, by number.
        buffers: the buffers to capture, by name.
        optimizer: optimizer of these parameters, and possibly others.
        scheduler: scheduler of its learning rates.

    Raises:
        ConfigError: the optimizer's parameter groups or state have a value that cannot be sent.
    """
    numbers = {id(tensor): number for number, tensor in owned.items()}
    tensors: dict[str, torch.Tensor] = {}
    scalars: dict[int, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        number = numbers.get(id(parameter))
        if number is None:
            continue
        rest: dict[str, Any] = {}
        for key, value in values.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{number}/{key}"] = value
            else:
                rest[key] = value
        scalars[number] = rest
    groups = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append({**options, "params": [numbers[id(p)] for p in group["params"] if id(p) in numbers]})
    specs = [spec_of(name, tensor) for name, tensor in buffers.items()]
    values = Layout([*(parameters[n] for n in owned), *specs]).pack([*owned.values(), *buffers.values()])
    state = [spec_of(name, tensor) for name, tensor in tensors.items()]
    return DenseState(
        list(parameters),
        list(owned),
        values,
        specs,
        _json(groups, optimizer),
        state,
        Layout(state).pack(list(tensors.values())),
        _json(scalars, optimizer),
        -1 if scheduler is None else int(scheduler.state_dict()[SCHEDULED]),
    )


def restore(
    state: DenseState,
    owned: Mapping[int, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler | None,
) -> None:
    """Restores the result of `capture` into tensors and an optimizer that were made in the same way.

    Raises:
        StoreError: the state belongs to another network or optimizer; nothing is changed.
    """
    groups = json.loads(state.groups)
    scalars = {int(number): values for number, values in json.loads(state.scalars).items()}
    saved_buffers = [(spec.name, spec.shape) for spec in state.buffers]
    own_buffers = [(name, list(tensor.shape)) for name, tensor in buffers.items()]
    if len(groups) != len(optimizer.param_groups) or set(owned) != set(state.owned) or own_buffers != saved_buffers:
        raise StoreError(
            f"The state has {len(groups)} parameter groups, {len(state.owned)} parameters and {len(saved_buffers)} "
            f"buffers, but the network {len(optimizer.param_groups)}, {len(owned)} and {len(own_buffers)}. Make "
            "model and optimizer the same way everywhere."
        )
    values = Layout([*(state.parameters[n] for n in state.owned), *state.buffers]).unpack(state.values)
    tensors = Layout(state.tensors).unpack(state.state)
    with torch.no_grad():
        for number, value in zip(state.owned, values, strict=False):
            owned[number].copy_(value)
        for buffer, value in zip(buffers.values(), values[len(state.owned) :], strict=True):
            buffer.copy_(value)
    previous: dict[int, dict[str, Any]] = {}
    for number, tensor in owned.items():
        previous[number] = optimizer.state.pop(tensor, {})
        if number in scalars:
            optimizer.state[tensor] = dict(scalars[number])
    for spec, value in zip(state.tensors, tensors, strict=True):
        number_text, key = spec.name.split("/", 1)
        parameter = owned[int(number_text)]
        # Counts of steps remain on the host, as in `Optimizer.load_state_dict`.
        device = torch.device("cpu") if key == "step" else parameter.device
        place = previous[int(number_text)].get(key)
        if isinstance(place, torch.Tensor) and spec_of("", place) == spec_of("", value) and place.device == device:
            place.copy_(value)  # New memory costs more than the copy.
        else:
            place = value.to(device, copy=True)
        optimizer.state[parameter][key] = place
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key != "params":
                group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    if scheduler is not None and state.updates >= 0:
        rates = [group["lr"] for group in optimizer.param_groups]
        lambdas = [None] * len(rates)
        counts = {SCHEDULED: state.updates, "_step_count": state.updates + 1}
        scheduler.load_state_dict({**counts, "_last_lr": rates, "lr_lambdas": lambdas})


def joined(parts: Sequence[DenseState]) -> DenseState:
    """Joins the states of all dense PSs."""
    if len(parts) == 1:
        return parts[0]
    whole = next(part for part in parts if part.buffers) if any(part.buffers for part in parts) else parts[0]
    owned = [number for part in parts for number in part.owned]
    values: list[torch.Tensor] = []
    buffers: list[torch.Tensor] = []
    for part in parts:
        tensors = Layout([*(part.parameters[n] for n in part.owned), *part.buffers]).unpack(part.values)
        values += tensors[: len(part.owned)]
        buffers += tensors[len(part.owned) :]
    specs = [spec for part in parts for spec in part.tensors]
    state = [tensor for part in parts for tensor in Layout(part.tensors).unpack(part.state)]
    groups = [json.loads(part.groups) for part in parts]
    scalars: dict[str, Any] = {}
    for part in parts:
        scalars |= json.loads(part.scalars)
    merged = [
        {**same[0], "params": [number for group in same for number in group["params"]]}
        for same in zip(*groups, strict=True)
    ]
    return DenseState(
        whole.parameters,
        owned,
        Layout([*(whole.parameters[n] for n in owned), *whole.buffers]).pack([*values, *buffers]),
        whole.buffers,
        json.dumps(merged),
        specs,
        Layout(specs).pack(state),
        json.dumps(scalars),
        whole.updates,
    )


def _json(value: object, optimizer: torch.optim.Optimizer) -> str:
    def plain(item: object) -> object:
        if isinstance(item, np.generic) or (isinstance(item, torch.Tensor) and item.ndim == 0):
            return item.item()
        raise ConfigError(
            f"{type(optimizer).__name__}: its parameter groups or state have a {type(item).__name__} in them, which "
            "cannot be handed over to a dense PS. Use numbers, strings and tensors.",
            field="optimizer",
        )

    return json.dumps(value, default=plain)
