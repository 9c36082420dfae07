"""Commands of the pages select measures that exist."""

import re
import shlex
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from benchmarks import runner

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"(?:python -m benchmarks|`\.\.\.) ([^`\n#]+)")


def unknown(text):
    """Returns the patterns of commands that select nothing. What is set in capitals stands for any name."""
    words = [word for command in COMMAND.findall(text) for word in shlex.split(command)]
    patterns = [word for word in words if re.fullmatch(r"[a-z0-9_]+\.[\w.*\[\]]+", word)]
    return [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in runner.names())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_select_measures(page):
    pytest.importorskip("ray", reason='Ray is not installed: pip install "persia-recsys[ray]"')
    assert unknown(page.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_found():
    text = "`python -m benchmarks modes.split 'modes.gone.*' --preset laptop`, `... 'apms.gone*'`, `... NAME`"
    assert unknown(text) == ["modes.gone.*", "apms.gone*"]
