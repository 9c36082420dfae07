"""Checks of APMSqueeze: no other code averages gradients; all workers have equal arguments and parameters."""

from __future__ import annotations

import gc
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from persia.checks import check_number, plain
from persia.errors import ConfigError, PersiaError
from persia.optim.exchange import Exchange

__all__ = ["check_group", "refuse_ddp", "same_everywhere", "same_parameters"]


def check_group(group: dict[str, Any], device: torch.device) -> None:
    """Raises ConfigError for an invalid argument of a parameter group, or a parameter that is complex or elsewhere."""
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ConfigError(f"Invalid betas = {betas!r}; expected two numbers.", field="betas")
    for beta in betas:
        check_number("betas", plain(beta), 0, 1, open_high=True)
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        check_number(name, value.item() if isinstance(value, torch.Tensor) else plain(value), 0)
    for parameter in group["params"]:
        if parameter.device != device or not parameter.is_floating_point():
            raise ConfigError(
                f"A parameter is {parameter.dtype} on {parameter.device}, but the first one is on {device}. Use real "
                "parameters on one device.",
                field="params",
            )


def refuse_ddp(parameters: Sequence[torch.nn.Parameter]) -> None:
    """Raises ConfigError if a DistributedDataParallel of this process holds one of the parameters."""
    # A wrapper needs a process group; iterating over many objects takes 0.1 s.
    if not dist.is_initialized():
        return
    ids = {id(p) for p in parameters}
    for module in gc.get_objects():
        # By type, as `isinstance` accesses the object, which can be a proxy that computes or warns.
        if issubclass(type(module), DistributedDataParallel) and any(id(p) in ids for p in module.parameters()):
            raise ConfigError(
                "The model is wrapped in DistributedDataParallel, but APMSqueeze averages itself: gradients would be "
                "sent twice, once uncompressed. Remove the wrapper.",
                field="params",
            )


def same_everywhere(exchange: Exchange, description: str) -> None:
    """Raises ConfigError if workers have different arguments, which would cause deadlocks or corrupt messages."""
    digest = hashlib.sha256(description.encode()).digest()
    rows = exchange.gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), "check of arguments")
    others = [rank for rank, row in enumerate(rows) if not torch.equal(row, rows[0])]
    if others:
        raise ConfigError(
            f"APMSqueeze was made differently on rank {', '.join(map(str, others))} and on rank 0: parameters (number, "
            f"order, shapes), beta2 and options must be equal. Rank {exchange.rank} has {description[:300]}.",
            field="params",
            ranks=others,
        )


def same_parameters(exchange: Exchange, parameters: Sequence[torch.nn.Parameter], step: int) -> None:
    """Raises PersiaError if the parameters are not bitwise equal on all workers."""
    flat = (p.detach().cpu().reshape(-1).contiguous() for p in parameters)
    sums = [zlib.crc32(f.view(torch.uint8).numpy().data) if f.numel() else 0 for f in flat]
    rows = exchange.gather(torch.tensor(sums, dtype=torch.int64), "check of the parameters")
    for rank, row in enumerate(rows):
        if not torch.equal(row, rows[0]):
            index = int((row != rows[0]).nonzero()[0])
            raise PersiaError(
                f"After step {step}, parameter {index} differs between rank 0 and rank {rank}. Other code "
                "changes it on only one worker; check learning rates, hooks and initialization.",
                rank=rank,
                parameter=index,
                step=step,
            )
