"""One-bit Adam in plain torch: what APMSqueeze is compared with.

`OneBitAdam` follows DeepSpeed's, from its published description and code: tensor by tensor; scale = L2 norm over the
root of the *padded* length; error kept by sender and averager; four collectives a tensor (signs and scales, scattered
and gathered); no bias correction; the first gradient is dropped. `numpy.packbits` stands for its `cupy.packbits`.

`NaiveOneBit` is what anyone would write first: signs and a mean scale per block of 2,048, as APMSqueeze sends them, but
no error feedback. Adam's warm-up and frozen variance are as there. It measures nothing but convergence, so it exchanges
the values that the bits stand for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import ParamsT

__all__ = ["NaiveOneBit", "OneBitAdam"]

BLOCK = 2048


def pack(values: Tensor) -> Tensor:
    """Signs of float32 `[8 n]` as uint8 `[n]`; zero counts as positive."""
    return torch.from_numpy(np.packbits((values >= 0).numpy()))


def unpack(packed: Tensor) -> Tensor:
    """From uint8 `[n]` to -1 or 1, float32 `[8 n]`."""
    return torch.from_numpy(np.unpackbits(packed.numpy())).float().mul_(2.0).sub_(1.0)


class OneBitAdam(torch.optim.Optimizer):
    """DeepSpeed's 1-bit Adam.

    Args:
        params: of a model that is not wrapped in DDP.
        lr: step length.
        warmup: steps of Adam with float32 gradients.
        betas: decay of momentum and variance.
        eps: added to the root of the variance.
    """

    def __init__(
        self, params: ParamsT, lr: float, warmup: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.warmup = warmup
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; collective."""
        self.steps += 1
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if self.steps <= self.warmup:
            flat = _flat(parameter.grad for parameter in parameters)
            dist.all_reduce(flat)
            flat.div_(dist.get_world_size())
            sizes = [parameter.numel() for parameter in parameters]
            for parameter, part in zip(parameters, flat.split(sizes), strict=True):
                parameter.grad = part.view_as(parameter)
        for group in self.param_groups:
            for parameter in group["params"]:
                self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if not state:  # as published, the step that makes the state does nothing else
            state["m"], state["v"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            return
        b1, b2 = group["betas"]
        state["m"].lerp_(gradient, 1 - b1)
        if self.steps > self.warmup:
            self._exchange(state)
        else:
            state["v"].mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
        parameter.addcdiv_(state["m"], state["v"].sqrt().add_(group["eps"]), value=-group["lr"])

    def _exchange(self, state: dict) -> None:
        """Replaces the momentum by the compressed average."""
        momentum, ranks = state["m"], dist.get_world_size()
        length = math.ceil(momentum.numel() / (8 * ranks)) * 8 * ranks
        if "worker_error" not in state:
            state["worker_error"] = torch.zeros(length)
            state["server_error"] = torch.zeros(length // ranks)
        padded = torch.zeros(length)
        padded[: momentum.numel()] = momentum.flatten()
        signs, scale = _compress(padded, state["worker_error"])
        received, scales = torch.empty_like(signs), torch.empty(ranks)
        dist.all_to_all_single(received, signs)
        dist.all_gather(list(scales.chunk(ranks)), scale)
        average = (unpack(received).view(ranks, -1) * scales[:, None]).mean(0)
        signs, scale = _compress(average, state["server_error"])
        gathered = torch.empty(len(signs) * ranks, dtype=torch.uint8)
        dist.all_gather(list(gathered.chunk(ranks)), signs)
        dist.all_gather(list(scales.chunk(ranks)), scale)
        result = (unpack(gathered).view(ranks, -1) * scales[:, None]).flatten()
        momentum.copy_(result[: momentum.numel()].view_as(momentum))


def _compress(values: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Packed signs and scale `[1]` of values plus error; leaves what is lost in `error`."""
    corrected = values.add_(error)
    scale = corrected.norm() / math.sqrt(corrected.numel())
    signs = pack(corrected)
    torch.sub(corrected, unpack(signs) * scale, out=error)
    return signs, scale.view(1)


class NaiveOneBit(torch.optim.Optimizer):
    """One bit, both ways, and what is lost is lost.

    Args:
        params: of a model that is not wrapped in DDP.
        lr: step length.
        warmup: steps of Adam with float32 gradients, bias-corrected.
        betas: decay of momentum and variance.
        eps: added to the root of the variance.
    """

    def __init__(
        self, params: ParamsT, lr: float, warmup: int, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})
        self.warmup, self.steps = warmup, 0
        self.parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        length = sum(parameter.numel() for parameter in self.parameters)
        self.momentum, self.variance = torch.zeros(length), torch.zeros(length)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update; collective."""
        self.steps += 1
        group = self.param_groups[0]
        (b1, b2), ranks = group["betas"], dist.get_world_size()
        gradient = _flat(parameter.grad for parameter in self.parameters)
        if self.steps <= self.warmup:
            dist.all_reduce(gradient)
            gradient.div_(ranks)
            self.momentum.lerp_(gradient, 1 - b1)
            self.variance.mul_(b2).addcmul_(gradient, gradient, value=1 - b2)
            momentum = self.momentum / (1 - b1**self.steps)
        else:
            sent = lossy(self.momentum.lerp_(gradient, 1 - b1))
            dist.all_reduce(sent)
            momentum = self.momentum = lossy(sent.div_(ranks))
        variance = self.variance / (1 - b2 ** min(self.steps, self.warmup))
        update = momentum / variance.sqrt_().add_(group["eps"])
        sizes = [parameter.numel() for parameter in self.parameters]
        for parameter, part in zip(self.parameters, update.split(sizes), strict=True):
            parameter.sub_(part.view_as(parameter), alpha=group["lr"])


def lossy(values: Tensor) -> Tensor:
    """What a sign and a mean magnitude per block say of float32 `[n]`."""
    length = len(values)
    padded = torch.nn.functional.pad(values, (0, -length % BLOCK)).view(-1, BLOCK)
    counts = torch.full((len(padded), 1), float(BLOCK))
    counts[-1] = BLOCK - -length % BLOCK
    scales = padded.abs().sum(1, keepdim=True) / counts
    return torch.where(padded >= 0, scales, -scales).flatten()[:length]


def _flat(gradients: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])
