"""`make demo` on a machine without data: what it prints, and what it leaves."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

import persia

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
FEW = ["--set", "train.max_steps=4", "--set", "data.batch_size=256", "--set", "data.options.rows=5000"]


def test_the_demo_trains_saves_and_links_to_its_report(tmp_path):
    environment = os.environ | {"PERSIA_DATA": str(tmp_path), "PYTHONPATH": str(Path(persia.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", *FEW],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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


def test_a_demo_that_fails_prints_nothing_to_go_on_with(tmp_path):
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py", "--set", "train.max_steps=many"],
        cwd=tmp_path,
        env=os.environ | {"PERSIA_DATA": str(tmp_path), "PYTHONPATH": str(Path(persia.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "Next:" not in done.stdout


def test_the_demo_waits_for_no_tools_of_the_tests(tmp_path):
    def commands(target: str) -> str:
        makes = ["make", "--dry-run", target, f"VENV={tmp_path}/new"]
        return subprocess.run(makes, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout

    assert "[dev,docs]" in commands("test-rest")
    assert "-e ." in commands("demo")
    assert "[dev" not in commands("demo")
