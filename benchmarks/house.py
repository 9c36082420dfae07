"""Counts what can be counted of the structure: sizes, circles of files, repeated declarations, members of `Shard`.

    python -m benchmarks.house [ROOT]

Prints a table for the checkout at ROOT, by default this one. `docs/decisions/0022-house.md` has it for two commits, and
what is counted by hand.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SHARED_OPTIONS = frozenset({"where", "split", "shuffle_rows", "seed", "drop_last", "shard", "require_labels"})
"""Options of rows that all readers have. A declaration has at least five of them."""


def files(package: Path) -> dict[str, Path]:
    """Returns the Python files of a package by dotted name."""
    return {".".join(path.relative_to(package.parent).with_suffix("").parts): path for path in package.rglob("*.py")}


def circles(package: Path) -> int:
    """Returns the number of circles of files that are found one after the other, each broken at its last import."""
    graph = imports(package)
    count = 0
    while True:
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            count += 1
            imported, importer = error.args[1][-2], error.args[1][-1]
            graph[importer].discard(imported)
            graph[imported].discard(importer)
        else:
            return count


def imports(package: Path) -> dict[str, set[str]]:
    """Returns the modules that each module imports anywhere, for types too. Packages only collect names: left out."""
    modules = {name: path for name, path in files(package).items() if path.name != "__init__.py"}
    return {name: set(_imports(path, modules.keys())) for name, path in modules.items()}


def _imports(path: Path, known: Collection[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        else:
            continue
        yield from (name for name in names if name in known)


def declarations(package: Path) -> int:
    """Returns the number of functions and records that declare the options that all readers share."""
    count = 0
    for path in files(package).values():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names: set[str] = set()
            if isinstance(node, ast.FunctionDef):
                names = {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
            elif isinstance(node, ast.ClassDef):
                names = {
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
            count += len(names & SHARED_OPTIONS) >= 5
    return count


def about_streams(package: Path) -> tuple[int, int]:
    """Returns the number of files about streams, and of their folders."""
    names = re.compile(r"stream|kafka|broker|joining|join_buffer|directories|offset_log|record(ed)?$|share$|log_file")
    found = [
        path
        for path in files(package).values()
        if path.name != "__init__.py"
        and ("streams" in path.parts or names.search(path.stem))
        and path.relative_to(package).parts[0] in ("data", "services", "types", "streams", "membership", "testing")
    ]
    return len(found), len({path.parent for path in found})


def members(header: Path, kind: str) -> tuple[int, int]:
    """Returns the number of members of a C++ class, and of lines of its header."""
    text = header.read_text(encoding="utf-8")
    start = re.search(rf"^class {kind} [^;]*?\{{", text, re.MULTILINE)
    assert start is not None, kind
    body = text[start.start() :]
    depth, end = 0, 0
    for end, letter in enumerate(body):  # noqa: B007 - used after the loop
        depth += (letter == "{") - (letter == "}")
        if letter == "}" and depth == 0:
            break
    body = re.sub(r"//[^\n]*", "", body[body.index("{") + 1 : end])
    flat, depth = "", 0
    for letter in body:  # Bodies of functions and of nested types count as one member.
        depth += letter == "{"
        if depth == 0:
            flat += letter
        elif letter == "}" and depth == 1:
            flat += ";"
        depth -= letter == "}"
    statements = [part.strip() for part in re.sub(r"\b(public|private|protected):", "", flat).split(";")]
    return len([part for part in statements if part and not part.startswith(("using ", "friend "))]), len(
        text.splitlines()
    )


def words(page: Path) -> int:
    """Returns the number of words of a page, without comments and the bars of tables."""
    return len(re.sub(r"<!--.*?-->|\|", " ", page.read_text(encoding="utf-8")).split())


def main(root: Path) -> None:
    """Prints the table."""
    package = root / "src" / "persia"
    python = files(package)
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in python.values())
    streams, folders = about_streams(package)
    shard, header = members(root / "cpp" / "include" / "persia" / "shard.hpp", "Shard")
    longest = max(len(path.read_text(encoding="utf-8").splitlines()) for path in python.values())
    for what, value in {
        "Python files in src": f"{len(python)}",
        "their lines": f"{lines:,}",
        "lines of the longest": f"{longest}",
        "circles of files": f"{circles(package)}",
        "declarations of the options that readers share": f"{declarations(package)}",
        "files about streams, in folders": f"{streams} in {folders}",
        "members of Shard, lines of its header": f"{shard}, {header}",
        "words of the README": f"{words(root / 'README.md'):,}",
        "words of the performance page": f"{words(root / 'docs' / 'performance.md'):,}",
        "lines of the changelog": f"{len((root / 'CHANGELOG.md').read_text(encoding='utf-8').splitlines())}",
    }.items():
        print(f"| {what} | {value} |")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1])
