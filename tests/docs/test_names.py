"""Every public class name exists once in the package, so that a name alone says which class is meant."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "persia"


def public_classes(sources):
    """Files by the public classes that they define, nested ones included."""
    found = defaultdict(list)
    for path in sorted(sources.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(sources)))
    return found


def test_public_class_names_are_unique():
    found = public_classes(SOURCES)
    assert len(found) > 200
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_name_that_exists_twice_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class Once: ...\nclass Twice: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class Twice: ...\n    class _Private: ...\n")
    assert public_classes(tmp_path) == {"Once": ["a.py"], "Twice": ["a.py", "b.py"]}
