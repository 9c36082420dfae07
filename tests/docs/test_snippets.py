"""The documentation runs: Python blocks of README, guides and some of the reference, TOML blocks as configurations.

Blocks of one page are one program, run in order in an empty directory. A block whose first line is `# not run`
is only compiled. Run one page: `pytest tests/docs -k your-data`.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import persia
from persia.cli.run_config import RunConfig
from persia.config import convert

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "modes.md",
    ROOT / "docs" / "concepts" / "modes.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]
REFERENCE = [
    ROOT / "docs" / "reference" / f"{name}.md"
    for name in (
        "persia",
        "nn",
        "models",
        "data",
        "modes",
        "optim",
        "interop",
        "checkpoint-api",
        "metrics",
        "publish",
        "serve",
        "served-rows",
    )
]
"""Pages of the reference that begin with an example."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name_of(page):
    """The stem of a page, with its folder where that is not `guide`."""
    return page.stem if page.parent.name in ("guide", ROOT.name) else f"{page.parent.name}-{page.stem}"


class Block(NamedTuple):
    line: int
    text: str


def blocks(page, language):
    text = page.read_text(encoding="utf-8")
    found = [m for m in FENCE.finditer(text) if m[1] == language]
    return [Block(text.count("\n", 0, m.start(2)), m[2]) for m in found]


def program(page):
    """The blocks to run, as one program whose lines are numbered as in the page."""
    lines = []
    for block in blocks(page, "python"):
        compile(block.text, str(page), "exec")
        if not block.text.startswith("# not run"):
            lines += [""] * (block.line - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines)


def make_adult(folder):
    """Writes files of the format of UCI Adult, from which something can be learned."""
    folder.mkdir(parents=True)
    for name, rows, end in (("adult.data", 1_500, ""), ("adult.test", 500, ".")):
        lines = (
            f"{20 + i % 50}, Private, {i}, Masters, {i % 16}, Never-married, {('Sales', 'Exec-managerial')[i % 2]}, "
            f"Not-in-family, White, {('Male', 'Female')[i % 3 == 0]}, 0, 0, 40, United-States, "
            f"{('<=50K', '>50K')[i % 2]}{end}"
            for i in range(rows)
        )
        (folder / name).write_text("\n".join(lines) + "\n")


@pytest.mark.processes
@pytest.mark.parametrize("page", [p for p in PAGES if program(p)], ids=name_of)
def test_python_blocks_run(page, tmp_path, forks):
    # In an interpreter of its own, as a reader would: what other tests have imported must not help.
    script = tmp_path / f"{page.stem}_md.py"
    script.write_text(program(page), encoding="utf-8")
    environment = {}
    if page.stem == "ten-minutes" and persia.data.find("adult") is None:
        make_adult(tmp_path / "data" / "adult")
        environment["PERSIA_DATA"] = str(tmp_path / "data")
    run(forks, [script], tmp_path, environment)


@pytest.mark.processes
def test_examples_of_the_reference_run(tmp_path, forks):
    # All in one interpreter: importing persia takes longer than they do.
    for page in REFERENCE:
        (tmp_path / page.stem).mkdir()
        (tmp_path / f"{page.stem}_md.py").write_text(program(page), encoding="utf-8")
    names = [page.stem for page in REFERENCE]
    run_each = f"for name in {names}: os.chdir(name); runpy.run_path(f'../{{name}}_md.py'); os.chdir('..')"
    run(forks, ["-c", f"import os, runpy\n{run_each}"], tmp_path)


def run(forks, arguments, folder, environment=None):
    """Runs Python with warnings as errors."""
    environment = os.environ | {"PYTHONPATH": str(Path(persia.__file__).parents[1])} | (environment or {})
    done = forks.run(["-W", "error", *arguments], folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanobind" not in done.stderr, done.stderr


def test_there_are_blocks_to_run():
    assert sum(len(blocks(page, "python")) for page in PAGES) > 20
    assert [page.stem for page in REFERENCE if not program(page)] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_toml_blocks_are_configurations(page):
    for block in blocks(page, "toml"):
        tree = {"data": {"kind": "synthetic"}} | tomllib.loads(block.text)
        convert(tree, RunConfig, f"{page.name}, line {block.line}")


def fields(record):
    """Every field of a record, with those of the sections in it."""
    for field in msgspec.structs.fields(record):
        yield field.name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from fields(field.type)


def test_the_configuration_reference_is_complete():
    text = (ROOT / "docs" / "guide" / "configuration.md").read_text(encoding="utf-8")
    missing = [name for name in fields(RunConfig) if f"`{name}`" not in text and f"{name} =" not in text]
    assert not missing
