"""What can be set of an embedding worker."""

from __future__ import annotations

from typing import Literal

import msgspec

from persia.errors import ConfigError

__all__ = ["WorkerOptions"]


class WorkerOptions(msgspec.Struct, frozen=True):
    """Bounds and deadlines of an embedding worker, and how rows travel.

    Args:
        compression: of rows and gradients between embedding worker and NN worker: "none", or "fp16" with a scale per
            row (docs: lossy, about half the bytes).
        capacity: batches that are buffered at most; more wait in `register`.
        timeout: seconds that `register` waits for room.
        expiry: seconds without a call after which a batch is forgotten.
    """

    compression: Literal["none", "fp16"] = "none"
    capacity: int = 4096
    timeout: float = 60.0
    expiry: float = 600.0

    def __post_init__(self) -> None:
        if self.compression not in ("none", "fp16"):
            raise ConfigError(f'compression = {self.compression!r}; use "none" or "fp16".', field="compression")
        if self.capacity < 1:
            raise ConfigError(f"capacity = {self.capacity}; give a whole number >= 1.", field="capacity")
        for name in ("timeout", "expiry"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} = {getattr(self, name)}; give seconds above 0.", field=name)
