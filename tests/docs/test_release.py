"""The release workflow publishes only what was built and tried, for every Python and architecture that is promised."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from persia import __version__

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_the_version_is_in_two_places_the_same():
    assert PROJECT["project"]["version"] == __version__


def test_publishing_waits_for_all_other_jobs_and_needs_no_token():
    publish = JOBS["publish"]
    assert set(publish["needs"]) == JOBS.keys() - {"publish"}
    assert publish["if"] == "github.ref_type == 'tag'"
    assert publish["permissions"] == {"id-token": "write"}
    assert "password" not in str(publish)


def test_wheels_are_tried_on_both_architectures_from_the_oldest_python_on():
    assert JOBS["try"]["strategy"]["matrix"]["runner"] == JOBS["wheels"]["strategy"]["matrix"]["runner"]
    pythons = JOBS["try"]["strategy"]["matrix"]["python"]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"


def test_pages_say_the_same_about_systems():
    """Wheels for aarch64 are built, but whether they work is not known before the workflow has run."""
    rows = [
        re.search(r"^\| system \| (.*aarch64.*? only)\.", (ROOT / "docs" / "guide" / page).read_text(), re.MULTILINE)[1]
        for page in ("install.md", "is-it-for-me.md")
    ]
    assert rows[0] == rows[1]
    assert "aarch64 is untried" in rows[0]


def test_wheels_are_built_from_the_source_distribution_and_tried():
    wheels = JOBS["wheels"]
    assert wheels["needs"] == "sdist"
    assert not [step for step in wheels["steps"] if "checkout" in step.get("uses", "")]
    (build,) = (step["run"] for step in wheels["steps"] if "run" in step)
    assert "cibuildwheel" in build
    assert "dist/*.tar.gz" in build
    assert JOBS["try"]["needs"] == "wheels"
    tried = JOBS["try"]["steps"][-1]["run"]
    assert "tests/wheel.py check wheelhouse/*.whl" in tried
    assert "tests/wheel.py installed" in tried


@pytest.mark.processes
def test_links_of_the_readme_work_on_the_package_index(tmp_path):
    (step,) = [step for step in JOBS["sdist"]["steps"] if "README.md" in step.get("run", "")]
    readme = tmp_path / "README.md"
    readme.write_text((ROOT / "README.md").read_text(encoding="utf-8"), encoding="utf-8")
    names = {"FILES": "https://example.org/persia", "GITHUB_REF_NAME": "v1.0.0"}
    subprocess.run(["bash", "-ec", step["run"]], cwd=tmp_path, env=os.environ | names, check=True)
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)]+)\)", readme.read_text(encoding="utf-8"))
    assert [link for _, link in links if not link.startswith("https://")] == []
    assert ("", "https://example.org/persia/blob/v1.0.0/docs/modes.md") in links
    assert ("!", "https://example.org/persia/raw/v1.0.0/docs/assets/demo/demo.svg") in links


def test_publishing_waits_for_the_gate():
    assert [step["run"] for step in JOBS["gate"]["steps"] if "run" in step] == [".ci/run"]


def test_actions_are_pinned_by_commit_and_tools_by_version():
    steps = [step for job in JOBS.values() for step in job["steps"]]
    loose = [step["uses"] for step in steps if "uses" in step and not re.search(r"@[0-9a-f]{40}$", step["uses"])]
    assert loose == []
    commands = " ".join(step.get("run", "") for step in steps)
    assert re.findall(r"pipx run (\S+)", commands) == re.findall(r"pipx run (\w+==[\d.]+)", commands)


def test_the_environment_is_the_documented_one():
    page = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    assert f"its environment `{JOBS['publish']['environment']}`" in " ".join(page.split())


def test_one_wheel_for_each_abi():
    config = PROJECT["tool"]["cibuildwheel"]
    stable = PROJECT["tool"]["scikit-build"]["wheel"]["py-api"]
    oldest = PROJECT["project"]["requires-python"].removeprefix(">=").replace(".", "")
    assert [re.match(r"cp\d+", each)[0] for each in config["build"]] == [f"cp{oldest}", stable]
    assert {config[f"manylinux-{machine}-image"] for machine in ("x86_64", "aarch64")} == {"manylinux_2_28"}


def test_a_wheel_of_the_stable_abi_is_never_built_without_it():
    found = re.search(r"find_package\(Python [^)]*\)", (ROOT / "CMakeLists.txt").read_text())[0]
    assert found.endswith(" ${SKBUILD_SABI_COMPONENT})")
    assert "OPTIONAL" not in found
    version = PROJECT["tool"]["scikit-build"]["cmake"]["version"].removeprefix(">=")
    assert tuple(map(int, version.split("."))) >= (3, 26)  # The first to know the component.


def test_nothing_but_the_build_is_needed_to_build():
    names = {re.match(r"[\w-]+", each)[0] for each in PROJECT["build-system"]["requires"]}
    assert names == {"scikit-build-core", "nanobind"}


def test_the_page_names_every_extra_of_users():
    page = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    extras = PROJECT["project"]["optional-dependencies"].keys() - {"dev", "docs", "test"}
    assert set(re.findall(r'"\[([\w-]+)\]"', page)) == extras
