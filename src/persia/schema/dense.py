"""`DenseFeature`: a non-ID-type feature, and the rules that turn its column into input of the network."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from types import NoneType
from typing import Literal

import msgspec

from persia.checks import check_choice, check_flag, check_integer, check_kind, check_number, plain, plain_fields
from persia.errors import ConfigError
from persia.schema.checks import check_name

__all__ = ["DenseFeature", "DenseStatistics", "Scale", "dense_feature"]

Scale = Literal["standard", "minmax", "quantile"]
MAX_VALUES = 1 << 16


class DenseStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Statistics of a column that `persia.fit_features` has found, for the rules that need them.

    Args:
        mean: mean of the values that are present, before any rule; for `fill="mean"`.
        centre: number that is subtracted after `clip` and `log`.
        width: positive number that the difference is divided by.
        quantiles: values at equally distant ranks from 0 to 1, which never fall, after `clip` and `log`; for
            `scale="quantile"`.
        rows: rows that were read.
    """

    mean: float | None = None
    centre: float | None = None
    width: float | None = None
    quantiles: tuple[float, ...] = ()
    rows: int = 0

    def __post_init__(self) -> None:
        for name in ("mean", "centre", "width"):
            if getattr(self, name) is not None:
                check_number(f"DenseStatistics.{name}", getattr(self, name), -math.inf)
        if self.width is not None and not self.width > 0:
            raise ConfigError(
                f"Invalid DenseStatistics.width = {self.width!r}; expected a positive number.", field="width"
            )
        check_rising("DenseStatistics.quantiles", self.quantiles, equal=True)
        msgspec.structs.force_setattr(self, "quantiles", tuple(self.quantiles))  # Of a list.
        if len(self.quantiles) == 1:
            raise ConfigError("DenseStatistics.quantiles has one value; give two or more, or none.", field="quantiles")


class DenseFeature(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A non-ID-type feature: one number, or a vector or small tensor of numbers, per sample.

    The rules are applied in this order: `fill`, `clip`, `log`, `scale`. A schema may name the column alone, as a
    string, which is a feature without rules.

    Args:
        name: column of the data.
        fill: number in place of a missing value, or "mean", the mean of the training data. None makes a missing value
            an error.
        missing_indicator: whether the model gets one more number after the feature's own: 1 where the value was
            missing, else 0. Needs `fill`.
        clip: (lowest, highest) value.
        log: whether to take sign(x) * log(1 + |x|).
        scale: "standard": subtracts the mean and divides by the standard deviation. "minmax": maps lowest and highest
            value to 0 and 1. "quantile": the rank among the training data, from 0 to 1. (centre, width): subtracts and
            divides. None leaves the values as they are. The first three need `persia.fit_features`.
        size: number of values per sample, or the shape of a tensor, whose values the model gets row by row.
        fitted: what `persia.fit_features` has found.
    """

    name: str
    fill: float | Literal["mean"] | None = None
    missing_indicator: bool = False
    clip: tuple[float, float] | None = None
    log: bool = False
    scale: Scale | tuple[float, float] | None = None
    size: int | tuple[int, ...] = 1
    fitted: DenseStatistics | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        owner = f"DenseFeature({self.name!r})"
        check_name("DenseFeature", self.name)
        if isinstance(self.fill, str):
            check_choice(f"{owner}.fill", self.fill, ("mean",))
        elif self.fill is not None:
            check_number(f"{owner}.fill", self.fill, -math.inf)
        check_flag(f"{owner}.missing_indicator", self.missing_indicator)
        if self.missing_indicator and self.fill is None:
            raise ConfigError(
                f"{owner}.missing_indicator needs a value in place of a missing one; set fill.", field=f"{owner}.fill"
            )
        check_flag(f"{owner}.log", self.log)
        if self.clip is not None:
            low, high = _pair(f"{owner}.clip", self.clip)
            msgspec.structs.force_setattr(self, "clip", (low, high))
            if not low < high:
                raise ConfigError(
                    f"Invalid {owner}.clip = {self.clip!r}; expected (lowest, highest).", field=f"{owner}.clip"
                )
        if isinstance(self.scale, str):
            check_choice(f"{owner}.scale", self.scale, ("standard", "minmax", "quantile"))
        elif self.scale is not None:
            centre, width = _pair(f"{owner}.scale", self.scale)
            msgspec.structs.force_setattr(self, "scale", (centre, width))
            if not width > 0:
                raise ConfigError(
                    f"Invalid {owner}.scale = {self.scale!r}; expected (centre, width) with a positive width.",
                    field=f"{owner}.scale",
                )
        sizes = self.size if isinstance(self.size, Sequence) else (self.size,)
        for size in sizes or (0,):
            check_integer(f"{owner}.size", plain(size), 1, MAX_VALUES)
        if not isinstance(self.size, int):
            msgspec.structs.force_setattr(self, "size", tuple(self.size))
        if self.values > MAX_VALUES:
            raise ConfigError(
                f"Invalid {owner}.size = {self.size!r}; expected at most {MAX_VALUES} values.", field=f"{owner}.size"
            )
        check_kind(f"{owner}.fitted", self.fitted, (DenseStatistics, NoneType), "DenseStatistics, or None")

    @property
    def values(self) -> int:
        """The number of values per sample, without the indicator."""
        return math.prod(self.size) if isinstance(self.size, tuple) else self.size

    @property
    def width(self) -> int:
        """The number of values per sample that the model gets."""
        return self.values + self.missing_indicator

    @property
    def needs_fit(self) -> bool:
        """Whether a rule still needs `persia.fit_features`."""
        if self.fill != "mean" and not isinstance(self.scale, str):
            return False
        statistics = self.fitted or DenseStatistics()
        if self.fill == "mean" and statistics.mean is None:
            return True
        if self.scale == "quantile":
            return not statistics.quantiles
        return isinstance(self.scale, str) and (statistics.centre is None or statistics.width is None)

    @property
    def plain(self) -> bool:
        """Whether the feature is one number without rules, as a string declares it."""
        return self == dense_feature(self.name)


@functools.lru_cache(maxsize=4096)
def dense_feature(name: str) -> DenseFeature:
    """Returns the feature that a plain string declares."""
    return DenseFeature(name)


def check_rising(owner: str, values: Sequence[float], *, equal: bool = False) -> None:
    """Raises ConfigError unless the numbers are finite and rise; neighbours may be equal if `equal` is set."""
    for number, value in enumerate(values):
        check_number(owner, plain(value), -math.inf)
        if number and not (values[number - 1] < value or (equal and values[number - 1] == value)):
            raise ConfigError(f"Invalid {owner}; expected rising numbers, not {value!r} after {values[number - 1]!r}.")


def _pair(owner: str, value: object) -> tuple[float, float]:
    """Returns two finite numbers.

    Raises:
        ConfigError: the value is something else.
    """
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise ConfigError(f"Invalid {owner} = {value!r}; expected two numbers.", field=owner)
    for each in value:
        check_number(owner, plain(each), -math.inf)
    return float(value[0]), float(value[1])
