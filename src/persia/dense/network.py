"""The network of an NN worker in asynchronous modes: pulls parameters before a batch, pushes gradients after it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from persia.dense.dense_state import capture, joined, restore
from persia.dense.server import check_optimizer, partition
from persia.dense.tensor_layout import Layout, spec_of
from persia.errors import ClosedError, DeadlineError
from persia.modes import Mode
from persia.retry import Deadline
from persia.rpc.fan_out import call_all, try_all
from persia.services import DensePS
from persia.types import Bytes, PushedDense, PushHeader, PushId

__all__ = ["SharedNetwork"]

SLICE_SECONDS = 0.5
"""Interval at which a waiting pull checks whether its result is still needed."""


class SharedNetwork:
    """A network on dense PSs. One thread pulls, one trains, one pushes.

    Args:
        model: the network, on its device.
        optimizer: optimizer of the network.
        scheduler: scheduler of the learning rates, or None.
        servers: the dense PSs.
        timeout: deadline of a call in seconds.

    Raises:
        ConfigError: dense PSs cannot run this optimizer.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None,
        servers: Sequence[DensePS],
        timeout: float = 600.0,
    ) -> None:
        check_optimizer(optimizer)
        self._optimizer = optimizer
        self._scheduler = scheduler
        self.servers = servers
        self._timeout = timeout
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._parameters = [p for _, p in named]
        self._specs = [spec_of(name, p) for name, p in named]
        persistent = set(model.state_dict(keep_vars=True))
        self._buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
        buffer_specs = [spec_of(name, buffer) for name, buffer in self._buffers.items()]
        self._owned = partition(self._specs, len(servers))
        self._gradients = [Layout([self._specs[n] for n in owned]) for owned in self._owned]
        self._buffer_layout = Layout(buffer_specs)
        self._values = [
            Layout([*(self._specs[n] for n in owned), *(buffer_specs if rank == 0 else [])])
            for rank, owned in enumerate(self._owned)
        ]
        self._versions = [-1] * len(servers)
        self._pulled_buffers: list[torch.Tensor] = []

    @property
    def versions(self) -> list[int]:
        """Versions of the last pulled parameters, by dense PS."""
        return list(self._versions)

    @property
    def version(self) -> int:
        """Version of the last pulled parameters; the oldest if dense PSs differ."""
        return min(self._versions)

    # --- a batch ----------------------------------------------------------------------------------------------

    def pull(self, least: int, needed: Callable[[], bool], after: PushId | None = None) -> Callable[[], None]:
        """Pulls the newest parameters; the returned function copies them into the network.

        Args:
            least: see `persia.services.DensePS.pull`.
            needed: polled during the wait, which ends once it returns False.
            after: see `persia.services.DensePS.pull`.

        Raises:
            DeadlineError: the version did not arrive in time.
            ClosedError: `needed` returned False.
        """
        deadline = Deadline(self._timeout)
        answers: dict[int, _PulledValues] = {}
        while len(answers) < len(self.servers):
            missing = [rank for rank in range(len(self.servers)) if rank not in answers]
            pulls = [
                functools.partial(self.servers[rank].pull, self._versions[rank], least, after, SLICE_SECONDS)
                for rank in missing
            ]
            late: DeadlineError | None = None
            for rank, pulled in zip(missing, try_all(pulls, DeadlineError), strict=True):
                if isinstance(pulled, DeadlineError):
                    late = pulled
                elif pulled.values is None:
                    answers[rank] = _PulledValues(pulled.version, None)
                else:
                    answers[rank] = _PulledValues(pulled.version, pulled.values)
            if late is not None:
                if not needed():
                    raise ClosedError("The parameters are no longer needed.")
                if deadline.passed:
                    raise late

        @torch.no_grad()
        def adopt() -> None:
            for rank, (version, packed) in sorted(answers.items()):
                self._versions[rank] = version
                if packed is None:
                    continue
                # Not in `pull`: a copy there would wait for the batch that the device computes.
                values = self._values[rank].unpack(packed, self._parameters[0].device)
                owned = self._owned[rank]
                for number, value in zip(owned, values, strict=False):
                    self._parameters[number].copy_(value)
                if rank == 0:
                    self._pulled_buffers = values[len(owned) :]
            # Even for the same version, as the previous batch has changed the local buffers.
            for buffer, value in zip(self._buffers.values(), self._pulled_buffers, strict=False):
                buffer.copy_(value)

        return adopt

    def gradients(self) -> Callable[[PushHeader, float], None]:
        """Removes the gradients from the network; the returned function pushes them."""
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        buffers = self._buffer_layout.pack(list(self._buffers.values())) if self._buffers else None

        def push(header: PushHeader, decay: float) -> None:
            if decay == 0 or header.rows == 0:
                self.push_empty(header)
                return
            parts: list[PushedDense] = []
            for rank, owned in enumerate(self._owned):
                owned_gradients = [gradients[number] for number in owned]
                present = np.array([gradient is not None for gradient in owned_gradients], np.bool_)
                packed = self._gradients[rank].pack(owned_gradients)
                parts.append(PushedDense(decay, packed, present, buffers if rank == 0 else None))
            call_all([functools.partial(s.push, header, part) for s, part in zip(self.servers, parts, strict=True)])

        return push

    def push_empty(self, header: PushHeader) -> None:
        """Fills a slot that has no gradient."""
        empty = PushedDense(0.0, None, None, None)
        call_all([functools.partial(server.push, header, empty) for server in self.servers])

    # --- quiescent ----------------------------------------------------------------------------------------------

    def load(self, generation: int, step: int, mode: Mode) -> None:
        """Loads the local network into the dense PSs for a phase of `mode`. One NN worker calls it for all."""
        everything = dict(enumerate(self._parameters))
        state = capture(self._specs, everything, self._buffers, self._optimizer, self._scheduler)
        call_all([functools.partial(server.load, state, generation, step, mode) for server in self.servers])

    def drain(self, generation: int, step: int, held: int) -> None:
        """Applies the gradients of an incomplete step that have arrived. One NN worker calls it for all."""
        call_all([functools.partial(server.drain, generation, step, held) for server in self.servers])

    def take_over(self) -> None:
        """Loads the state of the dense PSs into the local network and its optimizer."""
        state = joined(call_all([functools.partial(server.export) for server in self.servers]))
        restore(state, dict(enumerate(self._parameters)), self._buffers, self._optimizer, self._scheduler)
        for parameter in self._parameters:
            parameter.grad = None


class _PulledValues(NamedTuple):
    """Response of a dense PS to a pull; without values if the NN worker already has the version."""

    version: int
    values: Bytes | None
