import os
import subprocess
import sys

import pytest

from persia.malloc import allocated_bytes

KEEPING = """
import resource, sys
import numpy as np
from persia.malloc import keep_memory
from persia.cluster import Embedded
from persia.modes import Sync
from persia.schema import Adagrad, IdFeature, Schema

if sys.argv[1] == "keep":
    keep_memory()
if sys.argv[1] == "train":
    Embedded().connect(Schema([IdFeature("user", dim=4)], labels=["label"]), Adagrad(lr=0.1), Sync(), 0)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def fill():
    pieces = [np.full(1 << 20, 1, np.uint8) for _ in range(8)]

fill()
before = faults()
for _ in range(20):
    fill()
print(faults() - before)
"""


@pytest.mark.processes
def test_memory_of_messages_and_steps_is_kept():
    def page_faults(how, **env):
        run = subprocess.run(
            [sys.executable, "-c", KEEPING, how], capture_output=True, text=True, check=True, env={**os.environ, **env}
        )
        return int(run.stdout)

    pages = 20 * 8 * 256
    assert page_faults("keep") < pages / 20
    assert page_faults("train") < pages / 20, "a training in one process keeps it, too"
    assert page_faults("import") > pages / 2, "importing persia changes nothing"
    assert page_faults("keep", MALLOC_TRIM_THRESHOLD_="131072") > pages / 2, "what is set from outside stays"


@pytest.mark.parametrize("size", [1 << 20, 64 << 20])  # In the heap, and mapped separately.
def test_allocated_bytes_are_counted_until_they_are_freed(size):
    before = allocated_bytes()
    if before is None:
        pytest.skip("no glibc 2.33")
    pieces = [bytearray(size) for _ in range(4)]
    assert 3.5 * size < allocated_bytes() - before < 4.5 * size
    pieces.clear()
    assert allocated_bytes() - before < size / 2


def test_another_libc_counts_nothing(monkeypatch):
    monkeypatch.setattr("persia.malloc._mallinfo2", lambda: None)
    assert allocated_bytes() is None
