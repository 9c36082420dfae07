"""Training modes, one per file: pure functions that decide when to look up, and when to apply gradients."""

from persia.modes.async_ import Async
from persia.modes.auto import (
    Auto,
    AutoEvidence,
    AutoState,
    ModeChoice,
    ModeSetting,
    StepTime,
    decide,
    load_evidence,
    rehearse,
)
from persia.modes.base import (
    Action,
    Arrival,
    Asynchronous,
    Decision,
    Dense,
    Mode,
    Observation,
    OnArrival,
    Reduction,
    RowLimit,
    hold_until_full,
)
from persia.modes.bsp import Bsp
from persia.modes.gba import Gba
from persia.modes.hop_bs import HopBs
from persia.modes.hop_bw import HopBw
from persia.modes.hybrid import Hybrid
from persia.modes.registry import decode, encode, modules, register
from persia.modes.sync import Sync

__all__ = [
    "Action",
    "Arrival",
    "Async",
    "Asynchronous",
    "Auto",
    "AutoEvidence",
    "AutoState",
    "Bsp",
    "Decision",
    "Dense",
    "Gba",
    "HopBs",
    "HopBw",
    "Hybrid",
    "Mode",
    "ModeChoice",
    "ModeSetting",
    "Observation",
    "OnArrival",
    "Reduction",
    "RowLimit",
    "StepTime",
    "Sync",
    "decide",
    "decode",
    "encode",
    "hold_until_full",
    "load_evidence",
    "modules",
    "register",
    "rehearse",
]
