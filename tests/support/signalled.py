"""Programs that tests start and send signals to, as a terminal or a scheduler does."""

import contextlib
import os
import signal
import subprocess
import threading
import time

START_SECONDS = 120.0
END_SECONDS = 90.0


class Command:
    """A process in a process group of its own, as a shell starts it, and what it prints to stderr; a context."""

    def __init__(self, words, where, **environment):
        # A signal that is ignored here, as in the background of a script, would be ignored there.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            self.process = subprocess.Popen(
                words,
                cwd=where,
                env={**os.environ, **environment},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        finally:
            signal.signal(signal.SIGINT, before)
        self.lines = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join(END_SECONDS)
        if not self._reader.is_alive():  # Else a child of the process still has the pipe.
            self.process.stderr.close()

    @property
    def text(self):
        """Of stderr so far."""
        return "".join(self.lines)

    def until(self, condition, what, seconds=START_SECONDS):
        """Waits for a condition."""
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"it ended before: {what}\n{self.text}"
            assert time.monotonic() < end, f"not within {seconds:g} s: {what}\n{self.text}"
            time.sleep(0.01)

    def signal(self, number, group=True):
        """To the whole process group, as a terminal does, or to the process."""
        (os.killpg if group else os.kill)(self.process.pid, number)

    def end(self, seconds=END_SECONDS):
        """Its status, once it has ended."""
        status = self.process.wait(seconds)
        self._reader.join(5.0)
        return status


def resume_line(text, begin):
    """The line that resumes, as it was printed."""
    (line,) = [line.strip() for line in text.splitlines() if line.strip().startswith(begin)]
    return line
