"""The dense parameter server (GBA paper, appendix B, Algorithm 2): the network's tensors, and the user's optimizer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from persia.dense.dense_state import capture, restore
from persia.dense.tensor_layout import Layout
from persia.errors import ConfigError, StoreError
from persia.modes import Mode
from persia.pushes.journal import JournaledServer
from persia.pushes.sequencer import PushSequencer
from persia.services import DenseMaker
from persia.types import Bytes, DenseState, Pulled, PushedDense, PushHeader, PushId, TensorSpec

__all__ = ["DenseServer", "check_optimizer", "partition"]

REFUSED = ("LBFGS", "SparseAdam", "APMSqueeze", "APGSqueeze")
"""Optimizers that use several tensors at once, or more than their gradients."""


class DenseServer(JournaledServer):
    """Owns whole tensors. Thread-safe; calls block for their own work.

    Args:
        maker: makes the optimizer.
        rank: number of this dense PS.
        servers: number of dense PSs; each owns some of the tensors, and the first one owns all buffers.
        timeout: maximum wait of a call in seconds.

    Raises:
        ConfigError: gradients are clipped by their global norm, but there are several dense PSs.
    """

    def __init__(self, maker: DenseMaker, rank: int = 0, servers: int = 1, timeout: float = 600.0) -> None:
        if maker.clip_norm is not None and servers > 1:
            raise ConfigError(
                f"clip_norm needs the norm of the whole gradient, but each of {servers} dense PSs has a part. Use one.",
                field="clip_norm",
            )
        self._maker = maker
        self._rank = rank
        self._servers = servers
        self._timeout = timeout
        self._sequencer: PushSequencer[bool] = PushSequencer()
        self._mode: Mode | None = None
        self._lock = threading.Lock()
        self._owned: dict[int, torch.Tensor] = {}
        self._buffers: dict[str, torch.Tensor] = {}
        self._parameters: list[TensorSpec] = []
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: torch.optim.lr_scheduler.LambdaLR | None = None
        self._values = self._gradients = self._buffer_layout = Layout([])
        self._sum = _GradientSum(0)
        self._snapshot: Pulled | None = None
        self._exported: DenseState | None = None
        self._counts: Counter[str] = Counter()

    def load(self, state: DenseState, generation: int, step: int, mode: Mode) -> None:
        """Replaces this PS's part of the network; see `persia.services.DensePS`."""
        own_numbers = partition(state.parameters, self._servers)[self._rank]
        if not set(own_numbers) <= set(state.owned):
            raise StoreError(f"Dense PS {self._rank} owns tensors that the state lacks.", rank=self._rank)
        # Parameters of other PSs take no memory; they exist so that the optimizer is made for all parameters in order.
        everything = [
            torch.nn.Parameter(
                torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="cpu" if n in own_numbers else "meta")
            )
            for n, spec in enumerate(state.parameters)
        ]
        owned: dict[int, torch.Tensor] = {number: everything[number] for number in own_numbers}
        buffers = {
            spec.name: torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for spec in (state.buffers if self._rank == 0 else [])
        }
        optimizer = self._maker.optimizer(list(everything))
        check_optimizer(optimizer)
        known = {id(p) for p in everything}
        for group in optimizer.param_groups:
            if any(id(p) not in known for p in group["params"]):
                raise ConfigError(
                    "optimizer(params) uses tensors other than `params`, which a dense PS does not have. Build "
                    "parameter groups only from `params`, for example by their shapes.",
                    field="optimizer",
                )
            group["params"] = [p for p in group["params"] if not p.is_meta]
        for parameter in [p for p in optimizer.state if p.is_meta]:
            del optimizer.state[parameter]
        schedule = self._maker.schedule
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule.factor) if schedule else None
        restore(_part(state, own_numbers, with_buffers=self._rank == 0), owned, buffers, optimizer, scheduler)
        self._sequencer.begin(generation, step)
        with self._lock:
            self._mode = mode
            self._parameters, self._owned, self._buffers = list(state.parameters), owned, buffers
            self._optimizer, self._scheduler = optimizer, scheduler
            specs = [state.parameters[number] for number in own_numbers]
            buffer_specs = state.buffers if self._rank == 0 else []
            self._values, self._gradients = Layout([*specs, *buffer_specs]), Layout(specs)
            self._buffer_layout = Layout(buffer_specs)
            self._sum = _GradientSum(len(own_numbers))
            self._snapshot = self._exported = None

    def pull(self, have: int, least: int, after: PushId | None, timeout: float) -> Pulled:
        """Returns parameters and buffers of the newest version; see `persia.services.DensePS`."""
        if not self._sequencer.await_push(least, after, timeout):
            own = "" if after is None else f" with push {after.sequence} of NN worker {after.rank}"
            what = f"Dense PS {self._rank}: version {least} of the parameters{own}"
            raise self._sequencer.late(what, self._timeout)
        with self._lock:
            version = self._sequencer.step
            self._counts["pulls"] += 1
            if version == have:
                return Pulled(version, None)
            if self._snapshot is None or self._snapshot.version != version:
                # Once per version for all NN workers. It may still be in flight when the next one is made.
                self._snapshot = Pulled(version, self._pack())
            return self._snapshot

    def push(self, header: PushHeader, part: PushedDense) -> None:
        """Adds a gradient to the current step; see `persia.services.DensePS`."""
        gradients = self._gradients.unpack(part.gradients) if part.gradients is not None else None
        buffers = self._buffer_layout.unpack(part.buffers) if part.buffers is not None else None
        if part.present is not None and part.present.shape != (len(self._owned),):
            raise StoreError(f"Got {part.present.shape} flags for {len(self._owned)} parameters.", rank=header.rank)
        if gradients is not None and part.present is not None:
            present_gradients: list[torch.Tensor | None] | None = [
                g if there else None for g, there in zip(gradients, part.present, strict=True)
            ]
        else:
            present_gradients = None

        def work(step: int, last: bool) -> bool:
            assert self._mode is not None
            # The gradient may have become too old since the token scheduler placed it.
            decay = min(part.decay, self._mode.decay(step, header.token))
            with self._lock:
                self._counts["pushes"] += 1
                self._counts["stale"] += part.decay > decay
                self._sum.add(present_gradients, buffers, float(header.rows), decay)
                if (journal := self.journal) is not None:
                    journal.add(header, empty=present_gradients is None)
                if last:
                    self._apply()
            return True

        self._sequencer.push(header, work)

    def drain(self, generation: int, step: int, held: int) -> None:
        """Applies the gradients that have arrived of an incomplete step; see `persia.services.DensePS`."""

        def apply() -> None:
            with self._lock:
                self._apply()

        self._sequencer.drain(generation, step, held, apply)

    def export(self) -> DenseState:
        """Returns the state of all parameters that this PS owns; call it while the PS is quiescent."""
        with self._lock:
            if self._optimizer is None:
                raise StoreError("This dense PS has no network yet: load one first.")
            if self._exported is None:  # Once until the next step for all NN workers.
                self._exported = capture(self._parameters, self._owned, self._buffers, self._optimizer, self._scheduler)
            return self._exported

    def statistics(self) -> dict[str, int]:
        """Returns counters: `version`, `pushes`, `stale`, `pulls`, and `bytes` of parameters and buffers."""
        with self._lock:
            return {
                "version": self._sequencer.step,
                "pushes": self._counts["pushes"],
                "stale": self._counts["stale"],
                "pulls": self._counts["pulls"],
                "bytes": self._values.nbytes,
            }

    def _pack(self) -> Bytes:
        return self._values.pack([*self._owned.values(), *self._buffers.values()])

    def _apply(self) -> None:
        """Makes an optimizer step with the sum of the gradients, unless all have decay 0."""
        assert self._optimizer is not None
        self._exported = None
        gradient_sum, self._sum = self._sum, _GradientSum(len(self._owned))
        for buffer, value in zip(self._buffers.values(), gradient_sum.buffer_means(), strict=False):
            buffer.copy_(value)
        gradients = gradient_sum.means()
        if gradients is None:
            return
        for parameter, gradient in zip(self._owned.values(), gradients, strict=True):
            parameter.grad = gradient
        if self._maker.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(list(self._owned.values()), self._maker.clip_norm)
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        self._optimizer.zero_grad()


class _GradientSum:
    """The running sum of a step. Weights are rows divided by rows of the first gradient, so 1 for equal batches."""

    def __init__(self, parameters: int) -> None:
        self._sums: list[torch.Tensor | None] = [None] * parameters
        self._buffers: list[torch.Tensor] = []
        self._buffer_weight = 0.0
        self._unit = 0.0
        self._total = 0.0
        self._counted = 0.0

    def add(
        self,
        gradients: Sequence[torch.Tensor | None] | None,
        buffers: Sequence[torch.Tensor] | None,
        rows: float,
        decay: float,
    ) -> None:
        self._unit = self._unit or rows
        share = rows / self._unit if rows else 0.0
        self._total += share
        if gradients is None or decay == 0 or share == 0:
            return
        self._counted += share * decay
        for number, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[number]
            if total is None:
                self._sums[number] = gradient * (share * decay)
            else:
                total.add_(gradient, alpha=share * decay)
        if buffers:
            self._add_buffers(buffers, share * decay)

    def _add_buffers(self, buffers: Sequence[torch.Tensor], weight: float) -> None:
        if not self._buffers:
            self._buffers = [b * weight if b.is_floating_point() else b.clone() for b in buffers]
        else:
            for total, buffer in zip(self._buffers, buffers, strict=True):
                if total.is_floating_point():
                    total.add_(buffer, alpha=weight)
                else:
                    torch.maximum(total, buffer, out=total)
        self._buffer_weight += weight

    def means(self) -> list[torch.Tensor | None] | None:
        """Returns the sum divided by all weights, including gradients of decay 0; None if all weights are 0."""
        if not self._counted:
            return None
        if self._total == 1.0:
            return self._sums
        return [total if total is None else total.mul_(1.0 / self._total) for total in self._sums]

    def buffer_means(self) -> list[torch.Tensor]:
        return [b / self._buffer_weight if b.is_floating_point() else b for b in self._buffers]


def partition(parameters: Sequence[TensorSpec], servers: int) -> list[list[int]]:
    """Returns the numbers of the tensors of each dense PS. Assigns tensors, largest first, to the PS with fewest bytes.

    Args:
        parameters: parameters of the network.
        servers: number of dense PSs.
    """
    sizes = [Layout([spec]).nbytes for spec in parameters]
    load = [0] * servers
    owned: list[list[int]] = [[] for _ in range(servers)]
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        least = load.index(min(load))
        owned[least].append(number)
        load[least] += sizes[number]
    return [sorted(numbers) for numbers in owned]


def check_optimizer(optimizer: object) -> None:
    """Raises ConfigError if a dense PS cannot run the optimizer: it must treat each tensor separately."""
    name = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer(params) returned {name}; return a torch.optim.Optimizer.", field="optimizer")
    refused = [kind.__name__ for kind in type(optimizer).__mro__ if kind.__name__ in REFUSED]
    if refused:
        raise ConfigError(
            f"The optimizer {name} does not treat tensors separately, so dense PSs cannot run it. Use another one, "
            "such as Adam, or a mode with all-reduce (Sync, Hybrid).",
            field="optimizer",
        )


def _part(state: DenseState, numbers: Sequence[int], with_buffers: bool) -> DenseState:
    """Returns the part of a state that belongs to the parameters with these numbers."""
    if list(numbers) == state.owned and with_buffers:
        return state
    values = Layout([*(state.parameters[n] for n in state.owned), *state.buffers]).unpack(state.values)
    by_number = dict(zip(state.owned, values, strict=False))
    buffers = values[len(state.owned) :] if with_buffers else []
    specs = state.buffers if with_buffers else []
    specs_of_state = [spec for spec in state.tensors if int(spec.name.split("/", 1)[0]) in set(numbers)]
    tensors: Mapping[str, torch.Tensor] = dict(
        zip((s.name for s in state.tensors), Layout(state.tensors).unpack(state.state), strict=True)
    )
    return state._replace(
        owned=list(numbers),
        values=Layout([*(state.parameters[n] for n in numbers), *specs]).pack(
            [*(by_number[n] for n in numbers), *buffers]
        ),
        buffers=specs,
        tensors=specs_of_state,
        state=Layout(specs_of_state).pack([tensors[spec.name] for spec in specs_of_state]),
    )
