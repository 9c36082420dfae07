"""Runs every example, small, and shows what each prints; `make examples` calls it.

    python tests/examples.py [FILE...]

To import torch takes longer than most of them, so they are forks of one process that has imported it: see
`support.forked`. `PROGRAMS` run as users start them: those that start processes themselves, which a fork would save
little, and one that does not.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path

from support.forked import Forks, Interpreter, Started

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PROGRAMS = ("cluster.py", "own_loop_cluster.py", "online/run.py", "trainer.py")
DEMO = "demo.py"
"""`make demo` runs it."""

SECONDS = 300.0
"""After which an example is killed."""


class Running:
    """An example that runs.

    Args:
        name: of its file, below examples/.
        program: its process.
    """

    def __init__(self, name: str, program: Interpreter | Started) -> None:
        self.name = name
        self.program = program
        self.began = time.monotonic()

    def ended(self, timeout: float) -> int | None:
        """Returns its status, or None if it still runs after `timeout` seconds."""
        status = self.program.wait(timeout)
        if status is None and time.monotonic() - self.began > SECONDS:
            status = self.program.end()
        return status

    def shown(self, status: int) -> str:
        """Returns its line, and what it has printed."""
        said = "" if status == 0 else f", exit status {status}"
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in (self.program.out, self.program.err)]
        return f"--- examples/{self.name}: {time.monotonic() - self.began:.1f} s{said}\n{''.join(texts)}"


def run(names: list[str], lanes: int) -> list[str]:
    """Runs examples, so many side by side, and prints what they print. Returns that of those that fail."""
    waiting, running, failed = deque(names), list[Running](), []
    with Forks() as forks:
        environment = {**os.environ, "PERSIA_EXAMPLE_SMALL": "1"}

        def start(name: str) -> Running:
            begin = Interpreter if name in PROGRAMS else forks.start
            return Running(name, begin([EXAMPLES / name], ROOT, environment))

        try:
            while waiting or running:
                while waiting and len(running) < lanes and not awaited(waiting[0], running):
                    running.append(start(waiting.popleft()))
                for each in list(running):
                    status = each.ended(0.05)
                    if status is None:
                        continue
                    running.remove(each)
                    print(each.shown(status), flush=True)
                    if status != 0:
                        failed.append(each.shown(status))
        finally:
            for each in running:
                each.program.end()
    return failed


def awaited(name: str, running: list[Running]) -> bool:
    """Whether an example loads what one that runs saves."""
    return any(name.replace("_after", "_before") == each.name for each in running)


def main(arguments: list[str]) -> int:
    """Runs the command line; returns the exit status."""
    files = [Path(each).resolve() for each in arguments] or sorted([*EXAMPLES.glob("*.py"), EXAMPLES / "online/run.py"])
    names = [file.relative_to(EXAMPLES).as_posix() for file in files]
    # Those that take longest begin, and what is saved comes before what loads it.
    names.sort(key=lambda name: (name not in PROGRAMS, name.replace("_before", "_0")))
    failed = run([name for name in names if name != DEMO or arguments], os.cpu_count() or 1)
    if failed:
        print("\n".join(["=== failed", *failed]))
    return len(failed) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
