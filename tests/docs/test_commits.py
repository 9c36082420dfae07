"""Commits that the pages cite are in the history; what is not, such as a rebased one, has a date in its place."""

import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
HASH = re.compile(r"(?<![\w/#.-])(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,12}(?![\w/-])")


def git(*arguments):
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)


def missing(text):
    """Returns the cited commits that are not in the history."""
    found = dict.fromkeys(HASH.findall(text))
    return [commit for commit in found if git("merge-base", "--is-ancestor", commit, "HEAD").returncode != 0]


@pytest.fixture(autouse=True)
def history():
    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("needs the history of the repository")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commits_of_a_page_are_in_the_history(page):
    assert missing(page.read_text(encoding="utf-8")) == []


def test_a_commit_that_is_gone_is_found():
    here = git("rev-parse", "--short=8", "HEAD~1").stdout.strip()
    assert missing(f"At 0badc0de, and at {here}; not a date, 20261124, nor a word, feedface.") == ["0badc0de"]
