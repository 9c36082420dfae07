"""Diffs on the pages are those between the files that they name."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DIFF = re.compile(r"^```diff\n--- ([\w./]+)\n\+\+\+ ([\w./]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def difference(before, after):
    """The hunks of a unified diff."""
    texts = [(ROOT / path).read_text(encoding="utf-8").splitlines() for path in (before, after)]
    return [line.rstrip() for line in list(difflib.unified_diff(*texts, lineterm="", n=2))[2:]]


def stale(text):
    """Diffs of a page that are not those of the files."""
    found = [match.groups() for match in DIFF.finditer(text)]
    return [(before, after) for before, after, hunks in found if hunks.splitlines() != difference(before, after)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_diffs_are_those_of_the_files(page):
    assert stale(page.read_text(encoding="utf-8")) == []


def test_a_stale_diff_is_found():
    names = "examples/embedding_bag_before.py", "examples/embedding_bag_after.py"
    hunks = difference(*names)
    page = "```diff\n--- {}\n+++ {}\n{}\n```\n".format(*names, "\n".join(hunks))
    assert stale(page) == []
    assert stale(page.replace("+import persia\n", "")) == [names]
