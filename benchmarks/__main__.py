"""Runs benchmarks and prints one JSON line per measure.

    python -m benchmarks NAME... [--preset smoke|laptop|full] [--beside N] [--json FILE] [--seconds N] [--keep-going]
    python -m benchmarks --list

A NAME is any name that `--list` prints, or a pattern such as 'store.*'; they run in this order. With `--beside 1`
another process computes all the time, and the names begin with `beside_1.`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import runner
from benchmarks.elsewhere import busy, forking
from benchmarks.public_data import GLOBO


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Run benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="a name that --list prints, or a pattern: 'store.*'")
    parser.add_argument("--preset", choices=runner.PRESETS, default="laptop", help="amount of work (default: laptop)")
    parser.add_argument(
        "--beside", type=int, default=0, metavar="N", help="beside so many processes that compute all the time"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append the lines to this file")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, metavar="N", help="begin no benchmark after so many seconds"
    )
    parser.add_argument("--keep-going", action="store_true", help="after an error run the others, and exit with 1")
    parser.add_argument("--list", action="store_true", help="print all names and exit")
    arguments = parser.parse_args(argv)
    if arguments.list:
        print("\n".join(runner.names()))
        print(f"Names with `globo` need data: {GLOBO}", file=sys.stderr)
        return 0
    if not arguments.names:
        parser.error("no NAME given; --list prints all names, '*' selects them all")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # So that processes and networks are cleaned up.
    smoke = arguments.preset == "smoke"
    if smoke:
        runner.benchmarks()
        gc.freeze()  # A collection after each of hundreds of small functions goes through all that imports made, else.
    failed: list[str] = []
    measures = runner.run(
        arguments.names,
        arguments.preset,
        arguments.beside,
        seconds=arguments.seconds,
        failed=failed if arguments.keep_going else None,
    )
    try:
        with forking() if smoke else contextlib.nullcontext(), busy(arguments.beside):
            for measure in measures:
                line = json.dumps(_line(measure, arguments.preset, arguments.beside))
                print(line, flush=True)
                if arguments.json is not None:
                    with arguments.json.open("a") as stream:
                        stream.write(line + "\n")
    except KeyError as error:
        if hasattr(error, "__notes__"):  # Of a benchmark.
            raise
        parser.error(error.args[0])
    finally:
        gc.unfreeze()
    if failed:
        print(f"Failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


def _line(measure: runner.Measure, preset: str, beside: int) -> dict[str, Any]:
    command = ["python", "-m", "benchmarks", measure.name, "--preset", preset]
    return {
        "name": f"beside_{beside}.{measure.name}" if beside else measure.name,
        "value": _rounded(measure.value),
        "unit": measure.unit,
        "at_least": measure.at_least,
        "at_most": measure.at_most,
        "holds": measure.holds,
        "spread": _rounded(measure.spread),
        "interval": _rounded(measure.interval),
        "command": shlex.join([*command, "--beside", str(beside)] if beside else command),
        "commit": _commit(),
        # Of a GPU, it is what its figures are compared by.
        "machine": ", ".join(filter(None, [measure.details.get("gpu"), machine()])),
        **{key: _rounded(value) for key, value in measure.details.items()},
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


@functools.cache  # A run prints hundreds of lines.
def _commit() -> str:
    run = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.stdout.strip() or "unknown"


def machine() -> str:
    """Returns processor, cores and system of this machine."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, {platform.system()} {platform.release()}"


if __name__ == "__main__":
    sys.exit(main())
