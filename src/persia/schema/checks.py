"""Field checks that the records of this package share; each error names the record and the field."""

from __future__ import annotations

import msgspec

from persia.checks import check_choice, check_number, plain_fields
from persia.errors import ConfigError
from persia.types.half_floats import DTYPES

__all__ = ["TaggedRecord", "check_dtype", "check_name"]

MAX_NAME = 64


class TaggedRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of records that a configuration file distinguishes by their `kind`."""

    def __post_init__(self) -> None:
        plain_fields(self)

    def _number(self, name: str, low: float, high: float, *, open_low: bool = False, open_high: bool = False) -> None:
        place = f"{type(self).__name__}.{name}"
        check_number(place, getattr(self, name), low, high, open_low=open_low, open_high=open_high)


def check_dtype(owner: str, value: object) -> None:
    """Raises ConfigError unless `value` names a dtype of embeddings."""
    check_choice(f"{owner}.dtype", value, DTYPES)


def check_name(owner: str, value: object) -> None:
    """Raises ConfigError unless `value` can name a feature, a label or a table."""
    if not isinstance(value, str) or not 1 <= _utf8_bytes(value) <= MAX_NAME or "/" in value or "\0" in value:
        raise ConfigError(
            f"Invalid {owner} name {value!r}; expected a string of 1 to {MAX_NAME} bytes without '/'.", field=owner
        )


def _utf8_bytes(text: str) -> int:
    """Returns the length of a text in UTF-8; 0 if it cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return 0
