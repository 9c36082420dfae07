"""Wall clocks that are wrong, for programs that start with a library of `make_clock` in `LD_PRELOAD`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

__all__ = ["make_clock"]

SOURCE = """
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

int clock_gettime(clockid_t clock, struct timespec* found) {
  int failed = syscall(SYS_clock_gettime, clock, found);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) found->tv_sec += SHIFT;
  return failed;
}

int gettimeofday(struct timeval* restrict found, void* restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  found->tv_sec = now.tv_sec;
  found->tv_usec = now.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* found) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (found) *found = now.tv_sec;
  return now.tv_sec;
}
"""
"""A wait until a point in wall time is still the kernel's, so it ends too early where the clock is slow."""


def make_clock(folder: Path, shift: int) -> Path | None:
    """Compiles a library whose wall clock differs from that of this machine; None without a C compiler.

    Args:
        folder: of the library.
        shift: seconds by which the clock is fast; negative if it is slow.
    """
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(SOURCE)
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", f"-DSHIFT={shift}", "-o", str(library), str(source)], check=True
    )
    return library
