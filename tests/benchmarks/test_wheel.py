"""The environment in which a wheel is tried has torch and what it needs, and the wheel is the one just built."""

import importlib.util
import json
import os
import subprocess
from contextlib import nullcontext
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks import wheel


def the_script():
    """tests/wheel.py, which no package has."""
    spec = importlib.util.spec_from_file_location("wheel_script", Path(__file__).parents[1] / "wheel.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def distribution(folder, name, files, requires=()):
    """Installs a distribution of empty files."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.0", *(f"Requires-Dist: {each}" for each in requires)]
    (info / "METADATA").write_text("\n".join(lines))
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/METADATA"]))


@pytest.mark.processes
def test_distributions_that_share_a_folder_are_linked_once(tmp_path, monkeypatch):
    site = tmp_path / "lib" / "python" / "site-packages"
    needs = ["nvidia-cublas", "Nvidia_NCCL>=2; python_version > '3'"]
    distribution(site, "torch", ["torch/__init__.py", "../../bin/torchrun"], needs)
    distribution(site, "nvidia-cublas", ["nvidia/cublas/__init__.py"], ["torch"])
    distribution(site, "nvidia-nccl", ["nvidia/nccl/__init__.py"])
    distribution(site, "unrelated", ["unrelated.py"])
    monkeypatch.syspath_prepend(site)
    python = wheel.environment_with_torch(tmp_path / "environment")
    code = "import torch, nvidia.cublas, nvidia.nccl, importlib.metadata as m; print(*m.version('nvidia-nccl'))"
    done = subprocess.run([python, "-c", f"{code}; import unrelated"], capture_output=True, text=True)
    assert done.stdout.split() == ["1", ".", "0"]
    assert "No module named 'unrelated'" in done.stderr


def test_the_measured_wheel_is_the_last_one_of_this_version(tmp_path):
    assert wheel.newest(tmp_path, "0.2") is None
    names = [
        "persia_recsys-0.2-cp312-abi3-linux_x86_64.whl",
        "persia_recsys-0.2-cp311-cp311-linux_x86_64.whl",
        "persia_recsys-0.1-x.whl",
    ]
    for age, name in enumerate(reversed(names)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1_000 - age, 1_000 - age))  # That of the earlier version is the newest file.
    assert wheel.newest(tmp_path, "0.2").name == names[1]


def test_dist_has_only_the_wheel_just_built(tmp_path, monkeypatch):
    script = the_script()
    dist, folder = tmp_path / "dist", tmp_path / "build"
    dist.mkdir()
    for name in ("persia_recsys-0.0.1-py3-none-any.whl", "persia_recsys-0.0.1.tar.gz", "other-1.0-py3-none-any.whl"):
        (dist / name).touch()

    def run(*command, **_):
        if "auditwheel" in command:
            target = command[command.index("--wheel-dir") + 1]
            target.mkdir()
            (target / "persia_recsys-0.2-repaired.whl").touch()
        elif "build" in command:
            folder.mkdir()
            for name in ("persia_recsys-0.2.tar.gz", "persia_recsys-0.2-raw.whl"):
                (folder / name).touch()
        return ""

    monkeypatch.setattr(script, "run", run)
    monkeypatch.setattr(script, "DIST", dist)
    for check in ("check_sdist", "check_wheel", "check_sbom"):
        monkeypatch.setattr(script, check, lambda *_: None)
    assert script.build("sdist", folder) == dist / "persia_recsys-0.2-repaired.whl"
    assert sorted(path.name for path in dist.iterdir()) == [
        "other-1.0-py3-none-any.whl",
        "persia_recsys-0.2-repaired.whl",
        "persia_recsys-0.2.tar.gz",
    ]


def test_smoke_tests_run_in_a_copy_with_the_tools_of_this_python(tmp_path, monkeypatch):
    script = the_script()
    ran = []

    def run(*command, cwd, path):
        files = {str(file.relative_to(cwd)) for file in cwd.rglob("*.py")}
        assert {f"tests/{test}" for test in script.SMOKE_TESTS} <= files
        assert {"tests/conftest.py", "tests/rpc/conftest.py", "tests/support/stores.py"} <= files
        assert (cwd / "pyproject.toml").is_file()
        assert not any(file.startswith("src") for file in files)
        assert (path / "pytest").is_symlink()
        assert not (path / "torch").exists()
        ran.append(command[:3])
        return ""

    monkeypatch.setattr(script, "run", run)
    script.smoke_tests(tmp_path / "python", wheel.link)
    assert ran == [(tmp_path / "python", "-m", "pytest")]


@pytest.mark.parametrize("found", ["2.0", "3.0"])
def test_the_list_of_components_names_what_is_linked(tmp_path, found):
    file = tmp_path / "persia_recsys-0.2.whl"
    with ZipFile(file, "w") as archive:
        # auditwheel writes one beside ours, with nothing in it that we link.
        archive.writestr("persia_recsys-0.2.dist-info/sboms/auditwheel.cdx.json", "{}")
        components = [{"name": "nanobind", "version": found}, {"name": "robin-map"}]
        archive.writestr("persia_recsys-0.2.dist-info/sboms/persia.cdx.json", json.dumps({"components": components}))
    with nullcontext() if found == "2.0" else pytest.raises(SystemExit, match=r"nanobind 3\.0; linked is 2\.0"):
        the_script().check_sbom(file, "2.0")
