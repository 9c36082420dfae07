"""`Auto`: switches between two modes by the rates that both would have, predicted from the NN workers' step times.

The GBA paper leaves this to the user and names it as future work (section 6). Pure functions: a choice follows from
the recorded step times, so that the choices of a run can be repeated offline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from persia.checks import check_number, check_seconds, plain_fields
from persia.errors import ConfigError, DataError
from persia.modes.base import Dense, Mode, check_whole
from persia.modes.registry import mode_of
from persia.modes.sync import Sync
from persia.types.decoding import DECODERS, decode_hook
from persia.types.explaining import explained

__all__ = [
    "Auto",
    "AutoEvidence",
    "AutoState",
    "ModeChoice",
    "ModeSetting",
    "StepTime",
    "decide",
    "load_evidence",
    "rehearse",
]

MOMENTS = 64
"""Number of moments of a window at which both rates are compared."""


class StepTime(NamedTuple):
    """One step of one NN worker, without its waits for others.

    Attributes:
        worker: rank of the NN worker.
        began: start time, in seconds since the coordinator began to choose.
        seconds: duration.
    """

    worker: int
    began: float
    seconds: float


class Auto(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="auto"):
    """Trains in one of two modes: an asynchronous one while some NN workers are slow, else a synchronous one.

    A synchronous step takes as long as that of the slowest NN worker, while asynchronous rates add up. The speedup of
    the asynchronous mode is (sum of 1 / step time) / (N / longest step time), which is 1 if all step times are equal.

    Args:
        asynchronous: mode while some NN workers are slow; Gba trains with the learning rates of Sync.
        sync: mode otherwise: Sync or Hybrid.
        gain: predicted speedup from which the asynchronous mode is chosen.
        back: speedup below which the synchronous mode is chosen; less than `gain`, to avoid oscillation.
        windows: number of consecutive windows that must agree.
        seconds: length of a window.
    """

    asynchronous: Mode
    sync: Mode = msgspec.field(default_factory=Sync)
    gain: float = 1.3
    back: float = 1.1
    windows: int = 2
    seconds: float = 5.0

    def __post_init__(self) -> None:
        plain_fields(self)
        if not isinstance(self.sync, Mode) or self.sync.dense() is not Dense.ALL_REDUCE:
            raise ConfigError(f"Invalid Auto.sync = {self.sync!r}; expected Sync or Hybrid.", field="mode.sync")
        if not isinstance(self.asynchronous, Mode) or self.asynchronous.dense() is not Dense.SERVER:
            raise ConfigError(
                f"Invalid Auto.asynchronous = {self.asynchronous!r}; expected an asynchronous mode, such as Gba.",
                field="mode.asynchronous",
            )
        check_number("Auto.gain", self.gain, 1, open_low=True, field="mode.gain")
        check_number("Auto.back", self.back, 1, field="mode.back")
        if not self.back < self.gain:
            raise ConfigError(
                f"Invalid Auto.back = {self.back!r} and Auto.gain = {self.gain!r}; expected 1 <= back < gain.",
                field="mode.gain",
            )
        check_whole("Auto", "windows", self.windows, 1, "consecutive windows that must agree")
        check_seconds("Auto.seconds", self.seconds, field="mode.seconds")


if TYPE_CHECKING:
    ModeSetting: TypeAlias = Mode | Auto
else:

    @runtime_checkable
    class ModeSetting(Protocol):
        """The type of a configuration field that takes a mode or `Auto`, a union that msgspec cannot decode."""


def _setting_of(tree: Any) -> ModeSetting:
    if isinstance(tree, dict) and "kind" not in tree:  # Such as `--set mode.staleness=4` without a section [mode].
        tree = {"kind": "hybrid"} | tree
    if not isinstance(tree, dict) or tree["kind"] != "auto":
        return mode_of(tree, other_kinds=["auto"])
    try:
        return msgspec.convert(tree, Auto, dec_hook=decode_hook)
    except msgspec.ValidationError as error:
        raise ValueError(explained(error, tree, Auto)) from error


DECODERS[ModeSetting] = _setting_of  # type: ignore[index]  # A class at run time.


class AutoState(NamedTuple):
    """State of the rule between two windows.

    Attributes:
        asynchronous: whether the asynchronous mode is in force.
        against: number of consecutive windows that favoured the other mode.
    """

    asynchronous: bool = False
    against: int = 0


class ModeChoice(NamedTuple):
    """A decision at the end of a window, with its evidence; `str()` returns a line for the log.

    Attributes:
        time: end of the window, in seconds since the coordinator began to choose.
        switch: whether to switch.
        asynchronous: whether the asynchronous mode is in force from now on.
        sync_rate: predicted batches per second of all NN workers in the synchronous mode.
        asynchronous_rate: the same in the asynchronous mode.
        slowest: rank of the NN worker that was the slowest at most moments.
        against: number of consecutive windows that favoured the other mode.
    """

    time: float
    switch: bool
    asynchronous: bool
    sync_rate: float
    asynchronous_rate: float
    slowest: int
    against: int

    @property
    def ratio(self) -> float:
        """Predicted speedup of the asynchronous mode."""
        return self.asynchronous_rate / self.sync_rate

    def __str__(self) -> str:
        """Returns a line such as "35.0 s: switch to asynchronous (predicted 2.40x of 12.0 batches/s; ...)"."""
        mode = "asynchronous" if self.asynchronous else "sync"
        return (
            f"{self.time:.1f} s: {'switch to' if self.switch else 'stay'} {mode} (asynchronous: predicted "
            f"{self.ratio:.2f}x of {self.sync_rate:.1f} batches/s; slowest NN worker: {self.slowest}; "
            f"consecutive windows for the other mode: {self.against})"
        )


def decide(auto: Auto, state: AutoState, steps: Sequence[StepTime], end: float) -> tuple[AutoState, ModeChoice | None]:
    """Chooses a mode at the end of a window.

    Args:
        auto: the rule.
        state: state after the window before.
        steps: steps of all NN workers that began before `end`. One from before the window counts until that worker
            begins the next.
        end: end of the window, in seconds as in `StepTime.began`.

    Returns:
        The new state, and the choice; None until all NN workers have finished a step.
    """
    by_worker: dict[int, list[StepTime]] = defaultdict(list)
    for step in sorted(steps, key=lambda s: s.began):
        by_worker[step.worker].append(step)
    start = end - auto.seconds
    if not by_worker or any(timings[0].began > start for timings in by_worker.values()):
        start = max((timings[0].began for timings in by_worker.values()), default=end)
    if not start < end:
        return state, None
    sync = free = 0.0
    slow_at: dict[int, int] = defaultdict(int)
    for moment in range(MOMENTS):
        time = start + (moment + 0.5) / MOMENTS * (end - start)
        now = {
            worker: timings[max(0, bisect_right(timings, time, key=lambda s: s.began) - 1)].seconds
            for worker, timings in by_worker.items()
        }
        slowest = max(now, key=lambda worker: (now[worker], -worker))
        slow_at[slowest] += 1
        sync += len(now) / now[slowest] / MOMENTS
        free += sum(1 / seconds for seconds in now.values()) / MOMENTS
    against = free >= auto.gain * sync if not state.asynchronous else free < auto.back * sync
    count = state.against + 1 if against else 0
    switch = count >= auto.windows
    after = AutoState(state.asynchronous != switch, 0 if switch else count)
    slowest = max(slow_at, key=lambda worker: (slow_at[worker], -worker))
    return after, ModeChoice(end, switch, after.asynchronous, sync, free, slowest, count)


def rehearse(auto: Auto, steps: Sequence[StepTime]) -> Iterator[ModeChoice]:
    """Yields the choices of `auto` for the recorded step times of a run, one per window."""
    ordered = sorted(steps, key=lambda s: s.began + s.seconds)
    if not ordered:
        return
    state = AutoState()
    last = ordered[-1].began + ordered[-1].seconds
    end = min(s.began for s in ordered) + auto.seconds
    while end <= last:
        state, choice = decide(auto, state, [s for s in ordered if s.began + s.seconds <= end], end)
        if choice is not None:
            yield choice
        end += auto.seconds


class AutoEvidence(msgspec.Struct, frozen=True):
    """Step times of a run, and the mode choices that followed from them.

    Args:
        steps: step times, for `persia.modes.rehearse`.
        choices: mode choices, one per window.
    """

    steps: list[StepTime] = []
    choices: list[ModeChoice] = []

    def save(self, path: str | Path) -> None:
        """Writes a JSON file."""
        Path(path).write_bytes(msgspec.json.encode(self))


def load_evidence(path: str | Path) -> AutoEvidence:
    """Reads a file of `AutoEvidence.save`.

    Raises:
        DataError: the file cannot be read; the message has the path.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=AutoEvidence)
    except (OSError, msgspec.MsgspecError) as error:
        raise DataError(f"The step times {path} cannot be read: {error}.", path=str(path)) from error
