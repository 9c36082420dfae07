"""Programs that tests start and send signals to, as a terminal or a scheduler does."""

import os
import time

START_SECONDS = 120.0
END_SECONDS = 90.0


class Command:
    """A process in a process group of its own, as a shell starts it, and what it prints to stderr; a context.

    Args:
        forks: the `support.forked.Forks` that starts it.
        arguments: of `python`.
        where: working directory.
        environment: variables beside those of this process.
    """

    def __init__(self, forks, arguments, where, **environment):
        self._program = forks.start(arguments, where, {**os.environ, **environment})

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._program.end()

    @property
    def text(self):
        """Of stderr so far."""
        return self._program.err.read_text(encoding="utf-8")

    def until(self, condition, what, seconds=START_SECONDS):
        """Waits for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            assert self._program.wait(0.01) is None, f"it ended before: {what}\n{self.text}"
            assert time.monotonic() < end, f"not within {seconds:g} s: {what}\n{self.text}"

    def signal(self, number, group=True):
        """To the whole process group, as a terminal does, or to the process."""
        (os.killpg if group else os.kill)(self._program.pid, number)

    def end(self, seconds=END_SECONDS):
        """Its status, once it has ended."""
        status = self._program.wait(seconds)
        assert status is not None, f"it has not ended within {seconds:g} s\n{self.text}"
        return status


def resume_line(text, begin):
    """The line that resumes, as it was printed."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(begin)]
    return line
