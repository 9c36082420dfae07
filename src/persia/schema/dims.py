"""Dimensions of features by the frequency of their ids."""

from __future__ import annotations

from collections.abc import Mapping

from persia.checks import check_integer, check_number
from persia.errors import ConfigError
from persia.schema.tables import MAX_DIM

__all__ = ["dims_by_frequency"]


def dims_by_frequency(
    distinct: Mapping[str, int], widest: int = 32, *, power: float = 0.3, multiple: int = 1
) -> dict[str, int]:
    """Returns a dimension for each feature: with more distinct ids, each id is rarer and can learn fewer values.

    Follows mixed-dimension embeddings (Ginart et al., ISIT 2021, arXiv 1909.11810, power-law sizing): the dimension is
    `widest` for the feature with the fewest ids, and falls with the mean frequency of an id to the power `power`.

    Args:
        distinct: number of distinct ids by feature, each at least 1.
        widest: dimension of the feature with the fewest ids.
        power: 0 gives all features the same dimension, 1 gives all tables about the same size. The paper uses 0.3.
        multiple: dimensions are rounded to the nearest multiple of this number, and are at least this number.

    Raises:
        ConfigError: there are no features, or a number is out of range.
    """
    if not isinstance(distinct, Mapping) or not distinct:
        raise ConfigError(
            f"Invalid distinct = {distinct!r}; expected the number of distinct ids of each feature.", field="distinct"
        )
    for name, count in distinct.items():
        check_integer(f"distinct[{name!r}]", count, 1)
    check_integer("widest", widest, 1, MAX_DIM)
    check_number("power", power, 0, 1)
    check_integer("multiple", multiple, 1, widest)
    fewest = min(distinct.values())
    return {
        name: max(multiple, round(widest * (fewest / count) ** power / multiple) * multiple)
        for name, count in distinct.items()
    }
