"""Files that a stranger looks at first are whole."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_the_citation_has_the_three_papers():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    found = {paper["identifiers"][0]["value"] for paper in citation["references"]}
    assert found == {"arXiv:2111.05897", "arXiv:2205.11048", "arXiv:2008.11343"}
    assert all(paper["authors"] for paper in citation["references"])


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_have_what_github_asks_for(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    if path.stem == "config":
        assert form["blank_issues_enabled"] is True
        return
    assert form["name"]
    assert form["description"]
    inputs = [part for part in form["body"] if part["type"] != "markdown"]
    assert all(part["attributes"]["label"] for part in inputs)
    assert len({part["id"] for part in inputs}) == len(inputs)


def test_the_image_has_extras_that_exist():
    extras = re.search(r"\[([\w,]+)\]\"", (ROOT / "Dockerfile").read_text(encoding="utf-8"))[1].split(",")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(extras) <= project["optional-dependencies"].keys()


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_lead_to_files(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text)
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []
