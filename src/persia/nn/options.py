"""Settings of a collection that have good defaults."""

from __future__ import annotations

import msgspec

from persia.errors import ConfigError

__all__ = ["CollectionOptions"]


class CollectionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of a collection that have good defaults.

    Args:
        device: where the network runs: "cpu", "cuda", "cuda:1".
        seed: of row initialisation and admission.
        accumulation_steps: number of batches whose gradients are applied together, as one update.
        timeout: seconds that a wait for a batch, a lookup or a push may take.
    """

    device: str = "cpu"
    seed: int = 0
    accumulation_steps: int = 1
    timeout: float = 600.0

    def __post_init__(self) -> None:
        value = self.accumulation_steps
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"accumulation_steps = {value!r}; give a whole number >= 1.", field="accumulation_steps")
        if not self.timeout > 0:
            raise ConfigError(f"timeout = {self.timeout!r}; give a number of seconds > 0.", field="timeout")
