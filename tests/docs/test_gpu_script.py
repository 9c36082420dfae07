"""`make gpu` runs every test that is marked `gpu`."""

import re
import shlex
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
SCRIPT = TESTS / "gpu.sh"


def unreached(script, tests):
    """Returns the files with tests marked `gpu` that no call of pytest in the script names, alone or by folder."""
    commands = re.findall(r"-m pytest (.*)", script.replace("\\\n", " "))
    named = {word for command in commands for word in shlex.split(command) if word.startswith("tests/")}
    marked = [path for path in sorted(tests.rglob("test_*.py")) if re.search(r"\bmark\.gpu\b", path.read_text())]
    names = [path.relative_to(tests.parent) for path in marked]
    return [str(name) for name in names if named.isdisjoint({str(name), *map(str, name.parents)})]


def test_the_script_names_every_file_with_a_test_marked_gpu():
    assert unreached(SCRIPT.read_text(), TESTS) == []


def test_a_file_that_is_left_out_is_found(tmp_path):
    for name in ("nn/test_a.py", "serve/test_b.py", "serve/test_c.py", "serve/test_d.py"):
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("" if "_d" in name else "@pytest.mark." + "gpu\n")
    script = "python -m pytest -q -m gpu tests/nn \\\n  || failed=1\npython -m pytest -m gpu tests/serve/test_b.py\n"
    assert unreached(script, tmp_path / "tests") == ["tests/serve/test_c.py"]
