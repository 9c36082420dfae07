"""Every public class name exists once in the package, so that a name alone says which class is meant."""

import ast
import re
from collections import defaultdict
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "persia"
CLASS = re.compile(r"^[ \t]*class ([A-Za-z]\w*)[ \t]*[:(\[]", re.MULTILINE)


def public_classes(sources):
    """Files by the public classes that they define, nested ones included."""
    found = defaultdict(list)
    for path in sorted(sources.rglob("*.py")):
        for name in CLASS.findall(path.read_text()):
            found[name].append(str(path.relative_to(sources)))
    # Parsing all files takes a second, and a line of a docstring may look alike.
    return {name: files if len(files) == 1 else defined(name, files, sources) for name, files in found.items()}


def defined(name, files, sources):
    """The files, once for each class of this name."""
    nodes = [
        (file, node) for file in dict.fromkeys(files) for node in ast.walk(ast.parse((sources / file).read_text()))
    ]
    return [file for file, node in nodes if isinstance(node, ast.ClassDef) and node.name == name]


def test_public_class_names_are_unique():
    found = public_classes(SOURCES)
    assert len(found) > 200
    assert {name: files for name, files in found.items() if len(files) > 1} == {}


def test_a_name_that_exists_twice_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class Once: ...\nclass Twice: ...\n")
    (tmp_path / "b.py").write_text("def f():\n    class Twice: ...\n    class _Private: ...\n")
    assert public_classes(tmp_path) == {"Once": ["a.py"], "Twice": ["a.py", "b.py"]}
