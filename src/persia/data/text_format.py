"""How the texts of a source are read: which stand for missing values, and how numbers are written."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from persia.batching.numerals import Numerals
from persia.errors import ConfigError
from persia.schema import WrittenNumbers

__all__ = ["PYTHONS_TEXTS", "TextFormat"]


@dataclass(frozen=True)
class TextFormat:
    """How the texts of a source are read; see `ColumnOptions`.

    Attributes:
        null_values: texts that mean a missing value, besides the empty text.
        decimal: "." or ",", before the fraction of a number.
        thousands: separator of groups of three digits; empty if there is none.
        units: text around the numbers of a column, by name in the schema or the source.
    """

    null_values: tuple[str, ...] = ()
    decimal: str = "."
    thousands: str = ""
    units: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Numerals(self.decimal, self.thousands).check()
        for name, unit in self.units.items():
            if not isinstance(unit, str) or not set(unit) - set("., +-'_") or any(map(str.isdigit, unit)):
                raise ConfigError(
                    f"units has {unit!r} for {name!r}; expected a text such as '$' or '%', without digits.",
                    field="units",
                )

    def check(self, rename: Mapping[str, str], number_columns: Collection[str]) -> None:
        """Raises ConfigError if a unit is given for a column that has no numbers.

        Args:
            rename: column of the source by name in the schema, if they differ.
            number_columns: columns of the source that may hold numbers other than ids.
        """
        for name in self.units:
            if rename.get(name, name) not in number_columns:
                raise ConfigError(
                    f"Invalid key {name!r} in units; expected a dense feature, a label, a weight, or a column of "
                    "buckets or of a rule.",
                    field="units",
                )

    def numbers(self, rename: Mapping[str, str], number_columns: Collection[str]) -> dict[str, WrittenNumbers]:
        """Returns how numbers are written, by column of the source, if not as Python writes them; see `check`."""
        units = {rename.get(name, name): unit.strip() for name, unit in self.units.items()}
        written = {
            column: WrittenNumbers(decimal=self.decimal, thousands=self.thousands, unit=units.get(column, ""))
            for column in number_columns
        }
        return {column: each for column, each in written.items() if each != WrittenNumbers()}


PYTHONS_TEXTS = TextFormat()
"""Numbers as Python writes them, and no texts for missing values but the empty one."""
