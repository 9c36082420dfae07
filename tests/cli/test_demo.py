"""`make demo` on a machine without data: what it prints, and what it leaves."""

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

import persia

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FEW = ["--set", "train.max_steps=4", "--set", "data.batch_size=256", "--set", "data.options.rows=5000"]


def test_the_demo_trains_saves_and_links_to_its_report(tmp_path, forks):
    environment = os.environ | {"PERSIA_DATA": str(tmp_path), "PYTHONPATH": str(Path(persia.__file__).parents[1])}
    done = forks.run([ROOT / "examples" / "demo.py", *FEW], tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "runs" / "demo"
    assert (output / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    (link,) = re.findall(r"^  (file://\S+)$", done.stdout, re.MULTILINE)
    assert Path(url2pathname(urlsplit(link).path)) == output / "report.html"
    following = done.stdout.split("Next:\n\n")[1].splitlines()
    commands = [line.split()[1:3] for line in following if line]
    assert commands == [
        ["checkpoint", "inspect"],
        ["train", str(ROOT / "examples" / "synthetic.toml")],
        ["init", "YOUR_FILE.csv"],
    ]
    assert "--resume runs/demo" in following[1]


def test_a_demo_that_fails_prints_nothing_to_go_on_with(tmp_path, forks):
    done = forks.run(
        [ROOT / "examples" / "demo.py", "--set", "train.max_steps=many"],
        tmp_path,
        env=os.environ | {"PERSIA_DATA": str(tmp_path), "PYTHONPATH": str(Path(persia.__file__).parents[1])},
    )
    assert done.returncode != 0
    assert "Next:" not in done.stdout


def test_the_demo_waits_for_no_tools_of_the_tests(tmp_path):
    def commands(target: str) -> str:
        makes = ["make", "--dry-run", target, f"VENV={tmp_path}/new"]
        return subprocess.run(makes, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    def extras(target: str) -> list[str]:
        return re.findall(r"requirements\.py ?(.*?) >", commands(target))

    assert "-e ." in commands("demo")
    assert extras("demo") == [""]
    assert extras("quick") == extras("test") == ["test"]
    assert extras("test-all") == extras("lint") == ["dev docs"]
