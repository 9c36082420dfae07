"""Ids that are derived from columns of other kinds: buckets of numbers, parts of times, words of texts."""

from __future__ import annotations

from typing import Literal
from zoneinfo import ZoneInfo

import msgspec

from persia.checks import check_choice, check_flag, check_integer, check_kind, check_number, plain_fields
from persia.errors import ConfigError
from persia.schema.checks import check_name
from persia.schema.dense import check_rising

__all__ = ["Buckets", "Part", "TimePart", "TimeUnit", "Tokens"]

Part = Literal["minute", "hour", "weekday", "hour_of_week", "day", "week", "month", "year"]
PARTS = ("minute", "hour", "weekday", "hour_of_week", "day", "week", "month", "year")
TimeUnit = Literal["s", "ms", "us", "ns"]
MAX_BUCKETS = 1 << 20
MAX_WORDS = 8


class Buckets(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The number of the bucket that a number falls into. One of `edges`, `quantiles` and `width` is given.

    Args:
        column: column with numbers.
        edges: rising numbers e0, e1, ...: bucket 0 is below e0, bucket 1 from e0 up to below e1, and so on.
        quantiles: number of buckets with about equally many rows of the training data; needs `persia.fit_features`.
        width: width of all buckets: the bucket is floor(value / width). Negative buckets are odd: -1 is 1, 0 is 0, 1 is
            2 and so on, as ids are not negative.
        fitted: edges that `persia.fit_features` has found; fewer than `quantiles` - 1 if values repeat.
    """

    column: str
    edges: tuple[float, ...] | None = None
    quantiles: int | None = None
    width: float | None = None
    fitted: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        check_name("Buckets.column", self.column)
        given = [name for name in ("edges", "quantiles", "width") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"Buckets({self.column!r}) has {' and '.join(given) or 'no buckets'}; give one of edges, quantiles and "
                "width.",
                field="Buckets",
            )
        if self.edges is not None:
            if not self.edges:
                raise ConfigError(f"Buckets({self.column!r}).edges has no numbers; give at least one.", field="edges")
            check_rising(f"Buckets({self.column!r}).edges", self.edges)
            msgspec.structs.force_setattr(self, "edges", tuple(self.edges))  # Of a list.
        if self.quantiles is not None:
            check_integer(f"Buckets({self.column!r}).quantiles", self.quantiles, 2, MAX_BUCKETS)
        if self.width is not None:
            check_number(f"Buckets({self.column!r}).width", self.width, 0, open_low=True)
        if self.fitted is not None:
            check_rising(f"Buckets({self.column!r}).fitted", self.fitted)
            msgspec.structs.force_setattr(self, "fitted", tuple(self.fitted))

    @property
    def needs_fit(self) -> bool:
        """Whether the edges still need `persia.fit_features`."""
        return self.quantiles is not None and self.fitted is None


class TimePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A part of a time, as a number. The same instant has the same id, however the column writes it.

    Args:
        column: column with timestamps, dates, texts of these (2024-05-01, 2024-05-01T12:30:00+02:00, 1.5.2024 12:30),
            or numbers since 1970 in `unit`. Times without a time zone, and dates, which begin at midnight, are in UTC.
        part: "minute" 0 to 59, "hour" 0 to 23, "weekday" 0 (Monday) to 6, "hour_of_week" 0 to 167, "day" 1 to 31,
            "week" 1 to 53 (ISO), "month" 1 to 12, "year".
        zone: time zone in which the part is taken, such as "Europe/Berlin". None for UTC, and for times that are
            written in local time without a zone.
        unit: unit of numbers.
    """

    column: str
    part: Part
    zone: str | None = None
    unit: TimeUnit = "s"

    def __post_init__(self) -> None:
        plain_fields(self)
        owner = f"TimePart({self.column!r})"
        check_name("TimePart.column", self.column)
        check_choice(f"{owner}.part", self.part, PARTS)
        check_choice(f"{owner}.unit", self.unit, ("s", "ms", "us", "ns"))
        if self.zone is not None:
            check_kind(f"{owner}.zone", self.zone, str, "the name of a time zone, or None")
            try:
                ZoneInfo(self.zone)
            except Exception as error:  # Of several kinds, by the form of the name.
                raise ConfigError(
                    f"Invalid {owner}.zone = {self.zone!r}; expected the name of a time zone, such as "
                    "'Europe/Berlin' (install tzdata if the system has none).",
                    field=f"{owner}.zone",
                ) from error


class Tokens(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The words of a text, and sequences of words, as ids.

    A word is a sequence of ASCII letters, digits, "_", and all characters beyond ASCII except spaces, punctuation,
    symbols and emoji of common blocks of Unicode (listed in docs/guide/features.md). The id of a sequence is that of
    the text with single spaces between its words, so "york" is the same id as in a feature of kind "text". The ids of a
    text are in the order of their first word, then of `ngrams`.

    Args:
        column: column with texts.
        ngrams: lengths of the sequences of words: (1,) takes words, (1, 2) also pairs of neighbours.
        lower: whether to convert the text to lower case first, as `str.lower` does.
    """

    column: str
    ngrams: tuple[int, ...] = (1,)
    lower: bool = True

    def __post_init__(self) -> None:
        plain_fields(self)
        owner = f"Tokens({self.column!r})"
        check_name("Tokens.column", self.column)
        check_kind(f"{owner}.ngrams", self.ngrams, (tuple, list), "a tuple of whole numbers")
        for length in self.ngrams or (0,):
            check_integer(f"{owner}.ngrams", length, 1, MAX_WORDS)
        if len(set(self.ngrams)) != len(self.ngrams):
            raise ConfigError(f"Invalid {owner}.ngrams = {self.ngrams!r}; expected each length once.", field="ngrams")
        check_flag(f"{owner}.lower", self.lower)
