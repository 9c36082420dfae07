r"""An animated terminal recording, as SVG: runs a command in a terminal, and draws what it shows while it runs.

    python -m benchmarks.plot_demo [--title TEXT] OUTPUT.svg COMMAND...

A pause between two changes of the screen is shown for `LONGEST` seconds at most, and the last screen for `LAST`. The
picture needs no script: it is text whose visibility a style sheet animates. Readers who prefer reduced motion, and
programs without animation, see the last screen. The recording in README.md, on a machine without other programs:

    PERSIA_DATA=/nowhere python -m benchmarks.plot_demo --title "make demo" docs/assets/demo/demo.svg \
      .venv/bin/python examples/demo.py --set train.max_steps=300
"""

from __future__ import annotations

import argparse
import codecs
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Sequence
from fcntl import ioctl
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COLUMNS, LINES = 118, 36
LONGEST, LAST = 0.35, 8.0
WIDE, HIGH, TOP, SIDE = 7.25, 17, 38, 14
SCREEN, INK, SOFT = "#10151d", "#d7dde5", "#8b949e"

FONT = "12px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

_PART = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|([\r\n\b])|([^\x1b\r\n\b]+)|\x1b.?")


class Screen:
    """The part of a terminal that the output of `rich` needs: text, returns, cursor movements and erasure."""

    def __init__(self, columns: int = COLUMNS) -> None:
        self.lines: list[str] = [""]
        self._columns = columns
        self._row = self._column = 0

    def write(self, text: str) -> None:
        """Shows a text with its control sequences; colours are left out."""
        for arguments, command, control, plain in _PART.findall(text):
            if plain:
                self._put(plain)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._down(1)
            elif command:
                self._control(command, arguments)

    def _control(self, command: str, arguments: str) -> None:
        count = int(arguments or 0) if arguments.isdigit() else 0
        if command == "A":
            self._row = max(0, self._row - max(1, count))
        elif command == "B":
            self._down(max(1, count))
        elif command == "G":
            self._column = max(0, count - 1)
        elif command == "K":
            self.lines[self._row] = "" if count == 2 else self.lines[self._row][: self._column]

    def _down(self, count: int) -> None:
        self._row += count
        self.lines += [""] * (self._row + 1 - len(self.lines))

    def _put(self, text: str) -> None:
        while text:
            room = self._columns - self._column
            if room <= 0:
                self._down(1)
                self._column = 0
                continue
            part, text = text[:room], text[room:]
            line = self.lines[self._row].ljust(self._column)
            self.lines[self._row] = line[: self._column] + part + line[self._column + len(part) :]
            self._column += len(part)


class Frame(NamedTuple):
    """What a terminal shows from a moment on."""

    at: float
    lines: tuple[str, ...]


def record(command: Sequence[str], title: str) -> list[Frame]:
    """Runs a command in a terminal; returns its screens, the first one with the command typed.

    Raises:
        CalledProcessError: the command failed.
    """
    screen = Screen()
    screen.write(f"$ {title}\r\n")
    frames = [Frame(0.0, tuple(screen.lines))]
    began = time.monotonic()
    for at, text in _output(command):
        # Paths as a reader of the picture would see them.
        screen.write(text.replace(f"file://{ROOT}", "file:///home/you/persia").replace(f"{ROOT}{os.sep}", ""))
        frames.append(Frame(at - began, tuple(line.rstrip() for line in screen.lines)))
    return frames


def _output(command: Sequence[str]) -> Iterator[tuple[float, str]]:
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    while True:
        select.select([ours], [], [])
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # Linux reports the end of the last process so.
            break
        if not read:
            break
        yield time.monotonic(), decoder.decode(read)
    os.close(ours)
    if process.wait() != 0:
        raise subprocess.CalledProcessError(process.returncode, command)


def shortened(frames: Sequence[Frame], tail: int = LINES) -> tuple[list[Frame], float]:
    """Returns frames of the last lines each, without long pauses and with 20 per second at most; and their length."""
    shown: list[Frame] = []
    at = 0.0
    before = frames[0].at
    for frame in frames:
        at += min(LONGEST, frame.at - before)
        before = frame.at
        screen = frame.lines[-tail:]
        if shown and at - shown[-1].at < 0.05:
            shown[-1] = Frame(shown[-1].at, screen)
        elif not shown or shown[-1].lines != screen:
            shown.append(Frame(at, screen))
    return shown, at + LAST


def animation(frames: Sequence[Frame], length: float, title: str, rows: int) -> str:
    """Returns the picture.

    Args:
        frames: screens in order of time.
        length: seconds until it starts again.
        title: of the window.
        rows: height in lines of text.
    """
    width, height = COLUMNS * WIDE + 2 * SIDE, TOP + rows * HIGH + SIDE
    rules: list[str] = []
    texts: list[str] = []
    for row in range(rows):
        for begin, end, line in _spans(frames, row):
            if not line.strip():
                continue
            name = f"l{len(texts)}"
            first, last = (100 * moment / length for moment in (begin, length if end is None else end))
            shown = f"{first:.3f}%{{opacity:1}}" if first > 0 else ""
            hidden = f"{last:.3f}%{{opacity:0}}" if end is not None else ""
            rules.append(f"@keyframes {name}{{0%{{opacity:{int(first == 0)}}}{shown}{hidden}}}")
            final = "" if end is None else " class='g'"
            y = TOP + (row + 1) * HIGH - 4
            place = f'x="{SIDE}" y="{y}" style="animation-name:{name}" xml:space="preserve"'
            texts.append(f"<text{final} {place}>{escape(line)}</text>")
    style = (
        f"text{{font:{FONT};fill:{INK};white-space:pre;animation:{length:.2f}s step-end infinite}}"
        f".t{{fill:{SOFT};animation:none}}.g{{opacity:0}}"
        "@media (prefers-reduced-motion:reduce){text{animation:none!important}}"
    )
    dots = "".join(
        f'<circle cx="{SIDE + 6 + 18 * number}" cy="16" r="5" fill="{colour}"/>'
        for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    size = f'viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">\n'
        f"<style>{style}{''.join(rules)}</style>\n"
        f'<rect width="{width:.0f}" height="{height}" rx="8" fill="{SCREEN}"/>{dots}'
        f'<text class="t" x="{width / 2:.0f}" y="20" text-anchor="middle">{escape(title)}</text>\n'
        + "\n".join(texts)
        + "\n</svg>\n"
    )


def _spans(frames: Sequence[Frame], row: int) -> Iterator[tuple[float, float | None, str]]:
    """Yields what a line shows, each with its begin and end; None for the end of the animation."""
    begin, line = frames[0].at, _line(frames[0], row)
    for frame in frames[1:]:
        if _line(frame, row) != line:
            yield begin, frame.at, line
            begin, line = frame.at, _line(frame, row)
    yield begin, None, line


def _line(frame: Frame, row: int) -> str:
    return frame.lines[row] if row < len(frame.lines) else ""


def main() -> None:
    """Records a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--title", help="the command as it is shown")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    title = given.title or " ".join(given.command)
    frames = record(given.command, title)
    shown, length = shortened(frames)
    rows = max(len(frame.lines) for frame in shown)
    given.output.write_text(animation(shown, length, title, rows), encoding="utf-8")
    print(f"{given.output}: {len(shown)} screens, {frames[-1].at:.0f} s shown in {length:.0f} s")


if __name__ == "__main__":
    main()
