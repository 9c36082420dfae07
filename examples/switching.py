"""Stragglers come and go, and the mode follows: Auto goes from Sync to Gba and back, without any tuning.

    python examples/switching.py

Four NN workers are threads of this process; a slow one waits in place of computing. On a cluster it is
`cluster=persia.cluster.Ray(nn_workers=4, ...)`, and nothing else changes.
"""

import logging
import os
import time

import torch

import persia
from persia.modes import Auto, Gba
from persia.replay import alternating

SMALL = "PERSIA_EXAMPLE_SMALL" in os.environ
WORKERS, LOCAL_BATCH, COMPUTE = 4, 64, 0.005
QUIET, STRAINED = (0.4, 0.8) if SMALL else (4.0, 8.0)
TRACE = alternating([1, 1, 1, 5], quiet=QUIET, strained=STRAINED)
BATCHES = 300 if SMALL else 6000

data = persia.data.synthetic(BATCHES * LOCAL_BATCH, id_features=4, ids_per_feature=1000, batch_size=LOCAL_BATCH)
began = time.monotonic()


class Straggling(persia.nn.models.FFNN):
    """Takes as long as the trace says."""

    rank = 0

    def forward(self, dense, embeddings):
        if self.training:
            now = time.monotonic() - began
            time.sleep(TRACE.finish(self.rank, now, COMPUTE) - now)
        return super().forward(dense, embeddings)


def work(member):
    """One NN worker."""
    torch.manual_seed(0)
    model = Straggling(data.schema)
    model.rank = member.rank
    trainer = persia.Trainer(
        model,
        data.schema,
        optimizer=lambda params: torch.optim.Adam(params, 1e-3),
        embedding_optimizer=persia.optim.Adagrad(lr=0.05),
        mode=Auto(Gba(global_batch_size=WORKERS * LOCAL_BATCH), seconds=QUIET / 20),
        cluster=member,
        options=persia.TrainerOptions(progress=False),
    )
    return trainer.fit(data), trainer.switches


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    result, switches = persia.testing.Threads(WORKERS).run(work)[0]
    for switch in switches:
        print(f"step {switch.step}: {type(switch.before).__name__} -> {type(switch.after).__name__}")
    print(f"{result.rows:,} rows, {result.rows_per_second:,.0f} rows/s, AUC {result.progressive.auc:.4f}")
