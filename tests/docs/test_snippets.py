"""The documentation runs: every Python block of README and guides, every TOML block as a configuration.

Blocks of one page are one program, run in order in an empty directory. A block whose first line is `# not run`
is only compiled. Run one page: `pytest tests/docs -k your-data`.
"""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import persia
from persia.cli.run_config import RunConfig
from persia.config import convert

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "guide").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


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


@pytest.mark.parametrize("page", [p for p in PAGES if program(p)], ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path):
    # In an interpreter of its own, as a reader would: what other tests have imported must not help.
    script = tmp_path / f"{page.stem}_md.py"
    script.write_text(program(page), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(Path(persia.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nanobind" not in done.stderr, done.stderr


def test_there_are_blocks_to_run():
    assert sum(len(blocks(page, "python")) for page in PAGES) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
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
    text = (ROOT / "docs" / "guide" / "command-line.md").read_text(encoding="utf-8")
    missing = [name for name in fields(RunConfig) if f"`{name}`" not in text and f"{name} =" not in text]
    assert not missing
