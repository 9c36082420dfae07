"""Rows of a Trainer that nobody uses any more leave memory at once."""

import gc
import weakref

import numpy as np
import torch

import persia
from persia.cluster import Embedded
from persia.modes import Hybrid, Sync
from persia.optim import Adagrad


class Elsewhere:
    """All roles in this process, as if they were in others: lookups run ahead in every mode."""

    def connect(self, schema, optimizer, mode, seed):
        return Embedded().connect(schema, optimizer, mode, seed)._replace(near=False)


def trained(mode=None, cluster=None, **options):
    schema = persia.Schema([persia.IdFeature("user", dim=4)], labels=["label"])
    trainer = persia.Trainer(
        persia.nn.models.FFNN(schema, hidden=[4]),
        schema,
        optimizer=torch.optim.SGD,
        embedding_optimizer=Adagrad(lr=0.1),
        mode=mode,
        cluster=cluster,
        options=persia.TrainerOptions(**options),
    )
    batches = [persia.Batch.from_columns(schema, {"user": np.arange(8), "label": np.zeros(8)})] * 12
    trainer.fit(batches, eval_data=batches)
    return trainer


def test_rows_leave_memory_with_the_last_reference(tmp_path):
    trained()  # What torch imports at its first optimizer keeps the frames that import it until a collection.
    gc.collect()
    gc.disable()
    try:
        for options in (
            {},
            {"checkpoint_dir": str(tmp_path)},
            {"mode": Hybrid(4, warmup=0)},
            {"mode": Hybrid(4, warmup=0, refresh=False)},
            {"mode": Sync(), "cluster": Elsewhere()},
        ):
            trainer = trained(**options)
            (server,) = trainer.embeddings.push_log.connection.servers
            store = weakref.ref(server._store)
            del trainer, server
            assert store() is None, options
    finally:
        gc.enable()


def test_rows_leave_memory_after_a_loop_that_was_left():
    schema = persia.Schema([persia.IdFeature("user", dim=4)], labels=[])
    batch = persia.Batch.from_columns(schema, {"user": np.arange(8)})
    gc.collect()
    gc.disable()
    try:
        for mode in (Hybrid(4, warmup=0), Sync()):
            embeddings = persia.nn.EmbeddingCollection(
                schema, optimizer=Adagrad(lr=0.1), mode=mode, cluster=Elsewhere()
            )
            for number, prepared in enumerate(embeddings.prefetch([batch] * 20)):
                embeddings(prepared)["user"].sum().backward()
                if number == 5:
                    break
            store = weakref.ref(embeddings.push_log.connection.servers[0]._store)
            del embeddings, prepared
            assert store() is None, mode
    finally:
        gc.enable()
