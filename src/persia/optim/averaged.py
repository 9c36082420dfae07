"""APMSqueeze while the network is on dense PSs: gradients arrive averaged, so nothing is sent or compressed.

:meth:`persia.optim.APMSqueeze.hand_over` fills an :class:`Averaged`, which dense PSs can run, and `take_back` reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from persia.optim.cohort import Cohort
from persia.optim.exchange import Exchange
from persia.optim.optimizer_state import HEADER, VERSION, described

__all__ = ["Averaged", "fill", "flush", "read"]


class Averaged(torch.optim.Optimizer):
    """The updates of APMSqueeze on averaged gradients, tensor by tensor. Not thread-safe.

    During the warm-up it is Adam; once v is frozen, it divides the momentum by the root of v. It does not freeze v
    itself: a warm-up that is over meanwhile ends when APMSqueeze takes the network back. State by parameter: `step`,
    `exp_avg`, `exp_avg_sq` as in Adam, `frozen`, and `corrected`: whether the bias of v is corrected.

    Args:
        groups: parameter groups, each with `lr`, `betas`, `eps`, `weight_decay`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates the parameters that have a gradient. Returns the loss of the closure, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad.float(), group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            zeros = torch.zeros_like(gradient)
            state.update(step=torch.zeros(()), exp_avg=zeros, exp_avg_sq=zeros.clone(), frozen=False, corrected=False)
        beta1, beta2 = group["betas"]
        state["step"] += 1
        updates, m, v = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
        m.mul_(beta1).add_(gradient, alpha=1.0 - beta1)
        if state["frozen"]:
            deviation = v.sqrt()
        else:
            v.mul_(beta2).addcmul_(gradient, gradient, value=1.0 - beta2)
            deviation = (v / (1.0 if state["corrected"] else 1.0 - beta2**updates)).sqrt_()
        change = torch.div(m, deviation.add_(group["eps"])).mul_(group["lr"] / (1.0 - beta1**updates))
        parameter.copy_(parameter * (1.0 - group["lr"] * group["weight_decay"]) - change)

    def maker(self, parameters: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], Averaged]:
        """Returns a picklable function that makes such an optimizer without state for other tensors in this order."""
        number = {id(p): i for i, p in enumerate(parameters)}
        return _Maker([{**group, "params": [number[id(p)] for p in group["params"]]} for group in self.param_groups])


class _Maker:
    """See `Averaged.maker`; the groups have numbers of parameters."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        self._groups = groups

    def __call__(self, parameters: Sequence[torch.Tensor]) -> Averaged:
        return Averaged({**group, "params": [parameters[i] for i in group["params"]]} for group in self._groups)


def flush(cohort: Cohort, beta1: Sequence[float], momentum: bool, exchange: Exchange) -> None:
    """Adds the compression errors to the momentum, so that the next update includes them. A collective.

    Afterwards the errors are zero.

    Args:
        cohort: the cohort, compressed or not.
        beta1: decay by parameter of the cohort. If 0, the next update includes neither momentum nor errors.
        momentum: whether the errors are errors of the momentum; otherwise of gradients.
        exchange: collectives with the other workers.
    """
    cohort.settle()
    if cohort.phase == "warmup":
        return
    flat = cohort.flat
    unsent = flat.error.mul_(1.0 / exchange.size).add_(cohort.server_error())
    exchange.start_sum(unsent, "unsent errors")()
    for m, e, b in zip(flat.views(flat.momentum), flat.views(unsent), beta1, strict=True):
        m.add_(e, alpha=(1.0 if momentum else 1.0 - b) / b if b else 0.0)
    flat.error.zero_()
    cohort.set_server_error(flat.error)


def fill(averaged: Averaged, cohorts: Sequence[Cohort]) -> None:
    """Sets the state from flushed cohorts. Shares their tensors. A frozen v and its scale do not change meanwhile."""
    averaged.state.clear()
    for cohort in cohorts:
        cohort.fold_scale()
        flat = cohort.flat
        moments = zip(flat.views(flat.momentum), flat.views(flat.variance), strict=True)
        for parameter, updates, (m, v) in zip(flat.parameters, cohort.updates, moments, strict=True):
            averaged.state[parameter] = {
                "step": torch.tensor(float(updates)),
                "exp_avg": m,
                "exp_avg_sq": v,
                "frozen": cohort.phase == "compressed",
                "corrected": cohort.corrected,
            }


def read(
    averaged: Averaged, cohorts: Sequence[Cohort], parameters: Sequence[torch.Tensor]
) -> tuple[dict[str, Any], int]:
    """Returns a consolidated state for `optimizer_state.unpack`, without errors, and the number of steps.

    Args:
        averaged: the optimizer of the dense PSs.
        cohorts: cohorts from which it was filled. Parameters without a cohort form another one.
        parameters: parameters in the order of their numbers.
    """
    number = {id(p): i for i, p in enumerate(parameters)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    records: list[dict[str, Any]] = []
    max_steps = 0
    known = {id(p) for cohort in cohorts for p in cohort.flat.parameters}
    new = [p for p in parameters if id(p) not in known and averaged.state.get(p)]
    groups: list[tuple[Sequence[torch.Tensor], Sequence[int], dict[str, Any]]] = [
        (c.flat.parameters, c.updates, described(c)) for c in cohorts
    ]
    started = {"phase": "warmup", "steps": 0, "until": 0, "corrected": False}
    for members, updates, header in [*groups, (new, [0] * len(new), started)]:
        steps = 0
        for parameter, previous in zip(members, updates, strict=True):
            i, values = number[id(parameter)], averaged.state[parameter]
            state[i] = {name: values[name].detach() for name in ("step", "exp_avg", "exp_avg_sq")}
            if header["phase"] == "compressed":
                zeros = torch.zeros_like(values["exp_avg"])
                state[i] |= {"worker_error": zeros[None], "server_error": zeros}
            steps = max(steps, int(values["step"]) - previous)
        if members:
            numbers = [number[id(p)] for p in members]
            # "auto" restarts its window.
            changed = {"parameters": numbers, "steps": header["steps"] + steps, "norms": [], "rates": []}
            records.append({**header, **changed})
        max_steps = max(max_steps, steps)
    return {"state": state, HEADER: {"version": VERSION, "workers": 1, "rank": None, "cohorts": records}}, max_steps
