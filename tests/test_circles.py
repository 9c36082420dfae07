"""No file of the package imports itself through others; imports for types and within functions count."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import persia

ROOT = Path(persia.__file__).parent


def modules(root):
    """Returns the modules below a folder by name; packages are left out, as they only collect names."""
    found = {}
    for path in root.rglob("*.py"):
        if path.name != "__init__.py":
            found[".".join((root.name, *path.relative_to(root).with_suffix("").parts))] = path
    return found


def imports(path, known):
    """Returns the known modules that a file imports anywhere."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                yield from {node.module, f"{node.module}.{alias.name}"} & known.keys()
        elif isinstance(node, ast.Import):
            yield from {alias.name for alias in node.names} & known.keys()


def circle(root):
    known = modules(root)
    try:
        TopologicalSorter({name: set(imports(path, known)) for name, path in known.items()}).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_circles_of_files():
    assert len(modules(ROOT)) > 300
    assert circle(ROOT) is None


def test_a_circle_is_found(tmp_path):
    root = tmp_path / "package"
    root.mkdir()
    (root / "one.py").write_text("def f():\n    from package.two import x\n")
    (root / "two.py").write_text("from package import one\n")
    assert set(circle(root)) == {"package.one", "package.two"}
