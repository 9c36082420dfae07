"""SIGINT and SIGTERM during `Trainer.fit`: the first one ends it at a step boundary, a second one immediately."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from persia.checkpoint import list_checkpoints
from persia.errors import PersiaError
from persia.printable import printable

__all__ = ["REPORTED", "saved", "say", "stoppable", "terminable"]


SIGNALS = (signal.SIGINT, signal.SIGTERM)

REPORTED = "Training was stopped by a signal; the saved step has been printed."
"""Note on an exception with which `fit` ends."""


@contextlib.contextmanager
def stoppable(
    *,
    stop: Callable[[], None],
    step: Callable[[], int],
    directory: str | None,
    resume_line: Callable[[str, int], str],
) -> Iterator[None]:
    """Lets signals stop a call of `Trainer.fit` in the block, as its docstring says.

    Args:
        stop: makes it end after its step; called by a signal handler.
        step: returns the global step.
        directory: where it saves; None if it does not.
        resume_line: returns code that resumes from a directory at a step.

    Raises:
        KeyboardInterrupt: SIGINT has come.
        SystemExit: SIGTERM has come; the status is 143.
    """
    if threading.current_thread() is not threading.main_thread():  # Python runs handlers there only.
        yield
        return
    came: list[int] = []

    def handle(number: int, _: FrameType | None) -> None:
        came.append(number)
        if len(came) > 1:
            restore()  # A third signal meets the handlers from before `fit`.
            raise _exception(number)
        stop()
        then = f"and is saved to {directory}" if directory is not None else "and is not saved (no checkpoint_dir)"
        say(f"{_name(number)}: training ends after this step {then}. A second signal stops it immediately.")

    def outcome() -> str:
        return saved(directory, resume_line)

    ours = {n: handler for n in SIGNALS if _replaceable(handler := signal.getsignal(n))}

    def restore() -> None:
        for number, handler in ours.items():
            signal.signal(number, handler)

    for number in ours:
        signal.signal(number, handle)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if came:
            say(f"Stopped immediately by {_name(came[-1])}; steps since the last checkpoint are lost. {outcome()}")
            error.add_note(REPORTED)
        raise
    finally:
        restore()
    if came:
        say(f"Stopped by {_name(came[0])} after step {step()}. {outcome()}")
        ending = _exception(came[0])
        ending.add_note(REPORTED)
        raise ending


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Ends the block by SystemExit(143) on SIGTERM, so that what is open is closed. For programs, beyond `fit`."""

    def handle(number: int, _: FrameType | None) -> None:
        raise _exception(number)

    handler = signal.getsignal(signal.SIGTERM)
    if not _replaceable(handler):
        yield
        return
    handle.__module__ = __name__
    signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def saved(directory: str | None, resume_line: Callable[[str, int], str]) -> str:
    """Returns a message that says which step is saved where, and how to resume from it."""
    if directory is None:
        return "Nothing was saved: give a directory for checkpoints (`TrainerOptions.checkpoint_dir`, or --output)."
    try:
        checkpoints = list_checkpoints(directory)
    except (PersiaError, OSError) as error:
        return f"{directory} cannot be read: {error}"
    if not checkpoints:
        return f"Nothing was saved: there is no checkpoint in {directory} yet."
    step = checkpoints[-1].step
    return f"Step {step} is saved in {directory}. To resume:\n\n    {resume_line(directory, step)}\n"


def _replaceable(handler: Any) -> bool:
    """Returns whether a handler may be replaced: the default, `terminable`'s, or Ray's, not the program's own."""
    if handler in (signal.SIG_DFL, signal.default_int_handler):
        return True
    module = str(getattr(handler, "__module__", ""))
    return module == __name__ or module.startswith("ray.")  # Ray's ends all of its processes, with status 1 or 15.


def _exception(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def _name(number: int) -> str:
    return signal.Signals(number).name


def say(text: str) -> None:
    """Prints a message to stderr, also from a signal handler."""
    line = printable(f"persia: {text}")
    try:
        print(line, file=sys.stderr, flush=True)
    except RuntimeError:  # The signal came while something else was printed.
        os.write(2, f"{line}\n".encode())
