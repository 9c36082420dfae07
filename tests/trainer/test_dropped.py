"""Rows of a Trainer that nobody uses any more leave memory at once."""

import gc
import weakref

import numpy as np
import torch

import persia
from persia.optim import Adagrad


def trained(**options):
    schema = persia.Schema([persia.IdFeature("user", dim=4)], labels=["label"])
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=[4]),
        schema,
        optimizer=torch.optim.SGD,
        embedding_optimizer=Adagrad(lr=0.1),
        options=persia.TrainerOptions(**options),
    )
    batches = [persia.Batch.from_columns(schema, {"user": np.arange(8), "label": np.zeros(8)})] * 2
    trainer.fit(batches, eval_data=batches)
    return trainer


def test_rows_leave_memory_with_the_last_reference(tmp_path):
    trained()  # What torch imports at its first optimizer keeps the frames that import it until a collection.
    gc.collect()
    gc.disable()
    try:
        for options in ({}, {"checkpoint_dir": str(tmp_path)}):
            trainer = trained(**options)
            (server,) = trainer.embeddings.push_log.connection.servers
            store = weakref.ref(server._store)
            del trainer, server
            assert store() is None, options
    finally:
        gc.enable()
