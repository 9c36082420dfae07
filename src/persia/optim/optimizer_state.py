"""Converts the state of APMSqueeze to and from a form by parameter, for checkpoints and other numbers of workers.

The form does not depend on buckets. Each parameter has `step`, `exp_avg` and `exp_avg_sq` as in Adam, and after the
warm-up the residuals of error feedback, `worker_error` and `server_error`. A worker's own state has only its own
errors; its `server_error` is zero except for this worker's chunks. A consolidated state has the worker errors of all
workers, `[n, ...]`, and the complete server error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from persia.errors import CheckpointError
from persia.optim.cohort import Cohort
from persia.optim.exchange import Exchange

__all__ = ["HEADER", "VERSION", "check", "consolidated", "described", "pack", "unpack"]

HEADER = "apmsqueeze"
"""Key of the part of the state that does not belong to a parameter."""

VERSION = 1
"""Version of the header."""


def pack(
    cohorts: Sequence[Cohort], parameters: Sequence[torch.nn.Parameter], workers: tuple[int, int]
) -> dict[str, Any]:
    """Returns a worker's own state: `state` by parameter number, and the header. Tensors are copies.

    Args:
        cohorts: all cohorts.
        parameters: all parameters.
        workers: number of workers, and rank of this one.
    """
    number = {id(p): i for i, p in enumerate(parameters)}
    state: dict[int, dict[str, torch.Tensor]] = {}
    about = []
    for cohort in cohorts:
        cohort.settle()
        flat = cohort.flat
        arrays = {"exp_avg": flat.momentum, "exp_avg_sq": flat.variance}
        if cohort.phase == "compressed":
            arrays |= {"worker_error": flat.error, "server_error": cohort.server_error()}
        numbers = [number[id(p)] for p in flat.parameters]
        for i, updates in zip(numbers, cohort.updates, strict=True):
            state[i] = {"step": torch.tensor(float(updates))}
        for name, array in arrays.items():
            for i, view in zip(numbers, flat.views(array), strict=True):
                state[i][name] = view.clone()
        about.append({"parameters": numbers, **described(cohort)})
    header = {"version": VERSION, "workers": workers[0], "rank": workers[1], "cohorts": about}
    return {"state": state, HEADER: header}


def described(cohort: Cohort) -> dict[str, Any]:
    """Returns the header entry of a cohort, without the numbers of its parameters."""
    about: dict[str, Any] = {
        "phase": cohort.phase,
        "steps": cohort.steps,
        "until": cohort.until,
        "corrected": cohort.corrected,
        "norms": list(cohort.norms),
        "rates": [list(rates) for rates in cohort.rates],
    }
    if cohort.scale is not None:
        about["scale"] = [list(values) for values in cohort.scale.values]
    if cohort.refresh is not None:
        about["refresh"] = [cohort.refresh.count, cohort.refresh.last]
    return about


def consolidated(packed: dict[str, Any], exchange: Exchange) -> dict[str, Any]:
    """Gathers the errors of all workers, in host memory, on each worker. A collective. Modifies `packed`."""
    packed[HEADER]["rank"] = None
    for i, values in sorted(packed["state"].items()):
        for name, value in values.items():
            values[name] = value.cpu()
        if "worker_error" in values:
            what = f"errors of parameter {i}"
            values["worker_error"] = exchange.gather(values["worker_error"], what)
            values["server_error"] = exchange.gather(values["server_error"], what).sum(0)  # Only one is nonzero.
    return packed


def check(loaded: dict[str, Any], parameters: Sequence[torch.nn.Parameter]) -> None:
    """Checks that a loaded state fits these parameters.

    Raises:
        CheckpointError: it has another version, or another shape of a parameter.
    """
    header = loaded.get(HEADER)
    if not isinstance(header, dict) or header.get("version") != VERSION:
        raise CheckpointError(
            "This is not a state of this version of APMSqueeze; load the result of `state_dict` or `consolidate`."
        )
    for i, values in loaded["state"].items():
        shape = parameters[i].shape if i < len(parameters) else None
        extra = 1 if header["rank"] is None else 0
        for name, value in values.items():
            value_shape = value.shape[extra:] if name == "worker_error" else value.shape
            if name != "step" and value_shape != shape:
                raise CheckpointError(
                    f"{name} of parameter {i} has the shape {tuple(value_shape)}, the parameter "
                    f"{shape and tuple(shape)}. Create the optimizer with the same parameters.",
                    parameter=i,
                )


def unpack(
    loaded: dict[str, Any],
    parameters: Sequence[torch.nn.Parameter],
    make: Callable[[list[torch.nn.Parameter]], Cohort],
    exchange: Exchange,
) -> list[Cohort]:
    """Creates cohorts from a loaded state.

    From a consolidated state of the same number of workers, each worker takes its own errors. With another number, each
    takes the mean of all worker errors, which preserves their average, and its part of the server error.

    Args:
        loaded: a state that has passed `check`.
        parameters: parameters in the order of the state.
        make: creates a new cohort of some parameters.
        exchange: collectives with the other workers.

    Raises:
        CheckpointError: the state is another worker's own.
    """
    header, state = loaded[HEADER], loaded["state"]
    own = header["rank"] is not None
    compressed = any(about["phase"] == "compressed" for about in header["cohorts"])
    if own and compressed and (header["workers"], header["rank"]) != (exchange.size, exchange.rank):
        raise CheckpointError(
            f"This is the state of rank {header['rank']} of {header['workers']}, but this process is rank "
            f"{exchange.rank} of {exchange.size}: the errors of the others are missing. Save the result of "
            "`consolidate()`, called on all ranks.",
            rank=header["rank"],
            workers=header["workers"],
        )
    cohorts = []
    for about in header["cohorts"]:
        numbers = about["parameters"]
        cohort = make([parameters[i] for i in numbers])
        flat = cohort.flat
        number = {id(parameters[i]): i for i in numbers}
        numbers = [number[id(p)] for p in flat.parameters]
        cohort.phase, cohort.steps = about["phase"], about["steps"]
        cohort.norms.extend(about["norms"])
        cohort.rates.extend(tuple(rates) for rates in about["rates"])
        cohort.until, cohort.corrected = about["until"], about["corrected"]
        scales = []
        if "scale" in about:
            by_number = dict(zip(about["parameters"], about["scale"], strict=True))
            scales = [(q, u, frozen) for q, u, frozen in (by_number[i] for i in numbers)]
        if cohort.refresh is not None:
            # A state saved without `refresh_variance` has no entry.
            cohort.refresh.count, cohort.refresh.last = about.get("refresh", (0, cohort.steps))
        cohort.updates = [int(state[i]["step"]) for i in numbers]
        server = torch.zeros_like(flat.error)
        arrays = {"exp_avg": flat.momentum, "exp_avg_sq": flat.variance}
        if cohort.phase == "compressed":
            arrays |= {"worker_error": flat.error, "server_error": server}
        for name, array in arrays.items():
            for i, view in zip(numbers, flat.views(array), strict=True):
                value = state[i][name]
                if name == "worker_error" and not own:
                    value = value[exchange.rank] if header["workers"] == exchange.size else value.mean(0)
                view.copy_(value)
        cohort.set_server_error(server)
        if scales:
            cohort.set_scales(scales)
        cohorts.append(cohort)
    return cohorts
