"""When to switch: the rates that two modes would have now, from how long each NN worker's steps take.

The GBA paper leaves this to the user and names it as future work (section 6). Pure functions: a decision follows from
the recorded step times, so that a run's decisions can be repeated offline.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from persia.errors import ConfigError, DataError
from persia.modes.base import Dense, Mode, check_whole
from persia.modes.registry import mode_of
from persia.modes.sync import Sync
from persia.types.decoding import DECODERS, decode_hook

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
"""At so many moments of a window both rates are compared."""


class StepTime(NamedTuple):
    """One step of one NN worker, without its waits for others.

    Attributes:
        worker: rank of the NN worker.
        began: seconds on the run's clock.
        seconds: that it took.
    """

    worker: int
    began: float
    seconds: float


class Auto(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="auto"):
    """Trains in one of two modes, and switches as the cluster gets strained or quiet.

    A synchronous step lasts as long as the slowest NN worker's; asynchronous ones add up. So the asynchronous mode is
    the faster one by (sum of 1 / step time) / (N / longest step time), which is 1 when all are alike.

    Args:
        asynchronous: the mode for strained times; Gba needs no other learning rates than Sync.
        sync: the mode for quiet times: Sync or Hybrid.
        gain: predicted ratio of rates from which the asynchronous mode is taken up.
        back: ratio below which the synchronous one is; less than `gain`, so that it does not swing.
        windows: in a row that must agree.
        seconds: length of a window.
    """

    asynchronous: Mode
    sync: Mode = msgspec.field(default_factory=Sync)
    gain: float = 1.3
    back: float = 1.1
    windows: int = 2
    seconds: float = 5.0

    def __post_init__(self) -> None:
        if not isinstance(self.sync, Mode) or self.sync.dense() is not Dense.ALL_REDUCE:
            raise ConfigError(f"Auto.sync = {self.sync!r}; give Sync or Hybrid.", field="mode.sync")
        if not isinstance(self.asynchronous, Mode) or self.asynchronous.dense() is not Dense.SERVER:
            raise ConfigError(
                f"Auto.asynchronous = {self.asynchronous!r}; give a mode with a dense PS, such as Gba.",
                field="mode.asynchronous",
            )
        if not 1 <= self.back < self.gain < float("inf"):
            raise ConfigError(
                f"Auto.back = {self.back!r} and Auto.gain = {self.gain!r}; give 1 <= back < gain.", field="mode.gain"
            )
        check_whole("Auto", "windows", self.windows, 1, "windows in a row that must agree")
        if not 0 < self.seconds < float("inf"):
            raise ConfigError(f"Auto.seconds = {self.seconds!r}; give a number > 0.", field="mode.seconds")


if TYPE_CHECKING:
    ModeSetting: TypeAlias = Mode | Auto
else:

    @runtime_checkable
    class ModeSetting(Protocol):
        """A field of a configuration that takes a mode, or `Auto`: a union that msgspec cannot decode by itself."""


def _setting_of(tree: Any) -> ModeSetting:
    if not isinstance(tree, dict) or tree.get("kind") != "auto":
        return mode_of(tree)
    try:
        return msgspec.convert(tree, Auto, dec_hook=decode_hook)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error


DECODERS[ModeSetting] = _setting_of  # type: ignore[index]  # A class at run time.


class AutoState(NamedTuple):
    """What is remembered from window to window.

    Attributes:
        strained: whether the asynchronous mode is in force.
        against: windows in a row that spoke for the other.
    """

    strained: bool = False
    against: int = 0


class ModeChoice(NamedTuple):
    """A decision with its evidence; `str()` is the line for the log.

    Attributes:
        time: end of the window, seconds.
        switch: whether to switch.
        strained: whether the asynchronous mode is in force from now on.
        sync_rate: batches per second of all NN workers that the synchronous mode is predicted to have.
        asynchronous_rate: the same of the other.
        slowest: rank of the NN worker that was the slowest at most moments.
        against: windows in a row that spoke for the other mode.
    """

    time: float
    switch: bool
    strained: bool
    sync_rate: float
    asynchronous_rate: float
    slowest: int
    against: int

    @property
    def ratio(self) -> float:
        """By how much the asynchronous mode would be faster."""
        return self.asynchronous_rate / self.sync_rate

    def __str__(self) -> str:
        """As in: at 35.0 s: switch to asynchronous: 2.4x of 12.0 batches/s, NN worker 3 is the slowest."""
        mode = "asynchronous" if self.strained else "sync"
        return (
            f"at {self.time:.1f} s: {'switch to' if self.switch else 'stay'} {mode}: asynchronous would be "
            f"{self.ratio:.2f}x of {self.sync_rate:.1f} batches/s, NN worker {self.slowest} is the slowest "
            f"({self.against} windows for the other)"
        )


def decide(auto: Auto, state: AutoState, steps: Sequence[StepTime], end: float) -> tuple[AutoState, ModeChoice | None]:
    """The decision at the end of a window.

    Args:
        auto: the rule.
        state: after the window before.
        steps: of all NN workers, begun before `end`; older ones than the window count while no newer one has begun.
        end: of the window, seconds.

    Returns:
        The state from now on, and the verdict; None while an NN worker has not finished any step.
    """
    by_worker: dict[int, list[StepTime]] = defaultdict(list)
    for step in sorted(steps, key=lambda s: s.began):
        by_worker[step.worker].append(step)
    start = end - auto.seconds
    if not by_worker or any(mine[0].began > start for mine in by_worker.values()):
        start = max((mine[0].began for mine in by_worker.values()), default=end)
    if not start < end:
        return state, None
    sync = free = 0.0
    slow_at: dict[int, int] = defaultdict(int)
    for moment in range(MOMENTS):
        time = start + (moment + 0.5) / MOMENTS * (end - start)
        now = {
            worker: mine[max(0, bisect_right(mine, time, key=lambda s: s.began) - 1)].seconds
            for worker, mine in by_worker.items()
        }
        slowest = max(now, key=lambda worker: (now[worker], -worker))
        slow_at[slowest] += 1
        sync += len(now) / now[slowest] / MOMENTS
        free += sum(1 / seconds for seconds in now.values()) / MOMENTS
    against = free >= auto.gain * sync if not state.strained else free < auto.back * sync
    count = state.against + 1 if against else 0
    switch = count >= auto.windows
    after = AutoState(state.strained != switch, 0 if switch else count)
    slowest = max(slow_at, key=lambda worker: (slow_at[worker], -worker))
    return after, ModeChoice(end, switch, after.strained, sync, free, slowest, count)


def rehearse(auto: Auto, steps: Sequence[StepTime]) -> Iterator[ModeChoice]:
    """What `auto` would have decided in a run, window by window, from its recorded step times."""
    ordered = sorted(steps, key=lambda s: s.began + s.seconds)
    if not ordered:
        return
    state = AutoState()
    last = ordered[-1].began + ordered[-1].seconds
    end = min(s.began for s in ordered) + auto.seconds
    while end <= last:
        state, verdict = decide(auto, state, [s for s in ordered if s.began + s.seconds <= end], end)
        if verdict is not None:
            yield verdict
        end += auto.seconds


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
