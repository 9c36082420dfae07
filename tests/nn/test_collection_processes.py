"""`EmbeddingCollection` in programs that fork, or end while it is in use."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.processes

FORKED = """
import gc, os, sys
import numpy as np
import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.cluster import Embedded

schema = persia.Schema([persia.IdFeature("a", dim=4)], labels=["y"])
ids, dense, labels = np.arange(4, dtype=np.uint64), np.zeros((4, 0), np.float32), np.zeros((4, 1), np.float32)
batch = Batch({"a": IdColumn(ids)}, dense, labels)
embeddings = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.SGD(lr=1.0))
embeddings(batch)["a"].sum().backward()
child = os.fork()
if child == 0:
    try:
        next(embeddings.eval().prefetch([batch]))
    except persia.PersiaError as error:
        assert "another process" in str(error)
        del embeddings
        gc.collect()  # Must not join threads that only the parent has.
        os._exit(0)
    os._exit(1)
sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_forked_child_is_told_and_can_drop_what_it_inherited():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=60)


LEFT_OPEN = """
import itertools
import numpy as np
import persia
from persia.batching.batch import Batch
from persia.batching.id_column import IdColumn
from persia.cluster import Embedded

names = [f"f{i}" for i in range(8)]
schema = persia.Schema([persia.IdFeature(name, dim=16) for name in names], labels=["y"])
rng = np.random.default_rng(0)
def batches():
    while True:
        columns = {name: IdColumn(rng.integers(0, 1 << 40, 4096).astype(np.uint64)) for name in names}
        yield Batch(columns, np.zeros((4096, 0), np.float32), np.zeros((4096, 1), np.float32))
mode = persia.modes.Hybrid(4, warmup=0)
embeddings = persia.nn.EmbeddingCollection(schema, optimizer=persia.optim.SGD(lr=1.0), mode=mode)
open_loop = embeddings.prefetch(batches())
for batch in itertools.islice(open_loop, 3):
    sum(values.sum() for values in embeddings(batch).values()).backward()
# The program ends here, with lookups under way and the loop never left.
"""


def test_a_program_may_end_within_a_loop():
    ended = subprocess.run([sys.executable, "-c", LEFT_OPEN], check=False, timeout=60, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
