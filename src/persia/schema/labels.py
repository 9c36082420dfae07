"""`Label`: a target of the model, its kind, and the loss that trains it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import NoneType
from typing import Literal

import msgspec

from persia.checks import check_choice, check_integer, check_kind, check_number, plain, plain_fields
from persia.errors import ConfigError
from persia.schema.checks import check_name
from persia.schema.losses import (
    BPR,
    JRC,
    BinaryCrossEntropy,
    CrossEntropy,
    EntireSpace,
    Focal,
    Hinge,
    Huber,
    ListwiseSoftmax,
    Loss,
    OrdinalCrossEntropy,
    Poisson,
    Squared,
    Tweedie,
)

__all__ = ["Label", "LabelKind", "label"]

LabelKind = Literal["binary", "regression", "count", "multiclass", "ordinal"]
MAX_CLASSES = 1 << 16

_LOSSES: dict[str, tuple[type[Loss], ...]] = {
    "binary": (BinaryCrossEntropy, Focal, Squared, BPR, Hinge, ListwiseSoftmax, JRC, EntireSpace),
    "regression": (Squared, Huber, Tweedie, Poisson, BPR, Hinge, ListwiseSoftmax),
    "count": (Poisson, Tweedie, Squared, Huber),
    "multiclass": (CrossEntropy,),
    "ordinal": (OrdinalCrossEntropy,),
}
"""Losses by kind of label, the default first."""


class Label(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A target. A schema may name the column alone, as a string, which is a binary label.

    Args:
        name: column of the data.
        kind: "binary": a number in [0, 1]; the model answers a probability. "regression": any number. "count": a number
            from 0 on; the model answers its expectation. "multiclass": one of `classes`; the model answers a
            probability for each. "ordinal": one of `classes`, which are in order; the same.
        classes: number of classes, whose labels are 0, 1, ...; or their names, in order, as the column has them.
        missing: "mask": rows without a value of this label are left out of its loss and metrics. "error" refuses them.
        weight: factor of this label's loss in the mean over labels.
        loss: None for the default of the kind.
        rule: expression over columns of the data in place of a column: "rating >= 4"; see `persia.data.csv`.
        unit: unit of a regression or count, which answers and reports name: "s", "EUR".
    """

    name: str
    kind: LabelKind = "binary"
    classes: int | tuple[str, ...] | None = None
    missing: Literal["error", "mask"] = "error"
    weight: float = 1.0
    loss: Loss | None = None
    rule: str | None = None
    unit: str | None = None

    def __post_init__(self) -> None:
        plain_fields(self)
        owner = f"Label({self.name!r})"
        check_name("Label", self.name)
        check_choice(f"{owner}.kind", self.kind, tuple(_LOSSES))
        check_choice(f"{owner}.missing", self.missing, ("error", "mask"))
        check_number(f"{owner}.weight", self.weight, 0, open_low=True)
        for field in ("rule", "unit"):
            check_kind(f"{owner}.{field}", getattr(self, field), (str, NoneType), "a string, or None")
        if (self.classes is None) == (self.kind in ("multiclass", "ordinal")):
            raise ConfigError(
                f"{owner} of kind {self.kind!r} has classes = {self.classes!r}; "
                + ("give the number of classes, or their names." if self.classes is None else "leave classes out."),
                field=f"{owner}.classes",
            )
        if isinstance(self.classes, int):
            check_integer(f"{owner}.classes", self.classes, 2, MAX_CLASSES)
        elif self.classes is not None:
            self._check_names(owner)
        allowed = _LOSSES[self.kind]
        if self.loss is not None and not isinstance(self.loss, allowed):
            raise ConfigError(
                f"{owner}.loss is {type(self.loss).__name__}, which does not fit the kind {self.kind!r}; use one of "
                f"{', '.join(each.__name__ for each in allowed)}.",
                field=f"{owner}.loss",
            )
        if self.unit is not None and self.kind not in ("regression", "count"):
            raise ConfigError(f"{owner} of kind {self.kind!r} has no unit; leave it out.", field=f"{owner}.unit")

    def _check_names(self, owner: str) -> None:
        names = self.classes
        check_kind(f"{owner}.classes", names, (tuple, list), "a number, or the names of the classes")
        assert isinstance(names, Sequence)
        msgspec.structs.force_setattr(self, "classes", tuple(names))
        if not 2 <= len(names) <= MAX_CLASSES or len(set(names)) != len(names):
            raise ConfigError(
                f"{owner}.classes has {len(names)} names; give two or more, each once.", field=f"{owner}.classes"
            )
        for name in names:
            check_kind(f"{owner}.classes", plain(name), str, "names of classes as strings")

    @property
    def effective_loss(self) -> Loss:
        """The loss, or the default of the kind."""
        return self.loss if self.loss is not None else _LOSSES[self.kind][0]()  # type: ignore[call-arg]

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes: as declared, or "0", "1", ...; empty without classes."""
        if isinstance(self.classes, int):
            return tuple(map(str, range(self.classes)))
        return self.classes or ()

    @property
    def outputs(self) -> int:
        """The number of logits of this label: 1, with classes one each (one less if they are in order), with JRC 2."""
        count = len(self.class_names)
        if self.kind == "ordinal":
            return count - 1
        return count or (2 if isinstance(self.loss, JRC) else 1)

    @property
    def needs_groups(self) -> bool:
        """Whether the loss compares rows of a group."""
        return isinstance(self.loss, (BPR, Hinge, ListwiseSoftmax, JRC))


@functools.lru_cache(maxsize=1024)
def label(name: str) -> Label:
    """Returns the label that a plain string declares."""
    return Label(name)
