"""PERSIA_MAX_ISA bounds the instruction set of the hot loops, and rows do not depend on it."""

import hashlib
import os
import subprocess
import sys

import numpy as np
import pytest

from persia import _core
from persia.store import NativeStore, TableConfig

pytestmark = pytest.mark.processes

ISAS = ("baseline", "avx2", "avx512")


def rows_after_updates():
    """Returns a digest of the rows that a few steps see."""
    random = np.random.default_rng(5)
    store = NativeStore(2)
    store.create_table(TableConfig("t", 19, optimizer="adam", dtype="bfloat16", capacity=3000))
    rows = np.empty((800, store.config(0).row_words), np.float32)
    digest = hashlib.sha256()
    for step in range(1, 9):
        ids = random.choice(5000, 800, replace=False).astype(np.uint64)
        store.lookup([0], [ids], True, [rows])
        digest.update(rows.tobytes())
        gradients = random.normal(size=(800, 19)).astype(np.float32)
        store.update([0], [ids], [gradients], [0.01], step=step, client=1, sequence=step)
    return digest.hexdigest()


def run(most):
    """Runs this file with the variable set."""
    environment = {**os.environ, "PERSIA_MAX_ISA": most}
    return subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=60)


def test_the_variable_bounds_the_instruction_set_with_equal_rows():
    found = {most: run(most).stdout.split() for most in (*ISAS, "")}
    widest, digest = found.pop("")
    for most, (used, same) in found.items():
        assert used == ISAS[min(ISAS.index(most), ISAS.index(widest))]
        assert same == digest


def test_another_value_is_refused_at_import():
    done = run("sse2")
    assert done.returncode != 0
    assert "PERSIA_MAX_ISA: unknown instruction set 'sse2': use baseline, avx2 or avx512" in done.stderr


if __name__ == "__main__":
    print(_core.isa(), rows_after_updates())
