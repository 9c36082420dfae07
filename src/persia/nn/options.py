"""Settings of a collection that have good defaults."""

from __future__ import annotations

import re

import msgspec

from persia.checks import MAX_SEED, check_flag, check_integer, check_number, check_seconds, plain_fields
from persia.errors import ConfigError

__all__ = ["CollectionOptions", "check_device", "check_gpus"]

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


class CollectionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a collection that have good defaults.

    Args:
        device: where the network runs: "cpu", "cuda", "cuda:1", or "auto" for CUDA if this process has a device, else
            the CPU. The default is "cpu", where torch makes a network: a loop of your own moves it itself, whereas a
            `Trainer` moves it, so that `TrainerOptions.device` can be "auto".
        seed: of row initialisation and admission.
        accumulation_steps: number of batches whose gradients are applied together, as one update.
        timeout: seconds that a wait for a batch, a lookup or a push may take.
        clip_embedding_norm: largest L2 norm of the gradients of all rows of a batch together; None for no clipping.
            Each NN worker clips each of its batches by itself. See the guide on tables.
        one_thread: whether the thread that trains also looks rows up and pushes gradients, while a GPU computes, with
            at most one step in flight; False leaves that to other threads. None decides by where rows and network are:
            one thread where nothing can be hidden, as in `Sync` with rows in memory of this process, else threads. True
            is not for asynchronous modes, and not for several NN workers. See the guide on GPUs.
    """

    device: str = "cpu"
    seed: int = 0
    accumulation_steps: int = 1
    timeout: float = 600.0
    clip_embedding_norm: float | None = None
    one_thread: bool | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_device(self.device)
        check_integer("seed", self.seed, 0, MAX_SEED)
        check_integer("accumulation_steps", self.accumulation_steps, 1)
        check_seconds("timeout", self.timeout)
        if self.clip_embedding_norm is not None:
            check_number("clip_embedding_norm", self.clip_embedding_norm, 0, open_low=True)
        if self.one_thread is not None:
            check_flag("one_thread", self.one_thread)


def check_device(name: str) -> None:
    """Raises ConfigError unless the name is a device's, or "auto". Whether it exists is not checked."""
    if not isinstance(name, str) or DEVICE.fullmatch(name) is None:
        raise ConfigError(f"Invalid device {name!r}; expected auto, cpu, cuda or cuda:N.", field="device")


def check_gpus(device: str, gpus: float) -> None:
    """Checks that an NN worker for which GPUs are reserved does not train on the CPU.

    Args:
        device: where the network runs.
        gpus: that are reserved for the NN worker.

    Raises:
        ConfigError: it does.
    """
    if gpus and device == "cpu":
        raise ConfigError(
            f"Invalid device 'cpu': RayOptions.gpus reserves {gpus:g} GPU for each NN worker, which would idle. Set "
            'TrainerOptions(device="auto"), or CollectionOptions(device="auto") in a loop of your own; or set '
            "RayOptions(gpus=0) to train on CPUs.",
            field="device",
        )
