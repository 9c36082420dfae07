"""Files, modules and classes that the pages name in `code` exist.

A page that describes the past (`docs/decisions`, the changelog) may name what is gone.
"""

import ast
import importlib
import re
import tomllib
from pathlib import Path

import pytest

from persia.errors import MissingExtraError

ROOT = Path(__file__).parents[2]
PAST = {ROOT / "docs" / "changelog.md"}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / ".github" / "pull_request_template.md",
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page not in PAST and page.parent.name != "decisions"),
]
FOLDERS = (".ci", "benchmarks", "bindings", "cpp", "docs", "examples", "src", "tests")
ELSEWHERE = {
    "best.toml",
    "epoch.json",
    "config.toml",
    "model.py",
    "train.py",
    "site/",
    "globo_ctr/",
    "adult/",
    "utils.py",
    "auto.json",
    "manifest.json",
    "model.json",
    "regions.json",
    "run.json",
    "/openapi.json",
}
"""Paths that are made, downloaded, or forbidden."""

CODE = re.compile(r"`([^`\n]+)`")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"(?!persia\.)[\w./-]+\.(py|cpp|hpp|md|toml|json)|[\w-]+(/[\w.-]+)*/")
DOTTED = re.compile(r"\bpersia(?:\.[A-Za-z_]\w*)+(?!\.?\w)(?<!\.json)")
MEMBER = re.compile(r"(?<![\w.])([A-Z][a-z]\w+)\.([a-z_]\w*)")
CLASS = re.compile(r"\b[A-Z][a-z]+[A-Z]\w+")


def _paths():
    folders = [ROOT / folder for folder in FOLDERS]
    files = [*folders, *(path for folder in folders for path in folder.rglob("*") if "__pycache__" not in path.parts)]
    return {f"/{path.relative_to(ROOT)}{'/' if path.is_dir() else ''}" for path in [*files, *ROOT.glob("*.*")]}


def _classes():
    """By name of each class of the package: its bases, and what it defines, `self.x = ...` included."""
    found = {}
    for path in (ROOT / "src" / "persia").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases, members = found.setdefault(node.name, (set(), set()))
                bases |= {base.id for base in node.bases if isinstance(base, ast.Name)}
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.ClassDef):
                        members.add(part.name)
                    elif isinstance(part, ast.Name | ast.Attribute) and isinstance(part.ctx, ast.Store):
                        members.add(part.id if isinstance(part, ast.Name) else part.attr)
    return found


def _words():
    sources = [
        path
        for suffix in ("*.py", "*.hpp", "*.cpp")
        for folder in ("src", "cpp")
        for path in (ROOT / folder).rglob(suffix)
    ]
    return {word for path in sources for word in CLASS.findall(path.read_text(encoding="utf-8"))}


PATHS, CLASSES, WORDS = _paths(), _classes(), _words()


def _is_file(path):
    return path in ELSEWHERE or any(known.endswith(f"/{path}") for known in PATHS)


def _is_name(dotted):
    """Whether a module, or what it defines, has this dotted name."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if str(error.name).partition(".")[0] != parts[0]:
                pytest.skip(f"{'.'.join(parts[:count])} needs {error.name}, which is not installed")
            continue
        for part in parts[count:]:
            if not hasattr(found, part):
                return part in getattr(found, "__annotations__", {})
            found = getattr(found, part)
        return True
    return False


def _is_member(owner, name):
    """Whether a class has a member; True for classes of other packages."""
    if owner not in CLASSES:
        return True
    bases, members = CLASSES[owner]
    return name in members or any(base in CLASSES and _is_member(base, name) for base in bases)


def stale(text):
    """Returns what a text names in `code` and does not exist."""
    found = [name for name in re.findall(r"^::: ([\w.]+)", text, re.MULTILINE) if not _is_name(name)]
    for code in CODE.findall(FENCE.sub("", text)):
        if FILE.fullmatch(code):
            found += [] if _is_file(code) else [code]
            continue
        found += [name for name in DOTTED.findall(code) if not _is_name(name)]
        found += [name for name in CLASS.findall(code) if name not in WORDS]
        found += [f"{owner}.{name}" for owner, name in MEMBER.findall(code) if not _is_member(owner, name)]
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    try:
        found = stale(page.read_text(encoding="utf-8"))
    except MissingExtraError as error:
        pytest.skip(error.message)
    assert found == []


@pytest.mark.parametrize(
    "name",
    [
        "ps/gone.py",
        "gone/",
        "persia.ps.gone",
        "persia.Trainer.gone",
        "TrainerOptions.gone(1)",
        "HeldSteps",
        "EmbeddingPS.begin_cut",
    ],
)
def test_a_stale_name_is_found(name):
    assert len(stale(f"See `{name}`, and `ps/server.py`, `persia.Trainer.fit`, `TrainerOptions.log_dir`.")) == 1


def test_the_tree_of_the_architecture_page_is_the_tree_of_the_package():
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"^  ([a-z_]+(?:/|\.py)) ", text, re.MULTILINE))
    package = ROOT / "src" / "persia"
    there = {f"{path.parent.name}/" for path in package.glob("*/__init__.py")} | {p.name for p in package.glob("*.py")}
    assert drawn == there - {"__init__.py", "__main__.py"}


def test_the_layers_of_the_architecture_page_are_those_of_the_contract():
    text = (ROOT / "docs" / "concepts" / "architecture.md").read_text(encoding="utf-8")
    drawn = text.split("## Layers")[1].split("```text\n")[1].split("```")[0].split("\n")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contract = project["tool"]["importlinter"]["contracts"][0]
    assert [line.strip() for line in drawn if line] == contract["layers"]


MECHANISMS = (
    "eviction",
    "decay of GBA",
    "one-bit with error feedback",
    "attaching after a kill",
    "staleness bound",
    "a served row's update",
    "token",
    "step barrier",
    "SSD tier",
    "resharding",
)


def test_the_glossary_leads_from_each_mechanism_to_files_that_exist():
    text = (ROOT / "docs" / "concepts" / "glossary.md").read_text(encoding="utf-8")
    table = text.split("## From a mechanism to its file\n")[1]
    rows = {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines() if " | " in row}
    assert {*MECHANISMS} <= rows.keys()
    for name in MECHANISMS:
        paths = [code for code in CODE.findall(rows[name]) if "/" in code]
        assert len(paths) >= 2, name
        assert [path for path in paths if not (ROOT / path).is_file()] == [], name
