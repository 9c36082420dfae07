"""The release workflow publishes only what was built and tried, for every Python and architecture that is promised."""

import re
import tomllib
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parents[2]
JOBS = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


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
