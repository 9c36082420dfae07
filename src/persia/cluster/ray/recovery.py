"""Which deaths in a run are made good, and what is kept for that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persia.cluster.ray.replacing import Replacement
from persia.errors import DeadlineError, RoleDiedError, StalePushError

__all__ = ["ANEW", "CONSEQUENCES", "Recovery"]

ANEW = ("nn_worker", "dense_ps")
"""Roles that begin anew, together, when one of them has died."""

MADE_GOOD = (*ANEW, "embedding_ps")
"""Roles whose death for good an attempt tells of."""

CONSEQUENCES = (RoleDiedError, DeadlineError, StalePushError)
"""What NN workers raise because something has died."""


class Recovery:
    """What is known of one attempt.

    Args:
        lapses: deaths of embedding PSs that return; in asynchronous modes they are out of phase then.
    """

    def __init__(self, lapses: Sequence[RoleDiedError]) -> None:
        self._lapses = lapses
        self.replacing: Replacement | None = None
        self.kept: Any = None

    def keep(self, state: Any) -> None:
        """Takes what NN workers give to `Connection.keep`."""
        self.kept = state

    @property
    def spared(self) -> list[RoleDiedError]:
        """Of NN workers that the others went on without."""
        return list(self.replacing.deaths.values()) if self.replacing is not None else []

    def deaths(self, error: Exception) -> list[RoleDiedError]:
        """Which deaths an attempt has failed by, to be made good; none if it is not to be repeated.

        Args:
            error: one of CONSEQUENCES.
        """
        if isinstance(error, RoleDiedError):
            if any(fields["role"] not in MADE_GOOD for fields in (error.fields, *error.fields.get("later", []))):
                return []
            return [error] if error.fields["role"] == "embedding_ps" else self.spared or [error]
        return self.spared or (list(self._lapses) if isinstance(error, StalePushError) else [])
