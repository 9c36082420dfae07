"""Options of APMSqueeze."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from persia.errors import ConfigError
from persia.optim.compressors import AnyCompressor, Compressor, OneBit

__all__ = ["APMSqueezeOptions"]


class APMSqueezeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What APMSqueeze seldom needs to be told.

    Args:
        warmup: steps of full-precision Adam before v is frozen; "auto": until ||v||_1 has stabilised over a window of
            1 / (1 - beta2) steps, two windows at least.
        compressor: what is sent after the warm-up: `OneBit`, `TopK`, `StochasticTernary`; `Uncompressed` or None for
            the momentum itself.
        communicate: "momentum" (APMSqueeze), or "gradient" (APGSqueeze of the paper, section 5.3).
        clip_norm: largest global norm of the gradient; None for no clipping. During the warm-up it is the norm of the
            average; afterwards nobody knows the average, and it is the root mean square of the workers' own norms,
            which is never less.
        bucket_bytes: of parameters, as float32, that travel together.
        variance_floor: least frozen v of an element, as a share of its tensor's mean: compression gives an element
            noise as large as its neighbours' momentum, and division by a v of nearly 0 would blow it up.
        process_group: of torch.distributed; None for all processes.
        timeout: seconds that a wait for other workers may take.
        debug: after each step, checks that all workers have the same parameters to the bit. Slow.
    """

    warmup: int | Literal["auto"] = "auto"
    compressor: AnyCompressor | None = OneBit()
    communicate: Literal["momentum", "gradient"] = "momentum"
    clip_norm: float | None = None
    bucket_bytes: int = 25 << 20
    variance_floor: float = 1e-3
    process_group: Any = None
    timeout: float = 600.0
    debug: bool = False

    def __post_init__(self) -> None:
        whole = isinstance(self.warmup, int) and not isinstance(self.warmup, bool)
        if self.warmup != "auto" and not (whole and self.warmup >= 1):
            raise ConfigError(f'warmup = {self.warmup!r}; give a number of steps >= 1, or "auto".', field="warmup")
        if self.compressor is not None and not isinstance(self.compressor, Compressor):
            raise ConfigError(
                f"compressor = {self.compressor!r}; give a compressor of persia.optim, such as OneBit().",
                field="compressor",
            )
        if self.communicate not in ("momentum", "gradient"):
            raise ConfigError(f"communicate = {self.communicate!r}; use momentum or gradient.", field="communicate")
        for name in ("clip_norm", "bucket_bytes", "timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} = {value!r}; give a number > 0.", field=name)
        if not 0.0 <= self.variance_floor <= 1.0:
            raise ConfigError(
                f"variance_floor = {self.variance_floor!r}; give a number from 0 to 1.", field="variance_floor"
            )
