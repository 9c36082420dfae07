"""What `Auto` decided by, as a file: so that other thresholds can be tried on a run that is over."""

from __future__ import annotations

from pathlib import Path

import msgspec

from persia.errors import DataError
from persia.modes.auto import ModeChoice, StepTime

__all__ = ["AutoEvidence", "load_evidence"]


class AutoEvidence(msgspec.Struct, frozen=True):
    """Step times of a run, and the verdicts that were made of them.

    Args:
        steps: for `persia.modes.rehearse`.
        verdicts: one per window.
    """

    steps: list[StepTime] = []
    verdicts: list[ModeChoice] = []

    def save(self, path: str | Path) -> None:
        """Writes a file."""
        Path(path).write_bytes(msgspec.json.encode(self))


def load_evidence(path: str | Path) -> AutoEvidence:
    """Reads what `AutoEvidence.save` wrote.

    Raises:
        DataError: it cannot be read; the message has the path.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=AutoEvidence)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"The step times {path} cannot be read: {error}.", path=str(path)) from error
