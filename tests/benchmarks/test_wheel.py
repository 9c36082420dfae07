"""The environment in which a wheel is tried has torch with what it needs, and nothing else."""

import subprocess

from benchmarks import wheel


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
