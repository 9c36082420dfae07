"""Checks of fields that the records of this package share; each error names the record and the field."""

from __future__ import annotations

import msgspec

from persia.checks import check_number
from persia.errors import ConfigError
from persia.types.values import DTYPES

__all__ = ["TaggedRecord", "check_dtype", "check_name"]

MAX_NAME = 64


class TaggedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of records that a configuration file distinguishes by their `kind`."""

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
        place = f"{type(self).__name__}.{name}"
        check_number(place, getattr(self, name), low, high, open_low=open_low, open_high=open_high)


def check_dtype(owner: str, value: object) -> None:
    """Raises ConfigError unless `value` names a dtype of embeddings."""
    if value not in DTYPES:
        raise ConfigError(
            f"Invalid {owner}.dtype = {value!r}; expected one of: {', '.join(DTYPES)}.", field=f"{owner}.dtype"
        )


def check_name(owner: str, value: object) -> None:
    """Raises ConfigError unless `value` can name a feature, a label or a table."""
    if not isinstance(value, str) or not value or len(value.encode()) > MAX_NAME or "/" in value or "\0" in value:
        raise ConfigError(
            f"{owner} name {value!r} is not a text of 1 to {MAX_NAME} bytes without '/'; rename it.", field=owner
        )
