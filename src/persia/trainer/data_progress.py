"""`DataProgress`: passes of a run over the parts of its sources, and the pass under way. Reads no data.

docs/guide/continue.md is the table of what happens when data change between two calls of `fit`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from persia.errors import ConfigError
from persia.types import SourceFingerprint, SourcePart, changed_options

__all__ = ["OBJECT", "Begun", "DataProgress", "Pass", "begin_source", "begin_stream", "fingerprint_of_object"]

RESTART = "begin it again at its first batch, with restart_data=True (`--restart-data` of persia train and continual)"
OBJECT = "object"
"""Kind of a source without a fingerprint. It is recognised as an object, within one process only."""

_SHOWN = 3
"""Maximum number of parts that a message names."""


class Pass(msgspec.Struct, frozen=True):
    """One pass over parts of a source.

    Attributes:
        number: counts the passes of the run, over whatever source.
        epoch: number of passes that these parts have had before.
        order: parts in the order in which they are read and their rows are numbered; None for all of the source.
        read: those of `order` that are read; None for all of the source.
    """

    number: int
    epoch: int
    order: tuple[int, ...] | None = None
    read: tuple[int, ...] | None = None


class DataProgress(msgspec.Struct, frozen=True):
    """Passes of a run over the parts of its sources. Part of checkpoints.

    Attributes:
        source: the source of the last call of `fit`; None before the first one.
        passes: complete passes by key of a part, of all sources so far; see `SourceFingerprint.keys`.
        current: the pass under way.
        done: complete passes over the whole source.
        number: number of the next pass.
    """

    source: SourceFingerprint | None = None
    passes: dict[str, int] = {}
    current: Pass | None = None
    done: int = 0
    number: int = 0

    @property
    def epoch(self) -> int:
        """The epoch of the pass under way, or else of the next one."""
        return self.done if self.current is None else self.current.epoch

    def at_rest(self, position: int) -> DataProgress:
        """Returns the progress between two calls of `fit`: a pass of which nothing is trained has not begun."""
        if self.current is None or position:
            return self
        return msgspec.structs.replace(self, current=None, number=self.current.number)

    def left(self, epochs: int) -> bool:
        """Returns whether less than `epochs` passes over the source are complete."""
        return self.epoch < epochs

    def begin_pass(self) -> DataProgress:
        """Begins a pass over the parts that have had the fewest, unless one is under way."""
        if self.current is not None:
            return self
        counts = self._counts()
        least = min(counts)
        read = tuple(number for number, count in enumerate(counts) if count == least)
        if len(read) == len(counts):
            begun = Pass(self.number, least)
        else:
            assert self.source is not None
            begun = Pass(self.number, least, tuple(range(len(counts))) if self.source.numbered else read, read)
        return msgspec.structs.replace(self, current=begun, number=self.number + 1)

    def end_pass(self) -> DataProgress:
        """Counts the pass under way as complete."""
        assert self.source is not None
        assert self.current is not None
        keys, read = self.source.keys(), self.current.read
        ended = dict.fromkeys(keys if read is None else [keys[part] for part in read], self.current.epoch + 1)
        passes = self.passes | ended
        done = min(passes.get(key, 0) for key in keys)
        return msgspec.structs.replace(self, passes=passes, current=None, done=done)

    def uniform(self) -> bool:
        """Returns whether this and all later passes read the whole source, and are numbered by its epochs."""
        current = self.current
        if current is not None:
            return current.read is None and current.number == current.epoch and current.number + 1 == self.number
        return self.number == self.done and len(set(self._counts())) == 1

    def at(self, number: int) -> Pass:
        """Returns a pass of the current source by its number, that of the pass under way or of a later one."""
        progress = self
        while True:
            progress = progress.begin_pass()
            current = progress.current
            assert current is not None
            if current.number == number:
                return current
            progress = progress.end_pass()
            if current.read is None:  # From here on, all parts have had the same number of passes.
                return Pass(number, current.epoch + number - current.number)

    def _keys(self) -> list[str]:
        assert self.source is not None
        return self.source.keys()

    def _counts(self) -> list[int]:
        return [self.passes.get(key, 0) for key in self._keys()]


class Begun(NamedTuple):
    """How a call of `fit` begins.

    Attributes:
        progress: of the source that it was given.
        position: batches of the pass under way that are trained.
        notice: says that training continues on other data; None if they are the same.
        surprising: whether the notice says that rows are left out: of a pass before, or such as were trained before.
        repeated: whether data that were trained, or some of them, are trained again as if they had not been.
    """

    progress: DataProgress
    position: int
    notice: str | None = None
    surprising: bool = False
    repeated: bool = False


def begin_source(
    progress: DataProgress,
    position: int,
    given: SourceFingerprint,
    *,
    again: bool = False,
    restart: bool = False,
    exists: Callable[[str], bool] = os.path.exists,
) -> Begun:
    """Decides where training begins in the source of a call of `fit`.

    Args:
        progress: what the run has trained so far.
        position: batches of the pass under way that are trained.
        given: the source.
        again: train the source as if nothing of it had been trained.
        restart: begin an incomplete pass at its first batch.
        exists: whether there is a local file.

    Raises:
        ConfigError: a pass is under way, and the source has changed so that its position has no meaning.
    """
    progress = progress.at_rest(position)
    recorded = progress.source
    if recorded is not None and _moved(recorded, given, exists):
        progress = _renamed(progress, recorded, given)
        recorded = progress.source
    keys, passes = given.keys(), progress.passes
    other = recorded is not None and (recorded.kind, recorded.rows, recorded.parts) != (
        given.kind,
        given.rows,
        given.parts,
    )
    if recorded is not None and other and recorded.kind == OBJECT:
        passes = {key: passes[key] for key in passes.keys() - recorded.keys()}
    repeated = again and any(key in passes for key in keys)
    if again:
        passes = {key: passes[key] for key in passes.keys() - keys}
    current = None
    if recorded is not None and progress.current is not None:
        if not (again or restart):
            current = _continued(progress.current, recorded, given, position)
        elif position:
            repeated |= not {*recorded.parts}.isdisjoint(given.parts)
    dropped = position if progress.current is not None and current is None else 0
    notice, surprising = None, False
    if recorded is not None and other and not again:
        notice = _notice(progress, recorded, given, current, dropped)
        surprising = bool(dropped) or any(key in passes for key in keys)
    begun = DataProgress(given, passes, current, min(passes.get(key, 0) for key in keys), progress.number)
    return Begun(begun, position if current is not None else 0, notice, surprising, repeated)


def begin_stream(progress: DataProgress, position: int, given: SourceFingerprint) -> Begun:
    """Decides how a call of `fit` begins on a stream, whose offsets say where it goes on.

    Args:
        progress: what the run has trained so far.
        position: batches of the pass under way that are trained.
        given: the stream.
    """
    progress = progress.at_rest(position)
    keys = given.keys()
    passes = {key: count for key, count in progress.passes.items() if key not in keys}
    same = progress.source is not None and progress.source.keys() == keys
    current = progress.current if same else None
    return Begun(DataProgress(given, passes, current, 0, progress.number), position if current is not None else 0)


def _continued(current: Pass, recorded: SourceFingerprint, given: SourceFingerprint, position: int) -> Pass | None:
    """Returns the pass under way in terms of the given source; None if none of its parts is there.

    Raises:
        ConfigError: only some are, or options have changed.
    """
    places = {part: place for place, part in enumerate(given.parts)}
    read = range(len(recorded.parts)) if current.read is None else current.read
    given_places = [places.get(recorded.parts[part]) for part in read]
    if all(place is None for place in given_places):
        return None
    # Parts that are not read matter only if they decide which rows are.
    order = read if not recorded.numbered else range(len(recorded.parts)) if current.order is None else current.order
    missing = [recorded.parts[part].name for part in order if recorded.parts[part] not in places]
    where = f"in the middle of a pass, at batch {position} of epoch {current.epoch}"
    changed = changed_options(recorded.rows, given.rows) + changed_options(recorded.order, given.order)
    if recorded.kind != given.kind:
        changed.append("the kind of reader")
    if changed:
        old = {"the kind of reader": recorded.kind} | recorded.rows | recorded.order
        before = ", ".join(f"{name} was {old.get(name, 'not set')}" for name in changed)
        raise ConfigError(
            f"{' and '.join(changed)} changed {where}, so rows of train_data would be left out or trained twice. "
            f"Finish the pass with the options as they were ({before}), or {RESTART}.",
            field="train_data",
            changed=changed,
        )
    if missing:
        raise ConfigError(
            f"train_data lack {len(missing)} of {len(order)} parts {where}, or they have been changed: "
            f"{_named(missing)}. Finish the pass with all of them as they were, or {RESTART}.",
            field="train_data",
            missing=missing,
        )
    whole = tuple(range(len(given.parts)))
    own_parts = tuple(places[recorded.parts[part]] for part in read)
    if own_parts == whole:
        return Pass(current.number, current.epoch)
    return Pass(current.number, current.epoch, tuple(places[recorded.parts[part]] for part in order), own_parts)


def _moved(recorded: SourceFingerprint, given: SourceFingerprint, exists: Callable[[str], bool]) -> bool:
    """Returns whether the same local files are given that have been moved, or copied to another machine."""
    one, other = recorded.parts, given.parts
    if one == other or [part[1:] for part in map(_fields, one)] != [part[1:] for part in map(_fields, other)]:
        return False
    if any(part.size is None or part.modified is None or "://" in part.name for part in (*one, *other)):
        return False
    return _tails(one) == _tails(other) and not exists(one[0].name)


def _fields(part: SourcePart) -> tuple[str, int | None, int | None]:
    return part.name, part.size, part.modified


def _tails(parts: Sequence[SourcePart]) -> list[str]:
    """Returns the names below the folder that all parts are in."""
    folders = {os.path.dirname(part.name) for part in parts}
    try:
        base = os.path.commonpath(folders)
    except ValueError:  # Not all are absolute, so they are no paths.
        return [part.name for part in parts]
    return [part.name.removeprefix(base) for part in parts]


def _renamed(progress: DataProgress, recorded: SourceFingerprint, given: SourceFingerprint) -> DataProgress:
    """Returns the progress with the names of the given parts."""
    source = msgspec.structs.replace(recorded, parts=given.parts)
    names = dict(zip(recorded.keys(), source.keys(), strict=True))
    passes = {names.get(key, key): count for key, count in progress.passes.items()}
    return msgspec.structs.replace(progress, source=source, passes=passes)


def _notice(
    progress: DataProgress, recorded: SourceFingerprint, given: SourceFingerprint, current: Pass | None, dropped: int
) -> str:
    """Says in one line what of the given source is new."""
    reading = set() if current is None else set(range(len(given.parts)) if current.read is None else current.read)
    met = [number in reading or bool(progress.passes.get(key)) for number, key in enumerate(given.keys())]
    new = [part.name for part, seen in zip(given.parts, met, strict=True) if not seen]
    total = _counted(given, len(given.parts))
    if given.kind == OBJECT:
        text = (
            f"Continuing the model on other data: {given.parts[0].name.partition(' #')[0]}, from its first batch. Data "
            "of your own continue where training stopped if they have a method `fingerprint`."
        )
    elif not new:
        text = f"Continuing the model on data that it has met before: {total}."
    elif len(new) < len(given.parts):
        text = (
            f"Continuing the model on new data: {len(new)} of {total}, {_named(new)}; the others were trained before."
        )
    else:
        known = {part.name for part in recorded.parts}
        changed = sum(name in known for name in new)
        if {*given.parts} <= {*recorded.parts}:
            why = " and ".join(changed_options(recorded.rows, given.rows)) or "reader"
            seen = f"seen before, with another {why}"
        else:
            seen = f"{changed} of them changed, the others not seen before" if changed else "none seen before"
        text = f"Continuing the model on other data: {total}, {seen}."
    return text + (f" The pass before ends incomplete, at batch {dropped}." if dropped else "")


def _counted(given: SourceFingerprint, count: int) -> str:
    if count == 1:
        return given.parts[0].name
    return f"{count} {'files' if given.kind in ('csv', 'jsonl', 'parquet') else 'parts'}"


def _named(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def fingerprint_of_object(data: object) -> SourceFingerprint:
    """Returns a fingerprint of data that have none: no other has the same, of this run or another."""
    name = type(data).__name__
    article = "an" if name[:1].lower() in tuple("aeiou") else "a"
    return SourceFingerprint(OBJECT, (SourcePart(f"{article} {name} #{secrets.token_hex(8)}"),))
