"""Random generators of the NN workers, as a checkpoint holds them: dropout goes on as if there had been no pause."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import torch

from persia.checkpoint.packing import pack, unpack
from persia.checkpoint.tensors import decode, encode

__all__ = ["RandomState", "random_states", "set_random_state"]

RandomState: TypeAlias = dict[str, Any]
"""States of the generators of torch (and of each GPU), numpy and Python in one process."""


def random_states(gather: Callable[[bytes], list[bytes]]) -> list[RandomState]:
    """Those of all NN workers, by rank. Blocks until all have called it.

    Args:
        gather: of `nn.sync.Replicas`.
    """
    mine: RandomState = {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": np.random.get_state(),
        "python": random.getstate(),
    }
    payloads = gather(b"".join(encode(pack(mine, "random"))))
    return [unpack(decode(memoryview(bytearray(payload)), "random"), "random") for payload in payloads]


def set_random_state(state: RandomState) -> None:
    """Puts the generators of this process where those were."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
