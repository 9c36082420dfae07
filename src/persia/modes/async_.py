"""Asynchronous training: each gradient is applied on arrival."""

from __future__ import annotations

from persia.modes.base import Asynchronous
from persia.modes.registry import register

__all__ = ["Async"]


@register
class Async(Asynchronous, frozen=True, tag="async"):
    """Applies each gradient on arrival, to rows and dense parameters, whatever its age.

    A step is one local batch, so the learning rates of Sync do not fit. The dense parameters are stale by about as many
    versions as there are NN workers. The fastest mode, and the baseline of the others.

    An NN worker draws its next token once its own gradient is applied, so none of its own steps is in flight at a
    lookup.
    """
