"""The networks of `LocalAllReduce`: one per NN worker, with its own optimizer, averaged in pairs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from persia.errors import DataError
from persia.replay.local_all_reduce import LocalAllReduce
from persia.replay.replay_servers import Numbers, TakenGradient
from persia.replay.schedule import DENSE, ScheduleEvent, Timeline

__all__ = ["LocalNetworks"]

Optimizers = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]


class _Network(NamedTuple):
    parameters: list[torch.nn.Parameter]
    optimizer: torch.optim.Optimizer


class LocalNetworks:
    """In place of the dense PS of a timeline: batches read the network of their NN worker.

    Args:
        timeline: a timeline of `LocalAllReduce`.
        parameters: start of all networks.
        optimizer: the optimizer of these, whose state all networks start with.
        optimizers: makes an optimizer from parameters.

    Raises:
        DataError: the timeline has more than one dense PS, or one that does not own the whole network.
    """

    def __init__(
        self,
        timeline: Timeline,
        parameters: Sequence[torch.nn.Parameter],
        optimizer: torch.optim.Optimizer,
        optimizers: Optimizers,
    ) -> None:
        assert isinstance(timeline.mode, LocalAllReduce)
        servers = [name for name in timeline.servers if name.startswith(DENSE)]
        if servers != [f"{DENSE}-0"]:
            raise DataError(f"LocalAllReduce averages whole networks; the timeline has parts of it: {servers}.")
        self._local_steps = timeline.mode.local_steps
        self._partners = np.random.default_rng((timeline.mode.seed, timeline.step))
        self._worker = {event.batch: event.worker for event in timeline.events if event.kind == "pull"}
        self._networks = []
        for _ in range(timeline.nn_workers):
            own = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
            network = _Network(own, optimizers(own))
            network.optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            self._networks.append(network)
        self._steps = [0] * len(self._networks)

    def begin(self, mode: Any) -> None:
        """No-op: the timeline is known."""

    def read(self, batch: int) -> Numbers:
        """Returns a copy of the parameters of the NN worker that trains a batch."""
        return torch.cat([p.detach().reshape(-1) for p in self._networks[self._worker[batch]].parameters]).numpy()

    def add(self, gradient: Numbers | None, taken: TakenGradient) -> None:
        """No-op: see `trained`, which knows the NN worker."""

    def apply(self, step: int) -> None:
        """No-op: networks do not wait for the gradients of rows."""

    def trained(self, event: ScheduleEvent, gradient: Any) -> None:
        """Makes the local step of a push, and averages with a random partner if it is time."""
        if event.kind != "push" or not event.server.startswith(DENSE) or gradient is None:
            return
        network = self._networks[event.worker]
        parts = torch.from_numpy(gradient).split([p.numel() for p in network.parameters])
        for parameter, part in zip(network.parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        network.optimizer.step()
        self._steps[event.worker] += 1
        others = len(self._networks) - 1
        if others and self._steps[event.worker] % self._local_steps == 0:
            partner = (event.worker + 1 + int(self._partners.integers(others))) % len(self._networks)
            self._average([network, self._networks[partner]])

    def into(self, parameters: Sequence[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        """Ends the run: copies the mean of all networks, and of the states of their optimizers."""
        self._average(self._networks)
        with torch.no_grad():
            for parameter, own in zip(parameters, self._networks[0].parameters, strict=True):
                parameter.copy_(own)
        states = [network.optimizer.state_dict() for network in self._networks if network.optimizer.state]
        if states:
            optimizer.load_state_dict(states[0] | {"state": _mean([state["state"] for state in states])})

    @staticmethod
    def _average(networks: Sequence[_Network]) -> None:
        with torch.no_grad():
            for copies in zip(*(network.parameters for network in networks), strict=True):
                mean = torch.stack(copies).mean(0)
                for parameter in copies:
                    parameter.copy_(mean)


def _mean(states: Sequence[Any]) -> Any:
    """Returns the mean of tensors in equal trees of dicts; the first of other values."""
    if isinstance(states[0], dict):
        return {key: _mean([state[key] for state in states]) for key in states[0]}
    if isinstance(states[0], torch.Tensor):
        return torch.stack([state.float() for state in states]).mean(0).to(states[0].dtype)
    return states[0]
