"""Pull requests and commits are checked by the commands that the README and CONTRIBUTING.md name."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github" / "workflows" / "pull-request.yml").read_text())
MAKEFILE = (ROOT / "Makefile").read_text()


def recipe(target):
    """The commands of a target of the Makefile."""
    return re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)[1]


def test_a_pull_request_runs_the_documented_commands():
    commands = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    assert commands == ["make lint", "make test", "make test-all"]
    assert all(recipe(command.removeprefix("make ")) for command in commands)


def test_the_oldest_python_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={WORKFLOW['jobs']['test']['strategy']['matrix']['python'][0]}"


def test_actions_are_pinned_by_commit():
    used = [step["uses"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "uses" in step]
    assert [each for each in used if not re.search(r"@[0-9a-f]{40}$", each)] == []


def test_a_commit_runs_what_make_lint_runs():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    linted = [line.strip().replace("$(BIN)", ".venv/bin") for line in recipe("lint").splitlines()]
    ours = {
        re.sub(r" (\.|\$\$\(.*)$", "", line) for line in linted
    }  # Without the files: a hook gets those of the commit.
    assert {hook["entry"] for hook in hooks} == ours
