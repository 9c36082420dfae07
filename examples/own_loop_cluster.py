"""Your own training loop on several NN workers of a cluster, which need not have equally many batches.

python examples/own_loop_cluster.py              # processes on this machine
python examples/own_loop_cluster.py auto         # on the Ray cluster that this host is part of
"""

import os
import sys

import torch

import persia

BATCHES = 61 if os.environ.get("PERSIA_EXAMPLE_SMALL") else 977
BATCH_SIZE = 256
NN_WORKERS = 2


def train(cluster: persia.cluster.Ray) -> str:
    """Runs on every NN worker, where `torch.distributed` is initialised."""
    rank, count = torch.distributed.get_rank(), torch.distributed.get_world_size()
    reader = persia.data.synthetic(  # Batch i goes to NN worker i mod count: the first one has one more.
        BATCHES * BATCH_SIZE, id_features=8, ids_per_feature=1_000, batch_size=BATCH_SIZE, shard=(rank, count)
    )
    embeddings = persia.nn.EmbeddingCollection(
        reader.schema, optimizer=persia.optim.Adagrad(lr=0.05), mode=persia.modes.Hybrid(4), cluster=cluster
    )
    net = torch.nn.Sequential(torch.nn.Linear(8 * 16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    replicas = persia.dense.AllReduce(net)  # In place of DistributedDataParallel.
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    metrics = persia.metrics.Metrics(reader.schema.labels)
    steps = dummies = 0
    for batch in embeddings.prefetch(reader, equal_steps=replicas):
        with replicas.batch(batch.dummy):
            logits = replicas.model(torch.cat(list(embeddings(batch).values()), dim=1))
            torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps, dummies = steps + 1, dummies + batch.dummy
        if not batch.dummy:
            metrics.update(logits.detach(), batch.labels, batch.day)
    total = persia.metrics.merged_metrics(metrics, replicas.gather).result()
    return (
        f"NN worker {rank}: {steps} steps, {dummies} of them without data; "
        f"{total.rows} rows in all, progressive AUC {total.auc:.4f}"
    )


def main() -> None:
    options = persia.cluster.RayOptions(address=sys.argv[1] if len(sys.argv) > 1 else None)
    with persia.cluster.Ray(nn_workers=NN_WORKERS, options=options) as cluster:
        print(*cluster.run(lambda: train(cluster)), sep="\n")


if __name__ == "__main__":
    main()
