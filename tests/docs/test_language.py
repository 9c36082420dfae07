"""Docstrings start with a verb or with the thing that they describe: CONTRIBUTING.md, "Style"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "persia"

# Folders and modules whose docstrings follow the rule. Extend the list with each part that is reworded.
DONE = (
    "batching",
    "checkpoint",
    "checks.py",
    "cli",
    "cluster",
    "config.py",
    "coordinator",
    "data",
    "dense",
    "errors.py",
    "interop",
    "membership",
    "metrics",
    "modes",
    "nn",
    "optim",
    "plan",
    "ps",
    "pushes",
    "replay",
    "retry.py",
    "rpc",
    "schema",
    "serve/client.py",
    "serve/http",
    "services",
    "store",
    "telemetry",
    "testing",
    "trainer",
    "types",
    "worker",
)

FORBIDDEN = re.compile(
    r"(As|Deaths|It|Likewise|Nobody|None where|So (often|many|much|long)|Somebody|That|Those)\b"
    r"|(What|Who|Whoever|Whom|Whose)\b"
)


def _docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text.splitlines()[0]


def _wrong(path: Path) -> list[str]:
    return [f"{path}:{line}: {text}" for line, text in _docstrings(path) if FORBIDDEN.match(text)]


@pytest.mark.parametrize("part", DONE)
def test_docstrings_start_with_a_verb_or_a_noun(part):
    found = sorted((ROOT / part).rglob("*.py")) or [ROOT / part]
    assert all(path.is_file() for path in found)
    wrong = [line for path in found for line in _wrong(path)]
    assert not wrong, "\n".join(["Start with a verb in the third person, or with the noun that the thing is:", *wrong])


@pytest.mark.parametrize(
    ("text", "wrong"),
    [("What a batch is.", True), ("So many rows.", True), ("Itemises rows.", False), ("Returns what it read.", False)],
)
def test_the_rule(tmp_path, text, wrong):
    path = tmp_path / "module.py"
    path.write_text(f'def f():\n    """{text}"""\n')
    assert bool(_wrong(path)) == wrong
