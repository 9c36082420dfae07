"""An embedding PS of 16-bit rows, `ps_of_16_bits.py REGIONS STEPS`: trains, prints the number of rows, and waits."""

import sys

import numpy as np

from persia.modes import Hybrid
from persia.ps import EmbeddingServer, ServerOptions
from persia.schema import Adagrad, Adam, Table
from persia.types import Gradients, PushHeader
from persia.types.packed import PackedGradients

TABLES = {
    "item": Table("item", 5, optimizer=Adam(lr=0.01), dtype="bfloat16"),
    "tag": Table("tag", 3, optimizer=Adagrad(lr=0.05), dtype="float16"),
}


def begin(regions):
    return EmbeddingServer(TABLES, None, Hybrid(4, combine=False), 3, 2, ServerOptions(1, 60.0, regions))


def train(server, steps):
    """Applies the pushes of these steps."""
    for step in steps:
        rng = np.random.default_rng(step)
        ids = {name: rng.choice(200, 50, replace=False).astype(np.uint64) for name in TABLES}
        server.lookup(ids, True)
        gradients = {n: Gradients(mine, rng.normal(size=(50, TABLES[n].dim)).astype("f4")) for n, mine in ids.items()}
        server.push(PushHeader(1, 0, step + 1, step, 50), PackedGradients.of(gradients))


if __name__ == "__main__":
    started = begin(sys.argv[1])
    train(started, range(int(sys.argv[2])))
    print(sum(counts["rows"] for counts in started.statistics().values()), flush=True)
    sys.stdin.read()
