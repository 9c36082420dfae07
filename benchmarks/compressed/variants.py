"""The ways to train that are compared: each turns a model into what is called, and an optimizer that steps it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from benchmarks.baselines.one_bit_torch import NaiveOneBit, OneBitAdam
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam, Optimizer

__all__ = ["DEADLINE_S", "VARIANTS", "Ready", "prepare"]

DEADLINE_S = 3600.0
"""Of a wait for another rank: long, so that a run may be paused. One that has died is noticed at once."""

TOP = 0.01
"""Share of the momentum that top-k sends."""


class Ready(NamedTuple):
    """A model to call and the optimizer to step."""

    model: nn.Module
    optimizer: Optimizer


def local(model: nn.Module, lr: float, warmup: int) -> Ready:
    """No communication at all: what a step costs without it. The ranks drift apart."""
    return Ready(model, Adam(model.parameters(), lr, fused=True))


def adam(model: nn.Module, lr: float, warmup: int) -> Ready:
    """DDP, float32."""
    return Ready(DistributedDataParallel(model), Adam(model.parameters(), lr, fused=True))


def sgd(model: nn.Module, lr: float, warmup: int) -> Ready:
    """DDP, float32, plain SGD."""
    return Ready(DistributedDataParallel(model), SGD(model.parameters(), lr))


def fp16(model: nn.Module, lr: float, warmup: int) -> Ready:
    """DDP with torch's float16 hook."""
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return Ready(wrapped, Adam(model.parameters(), lr, fused=True))


def power_sgd(model: nn.Module, lr: float, warmup: int) -> Ready:
    """DDP with torch's PowerSGD hook, rank 2, error feedback and warm start as by default.

    In one bucket: the hook starts collectives from callbacks, and with gloo those of several buckets come in another
    order on each rank, which ends the process.
    """
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1000)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=max(2, warmup))
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return Ready(wrapped, Adam(model.parameters(), lr, fused=True))


def deepspeed(model: nn.Module, lr: float, warmup: int) -> Ready:
    """DeepSpeed's formulas."""
    return Ready(model, OneBitAdam(model.parameters(), lr, warmup))


def naive(model: nn.Module, lr: float, warmup: int) -> Ready:
    """One bit without error feedback."""
    return Ready(model, NaiveOneBit(model.parameters(), lr, warmup))


def squeezed(**options: Any) -> Callable[[nn.Module, float, int], Ready]:
    """APMSqueeze with these options; a compressor is given as (name, arguments)."""

    def make(model: nn.Module, lr: float, warmup: int) -> Ready:
        from persia import optim

        chosen = dict(options)
        if "compressor" in chosen:
            name, arguments = chosen["compressor"]
            chosen["compressor"] = getattr(optim, name)(**arguments)
        settings = optim.APMSqueezeOptions(warmup=warmup, timeout=DEADLINE_S, **chosen)
        return Ready(model, optim.APMSqueeze(model.parameters(), lr, options=settings))

    return make


VARIANTS: dict[str, Callable[[nn.Module, float, int], Ready]] = {
    "local": local,
    "adam": adam,
    "sgd": sgd,
    "fp16": fp16,
    "power_sgd": power_sgd,
    "deepspeed": deepspeed,
    "naive": naive,
    "one_bit": squeezed(),
    "tracked": squeezed(track_scale=True),
    "refreshed": squeezed(refresh_variance=16),
    "one_bit_l2": squeezed(compressor=("OneBit", {"scale": "l2"})),
    "top_k": squeezed(compressor=("TopK", {"ratio": TOP})),
    "ternary": squeezed(compressor=("StochasticTernary", {})),
    "uncompressed": squeezed(compressor=("Uncompressed", {})),
    "gradient": squeezed(communicate="gradient"),
}


def prepare(variant: str, model: nn.Module, lr: float, warmup: int) -> Ready:
    """That variant of training this model.

    Args:
        variant: a name of `VARIANTS`.
        model: the same values on every rank.
        lr: of Adam or APMSqueeze.
        warmup: steps before compression begins.
    """
    return VARIANTS[variant](model, lr, warmup)
