"""Pull requests and commits are checked by the commands that the README and CONTRIBUTING.md name."""

import importlib.util
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
    runs = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    commands = re.findall(r"make ([\w-]+)", "\n".join(runs))
    assert commands == ["lint", "test", "quick", "test-all"]
    assert all(map(recipe, commands))


def test_the_lowest_versions_are_those_of_the_project():
    """The script prints a constraint for each dependency, on the oldest Python."""
    job = WORKFLOW["jobs"]["lowest"]["steps"]
    constraints, quick = job[-1]["run"].splitlines()
    assert constraints == "python .ci/lowest.py > lowest.txt"
    assert quick.startswith("make quick CONSTRAINTS=lowest.txt")
    spec = importlib.util.spec_from_file_location("lowest", ROOT / ".ci" / "lowest.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f">={job[1]['with']['python-version']}" == project["requires-python"]
    assert list(script.lowest(project["dependencies"])) == [d.replace(">=", "==") for d in project["dependencies"]]
    with pytest.raises(SystemExit, match=r"'torch' in pyproject\.toml has no lowest version"):
        list(script.lowest(["torch"]))


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
