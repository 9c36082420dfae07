"""No file of the package imports itself through others; imports for types and within functions count."""

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from benchmarks.house import imports

import persia

ROOT = Path(persia.__file__).parent


def circle(imported):
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_circles_of_files():
    imported = imports(ROOT)
    assert len(imported) > 300
    assert circle(imported) is None


def test_a_circle_is_found(tmp_path):
    root = tmp_path / "package"
    root.mkdir()
    (root / "one.py").write_text("def f():\n    from package.two import x\n")
    (root / "two.py").write_text("from package import one\n")
    assert set(circle(imports(root))) == {"package.one", "package.two"}
