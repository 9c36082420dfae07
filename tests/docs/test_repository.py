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


def test_the_image_is_pinned_and_runs_as_a_user():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert {name for name, _ in instructions} <= {"FROM", "RUN", "COPY", "ARG", "USER", "WORKDIR", "ENTRYPOINT", "CMD"}
    ignored = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
    for name, rest in instructions:
        if name == "COPY" and "--from" not in rest:
            source = rest.split()[0]
            assert (ROOT / source).exists()
            assert source not in ignored
        if name == "RUN" and "pip install" in rest:
            assert "--constraint /wheels/constraints.txt" in rest
            assert '--extra-index-url "$TORCH_INDEX"' in rest
    assert [rest for name, rest in instructions if name == "USER"] == ["1000"]
    assert [rest for name, rest in instructions if name == "ENTRYPOINT"] == ['["tini", "--", "persia"]']
    assert {".git", ".venv", "**/*.so"} <= ignored  # A core of this machine must not get into the wheel.


@pytest.mark.parametrize("name", ["README.md", "SECURITY.md", "CODE_OF_CONDUCT.md"])
def test_links_lead_to_files(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[\w-]+)?\)", text)
    assert [link for link in links if not link.startswith("https://") and not (ROOT / link).exists()] == []
