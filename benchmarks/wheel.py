"""The wheel that users install: its size, and the time to install and to import it.

    python -m benchmarks 'wheel.*' [--preset smoke|laptop|full] [--json FILE]

wheel.size_mb    The wheel of this version in dist/, where `make wheel` puts it; without one, this and the next are
                 skipped.
wheel.install_s  `pip install` of it into an environment that has torch; all other dependencies come from the package
                 index or pip's cache, in the versions of constraints.txt. Preset smoke installs none of them.
wheel.import_s   `import persia` in a new interpreter: the checkout's, which has the same files.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from benchmarks import runner

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = {"smoke": 1, "laptop": 15, "full": 31}
IMPORT = "import time; start = time.perf_counter(); import persia; print(time.perf_counter() - start)"


@runner.measures("wheel.size_mb", "wheel.install_s")
def built(preset: str) -> Iterator[runner.Measure]:
    """What `make wheel` built."""
    wheel = newest(ROOT / "dist", metadata.version("persia-recsys"))
    if wheel is None:
        print(
            "wheel.size_mb and wheel.install_s are skipped: dist/ has no wheel of this version; `make wheel` builds.",
            file=sys.stderr,
        )
        return
    facts = {"wheel": wheel.name}
    yield runner.Measure("wheel.size_mb", wheel.stat().st_size / 1e6, "MB", at_most=5.0, details=facts)
    options = ["--no-deps"] if preset == "smoke" else []
    times = [timed_install(wheel, options) for _ in range(runner.MIN_ROUNDS if preset == "full" else 1)]
    wall, processor = (statistics.median(each) for each in zip(*times, strict=True))
    yield runner.Measure("wheel.install_s", wall, "s", at_most=20.0, details={**facts, "processor_s": processor})


def newest(folder: Path, version: str) -> Path | None:
    """Returns the wheel of a version of persia that was built last; None if there is none."""
    return max(folder.glob(f"persia_recsys-{version}-*.whl"), key=lambda wheel: wheel.stat().st_mtime, default=None)


def timed_install(wheel: Path, options: list[str]) -> tuple[float, float]:
    """Installs the wheel into a new environment beside torch; returns the seconds that passed, and of the processor."""
    with tempfile.TemporaryDirectory(prefix="persia-wheel-") as folder:
        python = environment_with_torch(Path(folder))
        start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        install(python, wheel, options)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return time.perf_counter() - start, processor


@runner.measures("wheel.import_s")
def import_time(preset: str) -> runner.Measure:
    """`import persia` in a new interpreter, with its files in the page cache."""
    times = []
    for _ in range(ROUNDS[preset]):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        times.append(float(done.stdout))
    return runner.quantity("wheel.import_s", times, "s", at_most=0.15)


def install(python: Path, wheel: Path, options: list[str] | None = None) -> None:
    """Installs a wheel with what it needs into the environment of another Python."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *(options or []), str(wheel)], check=True)


def environment_with_torch(folder: Path) -> Path:
    """Creates a virtual environment with this one's torch and what that needs, as links, and nothing else.

    Returns:
        Its Python. It has no pip: use `install`.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    link(packages, ["torch"])
    return folder / "bin" / "python"


def link(packages: Path, names: Iterable[str]) -> None:
    """Links distributions of this environment, and what they need, into a folder of packages."""
    # Distributions may share a folder: CUDA builds of torch need a dozen with a part of nvidia/ each.
    tops = {
        file.parts[0]: Path(str(distribution.locate_file(file.parts[0]))).absolute()
        for name in names
        for distribution in closure(name)
        for file in distribution.files or ()
    }
    for name, path in tops.items():
        if name not in ("..", "__pycache__"):
            (packages / name).symlink_to(path)


def closure(name: str) -> Iterator[metadata.Distribution]:
    """A distribution and all that it needs here, without extras."""
    waiting, seen = [name], set()
    while waiting:
        key = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = metadata.distribution(key)
        except metadata.PackageNotFoundError:
            continue  # A marker excludes it on this platform.
        yield distribution
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                waiting.append(re.match(r"[\w.-]+", requirement)[0])
