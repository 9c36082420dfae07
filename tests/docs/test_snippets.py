"""The documentation runs: every Python block of README and guides, every TOML block as a configuration.

Blocks of one page share their names and run in order, in an empty directory. A block whose first line is `# not run`
is only compiled. Run one page: `pytest tests/docs -k your-data`.
"""

import re
import tomllib
import types
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import torch

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


def compiled(page, block):
    """Numbered as in the page, so that a traceback points into it."""
    return compile("\n" * block.line + block.text, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("__main__")
    state = torch.get_rng_state()
    torch.manual_seed(0)
    for block in blocks(page, "python"):
        code = compiled(page, block)
        if not block.text.startswith("# not run"):
            exec(code, module.__dict__)
    torch.set_rng_state(state)


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
