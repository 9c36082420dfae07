"""Training modes: each file answers three questions with pure functions (gate, aggregate, dense)."""

from persia.modes.base import Aggregation, Dense, Mode, Observation, Reduction
from persia.modes.hybrid import Hybrid
from persia.modes.sync import Sync

__all__ = ["Aggregation", "Dense", "Hybrid", "Mode", "Observation", "Reduction", "Sync"]
