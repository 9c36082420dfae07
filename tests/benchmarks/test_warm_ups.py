"""Benchmarks say which warm-up Hybrid has: most are shorter than the default one, in which it is Sync at first."""

import ast
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parents[2] / "benchmarks").rglob("*.py"))
DEFAULT = {"globo.py": 1, "paper.py": 2, "quality.py": 2, "row_dtypes.py": 1, "step.py": 1, "threads.py": 1}
"""Files that measure the default warm-up, with the number of modes that have it."""
WITHOUT_GATE = {"EmbeddingServer"}
"""They get a mode, and look nothing up ahead."""
BY_HAND = {"profile_step.py"}
"""Calls the parts of a step in turn, without `prefetch`."""


def name_of(call):
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def calls(file):
    """Calls of a file, and whether each is an argument of one in `WITHOUT_GATE`."""
    tree = ast.parse(file.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    inside = {id(argument) for call in found if name_of(call) in WITHOUT_GATE for argument in call.args}
    return [(call, id(call) in inside) for call in found]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_benchmark_names_the_warm_up(file):
    bare = [
        call.lineno
        for call, inside in calls(file)
        if name_of(call) == "Hybrid" and not inside and "warmup" not in {keyword.arg for keyword in call.keywords}
    ]
    assert len(bare) == DEFAULT.get(file.name, 0), bare


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_benchmark_names_its_mode(file):
    bare = [
        call.lineno
        for call, _ in calls(file)
        if name_of(call) in ("Trainer", "EmbeddingCollection") and "mode" not in {k.arg for k in call.keywords}
    ]
    assert not bare or file.name in BY_HAND
