"""Options of APMSqueeze."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from persia.checks import MAX_STEPS, check_choice, check_flag, check_integer, check_number, check_seconds, plain_fields
from persia.errors import ConfigError
from persia.optim.compressors import AnyCompressor, Compressor, OneBit

__all__ = ["APMSqueezeOptions"]


class APMSqueezeOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Advanced options of APMSqueeze.

    Args:
        warmup: steps of full-precision Adam before v is frozen; "auto": until ||v||_1 has stabilized over a window of
            1 / (1 - beta2) steps, in which no learning rate has risen, and for at least two windows.
        compressor: compression after the warm-up: `OneBit`, `TopK`, `StochasticTernary`; `Uncompressed` or None for
            no compression.
        communicate: "momentum" (APMSqueeze), or "gradient" (APGSqueeze of the paper, section 5.3).
        clip_norm: maximum global norm of the gradient; None for no clipping. During the warm-up, it is the norm of
            the average. Afterwards no worker has the average, so it is the root mean square of the workers' norms, an
            upper bound.
        bucket_bytes: maximum bytes of parameters, as float32, that are sent together. A network of 1 MiB or more has
            up to 6 buckets, regardless of their size.
        variance_floor: minimum of an element of the frozen v, as a fraction of its tensor's mean. Compression gives an
            element noise as large as its neighbors' momentum, which division by a v near 0 would amplify.
        track_scale: after the warm-up, multiplies the root of the frozen v by one number per tensor, which follows the
            norms of the workers' gradients; see :class:`persia.optim.tracked_scale.TrackedScale`. Not in the paper.
        refresh_variance: updates the frozen v in some steps, with gradients averaged in float32. Their distance is 1
            step at first and doubles after every `refresh_variance` updates; 0/1 Adam has 16. None for no updates. See
            :class:`persia.optim.variance_refresh.VarianceRefresh`. Not in the paper.
        process_group: process group of torch.distributed; None for all processes.
        timeout: maximum seconds of a wait for other workers.
        debug: checks after each step that the parameters of all workers are bitwise equal. Slow.
    """

    warmup: int | Literal["auto"] = "auto"
    compressor: AnyCompressor | None = OneBit()
    communicate: Literal["momentum", "gradient"] = "momentum"
    clip_norm: float | None = None
    bucket_bytes: int = 25 << 20
    variance_floor: float = 1e-3
    track_scale: bool = False
    refresh_variance: int | None = None
    process_group: Any = None
    timeout: float = 600.0
    debug: bool = False

    def __post_init__(self) -> None:
        plain_fields(self)
        if self.warmup != "auto":
            _check_count("warmup", self.warmup, "'auto'")
        if self.compressor is not None and not isinstance(self.compressor, Compressor):
            raise ConfigError(
                f"Invalid compressor = {self.compressor!r}; expected one of persia.optim, such as OneBit().",
                field="compressor",
            )
        check_choice("communicate", self.communicate, ("momentum", "gradient"))
        if self.clip_norm is not None:
            check_number("clip_norm", self.clip_norm, 0, open_low=True)
        check_integer("bucket_bytes", self.bucket_bytes, 1, MAX_STEPS)
        check_seconds("timeout", self.timeout)
        check_flag("track_scale", self.track_scale)
        check_flag("debug", self.debug)
        if self.refresh_variance is not None:
            _check_count("refresh_variance", self.refresh_variance, "None")
        check_number("variance_floor", self.variance_floor, 0, 1)


def _check_count(name: str, value: object, other: str) -> None:
    """Raises ConfigError unless `value` is a number of steps; `other` is the option's alternative value."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_STEPS:
        raise ConfigError(
            f"Invalid {name} = {value!r}; expected a whole number from 1 to {MAX_STEPS}, or {other}.", field=name
        )
